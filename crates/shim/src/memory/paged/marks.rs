//! What the file of the host's pages says of itself to whoever takes a checkpoint, which looks at
//! it from outside and runs nothing in this process ([`kedge_transport::managed`]).

use kedge_cuda_types::arena::DEVICE_BASE;
use kedge_pages::{PAGE, Pages};
use kedge_transport::managed;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bits of a word.
const WORD: u64 = u64::BITS as u64;

/// The part of the file behind the arenas.
#[derive(Debug)]
pub(super) struct Marks {
    /// Addresses in the alias.
    bits: u64,
    head: u64,
}

impl Marks {
    /// Returns those of a file for so many devices that is mapped as a whole at `alias`, for as
    /// long as the process lives.
    pub(super) fn new(alias: u64, devices: u32) -> Marks {
        Marks { bits: alias + managed::bits(devices), head: alias + managed::head(devices) }
    }

    /// Says what watches the pages, and that the file can be read from now on.
    pub(super) fn ready(
        &self,
        devices: u32,
        descriptor: i32,
        (features, modes): (u64, u64),
        all_faults: bool,
    ) {
        for (place, value) in [
            (managed::DEVICES, devices.into()),
            (managed::DESCRIPTOR, descriptor as u64),
            (managed::FEATURES, features),
            (managed::MODES, modes),
            (managed::ALL_FAULTS, all_faults.into()),
            (managed::READY, managed::MAGIC),
        ] {
            self.head(place).store(value, Ordering::SeqCst);
        }
    }

    /// Returns a number that changes when the process has been made anew from an image.
    pub(super) fn generation(&self) -> u64 {
        self.head(managed::GENERATION).load(Ordering::SeqCst)
    }

    /// Says whether pages, or what is said of them, are being changed.
    pub(super) fn busy(&self, is: bool) {
        // Before all that follows, and after all that came before.
        self.head(managed::BUSY).store(is.into(), Ordering::SeqCst);
    }

    /// Says of pages whether the file alone has their current bytes.
    pub(super) fn own(&self, pages: &Pages, is: bool) {
        let first = DEVICE_BASE / PAGE;
        let (mut at, end) = (pages.start - first, pages.end - first);
        while at < end {
            let count = (WORD - at % WORD).min(end - at);
            let mask = (u64::MAX >> (WORD - count)) << (at % WORD);
            let word = self.word(self.bits + at / WORD * 8);
            match is {
                true => word.fetch_or(mask, Ordering::Relaxed),
                false => word.fetch_and(!mask, Ordering::Relaxed),
            };
            at += count;
        }
    }

    fn head(&self, place: u64) -> &AtomicU64 {
        self.word(self.head + place * 8)
    }

    fn word(&self, addr: u64) -> &AtomicU64 {
        // SAFETY: the file is mapped there for good, for reading and writing, up to its end, which
        // is behind the bits of every page and behind the head; the address is a multiple of 8.
        unsafe { &*(addr as *const AtomicU64) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_set_and_cleared_by_pages() {
        let memory: [AtomicU64; 4] = Default::default();
        let at = memory.as_ptr() as u64;
        let marks = Marks { bits: at, head: at };
        let first = DEVICE_BASE / PAGE;
        marks.own(&(first + 60..first + 130), true);
        let words = || [0, 1, 2, 3].map(|index| marks.word(at + index * 8).load(Ordering::Relaxed));
        assert_eq!(words(), [0xf << 60, u64::MAX, 3, 0]);
        marks.own(&(first + 64..first + 65), false);
        marks.own(&(first + 128..first + 192), false);
        assert_eq!(words(), [0xf << 60, u64::MAX - 1, 0, 0]);
        marks.own(&(first + 70..first + 70), true);
        assert_eq!(words(), [0xf << 60, u64::MAX - 1, 0, 0]);
    }
}
