//! The move of one client.

use super::owner::Owner;
use crate::base::phases;
use crate::checkpoint::checkpointer::Checkpointer;
use crate::checkpoint::error::MoveError;
use crate::checkpoint::recovery::Recovery;
use crate::devices::proxies::{Launch, Proxy, ProxyId, has_ended};
use crate::devices::quiesce::Quiet;
use kedge_control::proxy::{Answer, ControlError, Order};
use rustix::process::{Signal, pidfd_send_signal};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

/// Longer than any round takes.
const LIMIT: Duration = Duration::from_secs(3600);
/// For the new proxy to say that all is there, while the client waits.
const ARRIVAL: Duration = Duration::from_secs(120);
/// For the old proxy to hear the client no more, which waits for that.
const DEPARTURE: Duration = Duration::from_secs(10);
/// For one that is killed to end, or whose client has.
const END: Duration = Duration::from_secs(5);
/// For a new proxy that cannot go on to say why.
const LAST_WORDS: Duration = Duration::from_millis(500);
/// Most new proxies that are tried, where what it has on its devices changes.
const MAX_TRIES: u32 = 8;

/// A client that is being moved. Dropped before the new proxy has it, it stays where it is.
pub(super) struct Move<'a> {
    job: &'a Checkpointer,
    launch: &'a Launch,
    owner: &'a Owner,
    source: Arc<Proxy>,
    /// The client's process.
    pid: u32,
    target: Option<Target>,
    tries: u32,
    /// Whether the old proxy, or at last the new one, has got the order that it is to answer.
    given: Result<(), ControlError>,
    /// The old proxy, to be ended once the client has moved.
    departs: Option<OwnedFd>,
    /// What crossed last; `None` where the new proxy could not take it.
    crossed: Option<u64>,
}

/// A client that has moved.
pub(super) struct Settled {
    pub(super) pid: u32,
    pub(super) from: ProxyId,
    pub(super) to: ProxyId,
    pub(super) bytes: u64,
}

/// The new proxy.
struct Target {
    recovery: Arc<Recovery>,
    proxy: Arc<Proxy>,
    process: OwnedFd,
    /// It has the client, and is not ended with this.
    kept: bool,
}

impl Drop for Target {
    fn drop(&mut self) {
        if !self.kept {
            // One that has ended needs no signal.
            let _ = pidfd_send_signal(&self.process, Signal::KILL);
            self.recovery.end_session_of(self.proxy.pid());
        }
    }
}

/// Why a round has not crossed, by what the old proxy has answered. Where the way between the two
/// is broken the new one may know more (`refused`). What the old one says of its own devices is
/// told as it is: if it ends then, the new one knows of a broken way alone.
fn lost(
    answer: Result<Answer, ControlError>,
    refused: impl FnOnce() -> Option<MoveError>,
    stays: impl FnOnce(ControlError) -> MoveError,
) -> MoveError {
    match answer {
        Ok(Answer::Parted { why }) => {
            refused().unwrap_or_else(|| stays(ControlError::Failed(why.into_inner())))
        }
        Ok(_) => stays(ControlError::Nonsense),
        Err(error) => stays(error),
    }
}

/// Why the old proxy's process cannot be held: it may have just ended.
fn not_opened(pid: u32, source: io::Error) -> MoveError {
    match source.raw_os_error() {
        Some(libc::ESRCH) => MoveError::Gone { pid, said: String::new() },
        _ => MoveError::System { what: "open a process descriptor", source },
    }
}

/// What a proxy that has ended had said of it.
fn last_words(source: &ControlError) -> String {
    match source {
        ControlError::Failed(why) => format!("; before that it said: {why}"),
        _ => String::new(),
    }
}

impl<'a> Move<'a> {
    pub(super) fn new(
        job: &'a Checkpointer,
        launch: &'a Launch,
        owner: &'a Owner,
        source: Arc<Proxy>,
    ) -> Result<Move<'a>, MoveError> {
        let (pid, given) = (source.pid(), Ok(()));
        let (target, tries, departs, crossed) = Default::default();
        let mut one =
            Move { job, launch, owner, source, pid, target, tries, given, departs, crossed };
        one.begin_target()?;
        Ok(one)
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// New proxies that have been tried.
    pub(super) fn tries(&self) -> u32 {
        self.tries
    }

    /// Whether the new proxy could not take the last round.
    pub(super) fn is_unfit(&self) -> bool {
        self.crossed.is_none()
    }

    /// Starts the new proxy, and tells the old one of it.
    pub(super) fn begin_target(&mut self) -> Result<(), MoveError> {
        // One that is there already ends before another one has its place.
        self.target = None;
        self.tries += 1;
        let system = |what| move |source| MoveError::System { what, source };
        let (near, far) = UnixStream::pair().map_err(system("make a connection"))?;
        let given = self.source.control.give(&Order::Move {}, &[near.as_fd(), self.owner.as_fd()]);
        given.map_err(|source| self.stays(source))?;
        let (answer, fds) =
            self.source.control.answer_with(LIMIT).map_err(|source| self.stays(source))?;
        let (Answer::Ends { pid }, Ok([socket, ring, arena])) =
            (answer, <[OwnedFd; 3]>::try_from(fds))
        else {
            return Err(self.stays(ControlError::Nonsense));
        };
        self.pid = pid;
        let started = self.launch.provide(None, socket.as_fd(), &["--restore"]);
        let proxy = started.map_err(system("start a proxy"))?;
        let process = proxy.process().map_err(system("open a process descriptor"))?;
        let fds = [ring.as_fd(), arena.as_fd(), far.as_fd(), self.owner.as_fd()];
        let given = proxy.control.give(&Order::Arrive { client: pid }, &fds);
        let recovery = self.job.recovery.clone();
        self.target = Some(Target { recovery, proxy, process, kept: false });
        phases::moved("started");
        given.map_err(|source| MoveError::Arriving { pid, source })
    }

    /// The client is elsewhere.
    pub(super) fn leaves_nothing(&self) {
        // Of devices on another machine: it has said goodbye, unless it could not.
        self.job.recovery.end_session_of(self.source.pid());
    }

    /// The same with another new proxy; refused where that leads nowhere.
    pub(super) fn another(&mut self) -> Result<(), MoveError> {
        if self.tries >= MAX_TRIES {
            return Err(MoveError::Restless { pid: self.pid, tries: self.tries });
        }
        self.begin_target()
    }

    pub(super) fn another_if_unfit(&mut self) -> Result<(), MoveError> {
        if self.is_unfit() { self.another() } else { Ok(()) }
    }

    /// A client that has ended is no matter.
    pub(super) fn check_there(&self, quiet: &Quiet<'_>) -> Result<(), MoveError> {
        match quiet.clients.iter().any(|client| client.proxy.id == self.source.id) {
            true => Ok(()),
            false => Err(MoveError::Gone { pid: self.pid, said: String::new() }),
        }
    }

    /// The last round is about to begin.
    pub(super) fn is_to_depart(&mut self) -> Result<(), MoveError> {
        let opened = self.source.process().map_err(|source| not_opened(self.pid, source));
        self.departs = Some(opened?);
        Ok(())
    }

    /// Gives the old proxy an order, whose answer is to be heard.
    pub(super) fn order(&mut self, order: &Order) {
        self.given = self.source.control.give(order, &[]);
    }

    fn answer(&mut self, limit: Duration) -> Result<Answer, ControlError> {
        std::mem::replace(&mut self.given, Ok(()))?;
        self.source.control.answer(limit)
    }

    /// What its devices hold is known.
    pub(super) fn shown(&mut self) -> Result<(), MoveError> {
        match self.answer(LIMIT) {
            Ok(Answer::Captured { .. }) => Ok(()),
            Ok(_) => Err(self.stays(ControlError::Nonsense)),
            Err(error) => Err(self.stays(error)),
        }
    }

    /// That has crossed: how many bytes, or `None` where the new proxy cannot take them.
    pub(super) fn crossed(&mut self) -> Result<Option<u64>, MoveError> {
        self.crossed = match self.answer(LIMIT) {
            Ok(Answer::Crossed { bytes, fits }) => fits.then_some(bytes),
            other => return Err(lost(other, || self.refused(), |error| self.stays(error))),
        };
        Ok(self.crossed)
    }

    /// Why the new proxy cannot go on. If the client has ended, so does the old one, and the new
    /// one knows of a broken way alone.
    fn arriving(&self, source: ControlError) -> MoveError {
        let limit = if has_ended(self.pid) { END } else { Duration::ZERO };
        match self.source.ends_within(limit) {
            true => MoveError::Gone { pid: self.pid, said: String::new() },
            false => MoveError::Arriving { pid: self.pid, source },
        }
    }

    /// The new proxy says that it has all.
    pub(super) fn arrived(&mut self) -> Result<(), MoveError> {
        let said = self.target.as_ref().map(|target| target.proxy.control.answer(ARRIVAL));
        match said {
            Some(Ok(Answer::Yes {})) => Ok(()),
            Some(Err(source)) => Err(self.arriving(source)),
            Some(Ok(_)) | None => Err(self.arriving(ControlError::Nonsense)),
        }
    }

    pub(super) fn is_still_there(&mut self) -> Result<(), MoveError> {
        match self.target.as_ref().is_some_and(|target| !target.proxy.is_over()) {
            true => Ok(()),
            false => Err(self.arriving(ControlError::Failed("it has ended".into()))),
        }
    }

    /// It is written down that the new proxy has the client.
    pub(super) fn has_moved(&mut self, quiet: &mut Quiet<'_>) {
        if let Some(target) = &mut self.target {
            target.kept = true;
            quiet.replace(&self.source, target.proxy.clone());
        }
    }

    /// Has the old proxy hear the client no more. If it is gone already, so much the better.
    pub(super) fn depart(&mut self) {
        self.order(&Order::Depart {});
    }

    /// It does so; one that does not say that is ended.
    pub(super) fn departed(&mut self) {
        if matches!(self.answer(DEPARTURE), Ok(Answer::Yes {})) {
            return;
        }
        if let Some(process) = &self.departs {
            // One that has ended needs no signal.
            let _ = pidfd_send_signal(process, Signal::KILL);
        }
        self.source.ends_within(END);
    }

    /// Has the new proxy serve the client.
    pub(super) fn begin(&mut self) {
        let order = Order::Begin { pid: self.pid };
        if let Some(target) = &self.target {
            self.given = target.proxy.control.give(&order, &[]);
        }
    }

    /// It does.
    pub(super) fn begun(&mut self) -> Result<Settled, MoveError> {
        let (pid, given) = (self.pid, std::mem::replace(&mut self.given, Ok(())));
        let lost = |source| MoveError::Lost { pid, source };
        let target = self.target.as_ref().ok_or(ControlError::Nonsense).map_err(lost)?;
        let began = given.and_then(|()| target.proxy.control.answer(ARRIVAL));
        if began.is_err() {
            // It may begin all the same, and answer what is asked later: nobody would hear it
            // rightly.
            let _ = pidfd_send_signal(&target.process, Signal::KILL);
        }
        began.map_err(lost)?;
        let (from, to, bytes) = (self.source.id, target.proxy.id, self.crossed.unwrap_or(0));
        Ok(Settled { pid, from, to, bytes })
    }

    /// Why the new proxy has ended, if it says so: the old one knows no more than that it has.
    fn refused(&self) -> Option<MoveError> {
        let source = self.target.as_ref()?.proxy.control.answer(LAST_WORDS).err()?;
        let said = matches!(source, ControlError::Failed(_));
        said.then(|| self.arriving(source))
    }

    /// Why it stays where it is, as the old proxy says or shows: one that ends closes its
    /// connection a little before that.
    fn stays(&self, source: ControlError) -> MoveError {
        let limit = match source {
            ControlError::Channel(_) => END,
            _ => Duration::ZERO,
        };
        match self.source.ends_within(limit) {
            true => MoveError::Gone { pid: self.pid, said: last_words(&source) },
            false => MoveError::Source { pid: self.pid, source },
        }
    }
}

impl Drop for Move<'_> {
    fn drop(&mut self) {
        if !self.target.as_ref().is_some_and(|target| target.kept) {
            // One that does not hear it has ended.
            let _ = self.source.control.does(&Order::Stay {}, LIMIT);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_wire::Text;

    #[test]
    fn a_client_that_has_just_ended_fails_no_other() {
        let said = |code| not_opened(1, io::Error::from_raw_os_error(code));
        assert!(matches!(said(libc::ESRCH), MoveError::Gone { pid: 1, .. }));
        assert!(matches!(said(libc::EMFILE), MoveError::System { .. }));
    }

    #[test]
    fn a_fault_is_told_as_the_old_proxy_says_and_a_broken_way_as_the_new_one_does() {
        let arriving = |why: &str| {
            let source = ControlError::Failed(why.to_owned());
            Some(MoveError::Arriving { pid: 1, source })
        };
        let source = |source| MoveError::Source { pid: 1, source };
        let parted = || Ok(Answer::Parted { why: Text::truncated("Broken pipe".to_owned()) });
        let said = |error: MoveError| error.to_string();
        // The old one ends right after this, so that the new one finds the way broken.
        let fault = Err(ControlError::Failed("CUDA_ERROR_ILLEGAL_ADDRESS".to_owned()));
        let told = said(lost(fault, || arriving("Broken pipe"), source));
        assert!(told.ends_with("stays where it is: CUDA_ERROR_ILLEGAL_ADDRESS"), "{told}");
        let told = said(lost(parted(), || arriving("no device"), source));
        assert!(told.ends_with("the new proxy: no device"), "{told}");
        let told = said(lost(parted(), || None, source));
        assert!(told.ends_with("stays where it is: Broken pipe"), "{told}");
        let ended = last_words(&ControlError::Failed("a fault".to_owned()));
        assert!(said(MoveError::Gone { pid: 1, said: ended }).ends_with("it said: a fault"));
    }
}
