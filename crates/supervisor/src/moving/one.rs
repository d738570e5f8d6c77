//! The move of one client.

use super::MoveError;
use super::owner::Owner;
use crate::checkpoint::Checkpointer;
use crate::proxies::{Launch, Proxy};
use crate::quiesce::Quiet;
use crate::recover::Recovery;
use kedge_control::job::{Migrate, Moving, Settles};
use kedge_control::proxy::{Answer, ControlError, Order};
use kedge_wire::Text;
use rustix::process::{Signal, pidfd_send_signal};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// For devices to come to rest.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longer than any round takes.
const LIMIT: Duration = Duration::from_secs(3600);
/// For the new proxy to say that all is there, while the client waits.
const ARRIVAL: Duration = Duration::from_secs(120);
/// For the old proxy to hear the client no more, which waits for that.
const DEPARTURE: Duration = Duration::from_secs(10);
/// For one that is killed to end, or whose client has.
const END: Duration = Duration::from_secs(5);
/// Nothing is taken but what a round needs.
const PREPARE: Order = Order::PrepareRound {};
/// For a new proxy that cannot go on to say why.
const LAST_WORDS: Duration = Duration::from_millis(500);
/// New proxies that are tried while the program runs, where what it has on its devices changes.
const TRIES: u32 = 4;
/// Beyond the last bytes, a pause has messages and the ends of two proxies.
const BESIDES: Duration = Duration::from_millis(5);

/// A client that is being moved. Dropped before the new proxy has it, it stays where it is.
pub(super) struct Move<'a> {
    job: &'a Checkpointer,
    launch: &'a Launch,
    order: &'a Migrate,
    source: Arc<Proxy>,
    /// The client's process.
    pid: u32,
    target: Option<Target>,
    tries: u32,
}

/// The new proxy.
struct Target {
    recovery: Arc<Recovery>,
    proxy: Arc<Proxy>,
    process: OwnedFd,
    owner: Owner,
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

/// What crossed in a round, and how fast.
struct Round {
    bytes: u64,
    seconds: f64,
}

impl Round {
    /// How long as much would take while the client waits.
    fn pause(&self) -> Duration {
        Duration::try_from_secs_f64(self.seconds).unwrap_or(LIMIT).saturating_add(BESIDES)
    }
}

/// Whether the client is to wait now for what is left to cross, and why: after the round, which was
/// number `rounds`, and the one before it, if one could follow on from that.
fn settles(
    order: &Migrate,
    round: &Round,
    last: Option<&Round>,
    rounds: u32,
    tries: u32,
) -> Option<Settles> {
    let Some(last) = last else {
        return match (round.bytes, tries > TRIES) {
            (0, _) => Some(Settles::Fits),
            (_, true) => Some(Settles::Anew),
            // How much changes meanwhile shows in the second round.
            (_, false) => (rounds >= order.rounds && !order.or_stay).then_some(Settles::Rounds),
        };
    };
    if round.pause() <= Duration::from_millis(order.max_pause_ms) {
        Some(Settles::Fits)
    } else if rounds >= order.rounds {
        Some(Settles::Rounds)
    } else {
        // Where that is as long as it may be, the next one may bring less.
        (round.bytes >= last.bytes && !order.or_stay).then_some(Settles::NoLess)
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
        source: Arc<Proxy>,
        order: &'a Migrate,
    ) -> Result<Move<'a>, MoveError> {
        let pid = source.pid();
        let mut one = Move { job, launch, order, source, pid, target: None, tries: 0 };
        one.begin_target()?;
        Ok(one)
    }

    /// Moves it, in rounds, or finds out if it could.
    pub(super) fn run(&mut self, tell: &mut dyn FnMut(Moving)) -> Result<(), MoveError> {
        let mut rounds = 0;
        let mut last: Option<Round> = None;
        loop {
            let round = self.round()?;
            let Some(round) = round else {
                // What it has changed cannot be followed: from the beginning, with another.
                self.another()?;
                last = None;
                continue;
            };
            rounds += 1;
            let Round { bytes, seconds } = round;
            tell(Moving::Round { process: self.pid, round: rounds, bytes, seconds });
            phase("round");
            if self.order.check {
                return Ok(());
            }
            let Some(why) = settles(self.order, &round, last.as_ref(), rounds, self.tries) else {
                last = Some(round);
                continue;
            };
            if self.order.or_stay && why != Settles::Fits {
                return Err(self.too_fast(&round, why, tell));
            }
            if self.settle(why, tell)? {
                return Ok(());
            }
            self.another()?;
            last = None;
        }
    }

    /// Why it stays where it is, as nobody wants it to stand still for as long as it would have to.
    fn too_fast(&self, round: &Round, why: Settles, tell: &mut dyn FnMut(Moving)) -> MoveError {
        let (pid, most) = (self.pid, self.order.max_pause_ms);
        if why == Settles::Anew {
            return MoveError::Restless { pid, tries: self.tries };
        }
        let (bytes, seconds) = (round.bytes, round.pause().as_secs_f64());
        tell(Moving::Stays { process: pid, bytes, seconds });
        let pause = round.pause().as_millis() as u64;
        MoveError::TooFast { pid, kib: bytes >> 10, pause, most }
    }

    /// Starts the new proxy, and tells the old one of it.
    fn begin_target(&mut self) -> Result<(), MoveError> {
        // One that is there already ends before another one has its place.
        self.target = None;
        self.tries += 1;
        let system = |what| move |source| MoveError::System { what, source };
        let (near, far) = UnixStream::pair().map_err(system("make a connection"))?;
        let folder = self.job.socket.parent().unwrap_or(Path::new("/"));
        let owner = Owner::new(folder);
        let (file, token) = (text(&owner.file), Text::truncated(owner.token.clone()));
        let order = Order::Move { owner: file.clone(), token: token.clone() };
        self.source_gives(&order, &near)?;
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
        let order = Order::Arrive { client: pid, owner: file, token };
        let given = proxy.control.give(&order, &[ring.as_fd(), arena.as_fd(), far.as_fd()]);
        let recovery = self.job.recovery.clone();
        self.target = Some(Target { recovery, proxy, process, owner, kept: false });
        phase("started");
        given.map_err(|source| MoveError::Arriving { pid, source })
    }

    fn source_gives(&self, order: &Order, near: &UnixStream) -> Result<(), MoveError> {
        self.source.control.give(order, &[near.as_fd()]).map_err(|source| self.stays(source))
    }

    /// The same with another new proxy; refused where that leads nowhere.
    fn another(&mut self) -> Result<(), MoveError> {
        if self.tries >= 2 * TRIES {
            return Err(MoveError::Restless { pid: self.pid, tries: self.tries });
        }
        self.begin_target()
    }

    /// A round while the client runs; `None` where the new proxy cannot follow.
    fn round(&mut self) -> Result<Option<Round>, MoveError> {
        let quiet = self.job.proxies.quiesce(PATIENCE, &PREPARE)?;
        self.check_there(&quiet)?;
        self.show(false)?;
        drop(quiet);
        phase("shown");
        self.cross(self.order.rate.unwrap_or(0))
    }

    /// The last round, in which the client waits: whether it has moved.
    fn settle(&mut self, why: Settles, tell: &mut dyn FnMut(Moving)) -> Result<bool, MoveError> {
        let mut quiet = self.job.proxies.quiesce(PATIENCE, &PREPARE)?;
        let begin = Instant::now();
        self.check_there(&quiet)?;
        let system = |what| move |source| MoveError::System { what, source };
        let departs = self.source.process().map_err(system("open a process descriptor"))?;
        let Some(Round { bytes, .. }) = self.last_round()? else { return Ok(false) };
        let (pid, proxy) = (self.pid, self.hand_over()?);
        // At once: the end of the source is no loss of the client's devices any more.
        quiet.replace(&self.source, proxy.clone());
        phase("owned");
        self.depart(&departs);
        phase("departed");
        let began = proxy.control.does(&Order::Begin { pid }, ARRIVAL);
        if let (Err(_), Some(target)) = (&began, &self.target) {
            // It may begin all the same, and answer what is asked later: nobody would hear it
            // rightly.
            let _ = pidfd_send_signal(&target.process, Signal::KILL);
        }
        drop(quiet);
        let seconds = begin.elapsed().as_secs_f64();
        // Of devices on another machine: it has said goodbye, unless it could not.
        self.job.recovery.end_session_of(self.source.pid());
        began.map_err(|source| MoveError::Lost { pid, source })?;
        self.job.log.note(&format!(
            "process {pid} has moved: proxy {} after proxy {}, {bytes} bytes in a pause of {:.1} ms",
            proxy.id,
            self.source.id,
            seconds * 1e3
        ));
        tell(Moving::Pause { process: pid, bytes, seconds, why });
        Ok(true)
    }

    /// What is left crosses while the client waits, if the new proxy can take it.
    fn last_round(&mut self) -> Result<Option<Round>, MoveError> {
        self.show(true)?;
        phase("paused");
        let crossed = self.cross(0)?;
        if crossed.is_some() || self.tries <= TRIES || self.order.or_stay {
            return Ok(crossed);
        }
        // All of it is made anew: there is nothing to follow then.
        self.begin_target()?;
        self.show(true)?;
        self.cross(0)
    }

    /// The new proxy, which says that it has all, has the client from here on.
    fn hand_over(&mut self) -> Result<Arc<Proxy>, MoveError> {
        let pid = self.pid;
        let arriving = |source| MoveError::Arriving { pid, source };
        let target = self.target.as_mut().ok_or(ControlError::Nonsense).map_err(arriving)?;
        match target.proxy.control.answer(ARRIVAL) {
            Ok(Answer::Yes {}) => {}
            Ok(_) => return Err(arriving(ControlError::Nonsense)),
            Err(source) => return Err(arriving(source)),
        }
        phase("crossed");
        if target.proxy.is_over() {
            return Err(arriving(ControlError::Failed("it has ended".into())));
        }
        let what = "write down who has the client";
        target.owner.write().map_err(|source| MoveError::System { what, source })?;
        target.kept = true;
        Ok(target.proxy.clone())
    }

    /// Has the old proxy hear the client no more. If it is gone already, so much the better; one
    /// that does not say so is ended.
    fn depart(&self, process: &OwnedFd) {
        if matches!(self.source.control.does(&Order::Depart {}, DEPARTURE), Ok(true)) {
            return;
        }
        // One that has ended needs no signal.
        let _ = pidfd_send_signal(process, Signal::KILL);
        self.source.ends_within(END);
    }

    /// A client that has ended is no matter.
    fn check_there(&self, quiet: &Quiet<'_>) -> Result<(), MoveError> {
        match quiet.clients.iter().any(|client| client.proxy.id == self.source.id) {
            true => Ok(()),
            false => Err(MoveError::Gone { pid: self.pid, said: String::new() }),
        }
    }

    fn show(&self, last: bool) -> Result<(), MoveError> {
        match self.source.control.ask(&Order::Show { last }, &[], LIMIT) {
            Ok(Answer::Captured { .. }) => Ok(()),
            Ok(_) => Err(self.stays(ControlError::Nonsense)),
            Err(error) => Err(self.stays(error)),
        }
    }

    fn cross(&self, rate: u64) -> Result<Option<Round>, MoveError> {
        let begin = Instant::now();
        match self.source.control.ask(&Order::Cross { rate }, &[], LIMIT) {
            Ok(Answer::Crossed { bytes, fits }) => {
                let seconds = begin.elapsed().as_secs_f64();
                Ok(fits.then_some(Round { bytes, seconds }))
            }
            other => Err(lost(other, || self.refused(), |error| self.stays(error))),
        }
    }

    /// Why the new proxy has ended, if it says so: the old one knows no more than that it has.
    fn refused(&self) -> Option<MoveError> {
        let source = self.target.as_ref()?.proxy.control.answer(LAST_WORDS).err()?;
        let said = matches!(source, ControlError::Failed(_));
        said.then_some(MoveError::Arriving { pid: self.pid, source })
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

/// A variable for tests: `PHASE:FILE`. When a move first comes to that phase, FILE is made, and it
/// goes on once that is gone.
const HOLD: &str = "KEDGE_HOLD_MOVE";

/// A move has come so far.
fn phase(name: &str) {
    let Some(hold) = std::env::var(HOLD).ok() else { return };
    let Some(file) = hold.strip_prefix(name).and_then(|rest| rest.strip_prefix(':')) else {
        return;
    };
    static HELD: AtomicBool = AtomicBool::new(false);
    if !HELD.swap(true, Ordering::SeqCst) && std::fs::write(file, name).is_ok() {
        while Path::new(file).exists() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn text(path: &Path) -> Text<4096> {
    Text::truncated(path.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_client_waits_where_that_is_short_or_rounds_lead_nowhere() {
        let order = |or_stay| Migrate {
            to: "soft".to_owned(),
            max_pause_ms: 50,
            rounds: 4,
            or_stay,
            rate: None,
            check: false,
        };
        let round = |bytes, ms: f64| Round { bytes, seconds: ms / 1e3 };
        let (first, less, much, short) =
            (round(900, 900.0), round(500, 500.0), round(900, 900.0), round(500, 45.0));
        for or_stay in [false, true] {
            let settles = |round: &Round, last: Option<&Round>, rounds, tries| {
                settles(&order(or_stay), round, last, rounds, tries)
            };
            let unless_stays = |why| (!or_stay).then_some(why);
            assert_eq!(settles(&first, None, 1, 1), None);
            assert_eq!(settles(&round(0, 900.0), None, 1, 1), Some(Settles::Fits));
            assert_eq!(settles(&short, Some(&first), 2, 1), Some(Settles::Fits));
            assert_eq!(settles(&short, None, 1, 1), None, "all of it tells nothing of changes");
            assert_eq!(settles(&less, Some(&first), 2, 1), None);
            assert_eq!(settles(&much, Some(&less), 3, 1), unless_stays(Settles::NoLess));
            assert_eq!(settles(&less, Some(&much), 4, 1), Some(Settles::Rounds));
            assert_eq!(settles(&first, None, 4, 1), unless_stays(Settles::Rounds));
            // What cannot be followed is not begun anew for ever.
            assert_eq!(settles(&first, None, 2, TRIES), None);
            assert_eq!(settles(&first, None, 2, TRIES + 1), Some(Settles::Anew));
        }
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
