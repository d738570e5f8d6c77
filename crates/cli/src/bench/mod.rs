//! `kedge bench`: figures, beside what they should be and what others reach.

mod cache;
mod checkpoint;
pub(crate) mod cluster;
pub(crate) mod codecs;
mod cost;
mod far;
mod figures;
mod managed;
mod migrate;
mod parts;
pub(crate) mod process;
pub(crate) mod scratch;

use crate::Failure;
use crate::child::{self, Place};
use crate::gpu;
use crate::output::{self, DIM, FAIR, GOOD, PLAIN, Table};
use crate::progress::Progress;
use clap::{Args, ValueEnum};
use figures::Better;
use kedge_control::gpu::GpuSpec;
use kedge_control::size::Size;
use kedge_probe::Series;
use parts::Part;
use serde::Serialize;
use std::path::PathBuf;
use std::time::Duration;

const AFTER_HELP: &str = "\
With --json, one list of objects:
  name, unit
  value       the median
  min, max
  better      \"lower\" or \"higher\"
  target      what kedge means to reach, or null
  reference   native, or the best peer: {value, what, source}, or null

Run it on a machine that does nothing else: kedge's two processes want a core each.";

/// Bytes in each data set of `bench codecs`.
const CODECS_SIZE: u64 = 256 << 20;
/// Bytes on the device of `bench checkpoint`.
const SOFT_SIZE: u64 = 256 << 20;
const GPU_SIZE: u64 = 4 << 30;
/// How long may pass between two results.
const RESULT_TIMEOUT: Duration = Duration::from_secs(120);

/// Measure what kedge costs and how fast its devices are
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct BenchArgs {
    /// What to measure
    #[arg(value_enum)]
    what: What,
    /// The device: local for this machine's GPUs, or soft [default: as for `kedge run`; soft for
    /// `bench soft`]
    #[arg(long, value_name = "SPEC", conflicts_with = "native")]
    gpu: Option<GpuSpec>,
    /// Measure this machine's own driver and GPU instead, without kedge
    #[arg(long)]
    native: bool,
    /// codecs: bytes of memory in each data set [default: 256M]; process: of the job that is
    /// checkpointed
    /// [default: 1G and 4G, or less where memory or disk is short]; checkpoint: on the device
    /// [default: 4G, and 256M on soft]; migrate: on the device [default: 1G]; managed: of
    /// managed memory [default: 4G]; several: 4G,16G; cluster: one for all, or three, of the ranks'
    /// memory in all, of the job that moves and of the file [default: 1G,4G,1G]
    #[arg(long, value_name = "SIZE", value_delimiter = ',')]
    size: Vec<Size>,
    /// checkpoint: do not have the driver checkpoint a program of that size too, which takes it
    /// long
    #[arg(long)]
    no_driver: bool,
    /// codecs, process, checkpoint, cache, managed: a folder on the disk to write to [default:
    /// where images go]; cluster: one that all hosts share
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// far, migrate: the server whose devices are measured [default: one that is started for it,
    /// over loopback]
    #[arg(long, value_name = "HOST[:PORT]", conflicts_with = "native")]
    to: Option<GpuSpec>,
    /// process, far, migrate, cluster: these of its parts alone
    #[arg(long, value_name = "PART", value_delimiter = ',')]
    parts: Vec<Part>,
    /// cluster: the hosts, of which the first is this one: names or addresses that all reach
    #[arg(long, value_name = "HOST", value_delimiter = ',')]
    host: Vec<String>,
    /// cluster: hosts on which its jobs are restarted
    #[arg(long, value_name = "HOST", value_delimiter = ',')]
    spare: Vec<String>,
    /// cluster: rounds of each figure [default: 20 pairs of mpi, 9 of scp, 50
    /// barriers, 5 of the others]
    #[arg(long, value_name = "N")]
    rounds: Option<usize>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum What {
    /// What driver calls cost the program, in microseconds
    Calls,
    /// Copies to, from and on the device, beside this machine's memcpy
    Copy,
    /// Instructions that each core of the device executes, from kernels that need no compiler
    Soft,
    /// How fast memory becomes a durable image and how large that is, by codec: the tables of the
    /// CRUM paper. Random floats; then the arrays of a multigrid and of a sparse solver. Forked:
    /// how long a job with that memory stands still
    Codecs,
    /// How long 256 processes of one job wait for each other at a barrier
    Barriers,
    /// What programs see of a folder that `kedge cache` absorbs the writes of, by turns with tmpfs
    /// and with the file system below. Takes root, and 1.5 GiB of memory and disk
    Cache,
    /// What `bench cache` starts
    #[value(hide = true)]
    Writers,
    /// What jobs of processes cost: while they run, at checkpoints, at restarts; each beside the
    /// same without kedge, by turns, and beside DMTCP, CRIU (as root) and fio where PATH leads to
    /// them. Takes some minutes
    Process,
    /// What checkpoints of a job that uses a device cost the program, by its own clock; the second
    /// where 5 % of the memory has changed; what another program on the device notices; the
    /// driver's own checkpoint beside it. Takes a minute or more for each size
    Checkpoint,
    /// What being a job that can be checkpointed costs a program that uses a GPU, while it is not:
    /// by turns with the same program on the machine's own driver
    Cost,
    /// What it costs that a program's devices are on another machine: by turns with devices of this
    /// one (--gpu) and with the line itself, over a connection of its own with the same encryption
    Far,
    /// How long a program stands still while its devices move, by its own clock, and how long a
    /// move takes; between software devices of this machine, and to those of a server over loopback
    /// and back (--to: another server), beside what that line carries; what being able to move
    /// costs a call; an iterative program that comes home after a part of its steps
    Migrate,
    /// What managed memory costs a program that holds much of it, by turns with the same program
    /// without: launches, first touches by the host, and a dot product of twice what the device may
    /// have, with the pause of its checkpoint. Takes a minute or more
    Managed,
    /// What jobs over several hosts cost (--host): an MPI program while it runs, checkpoints of
    /// ranks and restarts on other hosts (--spare), files by scp and through remote shells, the
    /// move of a whole job, barriers of 1,000 processes over TCP. By turns with the same without
    /// kedge. `scripts/bench-cluster DIR` makes hosts of namespaces for it. Takes 40 minutes
    Cluster,
}

impl What {
    fn name(self) -> &'static str {
        match self {
            What::Calls => "calls",
            What::Copy => "copy",
            What::Soft => "soft",
            What::Codecs => "codecs",
            What::Barriers => "barriers",
            What::Cache => "cache",
            What::Writers => "writers",
            What::Process => "process",
            What::Checkpoint => "checkpoint",
            What::Cost => "cost",
            What::Far => "far",
            What::Migrate => "migrate",
            What::Managed => "managed",
            What::Cluster => "cluster",
        }
    }
}

/// One figure of the list.
#[derive(Debug, Serialize)]
struct Figure {
    name: String,
    unit: String,
    value: f64,
    min: f64,
    max: f64,
    better: Better,
    target: Option<f64>,
    reference: Option<figures::Reference>,
}

pub(crate) fn run(args: &BenchArgs) -> Result<(), Failure> {
    let progress = Progress::new("measuring…");
    let mut series = Vec::new();
    let result = measure(args, &mut |one| {
        progress.show(&format!("measuring… {}: {}", series.len() + 1, one.name));
        series.push(one);
    });
    progress.clear();
    let figures: Vec<Figure> = series.into_iter().filter_map(figure).collect();
    // What was measured before a failure is still worth reading, but not as the whole list.
    if args.json && result.is_ok() {
        output::json(&figures)?;
    } else if !args.json && !figures.is_empty() {
        output::print(&render(&figures))?;
    }
    result.map_err(|said| Failure::new(format!("bench {}: {said}", args.what.name())))
}

/// Hands over each series as it comes.
fn measure(args: &BenchArgs, sink: &mut dyn FnMut(Series)) -> Result<(), String> {
    Part::check(&args.parts, args.what)?;
    let dir = args.dir.as_deref();
    let sizes: Vec<u64> = args.size.iter().map(|size| size.0).collect();
    match args.what {
        What::Codecs => {
            let sizes = if sizes.is_empty() { vec![CODECS_SIZE] } else { sizes };
            return sizes.iter().try_for_each(|size| codecs::run(*size, dir, sink));
        }
        What::Barriers => return process::barriers::run(dir, sink),
        What::Cache => return cache::run(dir, sink),
        What::Writers => return cache::writers(dir, &sizes),
        What::Process => return process::run(sizes, dir, &args.parts, sink),
        What::Checkpoint => {
            let gpu = gpu::resolve(args.gpu.as_ref(), None)?.spec;
            let usual = if matches!(gpu, GpuSpec::Soft { .. }) { SOFT_SIZE } else { GPU_SIZE };
            let sizes = if sizes.is_empty() { vec![usual] } else { sizes };
            let folder = scratch::Scratch::new(dir)?;
            let driver = !args.no_driver;
            let bench = checkpoint::Bench { gpu: &gpu, dir: &folder.0, driver };
            return sizes.iter().try_for_each(|size| bench.run(*size, sink));
        }
        What::Cost => {
            let gpu = gpu::resolve(args.gpu.as_ref(), None)?.spec;
            let folder = scratch::Scratch::new(dir)?;
            return cost::run(&gpu, &folder.0, sink);
        }
        What::Far => {
            let gpu = gpu::resolve(args.gpu.as_ref(), None)?.spec;
            return far::Bench::new(&gpu, args.to.as_ref(), &args.parts)?.run(sink);
        }
        What::Migrate => {
            let gpu = gpu::resolve(args.gpu.as_ref(), None)?.spec;
            let folder = scratch::Scratch::new(dir)?;
            let size = sizes.first().copied().unwrap_or(migrate::SIZE);
            let bench = migrate::Bench::new(&gpu, args.to.as_ref(), &folder.0, size)?;
            return bench.run(&args.parts, sink);
        }
        What::Managed => {
            let gpu = match args.native {
                true => None,
                false => Some(gpu::resolve(args.gpu.as_ref(), None)?.spec),
            };
            let size = sizes.first().copied().unwrap_or(managed::SIZE);
            return managed::Bench { gpu: gpu.as_ref(), size, dir }.run(sink);
        }
        What::Cluster => {
            let (hosts, spares, parts) = (&args.host, &args.spare, &args.parts);
            let (sizes, rounds) = (&sizes, args.rounds);
            let asked = cluster::Asked { hosts, spares, sizes, rounds, dir, parts };
            return cluster::run(&asked, sink);
        }
        What::Calls | What::Copy | What::Soft => {}
    }
    let soft_only = (args.what == What::Soft).then_some("bench soft");
    let gpu = || gpu::resolve(args.gpu.as_ref(), soft_only).map(|gpu| gpu.spec);
    let place = if args.native { Place::Native } else { Place::job(gpu()?) };
    child::probe(place, &[args.what.name().into()], RESULT_TIMEOUT, |line| {
        if let Ok(one) = serde_json::from_str::<Series>(line) {
            sink(one);
        }
    })
}

/// Median, extremes and what is known of a series; `None` without samples.
fn figure(series: Series) -> Option<Figure> {
    let mut samples = series.samples;
    samples.retain(|sample| sample.is_finite());
    samples.sort_by(f64::total_cmp);
    let (min, max) = (*samples.first()?, *samples.last()?);
    let middle = samples.len() / 2;
    let value = match samples.len() % 2 {
        1 => samples[middle],
        _ => f64::midpoint(samples[middle - 1], samples[middle]),
    };
    let known = figures::known(&series.name, &series.unit);
    Some(Figure {
        name: series.name,
        unit: series.unit,
        value,
        min,
        max,
        better: known.better,
        target: known.target,
        reference: known.reference,
    })
}

fn render(figures: &[Figure]) -> String {
    let headings = ["WHAT", "MEDIAN", "MIN", "MAX", "TARGET", "UNIT", "REFERENCE"];
    let mut table = Table::new(&headings, &[1, 2, 3, 4]);
    for figure in figures {
        let style = match figure.target {
            None => PLAIN,
            Some(target) if figure.better.reaches(figure.value, target) => GOOD,
            Some(_) => FAIR,
        };
        let target =
            figure.target.map(|target| format!("{} {}", figure.better.sign(), short(target)));
        let reference = figure.reference.as_ref().map(|r| format!("{} {}", short(r.value), r.what));
        table.row([
            (PLAIN, figure.name.clone()),
            (style, short(figure.value)),
            (PLAIN, short(figure.min)),
            (PLAIN, short(figure.max)),
            (PLAIN, target.unwrap_or_default()),
            (PLAIN, figure.unit.clone()),
            (DIM, reference.unwrap_or_default()),
        ]);
    }
    table.render()
}

/// Three digits that count.
fn short(value: f64) -> String {
    let digits = match value.abs() {
        x if x >= 100.0 => 0,
        x if x >= 10.0 => 1,
        x if x >= 1.0 => 2,
        _ => 3,
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(samples: &[f64]) -> Option<Figure> {
        figure(Series { name: "x".into(), unit: "µs".into(), samples: samples.to_vec() })
    }

    #[test]
    fn figures_are_medians() {
        let figure = of(&[3.0, 1.0, f64::NAN, 2.0]).unwrap();
        assert_eq!((figure.value, figure.min, figure.max), (2.0, 1.0, 3.0));
        assert_eq!(of(&[4.0, 1.0]).unwrap().value, 2.5);
        assert!(of(&[]).is_none());
    }

    #[test]
    fn numbers_are_short() {
        for (value, text) in [(0.1234, "0.123"), (1.234, "1.23"), (12.34, "12.3"), (123.4, "123")] {
            assert_eq!(short(value), text);
        }
    }
}
