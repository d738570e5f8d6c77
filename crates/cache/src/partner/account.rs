//! What a partner keeps for each key, and the most of it.

use super::home as place;
use super::host::{Partner, other};
use crate::journal::Found;
use crate::tier::lock;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What a key has is measured anew after so long, and after so many times as long as that took.
const LOOK: Duration = Duration::from_secs(10);
const LOOKS: u32 = 10;
/// About the bytes that a record takes in a journal, beside a name.
pub(super) const RECORD: u64 = 64;

/// The most that a partner keeps for one key.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Caches that are connected.
    pub(super) sessions: usize,
    /// Folders of caches, connected or not.
    pub(super) homes: usize,
    /// What is kept for all caches that are connected.
    pub(super) kept: Kept,
}

/// What takes memory, of a file, a cache, or a key.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Kept {
    pub(super) files: usize,
    /// Parts of files.
    pub(super) parts: usize,
    /// Bytes of their names.
    pub(super) names: usize,
}

impl Limits {
    pub(super) const fn new() -> Limits {
        let kept = Kept { files: 1 << 20, parts: 1 << 20, names: 128 << 20 };
        Limits { sessions: 64, homes: 1024, kept }
    }

    /// Returns the most parts, with those that are made where something is cut out of others.
    pub(super) const fn most_parts(&self) -> usize {
        2 * self.kept.parts
    }
}

impl Kept {
    /// Returns what a file takes.
    pub(super) fn of(found: &Found) -> Kept {
        let names = found.identity.as_ref().map_or(0, |identity| identity.path.len());
        Kept { files: 1, parts: found.parts.len(), names }
    }

    /// Adds `more` to it.
    pub(super) fn add(&mut self, more: Kept) {
        self.files += more.files;
        self.parts += more.parts;
        self.names += more.names;
    }

    fn remove(&mut self, less: Kept) {
        self.files = self.files.saturating_sub(less.files);
        self.parts = self.parts.saturating_sub(less.parts);
        self.names = self.names.saturating_sub(less.names);
    }
}

/// What is kept for one key.
#[derive(Debug, Default)]
pub(super) struct Account {
    sessions: usize,
    /// Bytes of its folder: data, and the journals, which have the names. They are known once they
    /// were measured.
    bytes: u64,
    /// When they may be measured again; `None` before the first time.
    again: Option<Instant>,
    kept: Kept,
}

#[cfg(test)]
impl Account {
    /// Has it be measured when there is no room, however short ago that was.
    pub(super) fn let_measure(&mut self) {
        self.again = Some(Instant::now());
    }
}

/// A session's share of its key's account.
#[derive(Debug)]
pub(super) struct Seat {
    partner: Arc<Partner>,
    key: String,
    kept: Kept,
    /// Bytes of the journal that were counted.
    journal: u64,
}

impl Seat {
    /// Takes a seat for a cache of a key.
    ///
    /// # Errors
    /// There is none left.
    pub(super) fn take(partner: &Arc<Partner>, key: &str) -> io::Result<Seat> {
        let mut accounts = lock(&partner.accounts);
        let account = accounts.entry(key.to_owned()).or_default();
        if account.sessions >= partner.limits.sessions {
            return Err(other("this key has too many caches here"));
        }
        account.sessions += 1;
        let (partner, key, kept) = (partner.clone(), key.to_owned(), Kept::default());
        Ok(Seat { partner, key, kept, journal: 0 })
    }

    fn with<R>(&self, work: impl FnOnce(&mut Account) -> R) -> R {
        work(lock(&self.partner.accounts).entry(self.key.clone()).or_default())
    }

    /// Tells how long a journal was that an earlier session has left, and that is counted.
    pub(super) fn found_journal(&mut self, length: u64) {
        self.journal = length;
    }

    /// Counts what was kept before, and the bytes of the key's folder if nobody has.
    ///
    /// # Errors
    /// It is more than is kept.
    pub(super) fn begin(&mut self, kept: Kept) -> io::Result<()> {
        // Its own cache can give up what there is too much of.
        if self.parts() + kept.parts > self.partner.limits.most_parts() {
            return Err(other("the partner keeps no more parts of files for this key"));
        }
        self.fits(Kept::default(), Kept { parts: 0, ..kept }, 0)?;
        self.replace(Kept::default(), kept);
        if self.with(|account| account.again.is_none()) {
            self.measure();
        }
        Ok(())
    }

    /// Counts what the disk has of the key's folder: others may have recovered some of it, or
    /// removed what a session before has left. What is taken meanwhile counts beside it.
    fn measure(&self) {
        let (begin, before) = (Instant::now(), self.with(|account| account.bytes));
        let found = place::size_of(&self.partner.spec.folder.join(&self.key));
        let rest = LOOK.max(begin.elapsed() * LOOKS);
        self.with(|account| {
            account.bytes = found.saturating_add(account.bytes.saturating_sub(before));
            account.again = Some(Instant::now() + rest);
        });
    }

    /// Measures anew if that was long ago: before anything is refused for want of room.
    fn measure_again(&self) {
        let now = Instant::now();
        let is_due = self.with(|account| {
            let due = account.again.is_some_and(|again| now >= again);
            if due {
                // Nobody else does meanwhile.
                account.again = Some(now + LOOK);
            }
            due
        });
        if is_due {
            self.measure();
        }
    }

    /// Checks that there is room for bytes, and for what takes the place of `before`.
    ///
    /// # Errors
    /// What there is no room for.
    pub(super) fn fits(&self, before: Kept, after: Kept, bytes: u64) -> io::Result<()> {
        let most = self.partner.limits.kept;
        let now = self.with(|account| account.kept);
        let over = |before: usize, after: usize, now: usize, most: usize| {
            after > before && now.saturating_sub(before) + after > most
        };
        if over(before.files, after.files, now.files, most.files) {
            return Err(other("the partner keeps no more files for this key"));
        }
        if over(before.parts, after.parts, now.parts, most.parts) {
            return Err(other("the partner keeps no more parts of files for this key"));
        }
        if over(before.names, after.names, now.names, most.names) {
            return Err(other("the partner keeps no more names of files for this key"));
        }
        self.find_room(bytes)
    }

    /// Checks that there is room for bytes.
    fn find_room(&self, more: u64) -> io::Result<()> {
        let fits = || self.fit_bytes(self.with(|account| account.bytes), more);
        if fits().is_err() {
            self.measure_again();
        }
        fits()
    }

    fn fit_bytes(&self, used: u64, more: u64) -> io::Result<()> {
        match self.partner.spec.quota {
            Some(most) if more > 0 && used.saturating_add(more) > most => {
                Err(other("the partner has no more room for this key"))
            }
            _ => Ok(()),
        }
    }

    /// Counts what has taken the place of `before`.
    pub(super) fn replace(&mut self, before: Kept, after: Kept) {
        let change = |kept: &mut Kept| {
            kept.remove(before);
            kept.add(after);
        };
        change(&mut self.kept);
        self.with(|account| change(&mut account.kept));
    }

    /// Returns about how long a journal is that says no more than what is kept for the cache.
    pub(super) fn journal_of_kept(&self) -> u64 {
        // Each file has a name, and a record that commits its parts.
        self.kept.names as u64 + (2 * self.kept.files + self.kept.parts) as u64 * RECORD
    }

    /// Returns how many parts are kept for the key.
    pub(super) fn parts(&self) -> usize {
        self.with(|account| account.kept.parts)
    }

    /// Takes room for bytes of data.
    ///
    /// # Errors
    /// There is none.
    pub(super) fn take_bytes(&self, more: u64) -> io::Result<()> {
        self.find_room(more)?;
        self.with(|account| {
            self.fit_bytes(account.bytes, more)?;
            account.bytes += more;
            Ok(())
        })
    }

    /// Gives room back.
    pub(super) fn give_bytes(&self, less: u64) {
        self.with(|account| account.bytes = account.bytes.saturating_sub(less));
    }

    /// Counts the journal's bytes.
    pub(super) fn count_journal(&mut self, length: u64) {
        let before = std::mem::replace(&mut self.journal, length);
        self.with(|account| account.bytes = account.bytes.saturating_sub(before) + length);
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        // What the disk keeps still counts as long as another cache of the key is there.
        let kept = self.kept;
        self.replace(kept, Kept::default());
        let mut accounts = lock(&self.partner.accounts);
        if let Some(account) = accounts.get_mut(&self.key) {
            account.sessions -= 1;
            if account.sessions == 0 {
                accounts.remove(&self.key);
            }
        }
    }
}
