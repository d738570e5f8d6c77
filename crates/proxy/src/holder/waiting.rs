//! The programs that wait for room on a device.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicUsize;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long the cache puts nothing on the device after a request: the program allocates meanwhile.
const GRACE: Duration = Duration::from_secs(1);

/// The programs that wait for room.
#[derive(Debug, Default)]
pub(super) struct Rooms {
    waiting: Mutex<Waiting>,
    /// Requests that are being answered.
    pub(super) asking: AtomicUsize,
}

#[derive(Debug, Default)]
struct Waiting {
    /// Request number → bytes that it wants to be free.
    wanted: BTreeMap<u64, u64>,
    /// The number of the next request.
    next: u64,
    /// When the last request ended.
    last: Option<Instant>,
}

impl Rooms {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns how many bytes of the device programs want to be free.
    pub(super) fn wanted(&self) -> u64 {
        self.lock().wanted.values().fold(0, |all, bytes| all.saturating_add(*bytes))
    }

    /// Returns whether the cache must put nothing on the device, as programs need it.
    pub(super) fn rest(&self) -> bool {
        let waiting = self.lock();
        !waiting.wanted.is_empty() || waiting.last.is_some_and(|last| last.elapsed() < GRACE)
    }

    /// Registers a request for `bytes`, until the result is dropped.
    pub(super) fn wait(&self, bytes: u64) -> Request<'_> {
        let mut waiting = self.lock();
        let number = waiting.next;
        waiting.next += 1;
        waiting.wanted.insert(number, bytes);
        Request { rooms: self, number }
    }
}

/// A registered request; dropping it ends it.
pub(super) struct Request<'a> {
    rooms: &'a Rooms,
    number: u64,
}

impl Drop for Request<'_> {
    fn drop(&mut self) {
        let mut waiting = self.rooms.lock();
        waiting.wanted.remove(&self.number);
        waiting.last = Some(Instant::now());
    }
}
