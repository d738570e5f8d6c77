//! Threads that wait for the device, so that the dispatcher does so for a moment at most.
//!
//! There are as many as there are waits at a time. The one that finished last spins for a moment
//! before it sleeps: a program that launches and synchronises in a loop finds it awake.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a thread looks for more work before it sleeps.
const SPIN: Duration = Duration::from_micros(100);
/// Waits at a time; more queue up.
const MAX_THREADS: usize = 256;

pub(crate) type Job = Box<dyn FnOnce() + Send>;

#[derive(Clone, Default)]
pub(crate) struct Waiters {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    /// Jobs in the queue: what a spinning thread looks at.
    queued: AtomicUsize,
    work: Condvar,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    threads: usize,
    /// Threads that take a job as soon as there is one.
    free: usize,
    spinning: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiters {
    /// Runs `job` on a thread that nothing else occupies.
    pub(crate) fn run(&self, job: Job) {
        let mut queue = self.shared.lock();
        queue.jobs.push_back(job);
        self.shared.queued.store(queue.jobs.len(), Ordering::Release);
        if queue.free < queue.jobs.len() && queue.threads < MAX_THREADS && self.spawn() {
            queue.threads += 1;
            queue.free += 1;
        }
        // A spinning thread sees the count; the others sleep.
        let sleepers_needed = queue.jobs.len() > usize::from(queue.spinning);
        drop(queue);
        if sleepers_needed {
            self.shared.work.notify_one();
        }
    }

    /// Whether no job is queued or running.
    pub(crate) fn idle(&self) -> bool {
        let queue = self.shared.lock();
        queue.jobs.is_empty() && queue.free == queue.threads
    }

    fn spawn(&self) -> bool {
        let shared = Arc::clone(&self.shared);
        let builder = std::thread::Builder::new().name("device-wait".into());
        builder.spawn(move || shared.serve()).is_ok()
    }
}

impl Shared {
    fn serve(&self) {
        loop {
            let job = self.next();
            job();
            self.lock().free += 1;
        }
    }

    fn next(&self) -> Job {
        let mut queue = self.lock();
        loop {
            if let Some(job) = queue.jobs.pop_front() {
                self.queued.store(queue.jobs.len(), Ordering::Release);
                queue.free -= 1;
                return job;
            }
            if queue.spinning {
                queue = self.work.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            queue.spinning = true;
            drop(queue);
            let found = self.spin();
            queue = self.lock();
            queue.spinning = false;
            if !found && queue.jobs.is_empty() {
                queue = self.work.wait(queue).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Looks for work for a while.
    fn spin(&self) -> bool {
        let end = Instant::now() + SPIN;
        loop {
            for _ in 0..50 {
                if self.queued.load(Ordering::Acquire) > 0 {
                    return true;
                }
                std::hint::spin_loop();
            }
            if Instant::now() > end {
                return false;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn a_wait_does_not_hold_another_up() {
        let waiters = Waiters::default();
        let (release, blocked) = mpsc::channel::<()>();
        let (done, over) = mpsc::channel();
        let first = done.clone();
        waiters.run(Box::new(move || {
            let _ = blocked.recv();
            let _ = first.send("first");
        }));
        waiters.run(Box::new(move || done.send("second").unwrap()));
        assert_eq!(over.recv_timeout(Duration::from_secs(10)), Ok("second"));
        assert!(!waiters.idle());
        release.send(()).unwrap();
        assert_eq!(over.recv_timeout(Duration::from_secs(10)), Ok("first"));
        let end = Instant::now() + Duration::from_secs(10);
        while !waiters.idle() {
            assert!(Instant::now() < end, "the last thread is still busy");
            std::thread::yield_now();
        }
    }

    #[test]
    fn every_job_runs_once() {
        let waiters = Waiters::default();
        let (done, over) = mpsc::channel();
        for index in 0..2000 {
            let done = done.clone();
            waiters.run(Box::new(move || done.send(index).unwrap()));
        }
        let mut seen: Vec<i32> =
            (0..2000).map(|_| over.recv_timeout(Duration::from_secs(10)).unwrap()).collect();
        seen.sort_unstable();
        assert!(seen.into_iter().eq(0..2000));
    }
}
