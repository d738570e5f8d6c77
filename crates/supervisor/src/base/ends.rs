//! How long what is ended takes to end, and how often one looks.

use std::time::Duration;

/// A process that is killed may have much memory to give back.
pub(crate) const LAST: Duration = Duration::from_secs(30);
/// A proxy needs some milliseconds to notice that its client has ended and to free its memory.
pub(crate) const FAREWELL: Duration = Duration::from_millis(500);
/// Between two looks at what still runs: what is killed has often ended within a millisecond.
const FIRST_LOOK: Duration = Duration::from_millis(1);
pub(crate) const LAST_LOOK: Duration = Duration::from_millis(16);

/// How long to wait between looks: twice as long each time.
pub(crate) fn looks() -> impl Iterator<Item = Duration> {
    std::iter::successors(Some(FIRST_LOOK), |last| Some((*last * 2).min(LAST_LOOK)))
}
