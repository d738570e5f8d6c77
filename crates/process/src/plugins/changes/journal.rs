//! The journal of a restart: what it has changed, so that somebody else can undo it.
//!
//! One line of status, of a fixed length, then a line of JSON for each record. A record is on the
//! disk before what it tells of is done; a last line that is not whole tells of nothing.

use super::folder::{self, Private};
use super::reach;
use crate::plugins::error::{Context, PluginError, damaged};
use crate::plugins::path::SavedPath;
use rustix::fs::{FlockOperation, OFlags, fcntl_lock};
use rustix::process::geteuid;
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The folder of journals, in the user's state folder.
pub(super) const FOLDER: &str = "restarts";
const END: &str = "journal";
/// Longest journal that is read: a record takes some hundred bytes.
const MAX_BYTES: u64 = 64 << 20;

const PENDING: &[u8] = b"kedge restart 1 pending \n";
const COMMITTED: &[u8] = b"kedge restart 1 finished\n";

/// How a file was when it was looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stamp {
    pub(crate) device: u64,
    pub(crate) inode: u64,
    /// Kind and permissions.
    pub(crate) mode: u32,
    pub(crate) size: u64,
    /// Seconds and nanoseconds.
    pub(crate) modified: (i64, i64),
}

impl Stamp {
    pub(crate) fn of(metadata: &Metadata) -> Stamp {
        Stamp {
            device: metadata.dev(),
            inode: metadata.ino(),
            mode: metadata.mode(),
            size: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
        }
    }

    /// Of what is at `path`, be it a link; no planted link leads there.
    pub(crate) fn at(path: &Path) -> io::Result<Stamp> {
        Ok(Stamp::of(&File::from(reach::find(path, false)?).metadata()?))
    }

    pub(super) fn is_file(&self) -> bool {
        self.mode & libc::S_IFMT == libc::S_IFREG
    }

    /// Whether it is the same file, whatever has become of it.
    pub(super) fn is(&self, other: &Stamp) -> bool {
        let identity = |stamp: &Stamp| (stamp.device, stamp.inode, stamp.mode & libc::S_IFMT);
        identity(self) == identity(other)
    }

    /// Whether nobody has written to it meanwhile. What is no file is not looked into.
    pub(super) fn is_untouched(&self, other: &Stamp) -> bool {
        let contents = |stamp: &Stamp| (stamp.size, stamp.modified);
        self.is(other) && (!self.is_file() || contents(self) == contents(other))
    }
}

/// What is about to be done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Record {
    /// Something of kedge's own is made.
    Make {
        path: SavedPath,
    },
    /// A socket is bound.
    Bind {
        path: SavedPath,
    },
    /// It has been bound, and made this file. Processes that have it end a little later than the
    /// journal's writer.
    Bound {
        path: SavedPath,
        what: Stamp,
    },
    Rename {
        from: SavedPath,
        to: SavedPath,
        what: Stamp,
    },
    /// The file's mode is changed, for a moment.
    Mode {
        path: SavedPath,
        what: Stamp,
    },
    /// The file's contents are changed to those of `saved`; what they were is in `kept`.
    Change {
        path: SavedPath,
        before: Stamp,
        after: Stamp,
        kept: SavedPath,
        saved: SavedPath,
    },
    /// Told when the restart has succeeded.
    Note {
        text: String,
    },
}

/// A journal that is written.
#[derive(Debug)]
pub(super) struct Journal {
    file: File,
    length: u64,
}

/// Returns the path of a new journal, which is made when there is something to be written.
///
/// # Errors
///
/// If the user has no state folder.
pub(crate) fn new_path() -> Result<PathBuf, PluginError> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let name = format!("{}{now:x}-{}.{END}", host(), std::process::id());
    Ok(folder::of(FOLDER)?.join(name))
}

/// What the names of this host's journals begin with: the folder may be one of several hosts, whose
/// files and processes are others.
fn host() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '.' { c } else { '_' };
    format!("{}-", name.trim().chars().map(plain).collect::<String>())
}

/// Whether that is the name of a journal of this host.
pub(super) fn is_ours(name: &OsStr) -> bool {
    let ends = Path::new(name).extension().is_some_and(|end| end == END);
    ends && name.to_str().is_some_and(|name| name.starts_with(&host()))
}

/// The folder that a journal at `path` lies in, and its name there.
pub(super) fn place(path: &Path) -> Option<(&Path, &OsStr)> {
    Some((path.parent()?, path.file_name()?))
}

/// Creates the file `name` in `folder` and locks it to the end of this process, and of none that it
/// makes: as long as it is locked, nobody undoes. Who settles others' journals may take the new one
/// for an empty one before it is locked, and remove it.
fn create_locked(folder: &Private, name: &OsStr) -> io::Result<File> {
    let new = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
    let mut error = io::Error::from(io::ErrorKind::AlreadyExists);
    for _ in 0..TRIES {
        let locked = folder.file(name, new).and_then(|file| {
            fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive)?;
            Ok((file.metadata()?.nlink() > 0, file))
        });
        match locked {
            Ok((true, file)) => return Ok(file),
            Ok((false, _)) => {}
            Err(why) => error = why,
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Err(error)
}

/// How often a journal is tried to be made.
const TRIES: usize = 50;

impl Journal {
    pub(super) fn create(path: &Path) -> Result<Journal, PluginError> {
        let what = || format!("make {}, which tells how to undo a restart", path.display());
        let place = place(path).ok_or_else(|| damaged("a journal without a folder"))?;
        let folder = Private::make(place.0)?;
        let file = create_locked(&folder, place.1).to(what)?;
        file.write_all_at(PENDING, 0).to(what)?;
        folder.sync().to(what)?;
        Ok(Journal { file, length: PENDING.len() as u64 })
    }

    pub(super) fn append(&mut self, records: &[Record]) -> Result<(), PluginError> {
        let mut text = Vec::new();
        for record in records {
            serde_json::to_writer(&mut text, record).to(|| "write a record")?;
            text.push(b'\n');
        }
        let written = self.file.write_all_at(&text, self.length);
        written.and_then(|()| self.file.sync_data()).to(|| "write a restart's journal")?;
        self.length += text.len() as u64;
        match self.length > MAX_BYTES {
            true => Err(PluginError::Refused("too many files are to be changed".to_owned())),
            false => Ok(()),
        }
    }

    pub(super) fn commit(&mut self) -> Result<(), PluginError> {
        let written = self.file.write_all_at(COMMITTED, 0);
        written.and_then(|()| self.file.sync_data()).to(|| "write a restart's journal")
    }
}

/// What a journal tells.
#[derive(Debug)]
pub(super) struct Told {
    pub(super) committed: bool,
    pub(super) records: Vec<Record>,
    /// Locked for as long as this lives.
    _file: File,
}

/// Reads the journal `name`, whose writer has ended; `None` where it has not, or where there is
/// none.
///
/// # Errors
///
/// If it is not this user's own, or not a journal.
pub(super) fn read(folder: &Private, name: &OsStr) -> io::Result<Option<Told>> {
    let file = match folder.file(name, OFlags::RDWR) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    let found = file.metadata()?;
    let private = found.is_file()
        && found.uid() == geteuid().as_raw()
        && found.mode() & 0o7777 == 0o600
        && found.nlink() == 1;
    if !private {
        return Err(io::Error::other("it is not this user's own: it is not followed"));
    }
    match fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive) {
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::ACCESS) => return Ok(None),
        other => other?,
    }
    // Somebody may have settled it meanwhile.
    if folder.inode(name)? != Some(found.ino()) {
        return Ok(None);
    }
    let mut text = Vec::new();
    (&file).take(MAX_BYTES + 1).read_to_end(&mut text)?;
    if text.len() as u64 > MAX_BYTES {
        return Err(io::Error::other("it is longer than any journal"));
    }
    let (committed, records) = parse(&text).ok_or_else(|| io::Error::other("it is damaged"))?;
    Ok(Some(Told { committed, records, _file: file }))
}

fn parse(text: &[u8]) -> Option<(bool, Vec<Record>)> {
    if text.is_empty() {
        return Some((false, Vec::new()));
    }
    let (status, rest) = text.split_at_checked(PENDING.len())?;
    let committed = status == COMMITTED;
    if !committed && status != PENDING {
        return None;
    }
    // What follows the last line's end was never whole.
    let end = rest.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    let lines = rest[..end].split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    let records = lines.map(serde_json::from_slice).collect::<Result<Vec<Record>, _>>().ok()?;
    let absolute = |path: &SavedPath| path.0.is_absolute();
    let plain = records.iter().all(|record| match record {
        Record::Make { path } | Record::Bind { path } => absolute(path),
        Record::Bound { path, .. } | Record::Mode { path, .. } => absolute(path),
        Record::Rename { from, to, .. } => absolute(from) && absolute(to),
        Record::Change { path, kept, .. } => absolute(path) && absolute(kept),
        Record::Note { .. } => true,
    });
    plain.then_some((committed, records))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn text() -> Vec<u8> {
        let what = Stamp::at(Path::new("/")).unwrap();
        let path = |name: &str| SavedPath(PathBuf::from(name));
        let records = [
            Record::Make { path: path("/a") },
            Record::Rename { from: path("/a"), to: path("/b"), what },
            Record::Note { text: "a\nb".into() },
        ];
        let mut text = PENDING.to_vec();
        for record in records {
            text.extend(serde_json::to_vec(&record).unwrap());
            text.push(b'\n');
        }
        text
    }

    #[test]
    fn a_record_that_is_not_whole_tells_of_nothing() {
        let text = text();
        assert_eq!(parse(&text).unwrap().1.len(), 3);
        assert_eq!(parse(&text[..text.len() - 1]).unwrap().1.len(), 2);
        assert_eq!(parse(&text[..PENDING.len()]).unwrap().1.len(), 0);
        assert_eq!(PENDING.len(), COMMITTED.len());
    }

    proptest! {
        #[test]
        fn nonsense_is_no_journal_and_never_a_panic(at in any::<prop::sample::Index>(), byte: u8) {
            let mut text = text();
            let at = at.index(text.len());
            text[at] = byte;
            let _ = parse(&text);
            let _ = parse(&text[..at]);
        }
    }
}
