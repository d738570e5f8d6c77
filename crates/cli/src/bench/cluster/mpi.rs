//! What an MPI program over hosts loses by being a job.

use super::hosts::{Hosts, as_root_too, said};
use super::{Sink, by_turns, put, upper_limit};
use crate::bench::process::LIMIT;
use std::process::Command;
use std::time::Instant;

const CG: &str = include_str!("cg.c");
/// Pairs of each; the sixth-largest of 20 bounds the median.
pub(super) const PAIRS: usize = 20;
/// Ranks, hosts, the problem and how often it is solved: some seconds on two cores.
const SHAPES: [(usize, usize, [&str; 2]); 3] =
    [(2, 2, ["A", "3"]), (4, 4, ["A", "1"]), (16, 4, ["W", "1"])];
/// What the figures' names begin with.
const NAME: &str = "NAS CG";

pub(super) fn run(hosts: &Hosts, pairs: usize, sink: Sink<'_>) -> Result<(), String> {
    let program = hosts.compiled("cg", CG)?;
    for (ranks, most, work) in SHAPES {
        let on = hosts.first(most);
        // With fewer hosts the same shape comes twice.
        if on.len() < most {
            continue;
        }
        let mut words = hosts.mpirun(on, ranks);
        words.push(program.display().to_string());
        words.extend(work.map(str::to_owned));
        let name = format!("{NAME}, {ranks} ranks on {most} hosts");
        let [mut natives, mut ratios, mut beyond] = <[Vec<f64>; 3]>::default();
        for pair in 0..pairs {
            let mut whole = [0.0; 2];
            let times = by_turns(pair, |which| {
                let job = (which == 1).then(|| hosts.as_a_job(&hosts.job("cg")));
                let begin = Instant::now();
                let told = solve(job, &words)?;
                whole[which] = begin.elapsed().as_secs_f64();
                Ok(told)
            })?;
            natives.push(times[0]);
            ratios.push(times[1] / times[0]);
            beyond.push(whole[1] - whole[0]);
        }
        put(sink, format!("{name}, natively"), "s", natives);
        let limit = upper_limit(&ratios);
        put(sink, &name, "× native", ratios);
        put(sink, format!("{name}{LIMIT}"), "× native", limit.into_iter().collect());
        put(sink, format!("{name}: the whole command, beyond native"), "s", beyond);
    }
    Ok(())
}

/// The seconds that the program tells of itself.
fn solve(job: Option<Command>, words: &[String]) -> Result<f64, String> {
    let mut words = words.iter();
    let first = words.next().ok_or("no command")?;
    let mut command = match job {
        Some(mut job) => {
            job.arg(first);
            job
        }
        None => Command::new(first),
    };
    let text = said(as_root_too(&mut command).args(words))?;
    text.parse().map_err(|_| format!("NAS CG said `{text}`"))
}

pub(super) fn target(name: &str) -> Option<f64> {
    (name.starts_with(NAME) && name.ends_with(LIMIT)).then_some(1.02)
}
