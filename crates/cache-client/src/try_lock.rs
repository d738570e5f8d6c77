//! A lock that is never waited for.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};

/// A value that one has at a time. Whoever finds it taken does without: by another thread, by what
/// a signal handler has interrupted, or by a thread that a fork has left behind.
#[derive(Debug)]
pub(crate) struct TryLock<T> {
    taken: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: `try_lock` gives the value to one at a time.
unsafe impl<T: Send> Sync for TryLock<T> {}

impl<T> TryLock<T> {
    pub(crate) const fn new(value: T) -> TryLock<T> {
        TryLock { taken: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    /// Returns the value, unless somebody has it.
    pub(crate) fn try_lock(&self) -> Option<Taken<'_, T>> {
        let taken = self.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed);
        // Not made before that is known: its end would free the lock.
        taken.is_ok().then(|| Taken { lock: self })
    }

    /// The same, after a few tries: for what cannot be done without.
    pub(crate) fn try_often(&self) -> Option<Taken<'_, T>> {
        const TRIES: usize = 200;
        for _ in 0..TRIES {
            if let Some(taken) = self.try_lock() {
                return Some(taken);
            }
            // SAFETY: it takes no arguments and touches no memory.
            unsafe { libc::sched_yield() };
        }
        None
    }
}

/// The value, until this is dropped.
#[derive(Debug)]
pub(crate) struct Taken<'a, T> {
    lock: &'a TryLock<T>,
}

impl<T> Deref for Taken<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: `taken` was false and is true until `self` is dropped: nobody else has it.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for Taken<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for Taken<'_, T> {
    fn drop(&mut self) {
        self.lock.taken.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_has_it_at_a_time() {
        let lock = TryLock::new(1);
        let mut taken = lock.try_lock().into_iter().collect::<Vec<_>>();
        assert!(taken.len() == 1 && lock.try_lock().is_none() && lock.try_often().is_none());
        taken.iter_mut().for_each(|value| **value = 2);
        taken.clear();
        assert_eq!(lock.try_lock().as_deref(), Some(&2));
    }

    #[test]
    fn threads_count_together() {
        let lock = TryLock::new(0u64);
        let count = || {
            let mut own = 0;
            while own < 10_000 {
                if let Some(mut taken) = lock.try_lock() {
                    (*taken, own) = (*taken + 1, own + 1);
                }
            }
        };
        std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(count))));
        assert_eq!(lock.try_lock().as_deref(), Some(&40_000));
    }
}
