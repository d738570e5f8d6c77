//! Remembers the files that this process has mapped: they get no lease.
//!
//! The kernel learns a leased file's length only when it asks the daemon. It does not ask when a
//! mapping is touched, and a page behind the end that it knows of raises SIGBUS.

use crate::mounts::Id;
use crate::try_lock::TryLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// Most files that are remembered; once there are more, no file gets a lease.
const MAX_FILES: usize = 256;

#[derive(Debug)]
struct Files {
    ids: [Option<Id>; MAX_FILES],
}

/// The files that were mapped.
#[derive(Debug)]
pub(crate) struct Mapped {
    files: TryLock<Files>,
    /// Whether any file was mapped.
    some: AtomicBool,
    /// Whether a file could not be remembered: then all count as mapped.
    overflowed: AtomicBool,
}

impl Mapped {
    pub(crate) const fn new() -> Mapped {
        let files = TryLock::new(Files { ids: [None; MAX_FILES] });
        Mapped { files, some: AtomicBool::new(false), overflowed: AtomicBool::new(false) }
    }

    /// Notes that a file was mapped.
    pub(crate) fn add(&self, id: Id) {
        self.some.store(true, Ordering::SeqCst);
        let noted = self.files.try_often().is_some_and(|mut files| files.add(id));
        if !noted {
            self.overflowed.store(true, Ordering::SeqCst);
        }
    }

    /// Returns whether a file may have been mapped.
    pub(crate) fn has(&self, id: Id) -> bool {
        if !self.some.load(Ordering::SeqCst) {
            return false;
        }
        let is_known = |files: &Files| files.ids.contains(&Some(id));
        self.overflowed.load(Ordering::SeqCst)
            || self.files.try_lock().is_none_or(|files| is_known(&files))
    }
}

impl Files {
    /// Remembers a file; returns false if there is no room.
    fn add(&mut self, id: Id) -> bool {
        if self.ids.contains(&Some(id)) {
            return true;
        }
        let free = self.ids.iter_mut().find(|place| place.is_none());
        free.map(|place| *place = Some(id)).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mounts::Device;

    fn id(number: u64) -> Id {
        Id { device: Device { major: 0, minor: 1 }, number }
    }

    #[test]
    fn what_does_not_fit_is_everything() {
        let mapped = Mapped::new();
        assert!(!mapped.has(id(0)));
        (0..MAX_FILES as u64).for_each(|number| mapped.add(id(number)));
        mapped.add(id(0));
        assert!(mapped.has(id(0)) && mapped.has(id(255)) && !mapped.has(id(256)));
        mapped.add(id(256));
        assert!(mapped.has(id(256)) && mapped.has(id(1000)));
    }
}
