//! The folders that hold what a restart must keep: private ones, in the user's state folder.

use crate::plugins::error::{Context, PluginError};
use rustix::fs::{
    Access, AtFlags, Dir, DirEntry, Mode, OFlags, access, open, openat, statat, unlinkat,
};
use rustix::io::Errno;
use rustix::process::geteuid;
use std::ffi::{CStr, OsStr, OsString};
use std::fs::{self, DirBuilder, File};
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Returns `$XDG_STATE_HOME/kedge/NAME`, or `~/.local/state/kedge/NAME`, which need not exist;
/// where neither can be written to, `kedge-state-UID/NAME` in the folder for temporary files.
///
/// A home counts only if it is this user's own: `sudo` may leave root the variable HOME of the
/// user who calls it.
///
/// # Errors
///
/// If XDG_STATE_HOME leads root to where others can put another folder into its place, or nothing
/// leads anywhere.
pub(crate) fn of(name: &str) -> Result<PathBuf, PluginError> {
    let told = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from);
    if let Some(told) = told.as_ref().filter(|told| geteuid().is_root() && !is_roots_own(told)) {
        return Err(PluginError::Refused(format!(
            "XDG_STATE_HOME is {}, where others than root can make changes: root keeps nothing \
             there; unset it, or name a folder of root's",
            told.display()
        )));
    }
    let homes = [std::env::var_os("HOME").map(PathBuf::from), home_of(geteuid().as_raw())];
    let home = homes.into_iter().flatten().find(|home| is_own(home));
    let home = home.map(|home| home.join(".local/state"));
    let own = [told, home].into_iter().flatten().map(|state| state.join("kedge"));
    let temporary = || std::env::temp_dir().join(format!("kedge-state-{}", geteuid().as_raw()));
    let state = own.clone().find(|state| state.is_absolute() && can_be_made(state));
    let state = state.unwrap_or_else(temporary).join(name);
    match state.is_absolute() {
        true => Ok(state),
        false => Err(PluginError::Refused(
            "a restart keeps what it must in a folder of yours: set XDG_STATE_HOME to an absolute \
             path"
                .to_owned(),
        )),
    }
}

fn is_own(home: &Path) -> bool {
    home.is_absolute()
        && home.metadata().is_ok_and(|it| it.is_dir() && it.uid() == geteuid().as_raw())
}

/// Whether nobody but root can put another folder into the place of `path` or of one above it.
fn is_roots_own(path: &Path) -> bool {
    const STICKY: u32 = 0o1000;
    let is = |found: fs::Metadata| {
        let shared = found.mode() & 0o022 != 0 && found.mode() & STICKY == 0;
        found.uid() == 0 && (found.is_symlink() || !shared)
    };
    path.ancestors().all(|above| above.symlink_metadata().map_or(true, is))
}

/// Returns the home of a user, as the system's list of users has it.
pub fn home_of(user: u32) -> Option<PathBuf> {
    // Longer than any entry.
    let mut text = vec![0; 64 << 10];
    let mut entry = MaybeUninit::<libc::passwd>::uninit();
    let mut found = std::ptr::null_mut();
    // SAFETY: `entry`, `text` and `found` live through the call, and `text` is as long as it is
    // told.
    let error = unsafe {
        let length = text.len();
        libc::getpwuid_r(user, entry.as_mut_ptr(), text.as_mut_ptr(), length, &raw mut found)
    };
    if error != 0 || found.is_null() {
        return None;
    }
    // SAFETY: the call has filled `entry`, whose home is a string in `text`, ended by NUL.
    let home = unsafe { CStr::from_ptr(entry.assume_init().pw_dir) };
    Some(PathBuf::from(OsStr::from_bytes(home.to_bytes())))
}

/// Whether this user may make that folder, or may write to it.
fn can_be_made(folder: &Path) -> bool {
    let there = folder.ancestors().find(|above| above.symlink_metadata().is_ok());
    there.is_some_and(|there| access(there, Access::WRITE_OK | Access::EXEC_OK).is_ok())
}

/// A folder that belongs to this user, and that nobody else may look into: open, so that whatever
/// becomes of its path, what is looked up in it is looked up in this one.
#[derive(Debug)]
pub(crate) struct Private(File);

impl Private {
    /// Makes such a folder where it is not there, for its owner alone.
    ///
    /// # Errors
    ///
    /// If it cannot be made, or is not this user's alone.
    pub(crate) fn make(folder: &Path) -> Result<Private, PluginError> {
        let what = || format!("make {}", folder.display());
        DirBuilder::new().recursive(true).mode(0o700).create(folder).to(what)?;
        Private::open(folder).to(what)?.ok_or_else(|| {
            PluginError::Refused(format!(
                "{} is not a folder of this user's alone: make it so (chmod 700)",
                folder.display()
            ))
        })
    }

    /// Opens it; `None` if it is no such folder.
    pub(crate) fn open(folder: &Path) -> io::Result<Option<Private>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = match open(folder, flags, Mode::empty()) {
            Err(Errno::NOTDIR | Errno::LOOP) => return Ok(None),
            other => File::from(other?),
        };
        let found = opened.metadata()?;
        let private = found.uid() == geteuid().as_raw() && found.mode() & 0o77 == 0;
        Ok(private.then_some(Private(opened)))
    }

    /// Opens or makes the file `name` in it.
    pub(crate) fn file(&self, name: &OsStr, flags: OFlags) -> io::Result<File> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        Ok(File::from(openat(&self.0, name, flags, Mode::RUSR | Mode::WUSR)?))
    }

    /// The inode of what is at `name` in it; `None` if nothing is.
    pub(crate) fn inode(&self, name: &OsStr) -> io::Result<Option<u64>> {
        match statat(&self.0, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => Ok(None),
            found => Ok(Some(found?.st_ino)),
        }
    }

    pub(crate) fn remove(&self, name: &OsStr) -> io::Result<()> {
        Ok(unlinkat(&self.0, name, AtFlags::empty())?)
    }

    /// The names of what is in it.
    pub(crate) fn names(&self) -> io::Result<Vec<OsString>> {
        let name = |entry: DirEntry| OsStr::from_bytes(entry.file_name().to_bytes()).to_owned();
        Ok(Dir::read_from(&self.0)?.map(|entry| entry.map(name)).collect::<Result<_, _>>()?)
    }

    /// Has what was made and removed in it last.
    pub(crate) fn sync(&self) -> io::Result<()> {
        self.0.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    #[test]
    fn a_home_is_its_users_own() {
        let user = geteuid().as_raw();
        assert!(home_of(user).is_none_or(|home| home.is_absolute()));
        assert_eq!(home_of(4_000_000_000), None);
        let folder = std::env::temp_dir().join(format!("kedge-home-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        assert!(is_own(&folder) && !is_own(&folder.join("none")) && !is_own(Path::new("usr")));
        if user == 0 {
            chown(&folder, Some(1234), None).unwrap();
            assert!(!is_own(&folder), "another user's");
        }
        fs::remove_dir(&folder).unwrap();
    }

    /// Root alone can make folders of others.
    #[test]
    fn root_keeps_nothing_where_others_can_make_changes() {
        if !geteuid().is_root() {
            return;
        }
        let base = std::env::temp_dir().join(format!("kedge-roots-{}", std::process::id()));
        let below = base.join("user/state");
        fs::create_dir_all(&below).unwrap();
        // What is not there is made by root.
        assert!(is_roots_own(&below) && is_roots_own(&below.join("not/there")));
        chown(base.join("user"), Some(1234), None).unwrap();
        assert!(!is_roots_own(&below) && !is_roots_own(&base.join("user")));
        chown(base.join("user"), Some(0), None).unwrap();
        fs::set_permissions(base.join("user"), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(!is_roots_own(&below), "anybody's");
        fs::set_permissions(base.join("user"), fs::Permissions::from_mode(0o1777)).unwrap();
        assert!(is_roots_own(&below));
        symlink(&below, base.join("link")).unwrap();
        std::os::unix::fs::lchown(base.join("link"), Some(1234), None).unwrap();
        assert!(!is_roots_own(&base.join("link")), "somebody's link");
        fs::remove_dir_all(&base).unwrap();
    }

    #[test]
    fn what_is_in_a_private_folder_stays_in_it() {
        let base = std::env::temp_dir().join(format!("kedge-private-{}", std::process::id()));
        let (own, name) = (base.join("own"), OsStr::new("name"));
        let folder = Private::make(&own).unwrap();
        // Another folder in its place, as one that may change what lies above puts it there.
        fs::rename(&own, base.join("moved")).unwrap();
        fs::create_dir(&own).unwrap();
        folder.file(name, OFlags::RDWR | OFlags::CREATE | OFlags::EXCL).unwrap();
        assert_eq!(folder.names().unwrap().iter().filter(|found| *found == name).count(), 1);
        assert!(folder.inode(name).unwrap().is_some() && !own.join(name).exists());
        folder.remove(name).unwrap();
        assert_eq!(folder.inode(name).unwrap(), None);
        // Neither a link nor what others may enter.
        fs::set_permissions(&own, fs::Permissions::from_mode(0o750)).unwrap();
        symlink(base.join("moved"), base.join("link")).unwrap();
        for other in [own, base.join("link")] {
            assert!(Private::open(&other).unwrap().is_none(), "{other:?}");
            assert!(Private::make(&other).is_err(), "{other:?}");
        }
        assert!(Private::open(&base.join("none")).is_err());
        fs::remove_dir_all(&base).unwrap();
    }
}
