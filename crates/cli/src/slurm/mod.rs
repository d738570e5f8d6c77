//! `kedge slurm`: what `--kedge` of Slurm's sbatch, srun and salloc means. Slurm is told of that
//! option by a plugin (`slurm/kedge-spank.c`), which has the option read here where a job is
//! submitted, and tasks become kedge on the nodes (docs/design/0065-spank.md).

mod options;
mod script;
mod task;

use crate::{Failure, config};
use clap::{Args, Subcommand};
use options::{Given, Options};
use std::ffi::OsString;
pub(crate) use task::called;

const AFTER_HELP: &str = "\
--kedge=OPTION,OPTION… stands in a line of #SBATCH, or is given to sbatch, srun or salloc:

  #SBATCH --kedge=interval=10m
  sbatch --kedge=interval=10m,keep=2,ckpt-dir=/scratch/me/images script
  srun --kedge=off ./short

An OPTION is
  on            save the job when Slurm asks it to end, and nothing more
  off           leave it alone: also a step of a script that is not
  script        save the batch script with all that it starts, as one job
  steps         save each step that the script starts by srun, as a job of its own
                [default: steps where the word srun stands in the script, else script]
  no-requeue    when it was saved because it was asked to end, end by SIGTERM, not with status 85
  no-withhold   let the job's processes have SIGTERM, also where Slurm sends it to all of them: it
                is blocked in them there (--withhold-term of `kedge run`)
  NAME, or NAME=VALUE
                an option of `kedge run` without its dashes; `kedge run --help` explains them

The job is started by `kedge run --resume --job NAME --on-term checkpoint --requeue-exit 85`, and by
--gpu none where Slurm has given it no GPU. NAME is the cluster's name and the job's number; a
step's has besides its program and what tells its command line from others. In job=NAME, %j stands
for the job's number, %a for its index in an array, %t for the task.";

/// What --kedge means to Slurm's sbatch, srun and salloc
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct SlurmArgs {
    #[command(subcommand)]
    command: SlurmCommand,
}

#[derive(Debug, Subcommand)]
enum SlurmCommand {
    /// Check the value of --kedge, and print the words that a job is started by
    ///
    /// Slurm's plugin asks this before a job is submitted. Nothing is printed without --verbose.
    #[command(after_help = AFTER_HELP)]
    Check(CheckArgs),
}

#[derive(Debug, Args)]
struct CheckArgs {
    /// Print how kedge is run
    #[arg(long, short)]
    verbose: bool,
    /// What follows `--kedge=`
    options: String,
}

/// Checks an option's value as the plugin has been given it.
///
/// # Errors
/// kedge does not take it; the message names the option.
pub(crate) fn run(args: &SlurmArgs) -> Result<(), Failure> {
    let SlurmCommand::Check(args) = &args.command;
    let wrong = |error: String| Failure::of_usage(format!("--kedge={}: {error}", args.options));
    let options: Options = args.options.parse().map_err(|error| wrong(format!("{error}")))?;
    let task = task::Task::example();
    let name = task.job_name(&options, "program".as_ref(), &[]).map_err(wrong)?;
    let words = options.words(&name, Given::default());
    let all = ["kedge", "run"].into_iter().map(OsString::from);
    let all = all.chain(words.iter().map(OsString::from));
    config::check(all.chain(["--".into(), "true".into()]).collect())
        .map_err(|failure| wrong(failure.message().to_owned()))?;
    if args.verbose {
        crate::output::print(&format!("kedge run {} -- COMMAND\n", words.join(" ")))?;
    }
    Ok(())
}
