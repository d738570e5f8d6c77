//! `kedge`: runs CUDA programs on virtual GPUs.
#![forbid(unsafe_code)]

mod balance;
mod bench;
mod cache;
mod cdi;
mod check;
mod checkpoint;
mod child;
mod completions;
mod config;
mod devices;
mod doctor;
mod env;
mod events;
mod explain;
mod failure;
mod gpu;
mod http;
mod images;
mod k8s;
mod kernel_cache;
mod keys;
mod kill;
mod loader;
mod logs;
mod manual;
mod metrics;
mod migrate;
mod mistyped;
mod model;
mod moved_job;
mod output;
mod probe;
mod progress;
mod prometheus;
mod ps;
mod readiness;
mod restart;
mod run;
mod serve;
mod shell;
mod slurm;
mod swap;
mod take_job;
mod time;
mod top;
mod trace;
mod usage;
mod warden;
mod warm;

use clap::{Parser, Subcommand};
use failure::Failure;
use std::process::ExitCode;

const AFTER_HELP: &str = "\
Exit status:
  what the program's was, for `kedge run` and `kedge restart` (a signal that ends the program
       ends kedge too)
  0    done
  1    `kedge doctor` found something that kedge needs and that is missing; `kedge verify` found an
       image that is damaged
  2    the command line was not understood
  86   `kedge check` found something in the program
  125  kedge itself failed; stderr says why and what to do
  126  the program could not be executed
  127  there is no such program

Environment:
  XDG_STATE_HOME   images are kept in its folder kedge/images/, jobs in kedge/hosts/HOST/
       [default: ~/.local/state]
  XDG_RUNTIME_DIR  jobs are kept in its folder kedge/ where there is no home
       [default: a folder of the user's in /tmp]
  XDG_CACHE_HOME   the kernel cache is kept in its folder kedge/kernels/, what `kedge env` tells
       linkers of in kedge/link/ [default: ~/.cache]
  XDG_CONFIG_HOME  keys are kept in its folder kedge/keys/, options that are not given are those of
       kedge/config.toml [default: ~/.config]
  KEDGE_CONFIG     the file in its place; empty: no file is read (`kedge config --help`)
  KEDGE_LIB_DIR    where libkedge_cuda.so and kedge-proxy are
  NO_COLOR         no colours

Examples:
  kedge run -- ./vector_add        run a program on one software device
  kedge run --gpu soft:2 -- ./p2p  on two
  kedge run --gpu none --job sim -- ./simulate
  kedge checkpoint sim             save it as an image
  kedge restart sim-0001           bring it back from there, also after a reboot
  kedge serve                      lend this machine's devices, for --gpu HOST there
  kedge logs                       what kedge had to say about the latest job
  kedge top                        jobs on one screen, with keys to act on them
  kedge check ./program            what its kernels do wrong with memory; no GPU is needed
  kedge trace --stats ./program    its calls, kernels and copies, and how long they take
  kedge explain ./program          which of its kernels run on software devices, and on which GPUs
  kedge doctor                     what this machine offers, and what is missing";

/// Run unmodified CUDA programs on virtual GPUs
///
/// A program that `kedge run` starts finds kedge's driver where it looks for NVIDIA's, and with it
/// the devices that --gpu asks for. The program need not be recompiled, and no GPU is needed for
/// software devices.
#[derive(Debug, Parser)]
#[command(name = "kedge", version, after_help = AFTER_HELP, propagate_version = false)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(run::RunArgs),
    Check(check::CheckArgs),
    Trace(trace::TraceArgs),
    /// List the devices that a program would see
    Devices(devices::DevicesArgs),
    /// List running jobs
    Ps(ps::PsArgs),
    Top(top::TopArgs),
    /// Print what kedge had to say about a job
    ///
    /// The job's log has kedge's own messages: why a device faulted, which function is not
    /// supported, how a proxy ended. The program's own output is not in it.
    Logs(logs::LogsArgs),
    Kill(kill::KillArgs),
    Checkpoint(checkpoint::CheckpointArgs),
    Restart(restart::RestartArgs),
    Swap(swap::SwapArgs),
    Migrate(migrate::MigrateArgs),
    Balance(balance::BalanceArgs),
    Warm(warm::WarmArgs),
    Serve(serve::ServeArgs),
    Cdi(cdi::CdiArgs),
    K8s(k8s::K8sArgs),
    Slurm(slurm::SlurmArgs),
    Keys(keys::KeysArgs),
    Images(images::ImagesArgs),
    Inspect(images::inspect::InspectArgs),
    Verify(images::verify::VerifyArgs),
    Rm(images::rm::RmArgs),
    Prune(images::prune::PruneArgs),
    Cache(cache::CacheArgs),
    KernelCache(kernel_cache::KernelCacheArgs),
    Metrics(metrics::MetricsArgs),
    Config(config::ConfigArgs),
    Doctor(doctor::DoctorArgs),
    Env(env::EnvArgs),
    Explain(explain::ExplainArgs),
    Bench(bench::BenchArgs),
    Model(model::ModelArgs),
    /// Print completions for a shell
    ///
    /// Names of jobs and images are completed in bash, zsh and fish.
    ///
    /// For bash: kedge completions bash > ~/.local/share/bash-completion/completions/kedge
    Completions(completions::CompletionsArgs),
    /// Print the manual page
    ///
    /// To read it: kedge man | man -l -
    Man(manual::ManArgs),
    /// A small CUDA program: what doctor starts and bench times
    #[command(hide = true)]
    Probe(probe::ProbeArgs),
    /// What completions offer
    #[command(hide = true)]
    Names(completions::NamesArgs),
    #[command(hide = true)]
    RemoteShell(shell::RemoteShellArgs),
    #[command(hide = true)]
    Warden(warden::WardenArgs),
    #[command(hide = true)]
    TakeJob(take_job::TakeJobArgs),
    #[command(hide = true)]
    RelayJob(moved_job::RelayJobArgs),
}

fn main() -> ExitCode {
    if let Some(ended) = shell::called().or_else(slurm::called) {
        return ended;
    }
    let done = |()| ExitCode::SUCCESS;
    let cli = match config::parse() {
        Ok(cli) => cli,
        Err(failure) => return failure.report(),
    };
    let result = match cli.command {
        Command::Run(args) => run::run(args),
        Command::Check(args) => check::run(args),
        Command::Trace(args) => trace::run(args),
        Command::Devices(args) => devices::run(&args).map(done),
        Command::Ps(args) => ps::run(&args).map(done),
        Command::Top(args) => top::run(&args).map(done),
        Command::Logs(args) => logs::run(&args).map(done),
        Command::Kill(args) => kill::run(&args).map(done),
        Command::Checkpoint(args) => checkpoint::run(&args).map(done),
        Command::Restart(args) => restart::run(args),
        Command::Migrate(args) => migrate::run(&args).map(done),
        Command::Balance(args) => balance::run(&args).map(done),
        Command::Swap(args) => swap::run(&args).map(done),
        Command::Warm(args) => warm::run(&args).map(done),
        Command::Cdi(args) => cdi::run(&args).map(done),
        Command::K8s(args) => k8s::run(&args).map(done),
        Command::Slurm(args) => slurm::run(&args).map(done),
        Command::Serve(args) => serve::run(&args).map(done),
        Command::Keys(args) => keys::run(&args).map(done),
        Command::Images(args) => images::run(&args).map(done),
        Command::Inspect(args) => images::inspect::run(&args).map(done),
        Command::Verify(args) => images::verify::run(&args),
        Command::Rm(args) => images::rm::run(&args).map(done),
        Command::Prune(args) => images::prune::run(&args).map(done),
        Command::Cache(args) => cache::run(&args).map(done),
        Command::KernelCache(args) => kernel_cache::run(&args).map(done),
        Command::Metrics(args) => metrics::run(&args).map(done),
        Command::Config(args) => config::run(&args).map(done),
        Command::Doctor(args) => doctor::run(&args),
        Command::Env(args) => env::run(&args).map(done),
        Command::Explain(args) => explain::run(&args).map(done),
        Command::Bench(args) => bench::run(&args).map(done),
        Command::Model(args) => model::run(&args).map(done),
        Command::Completions(args) => completions::completions(&args).map(done),
        Command::Man(args) => manual::man(&args).map(done),
        Command::Probe(args) => probe::run(&args).map(done),
        Command::Names(args) => completions::names(&args).map(done),
        Command::RemoteShell(args) => shell::run(&args),
        Command::Warden(args) => warden::run(&args),
        Command::TakeJob(args) => take_job::run(&args).map(done),
        Command::RelayJob(args) => moved_job::run(&args),
    };
    result.unwrap_or_else(|failure| failure.report())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
