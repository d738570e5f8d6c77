//! Waiting for what tells nobody that it has come about.

use std::time::{Duration, Instant};

/// Asks `reached` again and again, less and less often, for `limit` at most.
pub(crate) fn until(limit: Duration, mut reached: impl FnMut() -> bool) -> bool {
    let begin = Instant::now();
    let mut pause = Duration::from_micros(20);
    loop {
        if reached() {
            return true;
        }
        if begin.elapsed() > limit {
            return false;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(1));
    }
}
