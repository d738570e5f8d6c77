//! What one tenant of a server has of it: memory that the server shares with the proxies of the
//! tenant's sessions, a slot of counters for each.
//!
//! A proxy alone writes its slot, the server clears it when the proxy has ended. Whoever has the
//! memory can write what it likes there; what is read of it is never an address or a length.

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::io::{pread, pwrite};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// Sessions of a tenant, at most.
pub const SLOTS: u32 = 256;
/// Words of 64 bits in a slot: a cache line.
pub const WORDS: usize = 8;
/// Bytes of it all: the slots, and one more for what is the tenant's as a whole.
pub const BYTES: usize = (SLOTS as usize + 1) * SLOT;
const SLOT: usize = WORDS * 8;

/// Which word of a slot has what: bytes of device memory, bytes that the session has received and
/// sent, and nanoseconds for which it has read nothing because of the tenant's limit.
pub const MEMORY: usize = 0;
pub const RECEIVED: usize = 1;
pub const SENT: usize = 2;
pub const PAUSED: usize = 3;
/// What work the session's devices have ([`Work::bits`]), and until when, in nanoseconds of the
/// monotonic clock, it hands over few launches at a time, and none: the server alone writes those.
pub const WORK: usize = 4;
pub const PACED: usize = 5;
pub const HELD: usize = 6;
/// The tenant's own word: when, in nanoseconds of the monotonic clock, what has crossed will have
/// had its time.
pub const PAID: usize = SLOTS as usize * WORDS;

/// What a slot says, or several together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Bytes of device memory that are had.
    pub memory: u64,
    /// Bytes that have come from near ends, and gone there.
    pub received: u64,
    pub sent: u64,
    /// Nanoseconds for which nothing was read, because more had crossed than may.
    pub paused: u64,
}

impl Counts {
    /// Adds others.
    #[must_use]
    pub fn and(self, other: Counts) -> Counts {
        Counts {
            memory: self.memory.saturating_add(other.memory),
            received: self.received.saturating_add(other.received),
            sent: self.sent.saturating_add(other.sent),
            paused: self.paused.saturating_add(other.paused),
        }
    }
}

/// Whether a session's devices have work.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Work {
    /// There is some that is not over, be it held up.
    pub wants: bool,
    /// Some of it is being done.
    pub runs: bool,
}

impl Work {
    /// Returns it as the slot has it.
    pub fn bits(self) -> u64 {
        u64::from(self.wants) | u64::from(self.runs) << 1
    }
}

/// How a session may use a device that its tenant shares with others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// As it likes.
    Free,
    /// Few launches at a time: others of its tenant are to have their turns.
    Paced,
    /// None: another of its tenant has the turn.
    Held,
}

/// Nanoseconds of the monotonic clock, which all processes of a machine have.
pub fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Returns the seals that a file has whose length stays.
fn seals() -> SealFlags {
    SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL
}

/// Checks that a file is an account: of this length for ever.
///
/// # Errors
/// It is none, or the kernel does not tell.
pub fn check(file: BorrowedFd<'_>) -> io::Result<()> {
    let sealed = rustix::fs::fcntl_get_seals(file)?.contains(seals());
    if !sealed || rustix::fs::fstat(file)?.st_size != BYTES as i64 {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "no account of a tenant"));
    }
    Ok(())
}

/// An account, as its server has it.
#[derive(Debug)]
pub struct Account(OwnedFd);

impl Account {
    /// Makes one in which nothing is had.
    ///
    /// # Errors
    /// There is no memory or no descriptor.
    pub fn new() -> io::Result<Account> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("kedge-account", flags)?;
        rustix::fs::ftruncate(&file, BYTES as u64)?;
        rustix::fs::fcntl_add_seals(&file, seals())?;
        Ok(Account(file))
    }

    /// Returns the memory.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Opens the memory anew, for a proxy: what one locks is locked to the others.
    ///
    /// # Errors
    /// There is no descriptor left, or no /proc.
    pub fn open(&self) -> io::Result<OwnedFd> {
        let path = format!("/proc/self/fd/{}", self.0.as_raw_fd());
        Ok(rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?)
    }

    /// Returns what a slot says; nothing where there is no such slot.
    pub fn counts(&self, slot: u32) -> Counts {
        let mut bytes = [0; SLOT];
        if slot >= SLOTS || pread(&self.0, &mut bytes, at(slot)).is_err() {
            return Counts::default();
        }
        let words = bytes.as_chunks::<8>().0;
        let word = |number: usize| u64::from_ne_bytes(words[number]);
        let (memory, received, sent) = (word(MEMORY), word(RECEIVED), word(SENT));
        Counts { memory, received, sent, paused: word(PAUSED) }
    }

    /// Returns what work a slot says that there is.
    pub fn work(&self, slot: u32) -> Work {
        let mut bits = [0; 8];
        if slot >= SLOTS || pread(&self.0, &mut bits, at(slot) + WORK as u64 * 8).is_err() {
            return Work::default();
        }
        let bits = u64::from_ne_bytes(bits);
        Work { wants: bits & 1 != 0, runs: bits & 2 != 0 }
    }

    /// Tells a slot's session how it may use its devices, until a moment: without another word it
    /// is free then.
    pub fn set_turn(&self, slot: u32, turn: Turn, until: u64) {
        let [paced, held] = match turn {
            Turn::Free => [0, 0],
            Turn::Paced => [until, 0],
            Turn::Held => [until, until],
        };
        let words = [paced.to_ne_bytes(), held.to_ne_bytes()].concat();
        if slot < SLOTS {
            // As below.
            let _ = pwrite(&self.0, &words, at(slot) + PACED as u64 * 8);
        }
    }

    /// Has a slot say nothing, and returns what it said. Its proxy has ended.
    pub fn clear(&self, slot: u32) -> Counts {
        let counts = self.counts(slot);
        if slot < SLOTS {
            // The file's length is sealed, and its pages have been written before.
            let _ = pwrite(&self.0, &[0; SLOT], at(slot));
        }
        counts
    }
}

/// Returns where a slot begins.
fn at(slot: u32) -> u64 {
    u64::from(slot) * SLOT as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_read_and_cleared_and_no_other() {
        let account = Account::new().unwrap();
        check(account.file()).unwrap();
        for (slot, word, value) in
            [(1, MEMORY, 5_u64), (1, SENT, 7), (1, PAUSED, 3), (2, RECEIVED, 9)]
        {
            let at = at(slot) + word as u64 * 8;
            pwrite(account.file(), &value.to_ne_bytes(), at).unwrap();
        }
        let first = Counts { memory: 5, sent: 7, paused: 3, ..Counts::default() };
        assert_eq!(account.counts(1), first);
        assert_eq!(account.counts(2).and(first), Counts { received: 9, ..first });
        assert_eq!((account.clear(1), account.counts(1)), (first, Counts::default()));
        assert_eq!(account.counts(2).received, 9);
        assert_eq!((account.counts(SLOTS), account.clear(SLOTS)), Default::default());
    }

    #[test]
    fn work_and_turns_are_told() {
        let account = Account::new().unwrap();
        let work = Work { wants: true, runs: false };
        pwrite(account.file(), &work.bits().to_ne_bytes(), at(2) + WORK as u64 * 8).unwrap();
        assert_eq!((account.work(2), account.work(1)), (work, Work::default()));
        let both = Work { runs: true, ..work };
        pwrite(account.file(), &both.bits().to_ne_bytes(), at(2) + WORK as u64 * 8).unwrap();
        assert_eq!((account.work(2), account.work(SLOTS)), (both, Work::default()));
        for (turn, paced, held) in [(Turn::Held, 9, 9), (Turn::Paced, 8, 0), (Turn::Free, 0, 0)] {
            account.set_turn(2, turn, paced);
            account.set_turn(SLOTS, turn, 7);
            let mut words = [0; 16];
            pread(account.file(), &mut words, at(2) + PACED as u64 * 8).unwrap();
            assert_eq!(words.as_chunks::<8>().0, &[paced, held].map(u64::to_ne_bytes));
        }
        assert_eq!(account.work(2), both);
    }

    #[test]
    fn what_could_be_made_shorter_is_no_account() {
        let made = |bytes: usize, seal: bool| {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let file = rustix::fs::memfd_create("other", flags).unwrap();
            rustix::fs::ftruncate(&file, bytes as u64).unwrap();
            if seal {
                rustix::fs::fcntl_add_seals(&file, seals()).unwrap();
            }
            check(file.as_fd()).is_ok()
        };
        assert!(made(BYTES, true));
        assert!(!made(BYTES, false) && !made(BYTES - 1, true) && !made(0, true));
    }
}
