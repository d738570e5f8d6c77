//! What it costs a program that what it makes on its devices can be repeated elsewhere.

use super::Sink;
use crate::process::job::Job;
use kedge_control::gpu::GpuSpec;
use kedge_control::stats::JobStats;
use kedge_probe::{Held, Series};
use std::fs;
use std::path::Path;

/// Events that are made in one round, rounds of a sample, and samples.
const EVENTS: usize = 2000;
const ROUNDS: usize = 10;
const SAMPLES: usize = 7;
/// Of the program whose messages are counted.
const ITERATIONS: usize = 200;
const HELD: usize = 64 << 20;

const FIGURE: &str = "a second record, and counting, of a call that is recorded";
const SHARE: &str = "messages of an iterative program that are recorded";

/// Every proxy keeps a record. One that counts (`--stats`) keeps a second one, of which it tells
/// the length: what that costs beside a proxy that does not count is no less than the record.
pub(super) fn run(near: &GpuSpec, dir: &Path, sink: Sink<'_>) -> Result<(), String> {
    let file = dir.join("stats.json");
    let counted = format!("--stats={}", file.display());
    let mut plain = Job::far(near, "one")?;
    let mut twice = Job::far_with(near, "two", &[&counted])?;
    let order = format!("makes {EVENTS}");
    for job in [&mut plain, &mut twice] {
        job.ask("connect")?;
        job.ask(&order)?;
    }
    let mut costs = Vec::new();
    for _ in 0..SAMPLES {
        // What else a machine does makes times longer, never shorter.
        let mut shortest = [f64::INFINITY; 2];
        for round in 0..ROUNDS {
            for which in [round % 2, 1 - round % 2] {
                let job = if which == 0 { &mut plain } else { &mut twice };
                shortest[which] = shortest[which].min(job.ask(&order)?);
            }
        }
        costs.push((shortest[1] - shortest[0]) / EVENTS as f64 * 1e6);
    }
    plain.end();
    twice.end();
    sink(Series::lower(FIGURE, "µs", costs).target(0.1));
    let mut job = Job::beating(near, &Held::noise(HELD), dir, "counted", &["--quiet", &counted])?;
    job.ask(&format!("iterate {ITERATIONS}"))?;
    job.end();
    let text = fs::read(&file).map_err(|error| format!("{}: {error}", file.display()))?;
    let told: JobStats = serde_json::from_slice(&text).map_err(|error| error.to_string())?;
    let (kept, all) = (told.stats.records, told.stats.posts + told.stats.calls);
    let samples = vec![100.0 * kept as f64 / all.max(1) as f64];
    sink(Series::lower(SHARE, "%", samples));
    Ok(())
}
