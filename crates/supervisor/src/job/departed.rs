//! Whether a job has left for another host, where nobody answers any more who would know.

use crate::job::jobs::{JobName, Jobs, State, open_lock, read_meta, try_lock};
use crate::job::leaving::{read, revoke};
use kedge_control::job::Moved;
use std::fs::File;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// For whoever has the job's folder to see its end.
const SEES: Duration = Duration::from_secs(60);
/// For killed processes to give their memory back.
const DIES: Duration = Duration::from_secs(120);
/// Between two looks.
const LOOK: Duration = Duration::from_millis(10);

/// What has become of a job whose supervisor was lost while it had the job leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Departure {
    /// Nothing of it runs here any more: it may run there.
    Left,
    /// It does not leave, and nobody can say any more that it does.
    Stays,
    /// Whoever has its folder may still say that it has left.
    Unknown,
}

impl Jobs {
    /// Finds out what has become of the job `name` after the line to its supervisor was lost.
    ///
    /// Where it was decided that it leaves, but its processes were not killed and go on here, the
    /// decision is taken back.
    #[must_use]
    pub fn settle_departure(&self, name: &JobName, moved: &Moved) -> Departure {
        let folder = self.folder(name);
        match is_decided(&folder, moved) {
            Some(true) => {}
            // He is gone who would have decided that.
            Some(false) => return Departure::Stays,
            None => return Departure::Unknown,
        }
        // Who takes the name of a job sees first that none of its processes is left.
        match locked(&folder, moved) {
            Ok(lock) => {
                let settled = settle(&folder);
                drop(lock);
                settled
            }
            Err(departure) => departure,
        }
    }
}

/// Whether this move was decided; `None` where that cannot be read.
fn is_decided(folder: &Path, moved: &Moved) -> Option<bool> {
    let found = read(folder).ok()?;
    Some(found.is_some_and(|found| found.token == moved.token))
}

/// Waits for the lock of the job's folder, in which the decision stands.
fn locked(folder: &Path, moved: &Moved) -> Result<File, Departure> {
    let begin = Instant::now();
    loop {
        let lock = open_lock(folder).ok().filter(try_lock);
        match (is_decided(folder, moved), lock) {
            (Some(true), Some(lock)) => return Ok(lock),
            (Some(false), _) => return Err(Departure::Left),
            _ if begin.elapsed() > SEES => return Err(Departure::Unknown),
            _ => thread::sleep(LOOK),
        }
    }
}

/// The same under the lock.
fn settle(folder: &Path) -> Departure {
    let Some(meta) = read_meta(folder) else { return Departure::Unknown };
    if meta.state != State::Running {
        return Departure::Left;
    }
    let begin = Instant::now();
    loop {
        if meta.left(folder).any_goes_on() {
            return revoke(folder).map_or(Departure::Unknown, |()| Departure::Stays);
        }
        if !meta.left(folder).any() {
            return Departure::Left;
        }
        if begin.elapsed() > DIES {
            return Departure::Unknown;
        }
        thread::sleep(LOOK);
    }
}
