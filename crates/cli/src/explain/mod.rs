//! `kedge explain`: which device code a program and its libraries hold, and what runs it.

mod binary;
mod code;
mod cubin;
mod files;
mod report;

use crate::progress::Progress;
use crate::{Failure, output};
use clap::Args;
use files::Found;
use report::Report;
use std::path::{Path, PathBuf};

const AFTER_HELP: &str = "\
A program of CUDA holds its kernels as PTX, as machine code for some kinds of GPUs, or as both. \
Software devices run PTX. GPUs run machine code that was made for them, and PTX. Nothing is \
started: what a program compiles as it runs (with NVRTC, nvJitLink, Triton) is not seen here, and \
runs.

Of a program, the libraries that the loader brings with it are looked at too; not what it opens \
later, as Python does: give the folder of its packages.

Examples:
  kedge explain ./simulation
  kedge explain .venv                     a Python environment: all that its packages hold
  kedge explain --kernels ./simulation    each kernel, too";

/// Tell which device code programs and libraries hold, what runs it, and what helps where nothing
/// does
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct ExplainArgs {
    /// A program, a library, or a folder such as a Python environment
    #[arg(value_name = "PROGRAM|FOLDER", required = true)]
    paths: Vec<PathBuf>,
    /// List the kernels, too
    #[arg(long)]
    kernels: bool,
    /// Print a JSON object: files (a list of objects: path; modules, how many; software, how many
    /// of them run on software devices, as objects: runs, newer, machine_code, link_time_code;
    /// gpus, compute capabilities that run all modules, 90 for 9.0; gpus_partly, that run some;
    /// kernels, with --kernels, objects: name, ptx, machine_code), missing (objects: library,
    /// needed_by), unread (objects: path, why), advice (sentences)
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &ExplainArgs) -> Result<(), Failure> {
    let found = find(args)?;
    let report = Report::of(&found, args.kernels);
    if args.json {
        return Ok(output::json(&report)?);
    }
    Ok(output::print(&report.render())?)
}

fn find(args: &ExplainArgs) -> Result<Found, Failure> {
    let shown = Progress::new("");
    let mut found = Found::default();
    for path in &args.paths {
        let real = path
            .canonicalize()
            .map_err(|error| Failure::new(format!("{}: {error}", path.display())))?;
        if real.is_dir() {
            let mut show = |folder: &Path| shown.show(&output::harmless(&folder.to_string_lossy()));
            found.add_folder(&real, args.kernels, &mut show);
        } else {
            found.add_program(&real, args.kernels);
        }
    }
    Ok(found)
}
