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

pub(crate) use link::{Held, Link};
pub(crate) use meet::{Meeting, STARTS, hear, met, tell};
pub(crate) use plugin::RankRestart;
pub(crate) use session::Open;
pub use session::RankError;

use crate::job::policy::Policy;
use kedge_control::joblog::JobLog;
use kedge_process::EngineError;
use rustix::io::{FdFlags, fcntl_setfd};
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

/// What the daemons of steps are called (proc(5): comm).
const DAEMON: &str = "slurmstepd";

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
        Seat::of(variable, peer)
    }

    /// The one of a job that is restarted from `image` alone, if it was a rank's.
    ///
    /// # Errors
    /// The policy has what no rank can have.
    pub(crate) fn of_image(image: &Path, policy: &Policy) -> Result<Option<Seat>, RankError> {
        // One that cannot be read is passed over where it would be restarted.
        let holds = || is_of_rank(image).unwrap_or(false);
        let seat = Seat::here().filter(|_| holds());
        if seat.is_some() && policy.recover.is_some() {
            return Err(RankError::Option("--recover"));
        }
        Ok(seat)
    }

    /// As these variables and the names of descriptors' peers tell.
    fn of(
        variable: impl Fn(&str) -> Option<String>,
        peer: impl Fn(RawFd) -> Option<String>,
    ) -> Option<Seat> {
        let number = |name| variable(name)?.parse::<u32>().ok();
        let step = variable("PMI_JOBID")?;
        // Hydra's proxy inherits Slurm's variables, puts PMI_FD, PMI_RANK and PMI_SIZE in place of
        // Slurm's, and gives its ranks sockets of its own.
        let job = (variable("SLURM_JOB_ID")?, variable("SLURM_STEP_ID")?);
        let rank = number("PMI_RANK")?;
        if step != format!("{}.{}", job.0, job.1) || number("SLURM_PROCID")? != rank {
            return None;
        }
        let size =
            number("PMI_SIZE").filter(|size| number("SLURM_STEP_NUM_TASKS") == Some(*size))?;
        let fd = RawFd::try_from(number("PMI_FD")?).ok().filter(|fd| *fd > 2)?;
        (peer(fd)? == DAEMON).then_some(Seat { fd, step, rank, size })
    }

    /// Keeps the daemon's socket from what this process starts where PMI_FD has been taken out of
    /// a step's environment (`env -u PMI_FD`): the job is one of its own, and no rank.
    pub(crate) fn leave() {
        if variable("PMI_JOBID").is_none() || variable("PMI_FD").is_some() {
            return;
        }
        let Ok(all) = std::fs::read_dir("/proc/self/fd") else { return };
        let numbers = all.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        for fd in numbers.filter(|fd| *fd > 2).collect::<Vec<RawFd>>() {
            if peer(fd).is_some_and(|name| name == DAEMON)
                && let Some(fd) = opened(fd)
            {
                // Where that fails, a checkpoint names the connection.
                let _ = fcntl_setfd(fd, FdFlags::CLOEXEC);
            }
        }
    }

    /// Whether there are others.
    pub(crate) fn has_others(&self) -> bool {
        self.size > 1
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        opened(self.fd)
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

/// Returns whether this process is one of several ranks of a step: all of them are one job.
#[must_use]
pub fn is_one_of_ranks() -> bool {
    Seat::here().is_some_and(|seat| seat.has_others())
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// A descriptor that this process was started with.
fn opened<'a>(fd: RawFd) -> Option<BorrowedFd<'a>> {
    std::fs::symlink_metadata(format!("/proc/self/fd/{fd}")).ok()?;
    // SAFETY: the descriptor is open, as /proc has just told, and this process, which was started
    // with it, closes it nowhere.
    Some(unsafe { BorrowedFd::borrow_raw(fd) })
}

/// What the process is called that has made the socket `fd`, if it is one.
fn peer(fd: RawFd) -> Option<String> {
    let pid = kedge_socket::peer_pid(opened(fd)?).ok()?;
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    Some(name.trim_end().to_owned())
}

/// The program's end of the relay, and the number under which the program has it.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) socket: OwnedFd,
    pub(crate) number: RawFd,
}

/// Returns whether the image is of a rank that had a session with its step.
///
/// # Errors
/// The image cannot be read.
pub(crate) fn is_of_rank(image: &Path) -> Result<bool, EngineError> {
    kedge_process::holds(image, plugin::NAME)
}

/// Has the program of the job that this process supervises speak with a relay: that, and the
/// program's end.
///
/// # Errors
/// There are no descriptors or threads left.
pub(crate) fn serve(
    seat: &Seat,
    open: Open,
    log: &Arc<JobLog>,
) -> Result<(Arc<Link>, End), RankError> {
    seat.keep()?;
    Link::start(seat, open, log.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    fn of(variables: &[(&str, &str)], peer: Option<&str>) -> Option<Seat> {
        let variable = |name: &str| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        Seat::of(variable, |fd| peer.filter(|_| fd == 11).map(str::to_owned))
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
            ("SLURM_STEP_NUM_TASKS", "2"),
        ];
        let daemon = Some("slurmstepd");
        let seat = Seat { fd: 11, step: "7.2".to_owned(), rank: 1, size: 2 };
        assert_eq!(of(&slurm, daemon), Some(seat));
        // Hydra, alone and in a step; and who cannot be seen.
        assert_eq!(of(&[("PMI_FD", "11"), ("PMI_RANK", "1"), ("PMI_SIZE", "2")], daemon), None);
        for other in [Some("hydra_pmi_proxy"), Some("kedge"), Some(""), None] {
            assert_eq!(of(&slurm, other), None, "{other:?}");
        }
        for (name, value) in [
            ("PMI_FD", "-1"),
            ("PMI_FD", "1"),
            ("PMI_JOBID", "kvs_4711_0"),
            ("SLURM_PROCID", "0"),
            ("PMI_SIZE", "many"),
            ("PMI_SIZE", "4"),
        ] {
            let mut other = slurm;
            other.iter_mut().filter(|pair| pair.0 == name).for_each(|pair| pair.1 = value);
            assert_eq!(of(&other, daemon), None, "{name}={value}");
        }
        for left in 0..slurm.len() {
            let mut some = slurm.to_vec();
            some.remove(left);
            assert_eq!(of(&some, daemon), None);
        }
    }

    #[test]
    fn a_socket_s_maker_is_known_by_name() {
        let (one, _other) = UnixStream::pair().unwrap();
        let own = std::fs::read_to_string("/proc/self/comm").unwrap();
        assert_eq!(peer(one.as_raw_fd()).as_deref(), Some(own.trim_end()));
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(peer(file.as_raw_fd()), None);
    }
}
