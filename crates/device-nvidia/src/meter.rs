//! How many bytes of a snapshot left a device, and for how long any were under way.

use kedge_device::Drained;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Counts the copies of all threads that read one snapshot; copies at the same time count their
/// time once.
#[derive(Default)]
pub(crate) struct Meter(Mutex<State>);

#[derive(Default)]
struct State {
    bytes: u64,
    /// Copies that are under way, and when the first of them began.
    under_way: usize,
    since: Option<Instant>,
    time: Duration,
}

/// A copy that is under way.
struct UnderWay<'a>(&'a Meter);

impl Meter {
    /// Runs `copy`, which counts with `bytes` if it says that it has moved them.
    pub(crate) fn during<E>(
        &self,
        bytes: usize,
        copy: impl FnOnce() -> Result<bool, E>,
    ) -> Result<bool, E> {
        let mut state = self.lock();
        if state.under_way == 0 {
            state.since = Some(Instant::now());
        }
        state.under_way += 1;
        drop(state);
        let under_way = UnderWay(self);
        let moved = copy();
        drop(under_way);
        if matches!(moved, Ok(true)) {
            self.lock().bytes += bytes as u64;
        }
        moved
    }

    /// Returns what was counted so far.
    pub(crate) fn drained(&self) -> Drained {
        let state = self.lock();
        let since = state.since.map_or(Duration::ZERO, |since| since.elapsed());
        Drained { bytes: state.bytes, time: state.time + since }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.under_way -= 1;
        if state.under_way == 0 {
            let since = state.since.take();
            state.time += since.map_or(Duration::ZERO, |since| since.elapsed());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_at_the_same_time_count_their_time_once() {
        let (meter, nap) = (Meter::default(), Duration::from_millis(40));
        let copy = |bytes, moved| {
            meter.during(bytes, || {
                std::thread::sleep(nap);
                moved
            })
        };
        let begin = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| copy(10, Ok(true)));
            }
        });
        let whole = begin.elapsed();
        assert_eq!(meter.drained().bytes, 80);
        assert!(meter.drained().time >= nap && meter.drained().time <= whole);
        // Nothing is under way: no time passes, and what was not moved does not count.
        let so_far = meter.drained();
        std::thread::sleep(nap);
        assert_eq!(meter.drained(), so_far);
        assert_eq!((copy(10, Ok(false)), copy(10, Err(()))), (Ok(false), Err(())));
        assert_eq!(meter.drained().bytes, 80);
        assert!(meter.drained().time >= so_far.time + 2 * nap);
    }
}
