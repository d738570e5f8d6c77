//! A folder that is this user's alone, and files in it that are.

use crate::error::KeyError;
use rustix::fs::{
    AtFlags, Dir, FileType, FlockOperation, Mode, OFlags, Stat, flock, fstat, fsync, linkat,
    openat, unlinkat,
};
use rustix::io::Errno;
use rustix::process::geteuid;
use std::fs::{DirBuilder, File};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use zeroize::Zeroizing;

/// Longest file, bytes.
const MAX_FILE: usize = 32 << 10;
/// Files of all kinds at most: keys are bounded by [`crate::store`], and each may have others.
const MAX_FILES: usize = 1 << 16;

/// An open private folder. Its files are reached by it, whatever becomes of its path.
#[derive(Debug)]
pub(crate) struct Folder {
    fd: OwnedFd,
    path: PathBuf,
}

impl Folder {
    /// Opens a folder, or returns that there is none.
    ///
    /// # Errors
    /// It is a link or no folder, another user's, or one that others may enter.
    pub(crate) fn open(path: &Path) -> Result<Option<Folder>, KeyError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let why = |why| KeyError::NotPrivate { path: path.to_owned(), why };
        let fd = match rustix::fs::open(path, flags, Mode::empty()) {
            Ok(fd) => fd,
            Err(Errno::NOENT) => return Ok(None),
            Err(Errno::LOOP | Errno::NOTDIR) => return Err(why("a link or no folder")),
            Err(error) => return Err(failed(path)(error)),
        };
        check(&fstat(&fd).map_err(failed(path))?, FileType::Directory).map_err(why)?;
        Ok(Some(Folder { fd, path: path.to_owned() }))
    }

    /// Opens a folder, which is made if there is none.
    ///
    /// # Errors
    /// As [`Folder::open`].
    pub(crate) fn make(path: &Path) -> Result<Folder, KeyError> {
        let io = |source| KeyError::Io { path: path.to_owned(), source };
        DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(io)?;
        Folder::open(path)?.ok_or_else(|| failed(path)(Errno::NOENT))
    }

    /// Returns where a file of it lies, for people.
    pub(crate) fn path_of(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Returns the names of its files, in order.
    ///
    /// # Errors
    /// There are too many.
    pub(crate) fn names(&self) -> Result<Vec<String>, KeyError> {
        let mut names = Vec::new();
        for entry in Dir::read_from(&self.fd).map_err(failed(&self.path))? {
            let entry = entry.map_err(failed(&self.path))?;
            // Names of ours are ASCII.
            names.extend(entry.file_name().to_str().ok().map(str::to_owned));
            if names.len() > MAX_FILES {
                return Err(KeyError::TooMany { path: self.path.clone(), max: MAX_FILES });
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    /// Returns what is in a file, or that there is none.
    ///
    /// # Errors
    /// It is a link, a pipe or the like, another user's, one that others may read, or too long.
    pub(crate) fn read(&self, name: &str) -> Result<Option<Zeroizing<Vec<u8>>>, KeyError> {
        let path = self.path_of(name);
        let why = |why| KeyError::NotPrivate { path: path.clone(), why };
        // Without NONBLOCK a pipe of that name would never open.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd = match openat(&self.fd, name, flags, Mode::empty()) {
            Ok(fd) => fd,
            Err(Errno::NOENT) => return Ok(None),
            Err(Errno::LOOP) => return Err(why("a link")),
            Err(error) => return Err(failed(&path)(error)),
        };
        check(&fstat(&fd).map_err(failed(&path))?, FileType::RegularFile).map_err(why)?;
        // All of its room at once: growing would leave copies of what is secret.
        let mut text = Zeroizing::new(Vec::with_capacity(MAX_FILE + 1));
        let read = File::from(fd).take(MAX_FILE as u64 + 1).read_to_end(&mut text);
        read.map_err(|source| KeyError::Io { path: path.clone(), source })?;
        if text.len() > MAX_FILE {
            let why = format!("it is longer than {MAX_FILE} bytes");
            return Err(KeyError::Damaged { path, why });
        }
        Ok(Some(text))
    }

    /// Writes a file as a whole, and returns whether it did: not where one of the name is there
    /// that is not to be replaced.
    ///
    /// # Errors
    /// The system refuses.
    pub(crate) fn write(&self, name: &str, text: &[u8], replace: bool) -> Result<bool, KeyError> {
        let path = self.path_of(name);
        let new = format!(".new-{}", std::process::id());
        let at = &self.fd;
        // One that a process of this number has left.
        self.remove(&new)?;
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = openat(at, &new, flags, Mode::RUSR | Mode::WUSR).map_err(failed(&path))?;
        let mut file = File::from(fd);
        let written = file.write_all(text).and_then(|()| file.sync_all());
        written.map_err(|source| KeyError::Io { path: path.clone(), source })?;
        let placed = match replace {
            true => rustix::fs::renameat(at, &new, at, name),
            // Unlike a rename it fails where the name is taken, on every file system.
            false => linkat(at, &new, at, name, AtFlags::empty()),
        };
        self.remove(&new)?;
        match placed {
            Ok(()) => self.sync().map(|()| true),
            Err(Errno::EXIST) if !replace => Ok(false),
            Err(error) => Err(failed(&path)(error)),
        }
    }

    /// Gives a file another name; whichever has that already goes.
    ///
    /// # Errors
    /// The system refuses.
    pub(crate) fn rename(&self, from: &str, to: &str) -> Result<(), KeyError> {
        let renamed = rustix::fs::renameat(&self.fd, from, &self.fd, to);
        renamed.map_err(failed(&self.path_of(from)))?;
        self.sync()
    }

    /// Removes a file, if there is one.
    ///
    /// # Errors
    /// The system refuses.
    pub(crate) fn remove(&self, name: &str) -> Result<(), KeyError> {
        match unlinkat(&self.fd, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(failed(&self.path_of(name))(error)),
        }
    }

    /// Waits until nobody else has it locked. It is locked as long as it is open.
    ///
    /// # Errors
    /// The system refuses.
    pub(crate) fn lock(&self) -> Result<(), KeyError> {
        flock(&self.fd, FlockOperation::LockExclusive).map_err(failed(&self.path))
    }

    /// Has the disk know its names.
    ///
    /// # Errors
    /// The system refuses.
    pub(crate) fn sync(&self) -> Result<(), KeyError> {
        fsync(&self.fd).map_err(failed(&self.path))
    }
}

fn failed(path: &Path) -> impl Fn(Errno) -> KeyError {
    move |errno| KeyError::Io { path: path.to_owned(), source: errno.into() }
}

/// Checks that something is of its kind, this user's, and nobody else's to read or write.
fn check(found: &Stat, kind: FileType) -> Result<(), &'static str> {
    if FileType::from_raw_mode(found.st_mode) != kind {
        return Err("no regular file");
    }
    if found.st_uid != geteuid().as_raw() {
        return Err("another user's");
    }
    match found.st_mode & 0o077 {
        0 => Ok(()),
        _ => Err("open to others"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Place;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn refused(result: Result<impl Sized, KeyError>) -> String {
        result.err().expect("it is refused").to_string()
    }

    #[test]
    fn what_others_can_reach_is_refused() {
        let place = Place::new("folder");
        let path = place.path.join("keys");
        assert!(Folder::open(&path).unwrap().is_none());
        let folder = Folder::make(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o700);
        assert!(folder.write("a", b"text", false).unwrap());
        let file = path.join("a");
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o7777, 0o600);
        assert_eq!(folder.read("a").unwrap().unwrap().as_slice(), b"text");

        fs::set_permissions(&file, Permissions::from_mode(0o640)).unwrap();
        assert!(refused(folder.read("a")).contains("open to others"));
        fs::set_permissions(&path, Permissions::from_mode(0o750)).unwrap();
        assert!(refused(Folder::open(&path)).contains("open to others"));
        symlink(&path, place.path.join("link")).unwrap();
        assert!(refused(Folder::open(&place.path.join("link"))).contains("a link"));
        assert!(refused(Folder::make(&file)).contains("cannot be used"));
        if rustix::process::geteuid().is_root() {
            fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
            std::os::unix::fs::chown(&file, Some(65534), None).unwrap();
            assert!(refused(folder.read("a")).contains("another user's"));
            fs::set_permissions(&path, Permissions::from_mode(0o700)).unwrap();
            std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
            assert!(refused(Folder::open(&path)).contains("another user's"));
        }
    }

    #[test]
    fn what_is_no_file_of_ours_is_refused() {
        let place = Place::new("files");
        let folder = Folder::make(&place.path.join("keys")).unwrap();
        folder.write("a", b"text", false).unwrap();
        symlink("a", folder.path_of("link")).unwrap();
        assert!(refused(folder.read("link")).contains("a link"));
        fs::create_dir(folder.path_of("dir")).unwrap();
        assert!(refused(folder.read("dir")).contains("no regular file"));
        let pipe = folder.path_of("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, FileType::Fifo, Mode::RUSR, 0).unwrap();
        assert!(refused(folder.read("pipe")).contains("no regular file"));
        folder.write("long", &vec![b'x'; MAX_FILE + 1], false).unwrap();
        assert!(refused(folder.read("long")).contains("longer than"));
        folder.write("longest", &vec![b'x'; MAX_FILE], false).unwrap();
        assert_eq!(folder.read("longest").unwrap().unwrap().len(), MAX_FILE);
    }

    #[test]
    fn a_file_is_replaced_as_a_whole_or_not_at_all() {
        let place = Place::new("replace");
        let folder = Folder::make(&place.path.join("keys")).unwrap();
        assert!(folder.write("a", b"one", false).unwrap());
        assert!(!folder.write("a", b"two", false).unwrap());
        assert_eq!(folder.read("a").unwrap().unwrap().as_slice(), b"one");
        assert!(folder.write("a", b"two", true).unwrap());
        assert_eq!(folder.read("a").unwrap().unwrap().as_slice(), b"two");
        folder.rename("a", "b").unwrap();
        let names = folder.names().unwrap();
        let left: Vec<&String> = names.iter().filter(|name| !name.starts_with("..")).collect();
        assert_eq!(left, [".", "b"]);
    }
}
