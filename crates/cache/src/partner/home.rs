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
use std::time::SystemTime;

/// Which cache has sent what is there.
pub(super) const TOKEN: &str = "token";
/// When the cache was there last: when this was changed.
pub(super) const CONTACT: &str = "contact";
/// The numbers of files whose recovery has begun.
pub(super) const BEGUN: &str = "begun";

/// When a home of a partner was told of last, and what was recovered in part since.
#[derive(Debug)]
pub(crate) struct Contact {
    pub(crate) last: SystemTime,
    pub(crate) begun: HashSet<u64>,
}

/// Makes a partner's folder, or finds it.
pub(super) fn check(folder: &Path) -> Result<(), CacheError> {
    let above = folder.parent().unwrap_or(folder);
    check_folder(above)?;
    private_folder(folder)
}

/// Returns what is known of a partner's home; `None` of a home of another kind.
pub(crate) fn contact(home: &Path) -> io::Result<Option<Contact>> {
    let last = match fs::metadata(home.join(CONTACT)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        meta => meta?.modified()?,
    };
    let text = fs::read_to_string(home.join(BEGUN)).unwrap_or_default();
    let begun = text.lines().filter_map(|line| line.parse().ok()).collect();
    Ok(Some(Contact { last, begun }))
}

/// Notes the files whose recovery begins: what it writes changes them.
pub(crate) fn note_begun(home: &Path, files: &HashSet<u64>) -> io::Result<()> {
    let mut file = File::create(home.join("begun.new"))?;
    for number in files {
        writeln!(file, "{number}")?;
    }
    file.sync_all()?;
    fs::rename(home.join("begun.new"), home.join(BEGUN))
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
