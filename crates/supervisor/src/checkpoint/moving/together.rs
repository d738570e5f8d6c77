//! The move of all clients of a job, in one step: from the moment that one of them is on its new
//! devices, what it shares reaches others there alone. So rounds cross for all of them, all stand
//! still at one moment, and one durable write decides where all of them are.

use super::one::{Move, Settled};
use super::owner::Owner;
use crate::base::phases;
use crate::checkpoint::checkpointer::Checkpointer;
use crate::checkpoint::error::MoveError;
use crate::devices::proxies::{Launch, Proxy, ProxyId};
use crate::devices::quiesce::Quiet;
use kedge_control::job::{Migrate, Moving, Settles};
use kedge_control::note;
use kedge_control::proxy::Order;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long devices may take to come to rest.
const QUIESCE_TIMEOUT: Duration = Duration::from_secs(10);
/// Nothing is taken but what a round needs.
const PREPARE: Order = Order::PrepareRound {};
/// New proxies of one client that are tried while the program runs, where what it has on its
/// devices changes.
const TRIES: u32 = 4;
/// Beyond the last bytes, a pause has messages and the ends of two proxies.
const BESIDES: Duration = Duration::from_millis(5);
/// Longer than any round takes.
const ROUND_LIMIT: Duration = Duration::from_secs(3600);
/// Processes that may end before they have moved until a move that has not met any other is given
/// up: a job may have none that lives for long.
const SHORT_LIVED: usize = 100;
/// Rounds of a job that gets others all the time until its move is given up: at least so many where
/// it is not to stand still for them, else so many more than are asked for.
const MAX_ROUNDS: u32 = 100;

/// What the last round has come to.
enum Ending {
    Moved,
    /// New proxies cannot take what is left.
    Unfit,
    /// Somebody has connected meanwhile, for whom nobody is to stand still.
    Others,
}

/// What crossed in a round, of all clients, and how fast.
struct Round {
    bytes: u64,
    seconds: f64,
    /// The process that most of it is of.
    pid: u32,
}

impl Round {
    /// How long as much would take while the clients wait.
    fn pause(&self) -> Duration {
        Duration::try_from_secs_f64(self.seconds).unwrap_or(ROUND_LIMIT).saturating_add(BESIDES)
    }
}

/// Whether the clients are to wait now for what is left to cross, and why: after the round, which
/// was number `rounds`, and the one before it, if one could follow on from that.
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

/// Rounds of a move at most. A job that may stand still needs no more than it is asked for, unless
/// what it does cannot be followed.
fn most_rounds(order: &Migrate) -> u32 {
    match order.or_stay {
        true => order.rounds.max(MAX_ROUNDS),
        false => order.rounds.saturating_add(MAX_ROUNDS),
    }
}

/// Whether others may take the place of those that have ended, after so many.
fn are_others_tried(order: &Migrate, error: &MoveError, seen: usize) -> bool {
    !order.check && all_ended(error) && seen < SHORT_LIVED
}

/// Whether nothing has moved only because nobody was there to be moved.
fn all_ended(error: &MoveError) -> bool {
    matches!(error, MoveError::Gone { .. } | MoveError::NoClients)
}

/// All clients of a job that are being moved. Dropped before the new proxies have them, they stay
/// where they are.
pub(super) struct Together<'a> {
    job: &'a Checkpointer,
    /// What the new proxies are started with, and what those are of clients that come later.
    target: &'a Launch,
    launch: &'a Launch,
    order: &'a Migrate,
    owner: &'a Owner,
    moves: Vec<Move<'a>>,
    seen: BTreeSet<ProxyId>,
    /// Of the last one that ended before it had moved.
    gone: Option<MoveError>,
    rounds: u32,
}

impl<'a> Together<'a> {
    pub(super) fn new(
        job: &'a Checkpointer,
        (target, launch): (&'a Launch, &'a Launch),
        order: &'a Migrate,
        owner: &'a Owner,
    ) -> Together<'a> {
        let (moves, seen, gone, rounds) = Default::default();
        Together { job, target, launch, order, owner, moves, seen, gone, rounds }
    }

    /// Moves them, in rounds, or finds out if that could be: how many they are.
    pub(super) fn run(&mut self, tell: &mut dyn FnMut(Moving)) -> Result<u32, MoveError> {
        loop {
            match self.run_with_these(tell) {
                // All that there were have ended; there may be others by now.
                Err(error) if self.may_have_others(&error) && self.take_in_new()? => {}
                done => return done,
            }
        }
    }

    /// Whether others may take the place of those that there were. One that cannot be moved is no
    /// reason to move the rest without it.
    fn may_have_others(&self, error: &MoveError) -> bool {
        self.moves.is_empty() && are_others_tried(self.order, error, self.seen.len())
    }

    fn run_with_these(&mut self, tell: &mut dyn FnMut(Moving)) -> Result<u32, MoveError> {
        let mut last: Option<Round> = None;
        loop {
            self.may_have_more_rounds()?;
            // A check is over at some time.
            if (self.seen.is_empty() || !self.order.check) && self.take_in_new()? {
                last = None;
            }
            let Some(round) = self.round(tell)? else {
                last = None;
                continue;
            };
            phases::moved("round");
            if self.order.check {
                return Ok(self.moves.len() as u32);
            }
            let tries = self.moves.iter().map(Move::tries).max().unwrap_or(0);
            let Some(why) = settles(self.order, &round, last.as_ref(), self.rounds, tries) else {
                last = Some(round);
                continue;
            };
            if self.order.or_stay && why != Settles::Fits {
                return Err(self.too_fast(&round, why, tries, tell));
            }
            last = None;
            if !self.order.or_stay {
                // What has come since begins to move before anything stands still.
                self.take_in_new()?;
            }
            match self.settle(why, tell)? {
                Ending::Moved => return Ok(self.moves.len() as u32),
                Ending::Unfit => drop(self.each(Move::another)?),
                Ending::Others => {}
            }
        }
    }

    /// There is an end of them.
    fn may_have_more_rounds(&self) -> Result<(), MoveError> {
        let rounds = self.rounds;
        let or = if self.order.or_stay { ", or without --max-pause" } else { "" };
        match rounds >= most_rounds(self.order) {
            true => Err(MoveError::Endless { rounds, or }),
            false => Ok(()),
        }
    }

    /// Why they stay where they are, as nobody wants them to stand still for as long as they would
    /// have to.
    fn too_fast(
        &self,
        round: &Round,
        why: Settles,
        tries: u32,
        tell: &mut dyn FnMut(Moving),
    ) -> MoveError {
        let (pid, most) = (round.pid, self.order.max_pause_ms);
        if why == Settles::Anew {
            return MoveError::Restless { pid, tries };
        }
        let (bytes, seconds) = (round.bytes, round.pause().as_secs_f64());
        tell(Moving::Stays { process: pid, bytes, seconds });
        let pause = round.pause().as_millis() as u64;
        MoveError::TooFast { pid, kib: bytes >> 10, pause, most }
    }

    /// Takes in what has connected to where the job was: whether there was any. Who comes while
    /// there are some to move is for the next round.
    fn take_in_new(&mut self) -> Result<bool, MoveError> {
        loop {
            let before = self.seen.len();
            let any = self.take_in(self.job.clients())?;
            if !self.moves.is_empty() || self.seen.len() == before {
                return Ok(any);
            }
            if self.seen.len() >= SHORT_LIVED {
                return Err(self.none());
            }
        }
    }

    fn take_in(&mut self, clients: Vec<Arc<Proxy>>) -> Result<bool, MoveError> {
        let before = self.moves.len();
        for source in clients {
            if !self.is_new(&source) || !self.seen.insert(source.id) {
                continue;
            }
            match Move::new(self.job, self.target, self.owner, source) {
                Ok(one) => self.moves.push(one),
                // There is nothing of it left to move.
                Err(error @ MoveError::Gone { .. }) => self.gone = Some(error),
                Err(error) => return Err(error),
            }
        }
        Ok(self.moves.len() > before)
    }

    /// Whether that is one to move that has not been looked at yet.
    fn is_new(&self, source: &Proxy) -> bool {
        source.place != self.launch.place && !source.is_over() && !self.seen.contains(&source.id)
    }

    /// Why there is none to move.
    fn none(&mut self) -> MoveError {
        self.gone.take().unwrap_or(MoveError::NoClients)
    }

    /// Has each do something, also where one cannot: the others may have been asked for an answer.
    /// Those that have ended meanwhile are left out.
    fn each<T>(
        &mut self,
        mut does: impl FnMut(&mut Move<'a>) -> Result<T, MoveError>,
    ) -> Result<Vec<T>, MoveError> {
        let (mut done, mut failed) = (Vec::new(), None);
        for mut one in std::mem::take(&mut self.moves) {
            match does(&mut one) {
                Ok(value) => done.push(value),
                Err(error @ MoveError::Gone { .. }) => {
                    self.gone = Some(error);
                    continue;
                }
                Err(error) => failed = failed.or(Some(error)),
            }
            self.moves.push(one);
        }
        if let Some(error) = failed {
            return Err(error);
        }
        if self.moves.is_empty() { Err(self.none()) } else { Ok(done) }
    }

    /// Gives all an order, and hears what becomes of it.
    fn all<T>(
        &mut self,
        order: &Order,
        hear: impl FnMut(&mut Move<'a>) -> Result<T, MoveError>,
    ) -> Result<Vec<T>, MoveError> {
        self.moves.iter_mut().for_each(|one| one.order(order));
        self.each(hear)
    }

    /// A round while the clients run; `None` where a new proxy could not follow, and another has
    /// begun.
    fn round(&mut self, tell: &mut dyn FnMut(Moving)) -> Result<Option<Round>, MoveError> {
        let job = self.job;
        let quiet = job.proxies.quiesce(QUIESCE_TIMEOUT, &PREPARE)?;
        self.each(|one| one.check_there(&quiet))?;
        self.all(&Order::Show { last: false }, Move::shown)?;
        drop(quiet);
        phases::moved("shown");
        // All of them at a time, by one line.
        let rate = self.order.rate.unwrap_or(0);
        let each = rate.div_ceil(self.moves.len() as u64);
        let begin = Instant::now();
        let crossed = self.all(&Order::Cross { rate: each }, |one| {
            Ok((one.pid(), one.crossed()?, begin.elapsed().as_secs_f64()))
        })?;
        self.rounds += 1;
        let mut round = Round { bytes: 0, seconds: begin.elapsed().as_secs_f64(), pid: 0 };
        let (mut follow, mut most) = (true, None);
        for (process, bytes, seconds) in crossed {
            let Some(bytes) = bytes else {
                follow = false;
                continue;
            };
            tell(Moving::Round { process, round: self.rounds, bytes, seconds });
            round.bytes += bytes;
            if most.is_none_or(|most| bytes > most) {
                (most, round.pid) = (Some(bytes), process);
            }
        }
        // What has changed cannot be followed: from the beginning, with another.
        self.each(Move::another_if_unfit)?;
        Ok(follow.then_some(round))
    }

    /// The last round, in which the clients wait.
    fn settle(&mut self, why: Settles, tell: &mut dyn FnMut(Moving)) -> Result<Ending, MoveError> {
        let job = self.job;
        let mut quiet = job.proxies.quiesce(QUIESCE_TIMEOUT, &PREPARE)?;
        let begin = Instant::now();
        self.each(|one| one.check_there(&quiet))?;
        if self.order.or_stay && quiet.clients.iter().any(|client| self.is_new(&client.proxy)) {
            // All that it has would cross while everybody waits.
            return Ok(Ending::Others);
        }
        // Who has come since the last round moves with the others.
        self.take_in(quiet.clients.iter().map(|client| client.proxy.clone()).collect())?;
        self.each(Move::is_to_depart)?;
        if !self.last_round()? {
            return Ok(Ending::Unfit);
        }
        self.hand_over(&mut quiet)?;
        self.moves.iter_mut().for_each(Move::depart);
        self.moves.iter_mut().for_each(Move::departed);
        phases::moved("departed");
        self.moves.iter_mut().for_each(Move::begin);
        let settled: Vec<Result<Settled, MoveError>> =
            self.moves.iter_mut().map(Move::begun).collect();
        drop(quiet);
        let seconds = begin.elapsed().as_secs_f64();
        self.moves.iter().for_each(Move::leaves_nothing);
        let mut lost = None;
        for one in settled {
            match one {
                Ok(one) => self.told(&one, seconds, why, tell),
                Err(error) => lost = lost.or(Some(error)),
            }
        }
        lost.map_or(Ok(Ending::Moved), Err)
    }

    fn told(&self, one: &Settled, seconds: f64, why: Settles, tell: &mut dyn FnMut(Moving)) {
        let Settled { pid: process, from, to, bytes } = *one;
        note!(
            self.job.log,
            "process {process} has moved: proxy {to} after proxy {from}, {bytes} bytes in a pause \
             of {:.1} ms",
            seconds * 1e3
        );
        tell(Moving::Pause { process, bytes, seconds, why });
    }

    /// What is left crosses while the clients wait, if the new proxies can take it.
    fn last_round(&mut self) -> Result<bool, MoveError> {
        self.all(&Order::Show { last: true }, Move::shown)?;
        phases::moved("paused");
        let fits = self.all(&Order::Cross { rate: 0 }, Move::crossed)?;
        if fits.iter().all(Option::is_some) {
            return Ok(true);
        }
        if self.order.or_stay || self.moves.iter().all(|one| one.tries() <= TRIES) {
            return Ok(false);
        }
        // All of it is made anew: there is nothing to follow then.
        let mut fits = true;
        self.each(|one| {
            if one.is_unfit() {
                one.begin_target()?;
                one.order(&Order::Show { last: true });
                one.shown()?;
                one.order(&Order::Cross { rate: 0 });
                fits &= one.crossed()?.is_some();
            }
            Ok(())
        })?;
        Ok(fits)
    }

    /// The new proxies, which say that they have all, have the clients from here on, and whoever
    /// connects from now on.
    fn hand_over(&mut self, quiet: &mut Quiet<'_>) -> Result<(), MoveError> {
        self.each(Move::arrived)?;
        phases::moved("crossed");
        self.each(Move::is_still_there)?;
        let what = "write down who has the clients";
        self.owner.write().map_err(|source| MoveError::System { what, source })?;
        for one in &mut self.moves {
            // At once: the end of the source is no loss of the client's devices any more.
            one.has_moved(quiet);
        }
        self.job.proxies.launch_by(self.launch.clone());
        phases::moved("owned");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_control::proxy::ControlError;
    use std::io;

    #[test]
    fn a_client_that_cannot_move_is_not_left_behind_by_others() {
        let refused = || ControlError::Failed("no".to_owned());
        let source = || io::Error::from_raw_os_error(11);
        assert!(all_ended(&MoveError::NoClients));
        assert!(all_ended(&MoveError::Gone { pid: 1, said: String::new() }));
        for error in [
            MoveError::System { what: "start a proxy", source: source() },
            MoveError::Source { pid: 1, source: refused() },
            MoveError::Arriving { pid: 1, source: refused() },
            MoveError::Restless { pid: 1, tries: 5 },
            MoveError::Lost { pid: 1, source: refused() },
        ] {
            assert!(!all_ended(&error), "{error}");
        }
    }

    fn order(or_stay: bool) -> Migrate {
        let (to, max_pause_ms, rounds, rate, check) = ("soft".to_owned(), 50, 4, None, false);
        Migrate { to, max_pause_ms, rounds, or_stay, rate, check }
    }

    #[test]
    fn processes_that_end_too_soon_to_be_moved_are_not_followed_for_ever() {
        let gone = MoveError::Gone { pid: 1, said: String::new() };
        let refused = MoveError::Restless { pid: 1, tries: 5 };
        for order in [order(false), order(true)] {
            assert!(are_others_tried(&order, &gone, SHORT_LIVED - 1));
            assert!(!are_others_tried(&order, &gone, SHORT_LIVED));
            assert!(!are_others_tried(&order, &refused, 1));
            assert!(!are_others_tried(&Migrate { check: true, ..order }, &gone, 1));
        }
    }

    /// Whatever comes and cannot be followed, and whether or not the job may stand still.
    #[test]
    fn rounds_come_to_an_end() {
        let most = |or_stay, rounds| most_rounds(&Migrate { rounds, ..order(or_stay) });
        assert_eq!((most(true, 4), most(true, 200)), (MAX_ROUNDS, 200));
        assert_eq!((most(false, 4), most(false, 200)), (MAX_ROUNDS + 4, MAX_ROUNDS + 200));
        assert_eq!(most(false, u32::MAX), u32::MAX);
    }

    #[test]
    fn the_clients_wait_where_that_is_short_or_rounds_lead_nowhere() {
        let round = |bytes, ms: f64| Round { bytes, seconds: ms / 1e3, pid: 1 };
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
}
