//! Waits that the thread which submits looks at itself, as long as it has nothing else to do.
//!
//! A wait on a thread of its own costs two hand-overs, and while it lasts the submitting thread falls
//! asleep: what comes next has to wake it, which takes longer than many kernels. So it asks the driver, as
//! a native program's own thread does, until something arrives, or for [`LIMIT`]; then another thread waits.

use crate::waiters::{Job, Waiters};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a wait is looked at: a hundred times what waking a thread costs.
const LIMIT: Duration = Duration::from_millis(2);
/// Processors with which one may be kept busy; a waiting client is another.
const ENOUGH_PROCESSORS: usize = 4;

/// Whether a wait's work is over, for one that costs nothing to ask; faults are over as well.
pub(crate) type Over = Box<dyn Fn() -> bool + Send>;

struct Wait {
    over: Over,
    began: Instant,
    /// Waits for the work, tells what has become of it.
    finish: Job,
}

#[derive(Default)]
pub(crate) struct LookedAt {
    /// Somebody looks.
    on: AtomicBool,
    number: AtomicUsize,
    waits: Mutex<Vec<Wait>>,
}

impl LookedAt {
    fn lock(&self) -> MutexGuard<'_, Vec<Wait>> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `finish` when `over`, on this thread the next times that it looks, or on one of `waiters`.
    pub(crate) fn run(&self, waiters: &Waiters, over: Over, finish: Job) {
        if !self.on.load(Ordering::Relaxed) {
            return waiters.run(finish);
        }
        let mut waits = self.lock();
        waits.push(Wait { over, began: Instant::now(), finish });
        self.number.store(waits.len(), Ordering::Release);
    }

    pub(crate) fn none(&self) -> bool {
        self.number.load(Ordering::Acquire) == 0
    }

    /// Finishes what is over. False where nothing is left to look at.
    pub(crate) fn look(&self, waiters: &Waiters) -> bool {
        if !self.on.load(Ordering::Relaxed) {
            self.on.store(processors() >= ENOUGH_PROCESSORS, Ordering::Relaxed);
        }
        if self.none() {
            return false;
        }
        let mut waits = self.lock();
        let over: Vec<_> = waits.extract_if(.., |wait| (wait.over)()).collect();
        let late: Vec<_> = waits.extract_if(.., |wait| wait.began.elapsed() > LIMIT).collect();
        drop(waits);
        over.into_iter().for_each(|wait| (wait.finish)());
        late.into_iter().for_each(|wait| waiters.run(wait.finish));
        // Counted when they are answered, so that nobody takes the device for being at rest before.
        let left = self.lock().len();
        self.number.store(left, Ordering::Release);
        left > 0
    }

    /// Has `waiters` wait for all of them: nobody looks for a while.
    pub(crate) fn hand_over(&self, waiters: &Waiters) {
        if self.none() {
            return;
        }
        let waits = std::mem::take(&mut *self.lock());
        waits.into_iter().for_each(|wait| waiters.run(wait.finish));
        self.number.store(0, Ordering::Release);
    }
}

fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    fn always(over: bool) -> Over {
        Box::new(move || over)
    }

    fn looking() -> (LookedAt, Waiters) {
        let (looked_at, waiters) = (LookedAt::default(), Waiters::default());
        looked_at.on.store(true, Ordering::Relaxed);
        (looked_at, waiters)
    }

    #[test]
    fn what_is_over_is_finished_by_who_looks() {
        let (looked_at, waiters) = looking();
        let (done, finished) = mpsc::channel();
        for (name, over) in [("slow", false), ("quick", true)] {
            let done = done.clone();
            let finish = move || done.send((name, std::thread::current().id())).unwrap();
            looked_at.run(&waiters, always(over), Box::new(finish));
        }
        assert!(looked_at.look(&waiters), "one is left");
        assert_eq!(finished.try_recv(), Ok(("quick", std::thread::current().id())));
        looked_at.hand_over(&waiters);
        assert!(looked_at.none());
        let (name, thread) = finished.recv_timeout(Duration::from_secs(10)).unwrap();
        assert_eq!(name, "slow");
        assert_ne!(thread, std::thread::current().id());
    }

    #[test]
    fn nobody_looks_for_long() {
        let (looked_at, waiters) = looking();
        let (done, finished) = mpsc::channel();
        looked_at.run(&waiters, always(false), Box::new(move || done.send(()).unwrap()));
        let began = Instant::now();
        while looked_at.look(&waiters) {
            assert!(began.elapsed() < Duration::from_secs(10), "still looked at");
        }
        assert_eq!(finished.recv_timeout(Duration::from_secs(10)), Ok(()));
    }

    #[test]
    fn without_anybody_who_looks_a_thread_waits() {
        let (looked_at, waiters) = (LookedAt::default(), Waiters::default());
        let (done, finished) = mpsc::channel();
        looked_at.run(&waiters, always(true), Box::new(move || done.send(()).unwrap()));
        assert_eq!(finished.recv_timeout(Duration::from_secs(10)), Ok(()));
    }
}
