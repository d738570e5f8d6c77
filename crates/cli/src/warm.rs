//! `kedge warm`.

use crate::Failure;
use crate::gpu;
use crate::output::{self, BAD, GOOD, PLAIN, Table};
use clap::{Args, Subcommand};
use kedge_control::gpu::GpuSpec;
use kedge_control::joblog::JobLog;
use kedge_control::size::Size;
use kedge_control::warn;
use kedge_image::DeviceLimits;
use kedge_supervisor::Parts;
use kedge_supervisor::jobs::JobName;
use kedge_supervisor::warm::{self, Keeping, Kind, PoolStatus};
use std::num::NonZeroU32;
use std::os::fd::RawFd;
use std::sync::OnceLock;

const AFTER_HELP: &str = "\
A warm proxy has its devices started and a context made, which takes 0.2 s on an H200; it holds \
some 0.5 GB of a GPU's memory for that. `kedge run` and `kedge restart` take one where it is what \
they would have started themselves: on the same devices, of the same kedge, under the same CUDA_ \
variables, on the same processors, in the same namespaces. If not, a new proxy starts, and the \
job's log tells why.

Examples:
  kedge warm start --gpu local:0 --gpu local:1 &   one ready for each of two GPUs, until it is told to stop
  kedge warm status
  kedge warm stop
  kedge run --warm -- ./train                      the same for one job alone";

/// Keep proxies ready for all your jobs on this machine
///
/// A job then gets its devices, or comes back from an image, sooner.
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct WarmArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Keep some ready, in the foreground, until it is told to stop
    Start(StartArgs),
    /// End what keeps proxies ready, and those that are
    ///
    /// Jobs that have been given one go on.
    Stop,
    /// Tell which are ready
    Status {
        /// Those that are kept for this job alone
        #[arg(long, value_name = "NAME")]
        job: Option<JobName>,
        /// Print JSON: a list of objects gpu, ready (process ids), starting, count, given, failure
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Args)]
struct StartArgs {
    /// Devices that they are ready for, as `kedge run` takes them; once for each choice [default:
    /// as for `kedge run`]
    #[arg(long = "gpu", value_name = "SPEC")]
    gpus: Vec<GpuSpec>,
    /// So many for each
    #[arg(long, value_name = "N", default_value = "1")]
    count: NonZeroU32,
    /// For jobs that have the same --soft-memory
    #[arg(long, value_name = "SIZE")]
    soft_memory: Option<Size>,
    /// For jobs that have the same --gpu-memory
    #[arg(long, value_name = "SIZE")]
    gpu_memory: Option<Size>,
    /// What a job's supervisor hands over: for that job alone
    #[arg(long, value_name = "FD", hide = true)]
    handed: Option<RawFd>,
}

pub(crate) fn run(args: &WarmArgs) -> Result<(), Failure> {
    match &args.what {
        What::Start(args) => start(args),
        What::Stop => Ok(warm::stop()?),
        What::Status { job, json } => status(job.as_ref(), *json),
    }
}

fn start(args: &StartArgs) -> Result<(), Failure> {
    let parts = Parts::find()?;
    let soft_memory = args.soft_memory.map(|size| size.0);
    let gpu_memory = args.gpu_memory.map(|size| size.0);
    let limits = DeviceLimits { soft_memory, gpu_memory, ..DeviceLimits::default() };
    let mut gpus = args.gpus.clone();
    if let Some(refused) = gpus.iter().find_map(|gpu| gpu.refuse_several("a proxy made ready")) {
        return Err(refused.into());
    }
    if gpus.is_empty() {
        gpus.push(gpu::resolve(None, soft_memory.map(|_| "--soft-memory"))?.spec);
    }
    let kinds = gpus.iter().map(|gpu| Kind::here(&parts, gpu, &limits)).collect();
    let keeping = args.handed.map_or(Keeping::Node, Keeping::Job);
    // A job's log, or what somebody looks at. Opened with the first line: what is open before is
    // closed, but for what was handed.
    let (of_a_job, log) = (args.handed.is_some(), OnceLock::new());
    let say = move |line: &str| match of_a_job {
        true => log.get_or_init(job_log).iter().for_each(|log| warn!(log, "{line}")),
        false => eprintln!("kedge: {line}"),
    };
    Ok(warm::keep(kinds, args.count.get() as usize, &keeping, say)?)
}

/// Opens the log that standard error is, by its own name, whose folder is the job's.
fn job_log() -> Option<JobLog> {
    let path = std::fs::read_link("/proc/self/fd/2").ok()?;
    JobLog::open(&path, format!("warm[{}]", std::process::id())).ok()
}

fn status(job: Option<&JobName>, json: bool) -> Result<(), Failure> {
    let pools = warm::status(job)?;
    if json {
        return Ok(output::json(&pools)?);
    }
    let mut table =
        Table::new(&["GPU", "READY", "OF", "GIVEN", "WHAT WENT WRONG LAST"], &[1, 2, 3]);
    for PoolStatus { gpu, ready, count, given, failure, .. } in pools {
        let style = if ready.len() < count { BAD } else { GOOD };
        table.row([
            (PLAIN, gpu),
            (style, ready.len().to_string()),
            (PLAIN, count.to_string()),
            (PLAIN, given.to_string()),
            (PLAIN, failure.unwrap_or_default()),
        ]);
    }
    Ok(output::print(&table.render())?)
}
