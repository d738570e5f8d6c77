//! `kedge probe`, hidden: runs one of kedge's own small CUDA programs in this process and prints
//! what it finds as JSON, one object a line.

use crate::Failure;
use crate::output;
use clap::{Args, Subcommand};
use kedge_probe::{Bench, Held, ProbeError, Sink};
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(crate) struct ProbeArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Start the CUDA runtime at PATH
    Runtime { path: PathBuf },
    /// Describe the devices
    Devices,
    /// Tell how much of each device's memory is free
    Room,
    /// Run a kernel through the driver
    Kernel,
    /// Draw a number, and add one to it for each line, for `doctor`
    Count {
        /// A kernel adds, in a device's memory
        #[arg(long)]
        on_device: bool,
    },
    /// Time calls
    Calls,
    /// Time copies
    Copy,
    /// Time kernels
    Soft,
    /// Hold memory of a data set of `bench codecs`
    Hold { data: String, size: usize },
    /// Time a loop of `bench process`
    Loop { name: String },
    /// Meet others at barriers for `bench process`
    Member { folder: PathBuf, index: u32 },
    /// Meet others at barriers over TCP for `bench cluster`
    FarMember { address: String, key: PathBuf, index: u32, members: u32, rounds: u32 },
    /// Hold random memory for `bench process` and obey orders
    Memory { size: usize },
    /// The same as a job of many processes, each with many threads
    Many { processes: usize, threads: usize, size: usize },
    /// Hold device memory for `bench checkpoint`, launch and synchronise, and obey orders
    Beat {
        size: usize,
        /// Bytes of its own memory
        #[arg(long, default_value_t = 0)]
        host: usize,
        /// What the device's memory holds is easy to compress
        #[arg(long)]
        plain: bool,
        /// Bytes of one allocation at most
        #[arg(long)]
        part: Option<usize>,
    },
    /// Do what `bench far` orders, one thing at a time
    Far,
    /// Do what `bench managed` orders, one thing at a time
    Managed,
    /// Time what it takes to have a device, for `model fit`
    Session,
    /// Time uses of a device, for `model fit`
    Uses,
    /// Hold events and regions of device memory, for `model fit`
    Objects { events: usize, regions: usize, size: usize },
    /// Have the driver checkpoint and restore a process, for `bench checkpoint`
    Driver { pid: i32 },
}

pub(crate) fn run(args: &ProbeArgs) -> Result<(), Failure> {
    match &args.what {
        What::Runtime { path } => line(&kedge_probe::start_runtime(path)?),
        What::Devices => {
            kedge_probe::devices(kedge_cuda_types::attribute::ALL)?.iter().try_for_each(line)
        }
        What::Room => kedge_probe::rooms()?.iter().try_for_each(line),
        What::Kernel => Ok(kedge_probe::check_kernel()?),
        What::Count { on_device } => {
            let (input, output) = (std::io::stdin().lock(), std::io::stdout().lock());
            Ok(kedge_probe::count(*on_device, input, output)?)
        }
        What::Calls => bench(Bench::Calls),
        What::Copy => bench(Bench::Copy),
        What::Soft => bench(Bench::Soft),
        What::Loop { name } => match kedge_probe::time_loop(name) {
            Some(nanoseconds) => line(&nanoseconds),
            None => Err(Failure::new(format!("no loop named {name}"))),
        },
        What::Member { folder, index } => {
            let times = kedge_bench::member(folder, *index);
            line(&times.map_err(Failure::new)?)
        }
        What::FarMember { address, key, index, members, rounds } => {
            let numbers = [*index, *members, *rounds];
            let times = kedge_bench::far_member(address, key, numbers);
            times.map_err(Failure::new)?.as_ref().map_or(Ok(()), line)
        }
        What::Memory { size } => {
            Ok(kedge_probe::hold_memory(*size, std::io::stdin().lock(), std::io::stdout().lock())?)
        }
        What::Many { processes, threads, size } => {
            let (input, output) = (std::io::stdin().lock(), std::io::stdout().lock());
            Ok(kedge_probe::hold_many(*processes, *threads, *size, input, output)?)
        }
        What::Beat { size, host, plain, part } => {
            let input = std::io::BufReader::new(std::io::stdin());
            let usual = Held::noise(*size);
            let part = part.unwrap_or(usual.part);
            let held = Held { host: *host, noise: !plain, part, ..usual };
            Ok(kedge_probe::beat(held, input, std::io::stdout().lock())?)
        }
        What::Far => {
            let input = std::io::BufReader::new(std::io::stdin());
            Ok(kedge_probe::obey(input, std::io::stdout().lock())?)
        }
        What::Managed => {
            let input = std::io::BufReader::new(std::io::stdin());
            Ok(kedge_probe::obey_managed(input, std::io::stdout().lock())?)
        }
        What::Session => times(kedge_probe::time_session),
        What::Uses => times(kedge_probe::time_uses),
        What::Objects { events, regions, size } => {
            let (input, output) = (std::io::stdin().lock(), std::io::stdout().lock());
            Ok(kedge_probe::hold_objects(*events, *regions, *size, input, output)?)
        }
        What::Driver { pid } => line(&kedge_probe::checkpoint_by_driver(*pid)?),
        What::Hold { data, size } => Ok(kedge_bench::hold(data, *size)?),
    }
}

fn bench(what: Bench) -> Result<(), Failure> {
    times(|sink| kedge_probe::bench(what, sink))
}

/// Prints each series as it comes.
fn times(measure: impl FnOnce(&mut Sink<'_>) -> Result<(), ProbeError>) -> Result<(), Failure> {
    let mut lost = None;
    measure(&mut |series| lost = lost.take().or(line(&series).err()))?;
    lost.map_or(Ok(()), Err)
}

fn line(value: &impl serde::Serialize) -> Result<(), Failure> {
    Ok(output::print(&format!("{}\n", serde_json::to_string(value)?))?)
}
