//! Work shared out among a few threads.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

/// Threads at most: more than that, and the disk is what is slow.
pub(crate) const MAX_THREADS: usize = 8;

/// Does `job` for each of `all`, each thread with scratch of its own. The first failure ends it.
pub(crate) fn each<T: Sync, S, E: Send>(
    all: &[T],
    scratch: impl Fn() -> S + Sync,
    job: impl Fn(&T, &mut S) -> Result<(), E> + Sync,
) -> Result<(), E> {
    by(MAX_THREADS, all, scratch, job)
}

/// As [`each`], by at most so many threads.
pub(crate) fn by<T: Sync, S, E: Send>(
    most: usize,
    all: &[T],
    scratch: impl Fn() -> S + Sync,
    job: impl Fn(&T, &mut S) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let next = AtomicUsize::new(0);
    let failure = Mutex::new(None);
    let work = || {
        let mut scratch = scratch();
        while let Some(one) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(error) = job(one, &mut scratch) {
                next.store(all.len(), Ordering::Relaxed);
                failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            }
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from).min(most);
    thread::scope(|scope| {
        for _ in 1..threads.min(all.len()) {
            scope.spawn(work);
        }
        work();
    });
    failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}
