//! Opening as the program did.

use crate::plugins::changes::{Stamp, reach};
use crate::plugins::error::{Context, PluginError};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::fs::{self, Permissions};
use std::io;
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
    // O_TMPFILE, which stays with a file, contains O_DIRECTORY.
    let made = if saved & TMPFILE == TMPFILE { OFlags::DIRECTORY } else { OFlags::empty() };
    (OFlags::from_bits_retain(saved & KEPT as u32) - made)
        | OFlags::CLOEXEC
        | OFlags::NOCTTY
        | OFlags::NONBLOCK
}

/// Opens what is there now, which must be of the same kind as in `mode`. `lends` is told before the
/// mode of the file is changed for a moment.
pub(super) fn by_path(
    path: &Path,
    saved: u32,
    mode: u32,
    lends: impl FnOnce(Stamp) -> Result<(), PluginError>,
) -> Result<OwnedFd, PluginError> {
    let what = || format!("open {}", path.display());
    let found = match reach::find(path, saved & libc::O_NOFOLLOW as u32 == 0) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return Err(PluginError::Refused(format!(
                "{} is not there: put it back, or name its new place with --path-map",
                path.display()
            )));
        }
        other => other.to(what)?,
    };
    let now = rustix::fs::fstat(&found).to(|| format!("look at {}", path.display()))?.st_mode;
    if now & libc::S_IFMT != mode & libc::S_IFMT {
        let what = format!("{} is another kind of file than it was", path.display());
        return Err(PluginError::Refused(what));
    }
    if saved & libc::O_PATH as u32 != 0 {
        return Ok(found);
    }
    attempt(&found, flags(saved), lends)?.to(what)
}

/// Opens the file that `home` is.
pub(crate) fn through(home: impl AsFd, saved: u32) -> Result<OwnedFd, PluginError> {
    through_lent(home, saved, |_| Ok(()))
}

/// The same, of one that others know: `lends` as above.
pub(super) fn through_lent(
    home: impl AsFd,
    saved: u32,
    lends: impl FnOnce(Stamp) -> Result<(), PluginError>,
) -> Result<OwnedFd, PluginError> {
    attempt(home.as_fd(), flags(saved), lends)?.to(|| "open a file again")
}

fn attempt(
    found: impl AsFd,
    flags: OFlags,
    lends: impl FnOnce(Stamp) -> Result<(), PluginError>,
) -> Result<io::Result<OwnedFd>, PluginError> {
    let attempt = |flags| reach::again(&found, flags);
    let errno = |error: &io::Error| error.raw_os_error().map(Errno::from_raw_os_error);
    Ok(match attempt(flags) {
        // O_NOATIME is the owner's alone; the file may have another one here.
        Err(e) if errno(&e) == Some(Errno::PERM) => attempt(flags - OFlags::NOATIME),
        // Its permissions were changed after it was opened.
        Err(e) if errno(&e) == Some(Errno::ACCESS) => {
            with_permission(&reach::through(&found), || attempt(flags), lends)?.unwrap_or(Err(e))
        }
        other => other,
    })
}

/// Does `what` while the owner, if that is us, may do anything to the file.
fn with_permission<T>(
    path: &Path,
    what: impl FnOnce() -> T,
    lends: impl FnOnce(Stamp) -> Result<(), PluginError>,
) -> Result<Option<T>, PluginError> {
    let Ok(metadata) = fs::metadata(path) else { return Ok(None) };
    let mine = metadata.uid() == rustix::process::geteuid().as_raw();
    let mode = metadata.mode() & 0o7777;
    if !mine || !metadata.is_file() {
        return Ok(None);
    }
    lends(Stamp::of(&metadata))?;
    let set = |mode| fs::set_permissions(path, Permissions::from_mode(mode));
    if set(mode | 0o600).is_err() {
        return Ok(None);
    }
    let done = what();
    set(mode).to(|| "set a file's mode")?;
    Ok(Some(done))
}
