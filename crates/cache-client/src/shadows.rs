//! Descriptors of this library's own in the program: those of shadows.
//!
//! The program does not know of them. Where it closes one, as programs do that close all, it is
//! told that there is none; where it wants the number for something else, this gives way.

use crate::sys;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicI32, Ordering};

/// Most shadows at a time: a program may need nearly all numbers for itself.
pub(crate) const MAX_SHADOWS: usize = 64;
/// Numbers that programs seldom reach; the second where the first is beyond the limit.
const HIGH: [RawFd; 2] = [900, 200];
/// No number.
const NONE: RawFd = -1;

/// The numbers of these descriptors.
#[derive(Debug)]
pub(crate) struct Shadows {
    numbers: [AtomicI32; MAX_SHADOWS],
    /// How many there are, for who asks often.
    count: AtomicI32,
}

impl Shadows {
    pub(crate) const fn new() -> Shadows {
        Shadows { numbers: [const { AtomicI32::new(NONE) }; MAX_SHADOWS], count: AtomicI32::new(0) }
    }

    /// Returns whether a descriptor is one of these.
    pub(crate) fn has(&self, fd: RawFd) -> bool {
        let some = self.count.load(Ordering::Relaxed) > 0;
        some && fd >= 0 && self.numbers.iter().any(|own| own.load(Ordering::Acquire) == fd)
    }

    /// Moves a descriptor to a high number, which is noted. `None`, and it is closed, if there is
    /// no place.
    pub(crate) fn adopt(&self, low: RawFd) -> Option<RawFd> {
        let moved = HIGH
            .iter()
            .find_map(|least| rustix::io::fcntl_dupfd_cloexec(sys::borrow(low)?, *least).ok());
        sys::close(low);
        let high = std::os::fd::IntoRawFd::into_raw_fd(moved?);
        let change = |own: &AtomicI32| {
            own.compare_exchange(NONE, high, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        if self.numbers.iter().any(change) {
            self.count.fetch_add(1, Ordering::Relaxed);
            return Some(high);
        }
        sys::close(high);
        None
    }

    /// Forgets a descriptor, and returns whether it was noted.
    pub(crate) fn forget(&self, fd: RawFd) -> bool {
        let change = |own: &AtomicI32| {
            own.compare_exchange(fd, NONE, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        let noted = fd >= 0 && self.numbers.iter().any(change);
        if noted {
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
        noted
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::IntoRawFd;

    fn descriptor() -> RawFd {
        std::fs::File::open("/dev/null").map_or(NONE, IntoRawFd::into_raw_fd)
    }

    #[test]
    fn they_are_high_and_no_more_than_there_are_places() {
        let shadows = Shadows::new();
        let own: Vec<_> = (0..MAX_SHADOWS).filter_map(|_| shadows.adopt(descriptor())).collect();
        assert!(own.len() == MAX_SHADOWS && own.iter().all(|fd| *fd >= 200 && shadows.has(*fd)));
        assert_eq!(shadows.adopt(descriptor()), None);
        for fd in own {
            sys::close(fd);
            assert!(shadows.forget(fd) && !shadows.forget(fd) && !shadows.has(fd));
        }
        assert!(!shadows.has(NONE) && !shadows.forget(NONE));
        assert_eq!(shadows.adopt(NONE), None);
    }
}
