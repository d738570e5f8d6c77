//! How fast a snapshot leaves a device while the program uses it.
//!
//! While bytes travel over the bus, each of the program's rounds of submitting work and waiting for
//! it takes a little longer, by about the same time whatever the round does; longer queues of work
//! hardly notice. So the drain looks how many rounds there are a second, and uses the bus for such
//! a part of the time that they lose little. What has left the device within the pause goes no
//! faster: packing and writing it takes the processors of such a program (0.87 of its rate beside
//! 100 GiB, of which 60 were packed as fast as they could be).

use crate::stream::Busy;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The speed of a drain.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DrainRate {
    /// As fast as the program does not notice much of it.
    #[default]
    Adaptive,
    /// Bytes a second, at most; the largest number for no limit.
    Limit(u64),
}

/// How copies leave a device: for measurements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DrainWays {
    /// Bytes of one copy, at most those of a pinned buffer.
    pub piece: usize,
    /// Copies that are under way at a time.
    pub at_once: usize,
    /// In a context of their own.
    pub apart: bool,
    /// Who waits for a copy asks now and then, instead of having the driver wake it.
    pub ask: bool,
}

impl DrainWays {
    /// As much at once as there is room for, in the client's context.
    pub const USUAL: DrainWays =
        DrainWays { piece: usize::MAX, at_once: usize::MAX, apart: false, ask: false };
}

impl Default for DrainWays {
    fn default() -> DrainWays {
        DrainWays::USUAL
    }
}

/// What the bus carries, bytes a second.
const BUS: f64 = 50e9;
/// Rounds a second that may take as much longer as one does while the bus is busy: each then takes
/// 10 µs more (measured on an H200: 12.5 µs become 23), so 1,000 of them lose 1 % of the time; what
/// is done to the bytes on the host takes more than that again, where it runs beside a thread of
/// the program's or the proxy's on one core (2 to 6 % with 2,500, 0 to 4 % with 1,500).
const HARMLESS: f64 = 1000.0;
/// Lowest rate that a drain is slowed to, in bytes per second: half of what a disk takes.
const MIN_RATE: f64 = 6e8;
/// So often the drain looks at the program.
const LOOK: Duration = Duration::from_millis(2);

/// A limit in bytes a second and in copies at a time, shared by all threads that read.
pub(crate) struct Pace {
    rate: DrainRate,
    busy: Arc<Busy>,
    state: Mutex<State>,
    over: Condvar,
}

struct State {
    /// When the bytes that were asked for so far will have left.
    next: Instant,
    looked: Instant,
    /// Rounds that had begun then, and how many there are a second.
    begun: u64,
    rounds: f64,
    /// Copies that may begin now.
    free: usize,
}

/// The right to have a copy under way.
pub(crate) struct Permit<'a>(&'a Pace);

impl Pace {
    pub(crate) fn new(rate: DrainRate, at_once: usize, busy: &Arc<Busy>) -> Pace {
        let (now, begun, free) = (Instant::now(), busy.begun(), at_once.max(1));
        let state = Mutex::new(State { next: now, looked: now, begun, rounds: 0.0, free });
        Pace { rate, busy: Arc::clone(busy), state, over: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `bytes` more may travel.
    pub(crate) fn wait(&self, bytes: u64) {
        let now = Instant::now();
        let mut state = self.lock();
        let rate = match self.rate {
            DrainRate::Limit(u64::MAX) => return,
            DrainRate::Limit(rate) => rate.max(1) as f64,
            DrainRate::Adaptive => {
                state.look(now, self.busy.begun());
                allowed(state.rounds)
            }
        };
        let begin = state.next.max(now);
        state.next = begin + Duration::from_secs_f64(bytes as f64 / rate);
        drop(state);
        std::thread::sleep(begin - now);
    }

    /// Whether one more copy may be under way.
    pub(crate) fn try_permit(&self) -> Option<Permit<'_>> {
        let mut state = self.lock();
        state.free = state.free.checked_sub(1)?;
        Some(Permit(self))
    }

    /// Waits until one more copy may be under way.
    pub(crate) fn permit(&self) -> Permit<'_> {
        let mut state = self.lock();
        while state.free == 0 {
            state = self.over.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.free -= 1;
        Permit(self)
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.0.lock().free += 1;
        self.0.over.notify_one();
    }
}

impl State {
    /// Counts the program's rounds. More of them count at once, fewer by and by.
    fn look(&mut self, now: Instant, begun: u64) {
        let since = now.saturating_duration_since(self.looked);
        if since < LOOK {
            return;
        }
        let rounds = begun.wrapping_sub(self.begun) as f64 / since.as_secs_f64();
        self.rounds = rounds.max((self.rounds + rounds) / 2.0);
        (self.looked, self.begun) = (now, begun);
    }
}

/// Bytes a second beside a program of so many rounds a second.
fn allowed(rounds: f64) -> f64 {
    if rounds <= HARMLESS { 1e15 } else { (BUS * HARMLESS / rounds).max(MIN_RATE) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pace(rate: DrainRate) -> Pace {
        Pace::new(rate, usize::MAX, &Arc::default())
    }

    #[test]
    fn bytes_leave_at_the_rate() {
        let begin = Instant::now();
        let slow = pace(DrainRate::Limit(1 << 20));
        (0..5).for_each(|_| slow.wait(10 << 10));
        // The fifth waits for four times ten milliseconds, less what a clock may be off.
        assert!(begin.elapsed() >= Duration::from_millis(35));
        let free = pace(DrainRate::Limit(u64::MAX));
        (0..100).for_each(|_| free.wait(1 << 40));
    }

    #[test]
    fn drains_give_way_to_programs_that_wait_often() {
        assert!(allowed(0.0) > 1e12);
        assert!(allowed(5000.0) < 0.4 * BUS);
        assert!(allowed(80e3) < 0.02 * BUS);
        assert_eq!(allowed(1e9), MIN_RATE);
        let idle = pace(DrainRate::Adaptive);
        let mut state = idle.lock();
        let begin = state.looked;
        let at = |ms: u64| begin + Duration::from_millis(ms);
        let (first, second, third) = (at(10), at(20), at(21));
        state.look(first, 800);
        assert!((79e3..81e3).contains(&state.rounds), "{}", state.rounds);
        state.look(second, 800);
        assert!((39e3..41e3).contains(&state.rounds), "it does not trust the silence");
        state.look(third, 10_000);
        assert!(state.rounds < 41e3, "too early to look");
    }

    #[test]
    fn copies_wait_for_each_other() {
        let one = Pace::new(DrainRate::Adaptive, 1, &Arc::default());
        let permit = one.permit();
        std::thread::scope(|scope| {
            let second = scope.spawn(|| drop(one.permit()));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!second.is_finished());
            drop(permit);
        });
    }
}
