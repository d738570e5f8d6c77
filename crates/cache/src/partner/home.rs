//! The folder of a partner, and what a home there has beside its tier.

use super::host::blocks;
use crate::CacheError;
use crate::home;
use crate::spec::home_in;
use crate::tier::{check_folder, private_folder};
use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, SystemTime};

/// Which cache has sent what is there.
pub(super) const TOKEN: &str = "token";
/// When the cache was there last: when this was changed.
pub(super) const CONTACT: &str = "contact";
/// The numbers of files whose recovery has begun.
pub(super) const BEGUN: &str = "begun";

/// When a home of a partner was told of last, and what was recovered in part since.
#[derive(Debug)]
pub(crate) struct Contact {
    last: SystemTime,
    /// Files whose recovery has begun, and until when that was under way.
    begun: HashSet<u64>,
    until: SystemTime,
}

impl Contact {
    /// Returns when the cache, or a recovery here, can have changed a file below last.
    pub(crate) fn last(&self, file: u64) -> SystemTime {
        if self.begun.contains(&file) { self.last.max(self.until) } else { self.last }
    }
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
    let begun = numbers(home);
    let until = fs::metadata(home.join(BEGUN)).and_then(|meta| meta.modified());
    Ok(Some(Contact { last, begun, until: until.unwrap_or(SystemTime::UNIX_EPOCH) }))
}

fn numbers(home: &Path) -> HashSet<u64> {
    let text = fs::read_to_string(home.join(BEGUN)).unwrap_or_default();
    text.lines().filter_map(|line| line.parse().ok()).collect()
}

/// Has a recovery done its `work`, with the files noted that it may change, and when it was there
/// last.
///
/// # Errors
/// They cannot be noted.
pub(crate) fn while_noted<R>(
    home: &Path,
    mut files: HashSet<u64>,
    work: impl FnOnce() -> R,
) -> io::Result<R> {
    files.extend(numbers(home));
    let mut file = File::create(home.join("begun.new"))?;
    for number in files {
        writeln!(file, "{number}")?;
    }
    file.sync_all()?;
    fs::rename(home.join("begun.new"), home.join(BEGUN))?;
    let now = || file.set_modified(SystemTime::now());
    let result = thread::scope(|scope| {
        let (done, wait) = mpsc::channel::<()>();
        scope.spawn(move || {
            while wait.recv_timeout(Duration::from_secs(1)) == Err(RecvTimeoutError::Timeout) {
                // What is changed later than that is left alone.
                let _ = now();
            }
        });
        let result = work();
        drop(done);
        result
    });
    let _ = now();
    Ok(result)
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

/// Returns the bytes of all files in a folder, and in those within it.
pub(super) fn size_of(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| Some((entry.path(), entry.metadata().ok()?)))
        .map(|(path, meta)| if meta.is_dir() { size_of(&path) } else { blocks(&meta) })
        .sum()
}
