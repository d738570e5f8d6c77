//! How far a lease's writer has come: one word that both sides change.
//!
//! | bits | |
//! |---|---|
//! | 32–63 | which lease of this slot it is |
//! | 31 | the lease is at its end: nothing more counts |
//! | 0–30 | bytes that were written, from the lease's first one on |
//!
//! Whoever has the page may write what it likes there. The daemon takes no more than the lease's
//! length for written, and reads nothing as an address.

use std::sync::atomic::{AtomicU64, Ordering};

const ENDED: u64 = 1 << 31;
const USED: u64 = ENDED - 1;

/// One lease's place in a page.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct Slot {
    /// The number of the lease's record in the journal; 0 if the slot is free.
    record: AtomicU64,
    word: AtomicU64,
}

/// A lease that has begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Begun {
    /// Which lease of its slot it is.
    pub epoch: u32,
}

fn word_of(epoch: u32, used: u32) -> u64 {
    u64::from(epoch) << 32 | (u64::from(used) & USED)
}

impl Slot {
    /// Begins a lease, of which a record of that number tells.
    pub fn begin(&self, record: u64) -> Begun {
        let before = self.word.load(Ordering::Relaxed);
        let epoch = ((before >> 32) as u32).wrapping_add(1);
        self.word.store(word_of(epoch, 0), Ordering::Release);
        self.record.store(record, Ordering::Release);
        Begun { epoch }
    }

    /// Says that `by` more bytes were written, after `used`. `false` if the lease is at its end:
    /// they do not count then.
    pub fn advance(&self, lease: Begun, used: u32, by: u32) -> bool {
        let Some(now) = used.checked_add(by).filter(|now| u64::from(*now) <= USED) else {
            return false;
        };
        let (old, new) = (word_of(lease.epoch, used), word_of(lease.epoch, now));
        self.word.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Returns whether the lease goes on and `used` bytes were written.
    pub fn stands_at(&self, lease: Begun, used: u32) -> bool {
        self.word.load(Ordering::Acquire) == word_of(lease.epoch, used)
    }

    /// Returns how many bytes were written until now: of `length`, no more.
    pub fn written(&self, length: u64) -> u64 {
        (self.word.load(Ordering::Relaxed) & USED).min(length)
    }

    /// Ends the lease, and returns how many bytes were written: of `length`, no more.
    pub fn end(&self, length: u64) -> u64 {
        let before = self.word.fetch_or(ENDED, Ordering::AcqRel);
        (before & USED).min(length)
    }

    /// Returns the number of the record that tells of the lease; `None` of a free slot.
    pub fn record(&self) -> Option<u64> {
        Some(self.record.load(Ordering::Acquire)).filter(|record| *record != 0)
    }

    /// Returns whether there never was a lease.
    pub fn is_blank(&self) -> bool {
        self.word.load(Ordering::Relaxed) == 0
    }

    /// Frees the slot of a lease that was ended.
    pub fn free(&self) {
        self.record.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_before_the_end_counts_and_nothing_after() {
        let slot = Slot::default();
        assert!(slot.record().is_none() && slot.is_blank());
        let lease = slot.begin(7);
        assert!(!slot.is_blank());
        assert_eq!(slot.record(), Some(7));
        assert!(slot.advance(lease, 0, 100) && slot.advance(lease, 100, 1));
        assert!(!slot.advance(lease, 100, 1), "somebody else was there");
        assert!(slot.stands_at(lease, 101) && slot.written(1000) == 101 && slot.written(9) == 9);
        assert_eq!(slot.end(1000), 101);
        assert!(!slot.advance(lease, 101, 1) && !slot.stands_at(lease, 101));
        assert_eq!(slot.end(1000), 101);
    }

    #[test]
    fn a_late_writer_changes_nothing_of_the_next_lease() {
        let slot = Slot::default();
        let late = slot.begin(1);
        slot.end(10);
        slot.free();
        let next = slot.begin(2);
        assert!(!slot.advance(late, 0, 5) && slot.advance(next, 0, 6));
        assert_eq!(slot.end(10), 6);
    }

    #[test]
    fn no_more_is_taken_than_the_lease_has() {
        let slot = Slot::default();
        let lease = slot.begin(1);
        assert!(slot.advance(lease, 0, u32::MAX >> 1) && !slot.advance(lease, u32::MAX >> 1, 1));
        assert_eq!(slot.end(10), 10);
    }
}
