//! Where the cache lies: in the user's folder for caches, in one that others cannot enter.

use crate::CacheError;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Returns where the cache is or will be: `$XDG_CACHE_HOME/kedge/NAME`, else
/// `~/.cache/kedge/NAME`.
pub(crate) fn path(name: &str) -> Result<PathBuf, CacheError> {
    let variable = |name| {
        let path = std::env::var_os(name).map(PathBuf::from);
        path.filter(|path| path.is_absolute())
    };
    let caches =
        variable("XDG_CACHE_HOME").or_else(|| variable("HOME").map(|home| home.join(".cache")));
    Ok(caches.ok_or(CacheError::NoFolder)?.join("kedge").join(name))
}

/// Makes the folder where there is none. What is made on the way is private, too.
pub(crate) fn make(dir: &Path) -> Result<(), CacheError> {
    let failed = |source| CacheError::Io { path: dir.to_owned(), source };
    let is_new = !dir.exists();
    if is_new && !is_own_ground(dir) {
        // `sudo -E` leaves root the variables of the user who calls it.
        return Err(CacheError::NotOwn { path: dir.to_owned() });
    }
    DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(failed)?;
    check(dir).map(drop)
}

/// Whether the folder is there.
///
/// # Errors
/// [`CacheError::NotOwn`] where it is another user's, or others can enter it.
pub(crate) fn check(dir: &Path) -> Result<bool, CacheError> {
    let found = match fs::symlink_metadata(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        found => found.map_err(|source| CacheError::Io { path: dir.to_owned(), source })?,
    };
    let private = found.is_dir() && found.permissions().mode() & 0o077 == 0;
    if private && is_own(&found) {
        Ok(true)
    } else {
        Err(CacheError::NotOwn { path: dir.to_owned() })
    }
}

/// Whether a file is this user's.
pub(crate) fn is_own(found: &fs::Metadata) -> bool {
    found.uid() == rustix::process::geteuid().as_raw()
}

/// Whether root may make `dir`: the nearest folder that is there is root's. Others are stopped by
/// the kernel where they may not.
fn is_own_ground(dir: &Path) -> bool {
    let nearest = dir.ancestors().find_map(|folder| fs::metadata(folder).ok());
    !rustix::process::geteuid().is_root() || nearest.is_some_and(|folder| is_own(&folder))
}
