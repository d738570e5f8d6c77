//! Whose turn it is with a job: one checkpoint, one move, or one swap at a time, and none before
//! the job's program is there.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

/// What one that is done may need to say so.
const LAST_WORDS: Duration = Duration::from_millis(200);
/// So often it is looked whether it is over.
const LOOK: Duration = Duration::from_millis(2);

/// Taken by one after the other.
#[derive(Debug, Default)]
pub(crate) struct Turn {
    taken: Mutex<()>,
    /// Whether it is taken by who starts the program.
    starting: AtomicBool,
}

/// The turn of who starts the job's program: nobody captures what is on its way to become it.
#[derive(Debug)]
pub(crate) struct Starting<'a> {
    turn: &'a Turn,
    _one: MutexGuard<'a, ()>,
}

impl Drop for Starting<'_> {
    fn drop(&mut self) {
        // Before the lock: who finds it free must not find this one there.
        self.turn.starting.store(false, Ordering::Release);
    }
}

impl Turn {
    /// Takes it to start the program, whatever comes meanwhile waits for that.
    pub(crate) fn start(&self) -> Starting<'_> {
        let one = self.wait();
        self.starting.store(true, Ordering::Release);
        Starting { turn: self, _one: one }
    }

    /// Takes it, if no other has it or that one just says that it is done. `None` where a
    /// checkpoint or a move is under way. A program that is being started is waited for: on a
    /// loaded machine that takes longer, and nothing is under way that could fail.
    pub(crate) fn take(&self) -> Option<MutexGuard<'_, ()>> {
        let mut since = Instant::now();
        loop {
            match self.taken.try_lock() {
                Ok(guard) => return Some(guard),
                Err(TryLockError::Poisoned(poison)) => return Some(poison.into_inner()),
                Err(TryLockError::WouldBlock) if self.starting.load(Ordering::Acquire) => {
                    since = Instant::now();
                }
                Err(TryLockError::WouldBlock) if since.elapsed() > LAST_WORDS => return None,
                Err(TryLockError::WouldBlock) => {}
            }
            thread::sleep(LOOK);
        }
    }

    /// Takes it when no other has it.
    pub(crate) fn wait(&self) -> MutexGuard<'_, ()> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether somebody has it.
    pub(crate) fn is_taken(&self) -> bool {
        matches!(self.taken.try_lock(), Err(TryLockError::WouldBlock))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    /// Longer than what is done needs for its last words.
    const PAST_LAST_WORDS: Duration = LAST_WORDS.saturating_mul(3);

    #[test]
    fn one_that_is_under_way_is_not_waited_for() {
        let turn = Turn::default();
        let one = turn.take().expect("nobody has it");
        assert!(turn.is_taken() && turn.take().is_none());
        drop(one);
        assert!(!turn.is_taken() && turn.take().is_some());
    }

    /// A checkpoint that was asked for meanwhile was told that another was under way.
    #[test]
    fn a_program_that_is_being_started_is_waited_for() {
        let turn = Turn::default();
        let starting = turn.start();
        assert!(turn.is_taken());
        let (asks, asked) = channel();
        thread::scope(|scope| {
            let asking = scope.spawn(|| {
                asks.send(()).expect("it is waited for");
                turn.take().is_some()
            });
            asked.recv().expect("it asks");
            thread::sleep(PAST_LAST_WORDS);
            drop(starting);
            assert!(asking.join().expect("no panic"), "it was its turn when the program was there");
        });
        let one = turn.take();
        assert!(turn.take().is_none(), "a checkpoint is no start");
        drop(one);
    }
}
