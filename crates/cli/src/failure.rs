//! How a command fails: one line on stderr and a status.

use kedge_supervisor::{EXIT_KEDGE_FAILED, RunError};
use std::fmt::Display;
use std::process::ExitCode;

/// As clap ends, which finds most of what is wrong with a command line.
const EXIT_USAGE: u8 = 2;

/// What went wrong, and the status that says so.
#[derive(Debug)]
pub(crate) struct Failure {
    message: String,
    code: u8,
}

impl Failure {
    /// kedge itself failed.
    pub(crate) fn new(message: impl Display) -> Failure {
        Failure { message: message.to_string(), code: EXIT_KEDGE_FAILED }
    }

    /// The command line was not understood.
    pub(crate) fn of_usage(message: impl Display) -> Failure {
        Failure { message: message.to_string(), code: EXIT_USAGE }
    }

    /// The program could not be run.
    pub(crate) fn of_run(error: &RunError) -> Failure {
        Failure { message: error.to_string(), code: error.exit_code() }
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    pub(crate) fn report(&self) -> ExitCode {
        anstream::eprintln!("kedge: {}", self.message);
        ExitCode::from(self.code)
    }
}

impl<E: Into<Box<dyn std::error::Error>>> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure::new(error.into())
    }
}
