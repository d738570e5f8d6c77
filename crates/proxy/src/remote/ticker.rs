//! A thread that looks again and again while there is work.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// Shortest time between two looks; work that is over sooner is never looked at.
const MIN_INTERVAL: Duration = Duration::from_millis(1);
/// A look may take this part of the time.
const SHARE: u32 = 10;
/// Longest time between two looks.
const MAX_INTERVAL: Duration = Duration::from_millis(200);

#[derive(Debug, Default)]
pub(crate) struct Ticker {
    awake: AtomicBool,
    thread: OnceLock<Thread>,
}

impl Ticker {
    /// Starts the thread, which calls `look` while that says that there is work.
    pub(crate) fn start(
        self: &Arc<Ticker>,
        name: &str,
        look: impl Fn() -> bool + Send + 'static,
    ) -> io::Result<()> {
        let ticker = self.clone();
        let run = move || ticker.run(look);
        let started = thread::Builder::new().name(name.into()).stack_size(256 << 10).spawn(run)?;
        let _ = self.thread.set(started.thread().clone());
        Ok(())
    }

    /// There is work.
    #[inline]
    pub(crate) fn wake(&self) {
        if self.awake.load(Ordering::SeqCst) || self.awake.swap(true, Ordering::SeqCst) {
            return;
        }
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    fn run(&self, look: impl Fn() -> bool) -> ! {
        loop {
            while !self.awake.load(Ordering::SeqCst) {
                thread::park();
            }
            self.tick(&look);
            self.awake.store(false, Ordering::SeqCst);
            // Work that came since it was last looked for has found the thread awake.
            if look() {
                self.awake.store(true, Ordering::SeqCst);
            }
        }
    }

    fn tick(&self, look: impl Fn() -> bool) {
        let mut pause = MIN_INTERVAL;
        loop {
            thread::sleep(pause);
            let begin = Instant::now();
            if !look() {
                return;
            }
            pause = (begin.elapsed() * SHARE).clamp(MIN_INTERVAL, MAX_INTERVAL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn work_is_looked_at_until_it_is_over() {
        let (ticker, left, looks) = (
            Arc::<Ticker>::default(),
            Arc::<AtomicUsize>::default(),
            Arc::<AtomicUsize>::default(),
        );
        let (work, count) = (left.clone(), looks.clone());
        let look = move || {
            count.fetch_add(1, Ordering::SeqCst);
            work.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok()
        };
        ticker.start("ticks", look).unwrap();
        for _ in 0..20 {
            left.fetch_add(3, Ordering::SeqCst);
            ticker.wake();
            let begin = Instant::now();
            while left.load(Ordering::SeqCst) > 0 {
                assert!(begin.elapsed() < Duration::from_secs(10), "work is left");
                thread::yield_now();
            }
        }
        thread::sleep(Duration::from_millis(50));
        let rested = looks.load(Ordering::SeqCst);
        thread::sleep(Duration::from_millis(50));
        assert_eq!(looks.load(Ordering::SeqCst), rested, "it looks though there is no work");
    }
}
