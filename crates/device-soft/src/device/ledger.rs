//! Memory that the software devices of several processes share, as they would a GPU's: for tests.
//!
//! Each process has a file in one folder, locked as long as it lives, which says how much it has;
//! the file `bytes` there says how much there is. All devices are one to it.

use super::tasks::lock;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

/// How the files of processes begin.
const PREFIX: &[u8] = b"of-";

/// What processes' software devices have together.
#[derive(Debug)]
pub(super) struct Ledger {
    folder: PathBuf,
    /// Locked by whoever counts.
    turn: File,
    own: File,
    used: Mutex<u64>,
}

impl Ledger {
    /// Joins those who share the memory that `folder` tells of.
    pub(super) fn join(folder: &Path) -> io::Result<Ledger> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let mut open = OpenOptions::new();
        open.read(true).write(true).create(true).truncate(false);
        let turn = open.open(folder.join("turn"))?;
        turn.lock()?;
        let own = open.open(folder.join(format!("of-{}-{number}", std::process::id())))?;
        own.try_lock()?;
        own.write_all_at(&0_u64.to_le_bytes(), 0)?;
        turn.unlock()?;
        Ok(Ledger { folder: folder.to_owned(), turn, own, used: Mutex::new(0) })
    }

    /// Returns a name of the memory that all who share it have for it, and no others.
    pub(super) fn name(&self) -> io::Result<[u8; 16]> {
        let folder = fs::metadata(&self.folder)?;
        let mut name = [0; 16];
        name[..8].copy_from_slice(&folder.dev().to_le_bytes());
        name[8..].copy_from_slice(&folder.ino().to_le_bytes());
        Ok(name)
    }

    /// Takes so many bytes. `false` if there are not so many.
    pub(super) fn take(&self, bytes: u64) -> io::Result<bool> {
        let mut used = lock(&self.used);
        self.turn.lock()?;
        let fits = self.left().map(|left| bytes <= left);
        let told = match fits {
            Ok(true) => self.own.write_all_at(&(*used + bytes).to_le_bytes(), 0),
            _ => Ok(()),
        };
        self.turn.unlock()?;
        told?;
        let fits = fits?;
        *used += if fits { bytes } else { 0 };
        Ok(fits)
    }

    /// Gives so many bytes back.
    pub(super) fn give_back(&self, bytes: u64) -> io::Result<()> {
        let mut used = lock(&self.used);
        *used = used.saturating_sub(bytes);
        self.own.write_all_at(&used.to_le_bytes(), 0)
    }

    /// Returns what is free.
    pub(super) fn free(&self) -> io::Result<u64> {
        // This process's threads have the turn together.
        let _used = lock(&self.used);
        self.turn.lock()?;
        let left = self.left();
        self.turn.unlock()?;
        left
    }

    /// The same, by whoever has the turn.
    fn left(&self) -> io::Result<u64> {
        let text = fs::read_to_string(self.folder.join("bytes"))?;
        let mut left = text.trim().parse::<u64>().map_err(io::Error::other)?;
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            if !entry.file_name().as_bytes().starts_with(PREFIX) {
                continue;
            }
            let file = File::open(entry.path())?;
            match file.try_lock_shared() {
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) => return Err(error),
                // Its process has ended, and so has what it had.
                Ok(()) => {
                    fs::remove_file(entry.path())?;
                    continue;
                }
            }
            let mut used = [0; 8];
            file.read_exact_at(&mut used, 0)?;
            left = left.saturating_sub(u64::from_le_bytes(used));
        }
        Ok(left)
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        // What a process forked off has its lock as well.
        let _ = self.own.write_all_at(&0_u64.to_le_bytes(), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_has_others_lack_until_it_has_ended() {
        let folder = std::env::temp_dir().join(format!("kedge-ledger-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("bytes"), "100\n").unwrap();
        let (one, other) = (Ledger::join(&folder).unwrap(), Ledger::join(&folder).unwrap());
        assert_eq!(one.name().unwrap(), other.name().unwrap());
        assert!(one.take(60).unwrap());
        assert!(!other.take(41).unwrap() && other.take(30).unwrap());
        assert_eq!(one.free().unwrap(), 10);
        one.give_back(20).unwrap();
        assert_eq!(other.free().unwrap(), 30);
        drop(one);
        assert!(other.take(70).unwrap() && !other.take(1).unwrap());
        fs::remove_dir_all(&folder).unwrap();
    }
}
