//! Whose each user is that keys' proxies run as: of which name in which folder of keys. It is noted
//! in one place of a machine, because users are the machine's, and a server knows its own folder
//! alone.

use crate::homes::root_s_own;
use kedge_keys::Name;
use rustix::fs::{AtFlags, Mode, OFlags, linkat, openat, unlinkat};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Longest note, in bytes: a name and a path.
const MAX_NOTE_LEN: u64 = 8 << 10;

/// The folder of notes, opened.
#[derive(Debug)]
pub(crate) struct Claims(OwnedFd);

impl Claims {
    /// Opens the folder, which is made if there is none.
    ///
    /// # Errors
    /// It is not this user's alone to change.
    pub(crate) fn open(path: &Path) -> io::Result<Claims> {
        root_s_own(path).map(Claims)
    }

    /// Notes that a user is this name's of this folder of keys, and returns whether he is: not
    /// where he is another's already.
    ///
    /// # Errors
    /// The system refuses.
    pub(crate) fn claim(&self, user: u32, name: &Name, keys: &Path) -> io::Result<bool> {
        let keys = keys.canonicalize()?;
        let note = [name.to_string().as_bytes(), b"\n", keys.as_os_str().as_bytes()].concat();
        let file = user.to_string();
        if let Some(held) = self.read(&file)? {
            return Ok(held == note);
        }
        let new = format!(".new-{}", std::process::id());
        let forget = |file: &str| match unlinkat(&self.0, file, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error),
        };
        // One that a process of this number has left.
        forget(&new)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let made = openat(&self.0, &new, flags, Mode::RUSR | Mode::WUSR)?;
        let mut made = File::from(made);
        made.write_all(&note)?;
        made.sync_all()?;
        // Of two that do so at once one is first, and each note is there as a whole.
        let placed = linkat(&self.0, &new, &self.0, &file, AtFlags::empty());
        forget(&new)?;
        match placed {
            Ok(()) => {
                rustix::fs::fsync(&self.0)?;
                Ok(true)
            }
            Err(Errno::EXIST) => Ok(self.read(&file)? == Some(note)),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the note of that name, if there is one.
    fn read(&self, file: &str) -> io::Result<Option<Vec<u8>>> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd = match openat(&self.0, file, flags, Mode::empty()) {
            Ok(fd) => fd,
            Err(Errno::NOENT) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let mut note = Vec::new();
        File::from(fd).take(MAX_NOTE_LEN).read_to_end(&mut note)?;
        Ok(Some(note))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::time::UNIX_EPOCH;

    #[test]
    fn a_user_is_one_folder_s_and_one_name_s() {
        let base = std::env::temp_dir().join(format!("kclaims-{}", std::process::id()));
        let [first, second] = ["first", "second"].map(|name| base.join(name));
        [&first, &second].into_iter().for_each(|path| fs::create_dir_all(path).unwrap());
        let claims = Claims::open(&base.join("users")).unwrap();
        let [alice, bob] = ["alice", "bob"].map(|name| name.parse::<Name>().unwrap());
        assert!(claims.claim(7, &alice, &first).unwrap());
        let users = File::open(base.join("users")).unwrap();
        users.set_modified(UNIX_EPOCH).unwrap();
        assert!(claims.claim(7, &alice, &first).unwrap(), "again");
        assert!(claims.claim(7, &alice, &base.join("second/../first")).unwrap(), "the same");
        for (name, keys) in [(&bob, &first), (&alice, &second)] {
            assert!(!claims.claim(7, name, keys).unwrap(), "{name} {keys:?}");
        }
        // Looking is enough for what is noted already.
        assert_eq!(users.metadata().unwrap().modified().unwrap(), UNIX_EPOCH);
        assert!(claims.claim(8, &alice, &second).unwrap());
        assert_eq!(fs::read_dir(base.join("users")).unwrap().count(), 2);
        fs::set_permissions(base.join("users"), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(Claims::open(&base.join("users")).is_err());
        fs::remove_dir_all(base).unwrap();
    }
}
