//! Asking for a checkpoint on the job's own behalf.

use crate::base::sending::Sending;
use crate::services::control::{self, Order, Progress, TakeError, Until};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// Before whoever finds another at a checkpoint waits for its end.
const PAUSE: Duration = Duration::from_millis(20);

/// The checkpoint that `order` asks for, after the one that may be under way.
pub(crate) fn take_one(
    control: &Path,
    order: &Order,
    until: Until,
    deadline: Option<Instant>,
    mut tell: impl FnMut(&Progress),
) -> Result<(), TakeError> {
    loop {
        match control::take(control, order, until, &Sending::default(), &mut tell) {
            Err(TakeError::Failed { busy: true, .. })
                if deadline.is_none_or(|at| Instant::now() < at) =>
            {
                // A part that has not been called yet has nothing to settle.
                thread::sleep(PAUSE);
                control::settle(control, deadline);
            }
            other => return other,
        }
    }
}
