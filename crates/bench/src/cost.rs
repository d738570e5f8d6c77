//! `kedge bench cost`: what being a job costs a program that uses a GPU while no checkpoint is
//! taken.

use super::process::LIMIT;
use super::process::job::Job;
use kedge_control::gpu::GpuSpec;
use kedge_probe::{Held, Series};
use std::path::Path;

/// Pairs of each load; the sixth-smallest and sixth-largest of 20 bound the median by 95.9 %.
const PAIRS: usize = 20;
const RANK: usize = 6;
const DEVICE: usize = 1 << 30;
const HELD: Held = Held::noise(DEVICE);

const STEPS: &str = "a step of copies and kernels";
const KERNELS: &str = "100 small kernels and a wait";
const BEATS: &str = "one small kernel and a wait";

/// Each with what tells the program to do it for some time.
const LOADS: [(&str, &str); 3] =
    [(STEPS, "steps 0.25"), (KERNELS, "kernels 0.25"), (BEATS, "rate 0.25")];

/// Measures and hands over each series as it is done.
pub(super) fn run(gpu: &GpuSpec, dir: &Path, sink: &mut dyn FnMut(Series)) -> Result<(), String> {
    let native = Job::native(&HELD).map_err(|said| format!("without kedge: {said}"))?;
    // As who wants checkpoints runs it.
    let options = ["--incremental", "--recover", "--interval", "1h"];
    let job = Job::beating(gpu, &HELD, dir, "cost", &options)?;
    let mut both = [native, job];
    both.iter_mut().try_for_each(|one| one.ask("rest").map(drop))?;
    for (name, order) in LOADS {
        let mut ratios = Vec::new();
        for pair in 0..PAIRS {
            ratios.push(turn(&mut both, order, pair % 2)?);
        }
        let mut sorted = ratios.clone();
        sorted.sort_by(f64::total_cmp);
        let unit = "× native";
        sink(Series::lower(name, unit, ratios));
        let limit = vec![sorted[PAIRS - RANK]];
        sink(Series::lower(format!("{name}{LIMIT}"), unit, limit).target(1.01));
    }
    Ok(())
}

/// The job's time for one, of the native program's. Whoever is second finds another machine than
/// who is first.
fn turn(both: &mut [Job; 2], order: &str, first: usize) -> Result<f64, String> {
    let mut rates = [0.0; 2];
    for one in [first, 1 - first] {
        rates[one] = both[one].ask(order)?;
        // Beats of the one would count in the other's time.
        both[one].ask("rest")?;
    }
    Ok(rates[0] / rates[1])
}
