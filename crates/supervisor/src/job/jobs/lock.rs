//! The lock of a job's folder, which its supervisor holds for as long as it lives.

use rustix::fs::{FlockOperation, flock};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

/// A supervisor that was killed needs no longer for its end.
pub(super) const DYING: Duration = Duration::from_millis(300);

/// Opens the lock of the job in `dir`: a regular file, so nothing is waited for.
pub(crate) fn open_lock(dir: &Path) -> io::Result<File> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    // NFS locks what is open for writing alone (flock(2)).
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).custom_flags(flags).open(dir.join("lock"))?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::ErrorKind::InvalidInput.into()),
    }
}

/// Takes the lock if nobody has it.
pub(crate) fn try_lock(file: &File) -> bool {
    flock(file, FlockOperation::NonBlockingLockExclusive).is_ok()
}

/// When the name was taken for its latest job: many start in one second, and process ids begin
/// anew.
pub(super) fn taken(dir: &Path) -> Option<SystemTime> {
    fs::symlink_metadata(dir.join("lock")).and_then(|lock| lock.modified()).ok()
}

/// Whether a process has the lock.
pub(super) fn is_locked(dir: &Path) -> bool {
    open_lock(dir).is_ok_and(|lock| !try_lock(&lock))
}

/// Whether another job has that folder. One whose supervisor was killed a moment ago, and is not
/// gone yet, has not.
pub(super) fn stays_locked(dir: &Path) -> bool {
    open_lock(dir).is_ok_and(|lock| !lock_soon(&lock))
}

/// Waits for the end of whoever was killed with the lock, too.
pub(super) fn lock_soon(file: &File) -> bool {
    let end = Instant::now() + DYING;
    while !try_lock(file) {
        if Instant::now() > end {
            return false;
        }
        thread::sleep(Duration::from_millis(5));
    }
    true
}
