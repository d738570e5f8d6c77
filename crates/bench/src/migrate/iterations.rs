//! An iterative program that begins far away and comes home after a part of its steps: figure 13 of
//! the mrCUDA paper (Markthub, Nomura, Matsuoka), which does so with LAMMPS.

use super::Sink;
use crate::process::job::Job;
use kedge_control::gpu::GpuSpec;
use kedge_probe::{Held, Series};
use kedge_supervisor::control::Moving;
use std::path::Path;

/// Iterations, bytes on the device, and runs of each kind.
const ITERATIONS: usize = 400;
const HELD: usize = 64 << 20;
const ROUNDS: usize = 3;
/// Of a hundred iterations, so many are begun before the program moves.
const PARTS: [usize; 3] = [25, 50, 75];

/// By turns: all here, moved at each part, all there.
pub(super) fn run(near: &GpuSpec, far: &GpuSpec, dir: &Path, sink: Sink<'_>) -> Result<(), String> {
    let ways: Vec<(String, Option<usize>, &GpuSpec)> = [("near alone".to_owned(), None, near)]
        .into_iter()
        .chain(PARTS.map(|part| (format!("moved at {part} %"), Some(part), far)))
        .chain([("far alone".to_owned(), None, far)])
        .collect();
    let mut times = vec![Vec::new(); ways.len()];
    let mut pauses = times.clone();
    for _ in 0..ROUNDS {
        for (at, (_, part, gpu)) in ways.iter().enumerate() {
            let mut job = Job::beating(gpu, &Held::noise(HELD), dir, "iterates", &[])?;
            let (seconds, pause) = match part {
                Some(part) => moved(&mut job, *part, near)?,
                None => (job.ask(&format!("iterate {ITERATIONS}"))?, None),
            };
            times[at].push(seconds);
            pauses[at].extend(pause.map(|seconds| seconds * 1e3));
            job.end();
        }
    }
    for ((way, part, _), (seconds, paused)) in ways.iter().zip(times.into_iter().zip(pauses)) {
        let name = format!("{ITERATIONS} iterations, {way}");
        if part.is_some() {
            sink(Series::lower(format!("{name}: pause"), "ms", paused));
        }
        sink(Series::lower(name, "s", seconds));
    }
    Ok(())
}

/// Seconds of all iterations, where the program begins to move home after a part of them, and goes
/// on meanwhile; and how long its devices stood still.
fn moved(job: &mut Job, part: usize, home: &GpuSpec) -> Result<(f64, Option<f64>), String> {
    let before = ITERATIONS * part / 100;
    let first = job.ask(&format!("iterate {before}"))?;
    job.tell(&format!("iterate {}", ITERATIONS - before))?;
    let told = Job::moved(job.name(), &home.to_string(), &[])?;
    let pauses = told.iter().filter_map(|moving| match moving {
        Moving::Pause { seconds, .. } => Some(*seconds),
        _ => None,
    });
    Ok((first + job.answer()?, pauses.reduce(f64::max)))
}
