//! The plugin for the program's end of the relay. An image says "the relay", and what waits in
//! either direction; a restart connects it to the relay of the new step.

use super::{Held, Link, Open, RankError, Seat};
use kedge_control::joblog::JobLog;
use kedge_pmi::{Rank, Saved};
use kedge_process::plugins::{Capture, Claim, Found, Job, Plugin, PluginError, World};
use rustix::io::{fcntl_dupfd_cloexec, ioctl_fionread};
use rustix::net::{RecvFlags, recv};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

/// The plugin of this process's job.
pub(crate) static PMI: LazyLock<Arc<Pmi>> =
    LazyLock::new(|| Arc::new(Pmi(Mutex::new(Moment::Without))));

#[derive(Debug)]
pub(crate) struct Pmi(Mutex<Moment>);

/// What there is of a relay.
#[derive(Debug, Default)]
enum Moment {
    /// The job is no rank.
    #[default]
    Without,
    /// It passes on what the rank says.
    Runs(Arc<Link>),
    /// The rank is about to be restarted in this seat; where another process has begun the
    /// session, as whom.
    Restart(Seat, Option<Rank>),
    /// Its descriptor is there again, and nobody serves it yet.
    Restarted(Box<Restarted>),
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

impl Pmi {
    fn moment(&self) -> MutexGuard<'_, Moment> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The job of this process is a rank, with that relay.
    pub(crate) fn runs(&self, link: Arc<Link>) {
        *self.moment() = Moment::Runs(link);
    }

    /// A rank's descriptor is about to be made again.
    pub(crate) fn restart_in(&self, seat: Seat, rank: Option<Rank>) {
        *self.moment() = Moment::Restart(seat, rank);
    }

    /// Begins to pass on what a restarted rank says, all ranks of the step being there.
    ///
    /// # Errors
    /// There are no threads left.
    pub(crate) fn serve(&self, log: Arc<JobLog>) -> Result<(), RankError> {
        let mut moment = self.moment();
        let restarted = match std::mem::take(&mut *moment) {
            Moment::Restarted(restarted) => restarted,
            // The others wait for all ranks.
            Moment::Restart(seat, Some(rank)) => return Link::only_meet(&seat, rank, log),
            other => {
                *moment = other;
                return Ok(());
            }
        };
        let Restarted { open, own, other, saved } = *restarted;
        *moment = Moment::Runs(Link::resume(own, &other, saved, open, log)?);
        Ok(())
    }

    /// Holds the rank's session, for a checkpoint, where there is one.
    ///
    /// # Errors
    /// The rank waits for others of its step.
    pub(crate) fn hold(&self) -> Result<Option<Held>, RankError> {
        let link = match &*self.moment() {
            Moment::Runs(link) => link.clone(),
            _ => return Ok(None),
        };
        link.hold().map(Some)
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

impl Plugin for Pmi {
    fn name(&self) -> &'static str {
        "pmi"
    }

    fn claim(&self, file: &Found, _job: &Job) -> Claim {
        match &*self.moment() {
            Moment::Runs(link)
                if file.socket.is_some() && link.is_end((file.stat.device, file.stat.inode)) =>
            {
                Claim::Yes
            }
            _ => Claim::No,
        }
    }

    fn checkpoint(
        &self,
        capture: &mut Capture,
        mine: &[usize],
    ) -> Result<Option<Value>, PluginError> {
        let moment = self.moment();
        let (Moment::Runs(link), Some(index)) = (&*moment, mine.first()) else { return Ok(None) };
        let waits = unread(&capture.duplicate(*index)?)?;
        let session = link.save(waits).map_err(|error| refused(&error))?;
        let state = State { socket: *index as u32, session };
        let state = serde_json::to_value(state);
        state.map(Some).map_err(|error| system("write the rank's state", error))
    }

    fn restart(&self, state: Value, world: &mut World) -> Result<(), PluginError> {
        let State { socket, session } = world.parse(state)?;
        let mut moment = self.moment();
        let Moment::Restart(seat, rank) = std::mem::take(&mut *moment) else {
            return Err(PluginError::Refused(format!(
                "the job is rank {} of a step of {}: restart it by Slurm, with as many ranks \
                 (`srun --mpi=pmi2 -n {} kedge restart …`)",
                session.rank, session.size, session.size
            )));
        };
        let open = match rank {
            Some(rank) => Open::after(&seat, rank),
            None => Open::begin(&seat),
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
        let restarted = Restarted { open, own, other: kept, saved: session };
        *moment = Moment::Restarted(Box::new(restarted));
        Ok(())
    }
}
