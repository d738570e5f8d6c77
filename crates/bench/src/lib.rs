//! What `kedge bench` measures: figures, beside what they should be and what others reach. The
//! command has the arguments, the table and the list.

#![forbid(unsafe_code)]

mod cache;
mod checkpoint;
mod cluster;
mod codecs;
mod cost;
mod far;
mod figures;
mod managed;
mod migrate;
mod parts;
mod process;
mod said;
mod scratch;

pub use cluster::barriers::member as far_member;
pub use codecs::hold;
pub use figures::Figure;
pub use parts::{Part, What};
pub use process::barriers::member;
pub use process::job::{Job, KEEP_READY, Taken};
pub use scratch::Scratch;

use kedge_control::gpu::GpuSpec;
use kedge_probe::Series;
use std::path::Path;

/// Bytes in each data set of `bench codecs`.
const CODECS_SIZE: u64 = 256 << 20;
/// Bytes on the device of `bench checkpoint`.
const SOFT_SIZE: u64 = 256 << 20;
const GPU_SIZE: u64 = 4 << 30;

/// What runs `kedge probe` with an argument, and hands over each line.
pub type Probe<'a> = dyn Fn(&str, &mut dyn FnMut(&str)) -> Result<(), String> + 'a;

/// What is asked for, and where it is measured.
#[expect(missing_debug_implementations, reason = "it has functions")]
pub struct Asked<'a> {
    pub what: What,
    /// Returns the devices; called by what uses some.
    pub gpu: &'a dyn Fn() -> Result<GpuSpec, String>,
    /// Runs `kedge probe` on them, with this argument, and hands over each line.
    pub probe: &'a Probe<'a>,
    /// Whether this machine's own driver is measured instead of kedge.
    pub native: bool,
    /// Bytes, of what each of them measures; none for the usual ones.
    pub sizes: Vec<u64>,
    /// Whether the driver is to checkpoint a program too.
    pub driver: bool,
    /// A folder to write to.
    pub dir: Option<&'a Path>,
    /// The server whose devices are measured.
    pub to: Option<&'a GpuSpec>,
    /// Parts of it alone; none for all.
    pub parts: &'a [Part],
    /// Hosts, of which the first is this one, and those on which jobs are restarted.
    pub hosts: &'a [String],
    pub spares: &'a [String],
    /// Rounds of each figure, where they are not the usual ones.
    pub rounds: Option<usize>,
}

/// Measures, and hands over each series as it comes.
///
/// # Errors
/// What could not be measured, and why: in words.
pub fn measure(asked: Asked<'_>, sink: &mut dyn FnMut(Series)) -> Result<(), String> {
    let Asked { what, gpu, dir, to, sizes, parts, .. } = asked;
    Part::check(parts, what)?;
    let size = |usual: u64| sizes.first().copied().unwrap_or(usual);
    match what {
        What::Calls | What::Copy | What::Soft => (asked.probe)(&what.name(), &mut |line| {
            if let Ok(one) = serde_json::from_str::<Series>(line) {
                sink(one);
            }
        }),
        What::Codecs => {
            let sizes = if sizes.is_empty() { vec![CODECS_SIZE] } else { sizes };
            sizes.iter().try_for_each(|size| codecs::run(*size, dir, sink))
        }
        What::Barriers => process::barriers::run(dir, sink),
        What::Cache => cache::run(dir, sink),
        What::Writers => cache::writers(dir, &sizes),
        What::Process => process::run(sizes, dir, parts, sink),
        What::Checkpoint => {
            let gpu = gpu()?;
            let usual = if matches!(gpu, GpuSpec::Soft { .. }) { SOFT_SIZE } else { GPU_SIZE };
            let sizes = if sizes.is_empty() { vec![usual] } else { sizes };
            let folder = Scratch::new(dir)?;
            let bench = checkpoint::Bench { gpu: &gpu, dir: &folder.0, driver: asked.driver };
            sizes.iter().try_for_each(|size| bench.run(*size, sink))
        }
        What::Cost => cost::run(&gpu()?, &Scratch::new(dir)?.0, sink),
        What::Far => far::Bench::new(&gpu()?, to, parts)?.run(sink),
        What::Migrate => {
            let (gpu, folder) = (gpu()?, Scratch::new(dir)?);
            migrate::Bench::new(&gpu, to, &folder.0, size(migrate::SIZE))?.run(parts, sink)
        }
        What::Managed => {
            let gpu = if asked.native { None } else { Some(gpu()?) };
            managed::Bench { gpu: gpu.as_ref(), size: size(managed::SIZE), dir }.run(sink)
        }
        What::Cluster => {
            let (hosts, spares, rounds) = (asked.hosts, asked.spares, asked.rounds);
            let asked = cluster::Asked { hosts, spares, sizes: &sizes, rounds, dir, parts };
            cluster::run(&asked, sink)
        }
    }
}
