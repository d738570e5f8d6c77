//! The folder of a partner, and what a home there has beside its tier.

use super::host::blocks;
use crate::CacheError;
use crate::home;
use crate::spec::home_in;
use crate::tier::{check_folder, lock, private_folder};
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, SystemTime};

/// Which cache has sent what is there.
pub(super) const TOKEN: &str = "token";
/// When the cache was there last: when this was changed.
pub(super) const CONTACT: &str = "contact";
/// The numbers of files whose recovery has begun, and when it was under way.
pub(super) const BEGUN: &str = "begun";

/// Folders from a key's to a home: the node, the user, and the home, which has the tier's folder.
const DEPTH: usize = 3;

/// When a home of a partner was told of last, and what was recovered of it in part since.
#[derive(Debug)]
pub(crate) struct Contact {
    home: PathBuf,
    last: SystemTime,
    /// The files that a recovery has begun to write, and when it did so last, in seconds since
    /// 1970.
    begun: Mutex<HashMap<u64, u64>>,
}

impl Contact {
    /// Returns when the cache, or a recovery of it here, can have changed a file below last, in
    /// seconds since 1970.
    pub(crate) fn last(&self, file: u64) -> u64 {
        let begun = lock(&self.begun).get(&file).copied().unwrap_or(0);
        seconds(self.last).max(begun)
    }

    /// Has a recovery write a file: what it changes is no change of others.
    ///
    /// # Errors
    /// Those of `work`, or it cannot be noted.
    pub(crate) fn while_writing(
        &self,
        file: u64,
        work: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        let path = self.home.join(BEGUN);
        let mut notes = File::options().append(true).create(true).open(path)?;
        let mut note = || {
            let now = seconds(SystemTime::now());
            lock(&self.begun).insert(file, now);
            writeln!(notes, "{file} {now}").and_then(|()| notes.sync_data())
        };
        note()?;
        thread::scope(|scope| {
            let (done, wait) = mpsc::channel::<()>();
            scope.spawn(move || {
                while wait.recv_timeout(Duration::from_secs(1)) == Err(RecvTimeoutError::Timeout) {
                    // What comes later than the last that was noted counts as others'.
                    let _ = note();
                }
                let _ = note();
            });
            let result = work();
            drop(done);
            result
        })
    }
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Makes a partner's folder, or finds it.
pub(super) fn check(folder: &Path) -> Result<(), CacheError> {
    let above = folder.parent().unwrap_or(folder);
    check_folder(above)?;
    private_folder(folder)
}

/// Returns what is known of a partner's home; `None` of a home of another kind.
pub(crate) fn contact(home: &Path) -> io::Result<Option<Contact>> {
    let is_none = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
    let last = match fs::metadata(home.join(CONTACT)) {
        Err(error) if is_none(&error) && !home.join(TOKEN).exists() => return Ok(None),
        // It was lost with the node's power: everything below may be newer.
        Err(error) if is_none(&error) => SystemTime::UNIX_EPOCH,
        meta => meta?.modified()?,
    };
    let text = fs::read_to_string(home.join(BEGUN)).unwrap_or_default();
    let begun = text.lines().filter_map(|line| {
        let (file, when) = line.split_once(' ')?;
        Some((file.parse().ok()?, when.parse().ok()?))
    });
    let begun = Mutex::new(begun.collect());
    Ok(Some(Contact { home: home.to_owned(), last, begun }))
}

/// Returns whether a folder of a partner has something of a cache.
pub(crate) fn holds(folder: &Path, under: &Path) -> bool {
    home::holds(&home_in(folder, under))
}

/// Removes the folders above a home that is gone, up to the partner's own, as far as they are
/// empty.
pub(crate) fn remove_empty(home: &Path, up_to: &Path) {
    for folder in home.ancestors().skip(1).take_while(|folder| *folder != up_to).take(3) {
        if fs::remove_dir(folder).is_err() {
            return;
        }
    }
}

/// Returns the bytes of all files and folders in a folder, as deep as a partner's homes are.
pub(super) fn size_of(of_key: &Path) -> u64 {
    fn within(folder: &Path, depth: usize) -> u64 {
        let size = |entry: fs::DirEntry| {
            let meta = entry.metadata().ok()?;
            let inner =
                if meta.is_dir() && depth > 1 { within(&entry.path(), depth - 1) } else { 0 };
            Some(blocks(&meta) + inner)
        };
        fs::read_dir(folder).into_iter().flatten().flatten().filter_map(size).sum()
    }
    within(of_key, DEPTH + 2)
}

/// Returns how many homes a key has.
pub(super) fn homes_of(of_key: &Path) -> usize {
    fn within(folder: &Path, depth: usize) -> usize {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        match depth {
            1 => folders.count(),
            _ => folders.map(|entry| within(&entry.path(), depth - 1)).sum(),
        }
    }
    within(of_key, DEPTH)
}
