//! Opening as the program did.

use crate::plugins::error::{Context, PluginError};
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

/// The flags that mean the same now as when the program opened it.
const KEPT: i32 = libc::O_ACCMODE
    | libc::O_APPEND
    | libc::O_NONBLOCK
    | libc::O_DIRECT
    | libc::O_NOATIME
    | libc::O_SYNC
    | libc::O_PATH
    | libc::O_DIRECTORY
    | libc::O_NOFOLLOW;

const TMPFILE: u32 = libc::O_TMPFILE as u32;

/// Nothing is waited for, whatever lies at the path now; that flag is set right with all others.
fn flags(saved: u32) -> OFlags {
    OFlags::from_bits_retain(saved & KEPT as u32)
        | OFlags::CLOEXEC
        | OFlags::NOCTTY
        | OFlags::NONBLOCK
}

/// Opens what is there now, which must be of the same kind as in `mode`.
pub(super) fn by_path(path: &Path, saved: u32, mode: u32) -> Result<OwnedFd, PluginError> {
    let fd = attempt(path, flags(saved)).map_err(|e| match e {
        Errno::NOENT => PluginError::Refused(format!(
            "{} is not there: put it back, or name its new place with --path-map",
            path.display()
        )),
        e => PluginError::System { what: format!("open {}", path.display()), source: e.into() },
    })?;
    let now = rustix::fs::fstat(&fd).to(|| format!("look at {}", path.display()))?.st_mode;
    if now & libc::S_IFMT != mode & libc::S_IFMT {
        let what = format!("{} is another kind of file than it was", path.display());
        return Err(PluginError::Refused(what));
    }
    Ok(fd)
}

/// Opens the file that `home` is.
pub(crate) fn through(home: &File, saved: u32) -> Result<OwnedFd, PluginError> {
    let path = format!("/proc/self/fd/{}", home.as_raw_fd());
    // What it leads to is a link that must be followed; and O_TMPFILE contains O_DIRECTORY.
    let mut flags = flags(saved) - OFlags::NOFOLLOW;
    if saved & TMPFILE == TMPFILE {
        flags -= OFlags::DIRECTORY;
    }
    attempt(Path::new(&path), flags).to(|| "open a file that has no name")
}

fn attempt(path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
    let attempt = |flags| open(path, flags, Mode::empty());
    match attempt(flags) {
        // O_NOATIME is the owner's alone; the file may have another one here.
        Err(Errno::PERM) => attempt(flags - OFlags::NOATIME),
        // Its permissions were changed after it was opened.
        Err(Errno::ACCESS) => {
            with_permission(path, || attempt(flags)).unwrap_or(Err(Errno::ACCESS))
        }
        other => other,
    }
}

/// Does `what` while the owner, if that is us, may do anything to the file.
fn with_permission<T>(path: &Path, what: impl FnOnce() -> T) -> Option<T> {
    let metadata = fs::metadata(path).ok()?;
    let mine = metadata.uid() == rustix::process::geteuid().as_raw();
    let mode = metadata.mode() & 0o7777;
    if !mine || !metadata.is_file() {
        return None;
    }
    fs::set_permissions(path, Permissions::from_mode(mode | 0o600)).ok()?;
    let done = what();
    fs::set_permissions(path, Permissions::from_mode(mode)).ok()?;
    Some(done)
}
