//! A lock that is had in the order in which it was asked for, or not at all after a moment.

use crate::tier::lock;
use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// A value that one thread at a time has, each in its turn.
#[derive(Debug, Default)]
pub(super) struct Turns<T> {
    queue: Mutex<Queue>,
    moved: Condvar,
    /// Whoever is first in the queue has this.
    value: Mutex<T>,
}

/// Who has the value, and who waits for it.
#[derive(Debug, Default)]
struct Queue {
    next: u64,
    waiting: VecDeque<u64>,
}

/// The value, until this is dropped.
#[derive(Debug)]
pub(super) struct Turn<'a, T> {
    // Goes before the turn.
    value: MutexGuard<'a, T>,
    _place: Place<'a>,
}

/// The first place in a queue.
#[derive(Debug)]
struct Place<'a> {
    queue: &'a Mutex<Queue>,
    moved: &'a Condvar,
}

impl<T> Turns<T> {
    /// Waits for the value.
    pub(super) fn wait(&self) -> Turn<'_, T> {
        let mut queue = lock(&self.queue);
        let own = queue.enter();
        while queue.waiting.front() != Some(&own) {
            queue = self.moved.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        drop(queue);
        self.turn()
    }

    /// Waits for the value until a moment; `None` if others had it until then.
    pub(super) fn wait_until(&self, moment: Instant) -> Option<Turn<'_, T>> {
        let mut queue = lock(&self.queue);
        let own = queue.enter();
        while queue.waiting.front() != Some(&own) {
            let left = moment.saturating_duration_since(Instant::now());
            if left.is_zero() {
                queue.waiting.retain(|waits| *waits != own);
                return None;
            }
            let waited = self.moved.wait_timeout(queue, left);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(queue);
        Some(self.turn())
    }

    fn turn(&self) -> Turn<'_, T> {
        let place = Place { queue: &self.queue, moved: &self.moved };
        Turn { value: lock(&self.value), _place: place }
    }
}

impl Queue {
    fn enter(&mut self) -> u64 {
        self.next += 1;
        self.waiting.push_back(self.next);
        self.next
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        lock(self.queue).waiting.pop_front();
        self.moved.notify_all();
    }
}

impl<T> Deref for Turn<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Turn<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;
    use std::time::Duration;

    #[test]
    fn those_who_wait_come_in_their_order() {
        let turns = Turns::<Vec<u64>>::default();
        thread::scope(|scope| {
            let first = turns.wait();
            for number in 0..8 {
                let turns = &turns;
                scope.spawn(move || turns.wait().push(number));
                while lock(&turns.queue).waiting.len() < number as usize + 2 {
                    thread::sleep(Duration::from_millis(1));
                }
            }
            assert!(turns.wait_until(Instant::now() + Duration::from_millis(20)).is_none());
            drop(first);
        });
        let soon = turns.wait_until(Instant::now()).expect("nobody has it");
        assert_eq!(*soon, (0..8).collect::<Vec<_>>());
    }
}
