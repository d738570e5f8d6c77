//! `kedge rm`.

use super::real;
use crate::Failure;
use crate::output;
use clap::Args;
use std::path::PathBuf;

const AFTER_HELP: &str = "\
All that are named go, or none: what is no image, what a checkpoint is writing, and what another \
image builds on (unless that one is named too) is refused.

Examples:
  kedge rm nightly-0003                from the folder where images go by default
  kedge rm /scratch/images/sim-00*     by path";

/// Remove checkpoint images, finished or not
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct RmArgs {
    /// Images: paths, or names in the folder where images go by default
    #[arg(value_name = "IMAGE", required = true)]
    images: Vec<PathBuf>,
    /// Print a JSON list of the paths that were removed
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &RmArgs) -> Result<(), Failure> {
    let folders = args.images.iter().map(|image| real(image)).collect::<Result<Vec<_>, _>>()?;
    kedge_image::remove(&folders)?;
    if args.json {
        output::json(&folders)?;
    }
    Ok(())
}
