//! A job whose devices move as soon as it runs, or as others are free: by a process beside it,
//! which is none of the job's and asks as any user does.

use crate::again::kedge_again;
use crate::jobs::JobName;
use crate::warm::leave;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Stdio;

/// Where a job's devices are to move.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MoveTo {
    /// As `kedge migrate --to` has it.
    pub to: String,
    /// Not before they are free.
    pub when_free: bool,
}

impl MoveTo {
    /// Starts what asks for the move, and again where it cannot be, until the job has moved or
    /// ended. What comes of it is in the job's log.
    pub(crate) fn start(&self, job: &JobName) -> io::Result<()> {
        let when = if self.when_free { "free" } else { "now" };
        let mut command = kedge_again();
        command
            .args(["migrate", &job.to_string(), "--begins", "--keep-trying"])
            .args(["--to", &self.to, "--when", when])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        // SAFETY: the closure runs in the child between fork and exec and only makes system calls.
        unsafe {
            command.pre_exec(leave);
        }
        // What was spawned ends at once: what it has forked goes on, as nobody's child.
        command.spawn()?.wait().map(drop)
    }
}
