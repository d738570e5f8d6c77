//! Remote shells that are on their way.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Most remote shells that are on their way at one time; the others wait.
pub(crate) const MAX_LAUNCHES: u32 = 32;

/// How many remote shells are on their way.
#[derive(Debug, Default)]
pub(crate) struct Launches {
    count: Mutex<u32>,
    fewer: Condvar,
}

impl Launches {
    fn count(&self) -> MutexGuard<'_, u32> {
        self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether none is within `patience`.
    pub(crate) fn wait_for_none(&self, patience: Duration) -> bool {
        let waited = self.fewer.wait_timeout_while(self.count(), patience, |count| *count > 0);
        *waited.unwrap_or_else(PoisonError::into_inner).0 == 0
    }

    pub(crate) fn begin(self: &Arc<Launches>) -> Option<Launching> {
        let mut count = self.count();
        if *count >= MAX_LAUNCHES {
            return None;
        }
        *count += 1;
        Some(Launching(Arc::clone(self)))
    }
}

/// One that is, until this is dropped.
#[derive(Debug)]
pub(crate) struct Launching(Arc<Launches>);

impl Drop for Launching {
    fn drop(&mut self) {
        *self.0.count() -= 1;
        self.0.fewer.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn a_checkpoint_waits_for_remote_shells_on_their_way() {
        let launches: Arc<Launches> = Arc::default();
        assert!(launches.wait_for_none(Duration::ZERO));
        let one = launches.begin().expect("room");
        assert!(!launches.wait_for_none(Duration::from_millis(10)));
        let waiting = launches.clone();
        let waits = thread::spawn(move || waiting.wait_for_none(Duration::from_secs(60)));
        drop(one);
        assert!(waits.join().expect("a thread"));
    }

    #[test]
    fn so_many_remote_shells_are_on_their_way_and_no_more() {
        let launches: Arc<Launches> = Arc::default();
        let mut all: Vec<_> = (0..MAX_LAUNCHES).map(|_| launches.begin().expect("room")).collect();
        assert!(launches.begin().is_none());
        all.pop();
        assert!(launches.begin().is_some());
    }
}
