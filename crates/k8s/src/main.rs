//! `kedge-k8s`: started by `kedge k8s plugin`.
#![forbid(unsafe_code)]

use kedge_k8s::life;
use kedge_k8s::options::Options;
use std::process::ExitCode;

fn main() -> ExitCode {
    let options = match Options::parse(std::env::args_os().skip(1)) {
        Ok(options) => options,
        Err(error) => {
            eprintln!("kedge-k8s: {error}");
            return ExitCode::from(2);
        }
    };
    match life::run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kedge-k8s: {error}");
            ExitCode::from(125)
        }
    }
}
