use std::time::{Duration, Instant};

/// A bounded busy wait: first the processor's pause, then giving way to other threads, so that on a
/// machine with few cores a spinning waiter does not starve whoever it waits for.
#[derive(Debug)]
pub(crate) struct Spin {
    limit: Duration,
    started: Option<Instant>,
    rounds: u32,
}

/// Pauses before the first yield (some 50 ns each on current x86): three times a round trip between
/// two cores, and no longer, for the case that both sides share one.
const PAUSES: u32 = 32;

impl Spin {
    pub(crate) fn new(limit: Duration) -> Spin {
        Spin { limit, started: None, rounds: 0 }
    }

    /// Waits a moment; false once the limit is over and the caller should sleep.
    #[inline]
    pub(crate) fn again(&mut self) -> bool {
        self.rounds += 1;
        if self.rounds <= PAUSES {
            std::hint::spin_loop();
            return !self.limit.is_zero();
        }
        let started = *self.started.get_or_insert_with(Instant::now);
        std::thread::yield_now();
        started.elapsed() < self.limit
    }
}
