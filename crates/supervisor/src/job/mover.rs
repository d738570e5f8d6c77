//! A job whose devices move as soon as it runs, or as others are free: by a process beside it,
//! which is none of the job's and asks as any user does.

use crate::base::again::kedge_again;
use crate::base::apart::leave;
use crate::job::jobs::{JobName, Jobs, Meta, State};
use kedge_process::running_since;
use std::fmt;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Stdio;
use std::str::FromStr;

/// Where a job's devices are to move.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MoveTo {
    /// As `kedge migrate --to` has it.
    pub to: String,
    /// Not before they are free.
    pub when_free: bool,
}

impl MoveTo {
    /// Starts what asks for the move of this process's job, and again where it cannot be, until
    /// that has moved or ended. What comes of it is in the job's log.
    pub(crate) fn start(&self, job: &JobName) -> io::Result<()> {
        let when = if self.when_free { "free" } else { "now" };
        let begins = Supervisor::here().to_string();
        let mut command = kedge_again();
        command
            .args(["migrate", &job.to_string(), "--begins", &begins, "--keep-trying"])
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

/// What supervises a job: tells that from others which get its name later. It is the same after the
/// job has gone back to an image by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Supervisor {
    pid: u32,
    /// Ticks since the machine's boot; `None` of one that cannot be seen from here.
    started: Option<u64>,
}

impl Supervisor {
    fn of_process(pid: u32) -> Supervisor {
        Supervisor { pid, started: running_since(pid as i32) }
    }

    /// This process.
    fn here() -> Supervisor {
        Supervisor::of_process(std::process::id())
    }

    /// That of the job `name`, if it runs.
    #[must_use]
    pub fn of(jobs: &Jobs, name: &JobName) -> Option<Supervisor> {
        Supervisor::of_meta(&jobs.find(name)?)
    }

    /// That of the job that `meta` is of, if it runs.
    #[must_use]
    pub fn of_meta(meta: &Meta) -> Option<Supervisor> {
        (meta.state == State::Running).then(|| Supervisor::of_process(meta.supervisor))
    }

    /// Whether it has not ended.
    #[must_use]
    pub fn lives(&self) -> bool {
        self.started.is_some() && running_since(self.pid as i32) == self.started
    }
}

impl fmt::Display for Supervisor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.pid, self.started.unwrap_or(0))
    }
}

impl FromStr for Supervisor {
    type Err = String;

    fn from_str(text: &str) -> Result<Supervisor, String> {
        let parts = text.split_once(':').map(|(pid, started)| (pid.parse(), started.parse()));
        match parts {
            Some((Ok(pid), Ok(started))) => Ok(Supervisor { pid, started: Some(started) }),
            _ => Err(format!("`{text}` is no process id and start")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_supervisor_is_none_that_has_its_id_later() {
        let here = Supervisor::here();
        assert!(here.lives());
        assert_eq!(here.to_string().parse(), Ok(here));
        let other = Supervisor { started: here.started.map(|ticks| ticks + 1), ..here };
        assert!(!other.lives() && other != here);
        assert_eq!(other.to_string().parse(), Ok(other));
        for text in ["", "1", "1:", ":1", "a:1", "1:-1"] {
            assert!(text.parse::<Supervisor>().is_err(), "{text}");
        }
    }
}
