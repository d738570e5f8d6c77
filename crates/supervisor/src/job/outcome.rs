//! How a program or a proxy ended.

use std::fmt;

/// How the program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Exited(u8),
    Killed(libc::c_int),
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Exited(status) => write!(f, "status {status}"),
            Outcome::Killed(signal) => write!(f, "signal {signal}"),
        }
    }
}

impl Outcome {
    /// From a status as wait() tells it.
    pub(crate) fn of(status: libc::c_int) -> Outcome {
        if libc::WIFSIGNALED(status) {
            Outcome::Killed(libc::WTERMSIG(status))
        } else {
            Outcome::Exited(libc::WEXITSTATUS(status) as u8)
        }
    }
}
