//! `kedge swap`.

use crate::Failure;
use crate::events::{Event, EventsArgs};
use crate::output;
use crate::size::Size;
use clap::{Args, ValueEnum};
use kedge_supervisor::control;
use kedge_supervisor::jobs::{JobName, Jobs};
use serde::Serialize;
use std::time::Instant;

const AFTER_HELP: &str = "\
Out: what the job has in its devices' memory is packed into host memory (kedge run --cache-host \
is the limit), and the devices' memory is others'. The job runs on; as soon as it asks its \
devices for anything, that comes back by itself, and waits until there is memory for it. \
Addresses stay as they were.

Memory that the program has made by cuMemCreate, arrays and module variables stay on the devices.

Examples:
  kedge swap out notebook      while nobody computes there
  kedge swap in notebook       ahead of time";

/// Take an idle job's memory off its devices, or bring it back
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct SwapArgs {
    /// Which way
    #[arg(value_enum)]
    way: Way,
    /// The job
    #[arg(value_name = "JOB")]
    job: JobName,
    /// Print a JSON object: job, way ("out" or "in"), bytes, seconds
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    events: EventsArgs,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    job: &'a str,
    way: &'static str,
    bytes: u64,
    seconds: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Way {
    Out,
    In,
}

pub(crate) fn run(args: &SwapArgs) -> Result<(), Failure> {
    let events = args.events.open()?;
    let (job, begin) = (args.job.to_string(), Instant::now());
    let (out, way) = match args.way {
        Way::Out => (true, "out"),
        Way::In => (false, "in"),
    };
    let swapped = control::swap(&Jobs::open()?, &args.job, out);
    if let Err(error) = &swapped {
        events.tell(&Event::Failed { error: &error.to_string() });
    }
    let (bytes, seconds, job) = (swapped?, begin.elapsed().as_secs_f64(), job.as_str());
    events.tell(&Event::Swapped { job, way, bytes, seconds });
    match args.way {
        _ if args.json => Ok(output::json(&Report { job, way, bytes, seconds })?),
        Way::Out => Ok(output::print(&format!("{} are off the devices\n", Size(bytes)))?),
        Way::In => Ok(()),
    }
}
