//! Ranks that Slurm starts (docs/design/0048-slurm.md): the job's program speaks PMI with a relay
//! of its supervisor's, which has the session with the step's daemon.
//!
//! ```text
//! slurmstepd ◄── PMI_FD ──► kedge run: relay ◄── socket pair ──► the rank
//! ```

mod link;
mod meet;
mod plugin;
mod session;

pub(crate) use link::Held;
use link::Link;
pub(crate) use meet::{Meeting, hear, tell};
pub(crate) use plugin::PMI;
pub(crate) use session::Open;
pub use session::RankError;

use kedge_control::joblog::JobLog;
use rustix::fs::{FileType, fstat};
use rustix::io::{FdFlags, fcntl_setfd};
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// The rank of a step that this process is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Seat {
    /// The descriptor that is connected to the step's daemon.
    pub(crate) fd: RawFd,
    /// The step's name.
    step: String,
    rank: u32,
    pub(crate) size: u32,
}

impl Seat {
    /// Returns the one that the environment tells of: Slurm's with `--mpi=pmi2`, no other
    /// launcher's.
    pub(crate) fn here() -> Option<Seat> {
        let seat = Seat::of(|name| std::env::var(name).ok())?;
        let status = fstat(seat.descriptor()?).ok()?;
        (FileType::from_raw_mode(status.st_mode) == FileType::Socket).then_some(seat)
    }

    /// As these variables tell.
    fn of(variable: impl Fn(&str) -> Option<String>) -> Option<Seat> {
        let number = |name| variable(name)?.parse::<u32>().ok();
        let step = variable("PMI_JOBID")?;
        // Hydra's proxy inherits Slurm's variables, and gives its ranks a socket of its own.
        let job = (variable("SLURM_JOB_ID")?, variable("SLURM_STEP_ID")?);
        let rank = number("PMI_RANK")?;
        if step != format!("{}.{}", job.0, job.1) || number("SLURM_PROCID")? != rank {
            return None;
        }
        let fd = RawFd::try_from(number("PMI_FD")?).ok().filter(|fd| *fd > 2)?;
        Some(Seat { fd, step, rank, size: number("PMI_SIZE")? })
    }

    /// Whether there are others.
    pub(crate) fn has_others(&self) -> bool {
        self.size > 1
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        std::fs::symlink_metadata(format!("/proc/self/fd/{}", self.fd)).ok()?;
        // SAFETY: the descriptor is open, as /proc has just told, and this process, which was
        // started with it, closes it nowhere.
        Some(unsafe { BorrowedFd::borrow_raw(self.fd) })
    }

    /// Returns a connection to the daemon.
    fn connection(&self) -> Result<UnixStream, RankError> {
        let closed = || io::Error::from_raw_os_error(libc::EBADF);
        let own = self.descriptor().ok_or_else(closed).and_then(|fd| fd.try_clone_to_owned());
        Ok(UnixStream::from(own.map_err(RankError::Daemon)?))
    }

    /// Keeps the daemon's socket from what this process starts: the program gets another in its
    /// place.
    pub(crate) fn keep(&self) -> Result<(), RankError> {
        let closed = || io::Error::from_raw_os_error(libc::EBADF);
        let fd = self.descriptor().ok_or_else(closed).map_err(RankError::Daemon)?;
        fcntl_setfd(fd, FdFlags::CLOEXEC).map_err(|error| RankError::Daemon(error.into()))
    }
}

/// The program's end of the relay, and the number under which the program has it.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) socket: OwnedFd,
    pub(crate) number: RawFd,
}

/// Has the program of the job that this process supervises speak with a relay: its end.
///
/// # Errors
/// There are no descriptors or threads left.
pub(crate) fn serve(seat: &Seat, open: Open, log: &Arc<JobLog>) -> Result<End, RankError> {
    seat.keep()?;
    let (link, end) = Link::start(seat, open, log.clone())?;
    PMI.runs(link);
    Ok(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Option<Seat> {
        Seat::of(|name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn slurm_s_ranks_are_known_from_others() {
        let slurm = [
            ("PMI_FD", "11"),
            ("PMI_JOBID", "7.2"),
            ("PMI_RANK", "1"),
            ("PMI_SIZE", "2"),
            ("SLURM_JOB_ID", "7"),
            ("SLURM_STEP_ID", "2"),
            ("SLURM_PROCID", "1"),
        ];
        let seat = Seat { fd: 11, step: "7.2".to_owned(), rank: 1, size: 2 };
        assert_eq!(of(&slurm), Some(seat));
        // Hydra, alone and in a step.
        assert_eq!(of(&[("PMI_FD", "11"), ("PMI_RANK", "1"), ("PMI_SIZE", "2")]), None);
        for (name, value) in [
            ("PMI_FD", "-1"),
            ("PMI_FD", "1"),
            ("PMI_JOBID", "kvs_4711_0"),
            ("SLURM_PROCID", "0"),
            ("PMI_SIZE", "many"),
        ] {
            let mut other = slurm;
            other.iter_mut().filter(|pair| pair.0 == name).for_each(|pair| pair.1 = value);
            assert_eq!(of(&other), None, "{name}={value}");
        }
        for left in 0..slurm.len() {
            let mut some = slurm.to_vec();
            some.remove(left);
            assert_eq!(of(&some), None);
        }
    }
}
