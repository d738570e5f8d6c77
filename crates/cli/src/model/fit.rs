//! Measures the coefficients: the same small programs here and there.

use super::costs::{Costs, FORMAT, Model, Moving};
use super::line::{Line, shortest};
use crate::child::{self, Place};
use crate::output;
use crate::progress::Progress;
use kedge_bench::{Job, Scratch};
use kedge_control::gpu::GpuSpec;
use kedge_probe::{READS, Series, WRITES};
use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long may pass between two results.
const RESULT_TIMEOUT: Duration = Duration::from_secs(300);
/// Sessions that are opened, and moves of one kind.
const SESSIONS: usize = 7;
const MOVES: usize = 3;
/// What is moved to find the coefficients of equations 4 to 6.
const EVENTS: u64 = 20_000;
const SMALL: (u64, u64) = (1024, 4 << 10);
const LARGE: (u64, u64) = (2, 16 << 20);

/// Measures a model. `moves`: also of what it takes to move a job, with images in that folder, or
/// where images go.
pub(super) fn fit(
    near: &GpuSpec,
    far: &GpuSpec,
    moves: Option<Option<&Path>>,
) -> Result<Model, String> {
    let progress = Progress::new("measuring…");
    let said = |gpu: &GpuSpec, why: String| format!("model fit: on {gpu}: {why}");
    let uses = |gpu: &GpuSpec| {
        progress.show(&format!("measuring… {gpu}"));
        Uses::of(gpu).map_err(|why| said(gpu, why))
    };
    let (here, there) = (uses(near)?, uses(far)?);
    let moving = moves.map(|dir| {
        progress.show("measuring… moves");
        moving(near, far, dir)
    });
    progress.clear();
    if let Some(Err(why)) = &moving {
        // Not all lines carry images, and the rest is worth having without.
        output::complain(&format!("what it takes to move a job is not known: {why}"));
    }
    let (near_costs, far_costs) = (here.costs()?, there.costs()?);
    // Equation 2: making an event is kept for a restart, recording one is not.
    let record = (here.one("record")? - here.one("event")?).max(0.0);
    Ok(Model {
        format: FORMAT,
        here: near.to_string(),
        there: far.to_string(),
        near: near_costs,
        far: far_costs,
        record,
        moving: moving.and_then(Result::ok),
    })
}

/// The shortest times, by name: what else a machine does makes times longer, never shorter.
struct Uses(HashMap<String, f64>);

impl Uses {
    fn of(gpu: &GpuSpec) -> Result<Uses, String> {
        let mut all: HashMap<String, Vec<f64>> = HashMap::new();
        let mut take = |line: &str| {
            if let Ok(Series { name, samples, .. }) = serde_json::from_str(line) {
                all.entry(name).or_default().extend(samples);
            }
        };
        for _ in 0..SESSIONS {
            child::probe(Place::job(gpu.clone()), &["session".into()], RESULT_TIMEOUT, &mut take)?;
        }
        child::probe(Place::job(gpu.clone()), &["uses".into()], RESULT_TIMEOUT, &mut take)?;
        Ok(Uses::shortest(all))
    }

    fn shortest(all: HashMap<String, Vec<f64>>) -> Uses {
        let shortest = |(name, samples)| Some((name, shortest(samples)?));
        Uses(all.into_iter().filter_map(shortest).collect())
    }

    fn one(&self, name: &str) -> Result<f64, String> {
        self.0.get(name).copied().ok_or_else(|| format!("model fit: nothing was told of {name}"))
    }

    fn line(&self, name: &str, sizes: [usize; 4]) -> Result<Line, String> {
        let point = |size: usize| Ok((size as f64, self.one(&format!("{name} {size}"))?));
        let points: Vec<(f64, f64)> =
            sizes.into_iter().map(point).collect::<Result<_, String>>()?;
        Line::through(&points).ok_or_else(|| format!("model fit: times of {name} make no line"))
    }

    fn costs(&self) -> Result<Costs, String> {
        let post = self.one("post")?;
        // A launch and a wait for it.
        let call = (self.one("call")? - post).max(0.0);
        let (write, read) = (self.line("write", WRITES)?, self.line("read", READS)?);
        // Each copy is a post and a call.
        let beside = |line: Line| (line.fixed - call - post).max(0.0);
        Ok(Costs {
            session: self.one("session")?,
            call,
            post,
            write: beside(write),
            write_byte: write.each,
            read: beside(read),
            read_byte: read.each,
            shared_write_byte: self.line("pinned write", WRITES)?.each,
            shared_read_byte: self.line("pinned read", READS)?.each,
        })
    }
}

/// Moves jobs that hold different things.
fn moving(near: &GpuSpec, far: &GpuSpec, dir: Option<&Path>) -> Result<Moving, String> {
    let scratch = Scratch::new(dir)?;
    let time = |events: u64, (regions, size): (u64, u64)| {
        let numbers = [events, regions, size].map(|number| number.to_string());
        let probe = ["objects", &numbers[0], &numbers[1], &numbers[2]];
        let all: Result<Vec<f64>, String> =
            (0..MOVES).map(|_| one_move(near, far, &probe, &scratch.0)).collect();
        shortest(all?).ok_or_else(|| "no move was timed".to_owned())
    };
    let none = (0, 0);
    let fixed = time(0, none)?;
    let record = ((time(EVENTS, none)? - fixed) / EVENTS as f64).max(0.0);
    let region = ((time(0, SMALL)? - fixed) / SMALL.0 as f64).max(0.0);
    let byte = ((time(0, LARGE)? - fixed) / (LARGE.0 * LARGE.1) as f64).max(0.0);
    Ok(Moving { fixed, record, region, byte })
}

/// Moves a job from here to there: seconds until it answers.
fn one_move(near: &GpuSpec, far: &GpuSpec, probe: &[&str], dir: &Path) -> Result<f64, String> {
    let job = Job::holding(near, probe, dir)?;
    let begin = Instant::now();
    let taken = job.checkpoint(&[])?;
    let stopped = begin.elapsed();
    // Its orderly end is no part of a move.
    job.end();
    let (job, back) = Job::restart(&taken.image, &["--gpu", &far.to_string(), "--quiet"])?;
    job.end();
    std::fs::remove_dir_all(&taken.image).map_err(|error| error.to_string())?;
    Ok(stopped.as_secs_f64() + back)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a line would be timed at that costs this and nothing else; what else the machine does
    /// adds to all samples but one.
    fn timed(costs: &Costs) -> HashMap<String, Vec<f64>> {
        let Costs { session, call, post, write, write_byte, read, read_byte, .. } = *costs;
        let mut all = HashMap::new();
        let mut take = |name: String, least: f64| {
            all.insert(name, vec![3.0 * least, least, least + 0.5, f64::NAN]);
        };
        take("session".into(), session);
        take("post".into(), post);
        take("call".into(), post + call);
        for (name, sizes, fixed, byte, shared_byte) in [
            ("write", WRITES, write, write_byte, costs.shared_write_byte),
            ("read", READS, read, read_byte, costs.shared_read_byte),
        ] {
            for size in sizes {
                let bytes = size as f64;
                take(format!("{name} {size}"), post + call + fixed + bytes * byte);
                take(format!("pinned {name} {size}"), post + call + bytes * shared_byte);
            }
        }
        all
    }

    #[test]
    fn costs_are_what_the_shortest_samples_say() {
        let line = Costs {
            session: 0.03,
            call: 1.1e-4,
            post: 1e-6,
            write: 5e-5,
            write_byte: 1e-8,
            read: 7e-5,
            read_byte: 2e-8,
            shared_write_byte: 3e-9,
            shared_read_byte: 4e-9,
        };
        let found = Uses::shortest(timed(&line)).costs().unwrap();
        for (found, cost) in found.all().into_iter().zip(line.all()) {
            assert!((found - cost).abs() < 1e-6 * cost, "{found} is not {cost}");
        }
    }

    #[test]
    fn what_was_not_timed_is_named() {
        let mut all = timed(&Costs { session: 0.03, ..Costs::default() });
        all.remove("post");
        let why = Uses::shortest(all).costs().unwrap_err();
        assert!(why.ends_with("nothing was told of post"), "{why}");
    }
}
