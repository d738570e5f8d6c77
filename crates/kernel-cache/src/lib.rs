//! The user's cache of PTX, by the hash of the machine code (cubin) that was made of it.
//!
//! Frameworks keep the cubins that they compile on disk, and load them in their next process. A
//! device that runs PTX finds here what such a cubin was made from
//! (`docs/design/0028-kernel-cache.md`). One file an entry, named by the cubin's SHA-256 and
//! written whole or not at all; what is read is checked, and what is damaged is removed. A second
//! cache, of another folder, has modules' images by their own hash, for devices that are lent to
//! other machines (`docs/design/0032-far-speed.md`).
#![forbid(unsafe_code)]

mod digest;
mod entry;
mod place;

pub use digest::Digest;

use rustix::fs::OFlags;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};
use thiserror::Error;

/// The longest PTX that is kept, bytes.
pub const MAX_PTX: u64 = 64 << 20;
/// The longest image of a module that is kept, bytes.
pub const MAX_MODULE: u64 = 512 << 20;
/// The kernels of an entry that are listed.
const MAX_LISTED: usize = 1000;
/// A file that a killed process has left half written is removed after this time.
const ABANDONED: Duration = Duration::from_secs(3600);
/// How long [`KernelCache::clear`] waits for a process that is removing old entries.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);
const LOCK: &str = "lock";

/// Why the cache cannot be used.
#[derive(Debug, Error)]
pub enum CacheError {
    #[error(
        "there is no folder for what kedge keeps: set HOME or XDG_CACHE_HOME to an absolute path"
    )]
    NoFolder,
    #[error(
        "{path} is not a folder of yours that others cannot enter: remove it, or set XDG_CACHE_HOME \
         to a folder of yours"
    )]
    NotOwn { path: PathBuf },
    #[error("{path}: {source}; XDG_CACHE_HOME may name a folder that you can write to")]
    Io { path: PathBuf, source: io::Error },
    #[error("{path}: another process has held the cache's lock for five seconds: try again")]
    Locked { path: PathBuf },
}

/// How much the cache keeps.
#[derive(Debug, Clone, Copy)]
struct Limits {
    bytes: u64,
    entries: usize,
    /// Bytes of an entry.
    entry: u64,
    /// A process looks whether the cache is within its bounds before it first writes, and each time
    /// that it has written so many bytes or entries more.
    between: (u64, u64),
}

const LIMITS: Limits =
    Limits { bytes: 512 << 20, entries: 16384, entry: MAX_PTX, between: (16 << 20, 256) };
/// Of modules' images: the largest fatbins of the large libraries are some hundred MiB.
const MODULES: Limits =
    Limits { bytes: 2 << 30, entries: 4096, entry: MAX_MODULE, between: (64 << 20, 64) };

/// An entry, as [`KernelCache::list`] tells it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Of the cubin.
    pub cubin: Digest,
    /// Of the PTX.
    pub bytes: u64,
    /// When it was written or found last.
    pub used: SystemTime,
    /// The kernels that the PTX defines, 1000 at most.
    pub kernels: Vec<String>,
}

/// What [`KernelCache::clear`] has removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cleared {
    pub entries: usize,
    pub bytes: u64,
}

/// Returns the user's folder `NAME` beside the caches, in which others can do nothing. Makes it
/// where there is none.
///
/// # Errors
/// [`CacheError::NoFolder`] without HOME and XDG_CACHE_HOME, [`CacheError::NotOwn`] where it is
/// another user's, [`CacheError::Io`] where it cannot be made.
pub fn folder(name: &str) -> Result<PathBuf, CacheError> {
    let dir = place::path(name)?;
    place::make(&dir)?;
    Ok(dir)
}

/// A cache of PTX in a folder.
#[derive(Debug)]
pub struct KernelCache {
    dir: PathBuf,
    limits: Limits,
    /// Bytes and entries that this process has written since it looked at the bounds; at first,
    /// more than it writes between two looks.
    written: (AtomicU64, AtomicU64),
}

/// A file of the folder.
struct Listed {
    path: PathBuf,
    /// `None`: of no finished entry.
    cubin: Option<Digest>,
    bytes: u64,
    used: SystemTime,
}

impl KernelCache {
    /// Returns the user's cache. Makes nothing yet.
    ///
    /// # Errors
    /// [`CacheError::NoFolder`] without HOME and XDG_CACHE_HOME.
    pub fn of_user() -> Result<KernelCache, CacheError> {
        Ok(KernelCache::at(place::path("kernels")?, LIMITS))
    }

    /// Returns the user's cache of modules' images that programs elsewhere have loaded on devices
    /// here: each is kept by its own digest. Makes nothing yet.
    ///
    /// # Errors
    /// As [`KernelCache::of_user`].
    pub fn of_modules() -> Result<KernelCache, CacheError> {
        Ok(KernelCache::at(place::path("modules")?, MODULES))
    }

    fn at(dir: PathBuf, limits: Limits) -> KernelCache {
        KernelCache { dir, limits, written: (AtomicU64::new(u64::MAX >> 1), AtomicU64::new(0)) }
    }

    /// Returns the folder.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    fn file(&self, cubin: &Digest) -> PathBuf {
        self.dir.join(cubin.to_string())
    }

    /// Returns the PTX that the cubin was made from, if it is known. A damaged entry is removed.
    ///
    /// # Errors
    /// [`CacheError`] where the folder or the file cannot be read, or is another user's.
    pub fn find(&self, cubin: &Digest) -> Result<Option<Vec<u8>>, CacheError> {
        if !place::check(&self.dir)? {
            return Ok(None);
        }
        let path = self.file(cubin);
        let Some((file, bytes)) = read(&path, entry::max_file(self.limits.entry))? else {
            return Ok(None);
        };
        let ptx = entry::decode(cubin, bytes);
        match &ptx {
            // What was used last goes last. A file system that is read-only keeps its times.
            Some(_) => drop(file.set_modified(SystemTime::now())),
            None => drop(fs::remove_file(&path)),
        }
        Ok(ptx)
    }

    /// Keeps the PTX that a cubin was made from.
    ///
    /// # Errors
    /// [`CacheError`] where it cannot be written. The cache is as it was then.
    pub fn keep(&self, cubin: &Digest, ptx: &[u8]) -> Result<(), CacheError> {
        if ptx.len() as u64 > self.limits.entry {
            return Ok(());
        }
        place::make(&self.dir)?;
        if self.find(cubin)?.is_some_and(|known| known == ptx) {
            return Ok(());
        }
        let file = entry::encode(cubin, ptx);
        self.make_room(file.len() as u64);
        self.write(cubin, &file).map_err(|source| CacheError::Io { path: self.file(cubin), source })
    }

    /// Writes the file under another name first: nobody sees half of it. It is not synced: what a
    /// crash of the machine leaves of it fails its check.
    fn write(&self, cubin: &Digest, bytes: &[u8]) -> io::Result<()> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let new = self.dir.join(format!(".{cubin}.{}.{number}", std::process::id()));
        // One of that name was left by another process that had this id.
        let _ = fs::remove_file(&new);
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600).custom_flags(nofollow());
        let written = options
            .open(&new)
            .and_then(|mut file| file.write_all(bytes))
            .and_then(|()| fs::rename(&new, self.file(cubin)));
        if written.is_err() {
            let _ = fs::remove_file(&new);
        }
        written
    }

    /// Removes what was used longest ago, if it is time to look and there is too much. Where that
    /// fails, or another process does so right now, the next look does it.
    fn make_room(&self, bytes: u64) {
        let (of_bytes, of_entries) = &self.written;
        let bytes = of_bytes.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        let entries = of_entries.fetch_add(1, Ordering::Relaxed) + 1;
        if bytes < self.limits.between.0 && entries < self.limits.between.1 {
            return;
        }
        of_bytes.store(0, Ordering::Relaxed);
        of_entries.store(0, Ordering::Relaxed);
        let Ok(lock) = self.open_lock() else { return };
        if lock.try_lock().is_ok()
            && let Ok(found) = self.files()
        {
            self.evict(found);
        }
    }

    fn evict(&self, mut found: Vec<Listed>) {
        found.sort_unstable_by_key(|file| file.used);
        let now = SystemTime::now();
        let old = |used| now.duration_since(used).is_ok_and(|age| age > ABANDONED);
        let mut entries = found.iter().filter(|file| file.cubin.is_some()).count();
        let mut bytes = found.iter().fold(0u64, |sum, file| sum.saturating_add(file.bytes));
        // Down to 7/8 of the bounds, so that not every look removes something.
        let (most_bytes, most_entries) = (self.limits.bytes / 8 * 7, self.limits.entries / 8 * 7);
        let is_full = bytes > self.limits.bytes || entries > self.limits.entries;
        for file in found {
            let is_entry = file.cubin.is_some();
            let surplus = is_full && (bytes > most_bytes || entries > most_entries);
            if (if is_entry { surplus } else { old(file.used) })
                && fs::remove_file(&file.path).is_ok()
            {
                bytes = bytes.saturating_sub(file.bytes);
                entries -= usize::from(is_entry);
            }
        }
    }

    fn open_lock(&self) -> Result<File, CacheError> {
        let path = self.dir.join(LOCK);
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(0o600).custom_flags(nofollow());
        options.open(&path).map_err(|source| CacheError::Io { path, source })
    }

    /// Returns the files of entries, finished or not.
    fn files(&self) -> Result<Vec<Listed>, CacheError> {
        let failed = |source| CacheError::Io { path: self.dir.clone(), source };
        let mut found = Vec::new();
        for file in fs::read_dir(&self.dir).map_err(failed)? {
            let file = file.map_err(failed)?;
            let name = file.file_name();
            let Some(name) = name.to_str() else { continue };
            let cubin = Digest::parse(name);
            let is_unfinished = || {
                let digest = name.strip_prefix('.').and_then(|rest| rest.split('.').next());
                digest.and_then(Digest::parse).is_some()
            };
            if cubin.is_none() && !is_unfinished() {
                continue;
            }
            // Another process may have removed it meanwhile.
            let Ok(data) = file.metadata() else { continue };
            let used = data.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            found.push(Listed { path: file.path(), cubin, bytes: data.len(), used });
        }
        Ok(found)
    }

    /// Returns every entry that is whole, the one that was used last first.
    ///
    /// # Errors
    /// [`CacheError`] where the folder cannot be read, or is another user's.
    pub fn list(&self) -> Result<Vec<Entry>, CacheError> {
        if !place::check(&self.dir)? {
            return Ok(Vec::new());
        }
        let mut entries = Vec::new();
        for file in self.files()? {
            let Some(cubin) = file.cubin else { continue };
            let Ok(Some((_, bytes))) = read(&file.path, entry::max_file(self.limits.entry)) else {
                continue;
            };
            let Some(ptx) = entry::decode(&cubin, bytes) else { continue };
            let kernels = entry::kernels(&ptx, MAX_LISTED);
            entries.push(Entry { cubin, bytes: ptx.len() as u64, used: file.used, kernels });
        }
        entries.sort_by_key(|entry| std::cmp::Reverse(entry.used));
        Ok(entries)
    }

    /// Removes every entry, and what killed processes have left of some.
    ///
    /// # Errors
    /// [`CacheError`] where something cannot be removed, or another process holds the lock for
    /// long.
    pub fn clear(&self) -> Result<Cleared, CacheError> {
        let mut cleared = Cleared::default();
        if !place::check(&self.dir)? {
            return Ok(cleared);
        }
        let _lock = self.lock()?;
        for file in self.files()? {
            match fs::remove_file(&file.path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                removed => {
                    removed.map_err(|source| CacheError::Io { path: file.path, source })?;
                }
            }
            cleared.entries += usize::from(file.cubin.is_some());
            cleared.bytes += file.bytes;
        }
        Ok(cleared)
    }

    fn lock(&self) -> Result<File, CacheError> {
        let lock = self.open_lock()?;
        let until = SystemTime::now() + LOCK_TIMEOUT;
        while lock.try_lock().is_err() {
            if SystemTime::now() > until {
                return Err(CacheError::Locked { path: self.dir.join(LOCK) });
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(lock)
    }
}

/// A link is followed nowhere, and a FIFO is not waited for.
fn nofollow() -> i32 {
    (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32
}

/// Returns a file of this user's and what is in it. `None` where there is none, or it is no entry
/// of `most` bytes.
fn read(path: &Path, most: u64) -> Result<Option<(File, Vec<u8>)>, CacheError> {
    let failed = |source| CacheError::Io { path: path.to_owned(), source };
    let file = match OpenOptions::new().read(true).custom_flags(nofollow()).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file.map_err(failed)?,
    };
    let data = file.metadata().map_err(failed)?;
    if !data.is_file() || !place::is_own(&data) || data.len() > most {
        return Ok(None);
    }
    let mut bytes = Vec::new();
    // It may grow while it is read.
    (&file).take(most + 1).read_to_end(&mut bytes).map_err(failed)?;
    Ok(Some((file, bytes)))
}

#[cfg(test)]
mod tests;
