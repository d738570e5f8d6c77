//! `kedge`: runs CUDA programs on virtual GPUs.
#![forbid(unsafe_code)]

mod run;
mod size;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

#[derive(Debug, Parser)]
#[command(name = "kedge", version, about = "Run unmodified CUDA programs on virtual GPUs")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a program on virtual GPUs; exits as the program does
    Run(run::RunArgs),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Run(args) => run::run(args).map_err(|error| (error.exit_code(), error.into())),
    };
    result.unwrap_or_else(|(code, error): (u8, Box<dyn std::error::Error>)| {
        eprintln!("kedge: {error}");
        ExitCode::from(code)
    })
}
