//! `kedge cache`.

mod partner;
mod program;
mod recover;
mod start;
mod status;
mod top;

pub(crate) use program::ForProgram;

use crate::Failure;
use crate::output;
use clap::{Args, Subcommand};
use kedge_cache::control::{self, Answer, Ask};
use kedge_cache::spec;
use partner::PartnerArgs;
use recover::RecoverArgs;
use start::{START_HELP, StartArgs};
use status::StatusArgs;
use std::path::{Path, PathBuf};

const AFTER_HELP: &str = "\
What programs write below the folder goes into spare memory, or to a local disk, and from there \
to the file system below while they compute. The folder's path stays the same, and so do the \
programs:
the cache is mounted over it. Other nodes see a file's new bytes once they are drained.

Examples:
  kedge cache start --tier ram:8G --under /scratch
  kedge cache start --tier ram:8G --tier nvme:/local:200G --fsync nvme --under /scratch
  kedge cache start --tier gpu:20G --under /scratch
  kedge cache status                       of each of yours
  kedge cache top                          the same from second to second, with what is written
  kedge cache drain --under /scratch       wait until other nodes have everything
  kedge cache stop --under /scratch        drain, unmount and end
  kedge cache recover --under /scratch     after the daemon was killed

With another node that has what fsync acknowledges, so that it survives the loss of this one:
  node2$ kedge cache partner --listen 0.0.0.0:7541 --dir /local/partner:200G
  node1$ kedge cache start --partner node2 --fsync partner --under /scratch
  node2$ kedge cache recover --partner /local/partner/KEY/node1 --under /scratch";

/// Absorb the writes of programs in spare memory
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct CacheArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Start to cache a folder, and go on with what a killed daemon left
    #[command(after_help = START_HELP)]
    Start(StartArgs),
    /// Tell what the cache of a folder holds, or each of yours
    Status(StatusArgs),
    /// Watch caches: their tiers, speeds and errors, with a key to drain
    Top(top::TopArgs),
    /// Write below all that the cache holds, and wait for it
    Drain(FolderArgs),
    /// Drain, unmount and end
    Stop(StopArgs),
    /// Keep what the caches of other nodes send, for `kedge cache recover` here
    Partner(PartnerArgs),
    /// Write below what a killed daemon held, without starting another
    Recover(RecoverArgs),
}

#[derive(Debug, Args)]
struct FolderArgs {
    /// The folder that is cached
    #[arg(long, value_name = "DIR")]
    under: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct StopArgs {
    #[command(flatten)]
    folder: FolderArgs,
    /// End also if not all can be drained: that stays in its tier for `kedge cache recover`
    #[arg(long)]
    leave: bool,
}

pub(crate) fn run(args: &CacheArgs) -> Result<(), Failure> {
    match &args.what {
        What::Start(args) => start::start(args),
        What::Status(args) => status::status(args),
        What::Top(args) => top::run(args),
        What::Drain(args) => order(args, Ask::Drain, "drained"),
        What::Stop(args) => {
            order(&args.folder, if args.leave { Ask::Leave } else { Ask::Stop }, "stopped")
        }
        What::Partner(args) => partner::keep_for_others(args),
        What::Recover(args) => recover::recover(args),
    }
}

fn ask(under: &Path, what: Ask) -> Result<Answer, Failure> {
    Ok(control::ask(&spec::full_path(under)?, what)?)
}

fn order(args: &FolderArgs, what: Ask, done: &str) -> Result<(), Failure> {
    let left = match ask(&args.under, what)? {
        Answer::Left(left) if what == Ask::Leave => Some(left),
        Answer::Left(left) => return Err(Failure::new(left)),
        _ => None,
    };
    match args.json {
        true => output::json(&serde_json::json!({ done: true, "left": left }))?,
        false => {
            output::tell(done);
            if let Some(left) = left {
                output::tell(&output::harmless(&left));
            }
        }
    }
    Ok(())
}
