//! As whom the proxies of keys run, where a server is started by root: each key's as a user of its
//! own, who has a folder of his own and nothing else.

use rustix::fs::{Mode, OFlags, fchown, fstat, mkdirat, open, openat};
use rustix::io::Errno;
use rustix::process::{Gid, Uid, geteuid};
use std::fs::DirBuilder;
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Users that are set aside for keys, by number, and where their folders are.
#[derive(Debug, Clone)]
pub struct Users {
    pub range: RangeInclusive<u32>,
    /// Root's; others may enter it.
    pub homes: PathBuf,
    /// Where all servers of this machine note whose each user is; root's.
    pub claims: PathBuf,
}

/// A key's user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Owner {
    /// Of him and of his group.
    pub(crate) id: u32,
    pub(crate) home: PathBuf,
}

impl Users {
    /// Returns whether they can be anybody's: none is root, or nobody at all.
    pub(crate) fn are_proper(&self) -> bool {
        let (first, last) = (*self.range.start(), *self.range.end());
        first > 0 && first <= last && last < u32::MAX
    }

    /// Returns a user with his folder, which is made if there is none.
    ///
    /// # Errors
    /// The folder of folders is not root's alone to change, or what is there is another's.
    pub(crate) fn owner(&self, id: u32) -> io::Result<Owner> {
        let all = root_s_own(&self.homes)?;
        let (name, home) = (id.to_string(), self.homes.join(id.to_string()));
        match mkdirat(&all, &name, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
        let own = folder(Some(&all), Path::new(&name))?;
        match fstat(&own)?.st_uid {
            owner if owner == id => {}
            // Just made, or by a server that was killed before this.
            owner if owner == geteuid().as_raw() => {
                fchown(&own, Some(Uid::from_raw(id)), Some(Gid::from_raw(id)))?;
            }
            _ => return Err(refused(&home, "is another user's")),
        }
        Ok(Owner { id, home })
    }
}

/// Opens a folder, which is made if there is none.
///
/// # Errors
/// It is not this user's, who is root where it matters, or others may write to it.
pub(crate) fn root_s_own(path: &Path) -> io::Result<OwnedFd> {
    DirBuilder::new().recursive(true).mode(0o755).create(path)?;
    let all = folder(None, path)?;
    let found = fstat(&all)?;
    if found.st_uid != geteuid().as_raw() || found.st_mode & 0o022 != 0 {
        return Err(refused(path, "must be this user's, and nobody else's to write to"));
    }
    Ok(all)
}

/// Opens a folder that is no link.
fn folder(at: Option<&OwnedFd>, path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(match at {
        Some(at) => openat(at, path, flags, Mode::empty())?,
        None => open(path, flags, Mode::empty())?,
    })
}

fn refused(path: &Path, why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, format!("{} {why}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    #[test]
    fn nobody_and_root_are_no_key_s_user() {
        let users = |range| Users { range, homes: "/".into(), claims: "/".into() }.are_proper();
        assert!(users(1..=1) && users(70_000..=80_000));
        assert!(!users(0..=5) && !users(5..=u32::MAX) && !users(RangeInclusive::new(6, 5)));
    }

    #[test]
    fn a_user_has_a_folder_of_his_own() {
        let base = std::env::temp_dir().join(format!("khomes-{}", std::process::id()));
        let users = Users { range: 1..=9, homes: base.join("homes"), claims: base.join("users") };
        let own = geteuid().as_raw();
        let other = if geteuid().is_root() { 70_001 } else { own };
        let owner = users.owner(other).unwrap();
        let found = fs::metadata(&owner.home).unwrap();
        assert_eq!((found.uid(), found.mode() & 0o7777), (other, 0o700));
        assert_eq!(users.owner(other).unwrap(), owner);
        fs::remove_dir(&owner.home).unwrap();
        symlink("/", &owner.home).unwrap();
        assert!(users.owner(other).is_err(), "a link");
        fs::remove_file(&owner.home).unwrap();
        fs::write(&owner.home, "").unwrap();
        assert!(users.owner(other).is_err(), "a file");
        fs::remove_file(&owner.home).unwrap();
        if geteuid().is_root() {
            fs::create_dir(&owner.home).unwrap();
            std::os::unix::fs::chown(&owner.home, Some(70_002), None).unwrap();
            let said = users.owner(other).unwrap_err().to_string();
            assert!(said.contains("is another user's"), "{said}");
        }
        fs::set_permissions(&users.homes, fs::Permissions::from_mode(0o777)).unwrap();
        let said = users.owner(other).unwrap_err().to_string();
        assert!(said.contains("nobody else's to write to"), "{said}");
        fs::remove_dir_all(base).unwrap();
    }
}
