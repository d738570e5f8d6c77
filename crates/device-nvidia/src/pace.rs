//! How fast a snapshot leaves a device while the program uses it.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A limit in bytes a second, shared by all threads that read.
pub(crate) struct Pace {
    /// Bytes a second; the largest number for no limit.
    rate: u64,
    /// When the bytes that were asked for so far will have left.
    next: Mutex<Instant>,
}

impl Pace {
    pub(crate) fn new(rate: u64) -> Pace {
        Pace { rate: rate.max(1), next: Mutex::new(Instant::now()) }
    }

    /// Waits until `bytes` more may travel.
    pub(crate) fn wait(&self, bytes: u64) {
        if self.rate == u64::MAX {
            return;
        }
        let now = Instant::now();
        let time = Duration::from_secs_f64(bytes as f64 / self.rate as f64);
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let begin = (*next).max(now);
        *next = begin + time;
        drop(next);
        std::thread::sleep(begin - now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_leave_at_the_rate() {
        let begin = Instant::now();
        let pace = Pace::new(1 << 20);
        (0..5).for_each(|_| pace.wait(10 << 10));
        // The fifth waits for four times ten milliseconds, less what a clock may be off.
        assert!(begin.elapsed() >= Duration::from_millis(35));
        let free = Pace::new(u64::MAX);
        (0..100).for_each(|_| free.wait(1 << 40));
    }
}
