//! `kedge swap`.

use crate::Failure;
use crate::output;
use crate::size::Size;
use clap::{Args, ValueEnum};
use kedge_supervisor::control;
use kedge_supervisor::jobs::{JobName, Jobs};

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
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Way {
    Out,
    In,
}

pub(crate) fn run(args: &SwapArgs) -> Result<(), Failure> {
    let bytes = control::swap(&Jobs::open()?, &args.job, args.way == Way::Out)?;
    match args.way {
        Way::Out => Ok(output::print(&format!("{} are off the devices\n", Size(bytes)))?),
        Way::In => Ok(()),
    }
}
