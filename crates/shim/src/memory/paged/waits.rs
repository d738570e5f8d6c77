//! Touches that wait for work. The log says when one waits for long: a kernel that waits for the
//! host's write never ends, since the write waits for the kernel.

use super::faults::spawn;
use crate::log;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a touch waits before the log says so.
const LOG_THRESHOLD: Duration = Duration::from_secs(5);

/// When each touch began that waits now: by numbers, the oldest first.
static WAITING: Mutex<(u64, Vec<(u64, Instant)>)> = Mutex::new((0, Vec::new()));
static BEGUN: Condvar = Condvar::new();

/// A touch waits while this lives.
pub(super) struct Waiting(u64);

impl Waiting {
    pub(super) fn begin() -> Waiting {
        let mut waiting = WAITING.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.0 += 1;
        let number = waiting.0;
        waiting.1.push((number, Instant::now()));
        if number == 1 {
            // Without it nothing is said.
            let _ = spawn(watch);
        }
        BEGUN.notify_one();
        Waiting(number)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut waiting = WAITING.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.1.retain(|(number, _)| *number != self.0);
    }
}

/// Says it once, and ends.
fn watch() {
    let mut waiting = WAITING.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        let Some((_, since)) = waiting.1.first() else {
            waiting = BEGUN.wait(waiting).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        let left = LOG_THRESHOLD.saturating_sub(since.elapsed());
        if left.is_zero() {
            break;
        }
        waiting = BEGUN.wait_timeout(waiting, left).unwrap_or_else(PoisonError::into_inner).0;
    }
    drop(waiting);
    log::line(
        "managed memory: a touch of the program's has been waiting for a kernel for 5 s; if the \
         kernel waits for the program, neither goes on: KEDGE_MANAGED=shared lets both use it at \
         once on a GPU (docs/memory.md)",
    );
}
