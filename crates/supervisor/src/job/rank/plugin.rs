//! The plugin for the program's end of the relay. An image says "the relay", and what waits in
//! either direction; a restart connects it to the relay of the new step.

use super::{Link, Open, RankError, Seat};
use kedge_control::joblog::JobLog;
use kedge_pmi::{Rank, Saved};
use kedge_process::plugins::{Capture, Claim, Found, Job, Plugin, PluginError, World};
use rustix::io::{fcntl_dupfd_cloexec, ioctl_fionread};
use rustix::net::{RecvFlags, recv};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What images call the plugins' state.
pub(super) const NAME: &str = "pmi";

/// The plugin of a restart: it makes the rank's descriptor again.
#[derive(Debug)]
pub(crate) struct RankRestart {
    /// The seat in which the job is restarted; where another process has begun the session, as
    /// whom. `None`: it is no rank here.
    seat: Option<(Seat, Option<Rank>)>,
    /// Its descriptor is there again, and nobody serves it yet.
    restarted: Mutex<Option<Restarted>>,
}

#[derive(Debug)]
struct Restarted {
    open: Open,
    own: UnixStream,
    other: OwnedFd,
    saved: Saved,
}

#[derive(Serialize, Deserialize)]
struct State {
    /// A description.
    socket: u32,
    session: Saved,
}

impl RankRestart {
    pub(crate) fn new(seat: Option<(Seat, Option<Rank>)>) -> RankRestart {
        RankRestart { seat, restarted: Mutex::default() }
    }

    /// Returns the descriptor that the job's init needs for it: the step's.
    pub(crate) fn number(&self) -> Option<RawFd> {
        self.seat.as_ref().map(|(seat, _)| seat.fd)
    }

    /// Begins to pass on what a restarted rank says, all ranks of the step being there. Returns its
    /// relay, if it has one.
    ///
    /// # Errors
    /// There are no threads left.
    pub(crate) fn serve(&self, log: Arc<JobLog>) -> Result<Option<Arc<Link>>, RankError> {
        let restarted = self.restarted().take();
        match (restarted, &self.seat) {
            (Some(Restarted { open, own, other, saved }), _) => {
                Link::resume(own, &other, saved, open, log).map(Some)
            }
            // The others wait for all ranks.
            (None, Some((seat, Some(rank)))) => {
                Link::only_meet(seat, rank.clone(), log).map(|()| None)
            }
            (None, _) => Ok(None),
        }
    }

    fn restarted(&self) -> MutexGuard<'_, Option<Restarted>> {
        self.restarted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn refused(error: &RankError) -> PluginError {
    PluginError::Refused(error.to_string())
}

fn system(what: &str, source: impl Into<std::io::Error>) -> PluginError {
    PluginError::System { what: what.to_owned(), source: source.into() }
}

/// What waits in the program's end.
fn unread(end: &OwnedFd) -> Result<Vec<u8>, PluginError> {
    let failed = |error| system("look at what waits for the rank", error);
    let waits = ioctl_fionread(end).map_err(failed)? as usize;
    let mut bytes = vec![0; waits];
    if waits > 0 {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let (seen, _) = recv(end, bytes.as_mut_slice(), flags).map_err(failed)?;
        if seen != waits {
            let why = "what waits for the rank from its step cannot be seen as a whole: try again";
            return Err(PluginError::Refused(why.to_owned()));
        }
    }
    Ok(bytes)
}

/// The plugin of a checkpoint.
impl Plugin for Link {
    fn name(&self) -> &'static str {
        NAME
    }

    fn claim(&self, file: &Found, _job: &Job) -> Claim {
        match file.socket.is_some() && self.is_end((file.stat.device, file.stat.inode)) {
            true => Claim::Yes,
            false => Claim::No,
        }
    }

    fn checkpoint(
        &self,
        capture: &mut Capture,
        mine: &[usize],
    ) -> Result<Option<Value>, PluginError> {
        let Some(index) = mine.first() else { return Ok(None) };
        let waits = unread(&capture.duplicate(*index)?)?;
        let session = self.save(waits).map_err(|error| refused(&error))?;
        let state = State { socket: *index as u32, session };
        let state = serde_json::to_value(state);
        state.map(Some).map_err(|error| system("write the rank's state", error))
    }
}

impl Plugin for RankRestart {
    fn name(&self) -> &'static str {
        NAME
    }

    fn claim(&self, _file: &Found, _job: &Job) -> Claim {
        Claim::No
    }

    fn restart(&self, state: Value, world: &mut World) -> Result<(), PluginError> {
        let State { socket, session } = world.parse(state)?;
        let Some((seat, rank)) = &self.seat else {
            return Err(PluginError::Refused(format!(
                "the job is rank {} of a step of {}: restart it by Slurm, with as many ranks \
                 (`srun --mpi=pmi2 -n {} kedge restart …`)",
                session.rank, session.size, session.size
            )));
        };
        let mut restarted = self.restarted();
        if restarted.is_some() {
            return Err(PluginError::Damaged("it has two sessions with a step".to_owned()));
        }
        let open = match rank {
            Some(rank) => Open::after(seat, rank.clone()),
            None => Open::begin(seat),
        };
        let open = open.map_err(|error| refused(&error))?;
        let found = (open.rank.rank, open.rank.size);
        if found != (session.rank, session.size) {
            return Err(PluginError::Refused(format!(
                "the job is rank {} of a step of {}, and this one is rank {} of {}",
                session.rank, session.size, found.0, found.1
            )));
        }
        let pair = UnixStream::pair();
        let (own, other) = pair.map_err(|error| system("make a relay", error))?;
        let kept = fcntl_dupfd_cloexec(&other, 0).map_err(|error| system("make a relay", error))?;
        world.made(socket, other)?;
        *restarted = Some(Restarted { open, own, other: kept, saved: session });
        Ok(())
    }
}
