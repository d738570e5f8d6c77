//! Copy engines: threads that move bytes while the pool computes, as a device's DMA engines do. A
//! copy so never waits for a kernel that spins until the copied flag arrives.

use super::tasks::lock;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// As ASYNC_ENGINE_COUNT tells the program.
const ENGINES: usize = 2;

/// How often a waiting task looks at its word.
const POLL_INTERVAL: Duration = Duration::from_micros(20);

type Job = Box<dyn FnOnce() + Send>;
/// Says whether it is over.
type Poll = Box<dyn FnMut() -> bool + Send>;

/// The threads end when this is dropped, after the jobs that they have begun.
pub(super) struct Engines {
    queue: Arc<Queue<Job>>,
    polls: Arc<Queue<Poll>>,
}

struct Queue<T> {
    state: Mutex<State<T>>,
    arrived: Condvar,
}

struct State<T> {
    entries: VecDeque<T>,
    closed: bool,
}

impl Engines {
    pub(super) fn start() -> std::io::Result<Self> {
        let engines = Self { queue: Queue::new(), polls: Queue::new() };
        for index in 0..ENGINES {
            let queue = Arc::clone(&engines.queue);
            thread::Builder::new().name(format!("copy-{index}")).spawn(move || {
                while let Some(job) = queue.next() {
                    job();
                }
            })?;
        }
        let polls = Arc::clone(&engines.polls);
        thread::Builder::new().name("wait-value".to_owned()).spawn(move || poll_all(&polls))?;
        Ok(engines)
    }

    /// Runs `job` on an engine, in order of arrival.
    pub(super) fn spawn(&self, job: impl FnOnce() + Send + 'static) {
        self.queue.push(Box::new(job));
    }

    /// Calls `poll` again and again until it says that it is over.
    pub(super) fn poll(&self, poll: impl FnMut() -> bool + Send + 'static) {
        self.polls.push(Box::new(poll));
    }
}

impl Drop for Engines {
    fn drop(&mut self) {
        self.queue.close();
        self.polls.close();
    }
}

impl<T> Queue<T> {
    fn new() -> Arc<Self> {
        let state = State { entries: VecDeque::new(), closed: false };
        Arc::new(Self { state: Mutex::new(state), arrived: Condvar::new() })
    }

    fn push(&self, entry: T) {
        lock(&self.state).entries.push_back(entry);
        self.arrived.notify_one();
    }

    /// Waits for an entry; `None` once the queue is closed.
    fn next(&self) -> Option<T> {
        let mut state = lock(&self.state);
        loop {
            if state.closed {
                return None;
            }
            if let Some(entry) = state.entries.pop_front() {
                return Some(entry);
            }
            state = self.arrived.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// What has arrived since, or `None` once the queue is closed.
    fn take(&self) -> Option<VecDeque<T>> {
        let mut state = lock(&self.state);
        if state.closed { None } else { Some(std::mem::take(&mut state.entries)) }
    }

    fn close(&self) {
        lock(&self.state).closed = true;
        self.arrived.notify_all();
    }
}

/// Sleeps while nobody waits for a value.
fn poll_all(queue: &Queue<Poll>) {
    while let Some(first) = queue.next() {
        let mut polls = vec![first];
        while !polls.is_empty() {
            polls.retain_mut(|poll| !poll());
            thread::sleep(POLL_INTERVAL);
            match queue.take() {
                Some(arrived) => polls.extend(arrived),
                None => return,
            }
        }
    }
}
