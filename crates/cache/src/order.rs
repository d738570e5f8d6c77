//! Which file is drained next, and when.

use std::collections::{BTreeSet, HashMap};

/// Milliseconds on the daemon's clock.
pub type Millis = u64;

/// When draining begins and rests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// A file that nobody has written for so long is drained.
    pub idle: Millis,
    /// A file with that much is drained, also while it is written.
    pub bytes: u64,
    /// Draining rests for so long after a write, as long as there is room.
    pub rest: Millis,
    /// Above that many percent there is no rest.
    pub full: u64,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace { idle: 1000, bytes: 16 << 20, rest: 100, full: 50 }
    }
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    since: Millis,
    last: Millis,
    bytes: u64,
    closed: bool,
    /// After a failure, it is tried again then.
    retry: Millis,
}

/// The files that have something to drain.
#[derive(Debug, Default)]
pub struct Order {
    pace: Pace,
    files: HashMap<u64, Entry>,
    /// From the longest dirty.
    oldest: BTreeSet<(Millis, u64)>,
    last_write: Option<Millis>,
    /// How many wait for everything to be drained.
    hurry: u32,
}

impl Order {
    /// Files that are drained at this pace.
    pub fn new(pace: Pace) -> Order {
        Order { pace, ..Order::default() }
    }

    /// Notes that `file` has that many dirty bytes, after a write.
    pub fn written(&mut self, file: u64, bytes: u64, now: Millis) {
        self.last_write = Some(now);
        let fresh = Entry { since: now, last: now, bytes, closed: false, retry: 0 };
        let entry = self.files.entry(file).or_insert(fresh);
        (entry.last, entry.bytes, entry.closed) = (now, bytes, false);
        self.oldest.insert((entry.since, file));
    }

    /// Notes that something is written that is not known yet.
    pub fn is_written(&mut self, now: Millis) {
        self.last_write = Some(now);
    }

    /// Notes that `file` has that many dirty bytes, after some were drained or forgotten.
    pub fn left(&mut self, file: u64, bytes: u64) {
        if bytes > 0 {
            if let Some(entry) = self.files.get_mut(&file) {
                entry.bytes = bytes;
            }
        } else if let Some(entry) = self.files.remove(&file) {
            self.oldest.remove(&(entry.since, file));
        }
    }

    /// Notes that nobody has `file` open for writing any more.
    pub fn closed(&mut self, file: u64) {
        if let Some(entry) = self.files.get_mut(&file) {
            entry.closed = true;
        }
    }

    /// Notes that so many bytes of `file` are there to drain, without a write.
    pub fn found(&mut self, file: u64, bytes: u64, now: Millis) {
        let fresh = Entry { since: now, last: now, bytes, closed: true, retry: 0 };
        let entry = self.files.entry(file).or_insert(fresh);
        entry.bytes = bytes;
        self.oldest.insert((entry.since, file));
    }

    /// Notes that `file` could not be drained.
    pub fn failed(&mut self, file: u64, retry: Millis) {
        if let Some(entry) = self.files.get_mut(&file) {
            entry.retry = retry;
        }
    }

    /// Notes that all files may be tried again at once.
    pub fn retry_all(&mut self) {
        self.files.values_mut().for_each(|entry| entry.retry = 0);
    }

    /// Notes that somebody waits for everything to be drained, or does no more.
    pub fn set_urgent(&mut self, on: bool) {
        self.hurry = if on { self.hurry + 1 } else { self.hurry.saturating_sub(1) };
    }

    /// Returns whether any file has something to drain that did not fail.
    pub fn has_drainable(&self, now: Millis) -> bool {
        self.files.values().any(|entry| entry.retry <= now)
    }

    /// Returns the files that have something to drain.
    pub fn files(&self) -> Vec<u64> {
        self.oldest.iter().map(|(_, file)| *file).collect()
    }

    /// Returns so many of the files that have something to drain, and at least so many bytes: those
    /// that are dirty for the longest.
    pub fn oldest(&self, most: usize, bytes: u64) -> Vec<u64> {
        let files = self.oldest.iter().map(|(_, file)| *file).take(most);
        files
            .filter(|file| self.files.get(file).is_some_and(|entry| entry.bytes >= bytes))
            .collect()
    }

    /// Returns for how long the file that is dirty for the longest is; `None` if none is.
    pub fn longest(&self, now: Millis) -> Option<Millis> {
        self.oldest.first().map(|(since, _)| now.saturating_sub(*since))
    }

    /// Returns the file whose turn it is: of those that may be drained, the longest dirty.
    ///
    /// `percent` is how full the tiers are; `busy` says which files have enough drains at work.
    pub fn next(&self, now: Millis, percent: u64, busy: impl Fn(u64) -> bool) -> Option<u64> {
        let urgent = self.hurry > 0 || percent >= self.pace.full;
        let rests = self.last_write.is_some_and(|last| now < last + self.pace.rest);
        if rests && !urgent {
            return None;
        }
        let mut files = self.oldest.iter().map(|(_, file)| *file);
        files.find(|file| {
            let Some(entry) = self.files.get(file) else { return false };
            let ripe = entry.closed
                || entry.bytes >= self.pace.bytes
                || now >= entry.last + self.pace.idle;
            (ripe || urgent) && entry.retry <= now && !busy(*file)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FREE: fn(u64) -> bool = |_| false;

    #[test]
    fn small_writes_are_left_to_grow() {
        let mut order = Order::new(Pace::default());
        order.written(1, 4096, 0);
        assert_eq!(order.next(500, 0, FREE), None, "more may come");
        assert_eq!(order.next(1000, 0, FREE), Some(1), "nobody writes it any more");
        order.written(1, 8192, 1000);
        assert_eq!(order.next(1200, 0, FREE), None);
        order.closed(1);
        assert_eq!(order.next(1200, 0, FREE), Some(1));
        order.left(1, 0);
        assert_eq!(order.next(9999, 0, FREE), None);
    }

    #[test]
    fn draining_rests_while_programs_write() {
        let mut order = Order::new(Pace::default());
        order.written(1, 64 << 20, 0);
        assert_eq!(order.next(99, 10, FREE), None);
        assert_eq!(order.next(99, 50, FREE), Some(1), "room becomes short");
        assert_eq!(order.next(100, 10, FREE), Some(1));
        order.set_urgent(true);
        assert_eq!(order.next(1, 0, FREE), Some(1), "somebody waits");
    }

    #[test]
    fn the_longest_dirty_comes_first_unless_it_failed() {
        let mut order = Order::new(Pace::default());
        order.written(2, 64 << 20, 0);
        order.written(1, 64 << 20, 10);
        assert_eq!(order.files(), [2, 1]);
        assert_eq!(order.longest(200), Some(200));
        assert_eq!(order.next(200, 0, FREE), Some(2));
        assert_eq!(order.next(200, 0, |file| file == 2), Some(1));
        order.failed(2, 5000);
        assert_eq!(order.next(200, 0, FREE), Some(1));
        assert!(order.has_drainable(200));
        order.failed(1, 5000);
        assert!(!order.has_drainable(200) && order.has_drainable(5000));
    }
}
