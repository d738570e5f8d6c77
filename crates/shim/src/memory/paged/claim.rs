//! Device memory that a thread wants and managed memory has: until the thread has taken it, other
//! threads' launches wait for a while, and bring nothing in.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Longest wait of a launch. What the thread waits for may itself wait for that launch.
const MAX_WAIT: Duration = Duration::from_secs(1);

static CLAIMS: Claims = Claims::new();

/// Ends with the thread's try to take memory.
#[derive(Debug)]
#[must_use = "launches take what has given way as soon as this ends"]
pub(crate) struct Claim(());

/// Says that the calling thread wants memory that is to give way.
pub(in crate::memory) fn claim() -> Claim {
    CLAIMS.begin();
    Claim(())
}

impl Drop for Claim {
    fn drop(&mut self) {
        CLAIMS.end();
    }
}

/// Whether a thread wants memory just now.
pub(super) fn is_claimed() -> bool {
    CLAIMS.any()
}

/// Waits until no thread wants memory, or for long enough.
pub(super) fn let_claims_pass() {
    CLAIMS.wait(MAX_WAIT);
}

#[derive(Debug)]
struct Claims {
    count: AtomicU32,
    changes: Mutex<()>,
    over: Condvar,
}

impl Claims {
    const fn new() -> Claims {
        Claims { count: AtomicU32::new(0), changes: Mutex::new(()), over: Condvar::new() }
    }

    fn any(&self) -> bool {
        self.count.load(Ordering::SeqCst) > 0
    }

    fn begin(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
    }

    fn end(&self) {
        let _changes = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        if self.count.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.over.notify_all();
        }
    }

    /// Returns whether there is none.
    fn wait(&self, patience: Duration) -> bool {
        if !self.any() {
            return true;
        }
        let changes = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.over.wait_timeout_while(changes, patience, |()| self.any());
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn who_waits_goes_on_when_the_last_claim_is_over() {
        let claims = Claims::new();
        assert!(claims.wait(Duration::ZERO));
        claims.begin();
        claims.begin();
        assert!(!claims.wait(Duration::ZERO));
        claims.end();
        assert!(claims.any() && !claims.wait(Duration::ZERO));
        thread::scope(|scope| {
            let waits = scope.spawn(|| claims.wait(Duration::MAX));
            claims.end();
            assert!(waits.join().unwrap());
        });
    }
}
