//! Images on a write-back cache of kedge's: what it holds of their files, and what it is asked for.

use rustix::fs::{XattrFlags, fgetxattr, fsetxattr, lgetxattr};
use std::fs::File;
use std::path::Path;

/// Attributes by which the cache is asked; no file has them.
const UNDRAINED: &str = "kedge.cache.undrained";
const ALONE: &str = "kedge.cache.alone";
const KEEP: &str = "kedge.cache.keep";

/// Which of an image's files one is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    Data,
    /// It says what the others are, and must not be on the disk before them.
    Manifest,
}

/// Has a write-back cache that the file is on, if it is on one, have the disk below have each part
/// before that counts as drained.
pub(crate) fn keep(file: &File, part: Part) {
    let value: &[u8] = match part {
        Part::Data => b"synced",
        Part::Manifest => b"last",
    };
    // Elsewhere it might become an attribute of the file.
    if number(|text| fgetxattr(file, UNDRAINED, text)).is_some() {
        // An older cache drains it as other files.
        let _ = fsetxattr(file, KEEP, value, XattrFlags::empty());
    }
}

/// Returns how many bytes of the image in `folder` a write-back cache holds that are not on a disk
/// below; 0 where it is on none.
pub fn undrained(folder: &Path) -> u64 {
    sum(folder, &|path| asked(path, UNDRAINED).unwrap_or(0))
}

/// Returns how many of those bytes are lost with this node, as the cache's partner, on another one,
/// does not have them.
pub fn alone(folder: &Path) -> u64 {
    // A cache that knows nothing of partners has none.
    sum(folder, &|path| asked(path, ALONE).or_else(|| asked(path, UNDRAINED)).unwrap_or(0))
}

/// Sums up what `of` says of each file of an image.
fn sum(folder: &Path, of: &dyn Fn(&Path) -> u64) -> u64 {
    let Ok(entries) = std::fs::read_dir(folder) else { return 0 };
    let count = |entry: std::fs::DirEntry| match entry.file_type() {
        // A part of it has a folder of its own.
        Ok(kind) if kind.is_dir() => sum(&entry.path(), of),
        Ok(kind) if kind.is_file() => of(&entry.path()),
        _ => 0,
    };
    entries.flatten().map(count).sum()
}

fn asked(path: &Path, name: &str) -> Option<u64> {
    number(|text| lgetxattr(path, name, text))
}

fn number(read: impl Fn(&mut [u8]) -> rustix::io::Result<usize>) -> Option<u64> {
    let mut text = [0; 24];
    let length = read(&mut text).ok()?;
    std::str::from_utf8(text.get(..length)?).ok()?.parse().ok()
}
