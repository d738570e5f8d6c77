//! `kedge warden`: what a part's supervisor starts.

use crate::Failure;
use clap::Args;
use std::process::ExitCode;

/// Watch over a part of a job that goes back by itself
#[derive(Debug, Args)]
pub(crate) struct WardenArgs {
    /// What the supervisor tells it
    #[arg(value_name = "JSON")]
    charge: String,
}

pub(crate) fn run(args: &WardenArgs) -> Result<ExitCode, Failure> {
    let ended = kedge_supervisor::ward(&args.charge);
    ended.map(ExitCode::from).map_err(|error| Failure::of_run(&error))
}
