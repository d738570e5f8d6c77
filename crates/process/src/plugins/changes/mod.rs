//! What a restart changes of the user's files, and how that is undone
//! (docs/design/0015-files-at-a-restart.md).
//!
//! Until [`Changes::apply`], names are only added: files, folders, sockets. What there was before
//! is changed by `apply` alone, when all else of the job is there. Each change is recorded before
//! it is made.

pub(crate) mod folder;
mod journal;
pub(crate) mod reach;
mod steps;
mod undo;

use crate::plugins::contents;
use crate::plugins::error::{Context, PluginError, damaged};
pub use folder::home_of;
pub(crate) use journal::Stamp;
pub(crate) use journal::new_path;
use journal::{Journal, Record};
use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags, linkat, mkdirat, mknodat, openat};
use rustix::fs::{renameat, renameat_with, statat, unlinkat};
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
pub(crate) use steps::{Dress, InPlace, Later, Old};
pub use undo::{Settled, settle, settle_all, settle_in};

/// A moment of a restart at which a test may end it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// All is there, and no file of the user's has been changed.
    Ready,
    /// What is to be changed is recorded.
    Recorded,
    /// So many of the changes have been made.
    Changed(usize),
    /// All have been made.
    Applied,
    /// The restart has succeeded.
    Committed,
}

/// Most names that are tried for something moved aside.
const MAX_ASIDE: u32 = 10_000;
/// What all names have that a restart makes for its own use; some random digits follow.
const NEW: &str = ".kedge-new-";
/// The same of what has no use any more.
const OLD: &str = ".kedge-old-";

/// The changes of one restart.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    /// Where the journal is to lie; without, dropping this undoes.
    place: Option<PathBuf>,
    journal: Option<Journal>,
    records: Vec<Record>,
    later: Vec<Later>,
    /// What will be at these paths.
    homes: BTreeMap<PathBuf, File>,
    committed: bool,
    at: Option<fn(Moment)>,
}

impl Changes {
    pub(crate) fn new(place: Option<PathBuf>, at: Option<fn(Moment)>) -> Changes {
        let mut changes = Changes::default();
        (changes.place, changes.at) = (place, at);
        changes
    }

    /// Writes down what is about to be done.
    fn record(&mut self, records: Vec<Record>) -> Result<(), PluginError> {
        if records.is_empty() {
            return Ok(());
        }
        if let (None, Some(place)) = (&self.journal, &self.place) {
            self.journal = Some(Journal::create(place)?);
        }
        if let Some(journal) = &mut self.journal {
            journal.append(&records)?;
        }
        self.records.extend(records);
        Ok(())
    }

    /// Makes a file beside `path`, or in `folder`, for its owner alone; under a name that nobody
    /// else has.
    pub(crate) fn make_file(&mut self, path: &Path) -> io::Result<Result<New, PluginError>> {
        let name = random_name(path, NEW)?;
        if let Err(error) = self.record(vec![Record::Make { path: name.clone().into() }]) {
            return Ok(Err(error));
        }
        let (folder, last) = parent(&name)?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = File::from(openat(folder, last, flags, Mode::RUSR | Mode::WUSR)?);
        Ok(Ok(New { path: name, file }))
    }

    /// Makes a folder or a FIFO at `path`, where nothing is.
    pub(crate) fn make(&mut self, path: &Path, kind: FileType) -> Result<(), PluginError> {
        let what = || format!("make {}", path.display());
        let new = random_name(path, NEW).to(what)?;
        self.record(vec![Record::Make { path: new.clone().into() }])?;
        let (folder, last) = parent(&new).to(what)?;
        match kind {
            FileType::Directory => mkdirat(folder, last, Mode::RWXU).to(what)?,
            _ => mknodat(folder, last, kind, Mode::RUSR | Mode::WUSR, 0).to(what)?,
        }
        self.rename(&new, path)
    }

    /// Renames, never over something else.
    fn rename(&mut self, from: &Path, to: &Path) -> Result<(), PluginError> {
        let stamp = Stamp::at(from).to(|| format!("look at {}", from.display()))?;
        let (old, new) = (from.to_owned().into(), to.to_owned().into());
        self.record(vec![Record::Rename { from: old, to: new, what: stamp }])?;
        rename(from, to)
    }

    /// Moves away what is at `path` and has no use any more; it is removed when the restart has
    /// succeeded.
    pub(crate) fn put_away(&mut self, path: &Path) -> Result<(), PluginError> {
        let to = random_name(path, OLD).to(|| format!("move {} away", path.display()))?;
        self.rename(path, &to)
    }

    /// Says that a socket is about to be bound to `path`.
    pub(crate) fn binds(&mut self, path: &Path) -> Result<(), PluginError> {
        self.record(vec![Record::Bind { path: path.to_owned().into() }])
    }

    /// Says that it has been bound.
    ///
    /// # Errors
    ///
    /// If there is no socket: binding follows links, and somebody has put one into the way since it
    /// was looked at.
    pub(crate) fn bound(&mut self, path: &Path) -> Result<(), PluginError> {
        let what = Stamp::at(path).to(|| format!("look at {}", path.display()))?;
        if what.mode & libc::S_IFMT != libc::S_IFSOCK {
            let what = format!("{} was exchanged while a socket was bound to it", path.display());
            return Err(PluginError::Refused(what));
        }
        self.record(vec![Record::Bound { path: path.to_owned().into(), what }])
    }

    /// Says that the mode of the file at `path` is about to be changed for a moment.
    pub(crate) fn lends(&mut self, path: &Path, what: Stamp) -> Result<(), PluginError> {
        self.record(vec![Record::Mode { path: path.to_owned().into(), what }])
    }

    /// The folder of the user's own for what cannot be kept beside a file.
    pub(crate) fn kept_folder(&self) -> Result<PathBuf, PluginError> {
        let state = self.place.as_deref().and_then(Path::parent).and_then(Path::parent);
        let folder = state.map_or_else(|| folder::of("kept"), |state| Ok(state.join("kept")))?;
        folder::Private::make(&folder).map(|_| folder)
    }

    /// Leaves a change of what there is to [`Changes::apply`].
    pub(crate) fn later(&mut self, later: Later) {
        self.later.push(later);
    }

    /// Says what will be at `path`.
    pub(crate) fn will_be(&mut self, path: &Path, file: &File) -> Result<(), PluginError> {
        let file = file.try_clone().to(|| "duplicate a descriptor")?;
        self.homes.insert(path.to_owned(), file);
        Ok(())
    }

    /// What will be at `path`, where that is another file than now or has other contents.
    pub(crate) fn home(&self, path: &Path) -> Option<&File> {
        self.homes.get(path)
    }

    /// Whether this restart has made the folder.
    pub(crate) fn has_made(&self, folder: &Path) -> bool {
        let is = |record: &Record| matches!(record, Record::Rename { to, .. } if to.0 == folder);
        self.records.iter().any(is)
    }

    fn at(&self, moment: Moment) {
        if let Some(at) = self.at {
            at(moment);
        }
    }

    /// Makes all changes that were left for later: first looks at all of them, then records them,
    /// then makes them. What the user should know is added to `notes`.
    pub(crate) fn apply(&mut self, notes: &mut Vec<String>) -> Result<(), PluginError> {
        self.at(Moment::Ready);
        let mut steps = Vec::new();
        for later in std::mem::take(&mut self.later) {
            later.plan(&mut steps, notes)?;
        }
        let mut records: Vec<Record> = steps.iter().filter_map(steps::Step::record).collect();
        if self.journal.is_some() || !records.is_empty() {
            records.extend(notes.iter().map(|note| Record::Note { text: note.clone() }));
        }
        self.record(records)?;
        self.at(Moment::Recorded);
        for (number, step) in (1..).zip(steps) {
            step.take(notes)?;
            self.at(Moment::Changed(number));
        }
        self.at(Moment::Applied);
        Ok(())
    }

    /// Says that the restart has succeeded: from here on nothing is undone.
    pub(crate) fn commit(&mut self) -> Result<(), PluginError> {
        if let Some(journal) = &mut self.journal {
            journal.commit()?;
        }
        self.committed = true;
        self.journal = None;
        undo::remove_useless(&self.records);
        self.at(Moment::Committed);
        Ok(())
    }
}

impl Drop for Changes {
    fn drop(&mut self) {
        // With a journal, whoever has started this process undoes when it has ended, and tells.
        if !self.committed && self.place.is_none() {
            undo::undo(&self.records);
        }
    }
}

/// A file that was just made.
#[derive(Debug)]
pub(crate) struct New {
    pub(crate) path: PathBuf,
    pub(crate) file: File,
}

impl New {
    /// Copies all of `from` into it, down to the disk.
    pub(crate) fn keep(&self, from: &File) -> io::Result<()> {
        contents::copy(from, &self.file)?;
        self.file.sync_all()
    }
}

/// The directory and the name of `path`.
pub(crate) fn split(path: &Path) -> Option<(&Path, &OsStr)> {
    Some((path.parent()?, path.file_name()?))
}

/// The folder that `path` lies in, where no planted link leads to, and the last name.
fn parent(path: &Path) -> io::Result<(OwnedFd, &OsStr)> {
    let (folder, name) = split(path).ok_or(io::ErrorKind::InvalidInput)?;
    Ok((reach::find(folder, true)?, name))
}

fn rename(from: &Path, to: &Path) -> Result<(), PluginError> {
    let renamed = || -> io::Result<()> {
        let ((old, from), (new, to)) = (parent(from)?, parent(to)?);
        match renameat_with(&old, from, &new, to, RenameFlags::NOREPLACE) {
            // File systems such as NFS know no such flag.
            Err(Errno::INVAL | Errno::NOSYS) => rename_plainly(&old, from, &new, to),
            other => Ok(other?),
        }
    };
    renamed().to(|| format!("rename {} to {}", from.display(), to.display()))
}

/// The same where the file system cannot be told not to replace: what has no other name gets a
/// second one first, and a folder is only moved to a name that is free when it is looked at.
fn rename_plainly(old: &OwnedFd, from: &OsStr, new: &OwnedFd, to: &OsStr) -> io::Result<()> {
    match linkat(old, from, new, to, AtFlags::empty()) {
        Ok(()) => return Ok(unlinkat(old, from, AtFlags::empty())?),
        Err(Errno::EXIST) => return Err(Errno::EXIST.into()),
        // Folders have one name, and some file systems give none a second one.
        Err(_) => {}
    }
    match statat(new, to, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(_) => Err(Errno::EXIST.into()),
        Err(Errno::NOENT) => Ok(renameat(old, from, new, to)?),
        Err(error) => Err(error.into()),
    }
}

/// PATH, `word` and a number that nobody has guessed.
pub(crate) fn random_name(path: &Path, word: &str) -> io::Result<PathBuf> {
    let mut bytes = [0; 8];
    getrandom(&mut bytes, GetRandomFlags::empty())?;
    named(path, &format!("{word}{:016x}", u64::from_ne_bytes(bytes)))
}

/// A file's name may take 255 bytes (NAME_MAX): what is too long is cut.
fn named(path: &Path, end: &str) -> io::Result<PathBuf> {
    use std::os::unix::ffi::OsStrExt;
    let (folder, name) = split(path).ok_or(io::ErrorKind::InvalidInput)?;
    let kept = name.as_bytes().len().min(255 - end.len());
    let mut name = OsStr::from_bytes(&name.as_bytes()[..kept]).to_owned();
    name.push(end);
    Ok(folder.join(name))
}

/// PATH.kedge-aside-N that does not exist.
fn aside_of(path: &Path) -> Result<PathBuf, PluginError> {
    if split(path).is_none() {
        return Err(damaged(format!("{}", path.display())));
    }
    let named = |number: u32| named(path, &format!(".kedge-aside-{number}")).ok();
    let is_free = |path: &PathBuf| path.symlink_metadata().is_err();
    let free = (1..MAX_ASIDE).filter_map(named).find(is_free);
    free.ok_or_else(|| {
        PluginError::Refused(format!("too many files {}.kedge-aside-*", path.display()))
    })
}

/// Removes what is at `path`, in the folder that no planted link leads to.
fn remove(path: &Path) -> io::Result<()> {
    let (folder, name) = parent(path)?;
    let found = statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
    let flags = match found.st_mode & libc::S_IFMT {
        libc::S_IFDIR => AtFlags::REMOVEDIR,
        _ => AtFlags::empty(),
    };
    Ok(unlinkat(&folder, name, flags)?)
}

/// Removes the empty folder at `path`, and nothing else.
fn remove_folder(path: &Path) -> io::Result<()> {
    let (folder, name) = parent(path)?;
    Ok(unlinkat(&folder, name, AtFlags::REMOVEDIR)?)
}

/// Removes the file at `path`, and nothing else.
fn remove_file(path: &Path) -> io::Result<()> {
    let (folder, name) = parent(path)?;
    Ok(unlinkat(&folder, name, AtFlags::empty())?)
}

/// Removes the file of a socket at `path`, and nothing else.
pub(crate) fn remove_socket(path: &Path) -> io::Result<()> {
    let (folder, name) = parent(path)?;
    let found = statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
    match found.st_mode & libc::S_IFMT {
        libc::S_IFSOCK => Ok(unlinkat(&folder, name, AtFlags::empty())?),
        _ => Err(io::ErrorKind::InvalidInput.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_plain_rename_replaces_nothing() {
        let folder = std::env::temp_dir().join(format!("kedge-plain-{}", std::process::id()));
        fs::create_dir_all(folder.join("folder")).unwrap();
        fs::write(folder.join("one"), "1").unwrap();
        fs::write(folder.join("two"), "2").unwrap();
        let at = reach::find(&folder, true).unwrap();
        let rename = |from: &str, to: &str| {
            rename_plainly(&at, OsStr::new(from), &at, OsStr::new(to)).map_err(|e| e.kind())
        };
        assert_eq!(rename("one", "two"), Err(io::ErrorKind::AlreadyExists));
        assert_eq!(rename("folder", "two"), Err(io::ErrorKind::AlreadyExists));
        assert_eq!(rename("one", "three"), Ok(()));
        assert_eq!(rename("folder", "other"), Ok(()));
        assert_eq!(fs::read(folder.join("three")).unwrap(), b"1");
        assert_eq!(fs::read(folder.join("two")).unwrap(), b"2");
        assert!(folder.join("other").is_dir() && !folder.join("one").exists());
        assert!(remove_socket(&folder.join("two")).is_err());
        fs::remove_dir_all(&folder).unwrap();
    }
}
