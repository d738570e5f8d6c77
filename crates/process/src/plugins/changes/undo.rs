//! Undoing a restart by what it has recorded: in its own process, or by another one later.
//!
//! What somebody has changed since is kept, and told.

use super::folder::Private;
use super::journal::{self, FOLDER, Record, Stamp, Told};
use super::{NEW, OLD, aside_of, folder, reach, remove, remove_file, remove_folder, remove_socket};
use super::{rename, split, steps};
use crate::plugins::contents;
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a restart that was killed may take to be gone.
const RESTART_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the socket of a process that has ended may take to be gone.
const LAST: Duration = Duration::from_secs(2);
/// Most journals that are looked at.
const MAX_JOURNALS: usize = 1024;
const PIECE: usize = 1 << 20;

/// What has been done about a restart that did not come to its end.
#[derive(Debug, Default)]
pub struct Settled {
    /// What the user should know, a sentence each.
    pub said: Vec<String>,
}

/// Undoes the restart of the journal at `path`, or tells what it has left if it had succeeded, and
/// removes the journal. Nothing, where there is none. Waits until the restart's processes are gone.
pub fn settle(path: &Path) -> io::Result<Settled> {
    let begin = Instant::now();
    let Some((folder, name)) = journal::place(path) else { return Ok(Settled::default()) };
    let folder = match Private::open(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Settled::default()),
        other => other?.ok_or_else(|| io::Error::other("its folder is not this user's alone"))?,
    };
    while folder.inode(name)?.is_some() {
        if let Some(told) = journal::read(&folder, name)? {
            return follow(&folder, name, &told);
        }
        if begin.elapsed() > RESTART_TIMEOUT {
            return Err(io::Error::other("the restart that wrote it does not end"));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(Settled::default())
}

/// Does the same with all journals of this user whose restarts have ended, on this host. Never
/// fails: what cannot be undone is told.
pub fn settle_all() -> Settled {
    folder::of(FOLDER).map(|folder| settle_in(&folder)).unwrap_or_default()
}

/// The same with all journals in the folder at `path`.
pub fn settle_in(path: &Path) -> Settled {
    let mut settled = Settled::default();
    let Ok(Some(folder)) = Private::open(path) else { return settled };
    let names = folder.names().unwrap_or_default();
    for name in names.iter().filter(|name| journal::is_ours(name)).take(MAX_JOURNALS) {
        let told = journal::read(&folder, name);
        let done = told.and_then(|told| told.map(|told| follow(&folder, name, &told)).transpose());
        match done {
            Ok(done) => settled.said.extend(done.unwrap_or_default().said),
            Err(why) => settled.said.push(format!(
                "a restart that was ended early cannot be undone by {}: {why}",
                path.join(name).display()
            )),
        }
    }
    settled
}

fn follow(folder: &Private, name: &OsStr, told: &Told) -> io::Result<Settled> {
    let said = if told.committed {
        remove_useless(&told.records);
        let notes = told.records.iter().filter_map(|record| match record {
            Record::Note { text } => Some(format!("an earlier restart: {text}")),
            _ => None,
        });
        notes.collect()
    } else {
        undo(&told.records)
    };
    folder.remove(name)?;
    Ok(Settled { said })
}

/// Removes what had no use any more once the restart had succeeded.
pub(super) fn remove_useless(records: &[Record]) {
    for record in records {
        if let Record::Rename { to, what, .. } = record
            && is_named(&to.0, OLD)
            && Stamp::at(&to.0).is_ok_and(|now| now.is(what))
        {
            // What cannot be removed stays, which harms nobody.
            let _ = remove_file(&to.0);
        }
    }
}

fn is_named(path: &Path, word: &str) -> bool {
    split(path).is_some_and(|(_, name)| name.to_string_lossy().contains(word))
}

/// Undoes what was done, the last first. What the user should know.
pub(super) fn undo(records: &[Record]) -> Vec<String> {
    let renamed = |record: &Record| match record {
        Record::Rename { from, what, .. } => Some((from.0.clone(), *what)),
        _ => None,
    };
    let mut undoing =
        Undoing { kept: records.iter().filter_map(renamed).collect(), ..Undoing::default() };
    records.iter().rev().for_each(|record| undoing.one(record));
    if undoing.files > 0 {
        let files = undoing.files;
        let files = if files == 1 { "1 file".to_owned() } else { format!("{files} files") };
        undoing.said.insert(0, format!("a restart was ended early: {files} put back as before it"));
    }
    undoing.said
}

#[derive(Debug, Default)]
struct Undoing {
    said: Vec<String>,
    /// How many files of the user's are again what they were.
    files: usize,
    /// What copies are that were to be moved aside, by their first path.
    kept: BTreeMap<PathBuf, Stamp>,
    /// What is not removed, though it is kedge's own.
    spared: BTreeSet<PathBuf>,
}

impl Undoing {
    fn one(&mut self, record: &Record) {
        match record {
            Record::Make { path } => self.unmake(&path.0),
            Record::Bind { path } if is_dead_socket(&path.0) => drop(remove_socket(&path.0)),
            Record::Bound { path, what } if Stamp::at(&path.0).is_ok_and(|now| now.is(what)) => {
                // It may have been removed meanwhile.
                let _ = remove_socket(&path.0);
            }
            Record::Bind { .. } | Record::Bound { .. } | Record::Note { .. } => {}
            Record::Mode { path, what } => drop(put_mode_back(&path.0, what)),
            Record::Rename { from, to, what } => self.rename_back(&from.0, &to.0, what),
            Record::Change { path, before, after, kept, saved } => {
                self.change_back(&path.0, (before, after), &kept.0, &saved.0);
            }
        }
    }

    fn unmake(&mut self, path: &Path) {
        if is_named(path, NEW) && !self.spared.contains(path) {
            // It may never have been made, or have got its name.
            let _ = remove(path);
        }
    }

    fn rename_back(&mut self, from: &Path, to: &Path, what: &Stamp) {
        let new = is_named(from, NEW);
        let Some(now) = Stamp::at(to).ok().filter(|now| now.is(what)) else {
            let undone = Stamp::at(from).is_ok_and(|now| now.is(what));
            if !new && !undone {
                let (from, to) = (from.display(), to.display());
                self.said.push(format!(
                    "{from}, which a restart had moved to {to}, is not there any more"
                ));
            }
            return;
        };
        if new && now.mode & libc::S_IFMT == libc::S_IFDIR {
            // In which somebody has put something.
            let _ = remove_folder(to);
            return;
        }
        if new && !now.is_untouched(what) {
            let to = to.display();
            self.said
                .push(format!("{to} was changed after a restart that was ended early: it is kept"));
            return;
        }
        match rename(to, from) {
            Ok(()) => self.files += usize::from(!new && !is_named(to, OLD)),
            Err(_) => {
                let (from, to) = (from.display(), to.display());
                self.said
                    .push(format!("what {from} was before a restart that was ended early is {to}"));
            }
        }
    }

    fn change_back(
        &mut self,
        path: &Path,
        (before, after): (&Stamp, &Stamp),
        kept: &Path,
        saved: &Path,
    ) {
        let now = reach::open_at(path, OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK);
        let now = now.map(File::from);
        let stamp =
            now.as_ref().ok().and_then(|now| now.metadata().ok()).map(|now| Stamp::of(&now));
        match (now, stamp) {
            (_, Some(stamp)) if stamp == *before => {}
            (Ok(now), Some(stamp)) if stamp.is(before) => {
                let copy = open_kept(kept, self.kept.get(kept));
                let done = match whose(&now, &stamp, after, copy.as_ref().ok(), saved) {
                    Whose::Theirs => return self.spare(path, kept),
                    Whose::Ours => copy.and_then(|copy| put_back(&now, before, &copy)),
                    Whose::Unknown => copy_aside(path, &now).and_then(|beside| {
                        self.said.push(format!(
                            "what {} held in the midst of a restart is {}",
                            path.display(),
                            beside.display()
                        ));
                        copy.and_then(|copy| put_back(&now, before, &copy))
                    }),
                };
                match done {
                    Ok(()) => self.files += 1,
                    Err(why) => {
                        self.said.push(format!("cannot put {} back: {why}", path.display()));
                        self.spare(path, kept);
                    }
                }
            }
            _ => self.spare(path, kept),
        }
    }

    /// Leaves what somebody has changed, and what it was before.
    fn spare(&mut self, path: &Path, kept: &Path) {
        let aside = aside_of(path).ok().filter(|aside| rename(kept, aside).is_ok());
        self.spared.insert(kept.to_owned());
        let (path, aside) = (path.display(), aside.as_deref().unwrap_or(kept).display());
        self.said.push(format!(
            "{path} is kept as it is now; what it was before a restart that was ended early is {aside}"
        ));
    }
}

/// Who has written what a file holds now.
enum Whose {
    Ours,
    Theirs,
    Unknown,
}

/// Opens the copy of what a file held: a plain file with one name, where no planted link leads to,
/// and the one that was made, if that is known.
fn open_kept(path: &Path, known: Option<&Stamp>) -> io::Result<File> {
    let file = open_plain(path)?;
    let found = file.metadata()?;
    let is_it = found.nlink() == 1 && known.is_none_or(|known| Stamp::of(&found).is(known));
    is_it.then_some(file).ok_or_else(|| {
        let what = format!("{} is not the copy that was made of it", path.display());
        io::Error::new(io::ErrorKind::PermissionDenied, what)
    })
}

/// Opens a regular file, without waiting for anybody.
fn open_plain(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = File::from(reach::open_at(path, flags)?);
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::ErrorKind::InvalidInput.into()),
    }
}

fn whose(now: &File, stamp: &Stamp, after: &Stamp, kept: Option<&File>, saved: &Path) -> Whose {
    if stamp.is_untouched(after) {
        return Whose::Ours;
    }
    let (Some(old), Ok(new)) = (kept, open_plain(saved)) else { return Whose::Unknown };
    match is_between(now, old, &new) {
        Ok(true) => Whose::Ours,
        Ok(false) => Whose::Theirs,
        Err(_) => Whose::Unknown,
    }
}

/// Whether each byte is one of `old` or of `new`: those were being written when it was ended. Past
/// the end of a file there are zeros.
fn is_between(now: &File, old: &File, new: &File) -> io::Result<bool> {
    let length = |file: &File| file.metadata().map(|found| found.len());
    let end = length(now)?;
    if end > length(old)?.max(length(new)?) {
        return Ok(false);
    }
    let mut pieces = [vec![0; PIECE], vec![0; PIECE], vec![0; PIECE]];
    let mut at = 0;
    while at < end {
        let [a, b, c] = &mut pieces;
        let want = PIECE.min((end - at) as usize);
        for (file, piece) in [(now, &mut *a), (old, &mut *b), (new, &mut *c)] {
            read_or_zero(file, &mut piece[..want], at)?;
        }
        let is = |index: usize| a[index] == b[index] || a[index] == c[index] || a[index] == 0;
        if !(0..want).all(is) {
            return Ok(false);
        }
        at += want as u64;
    }
    Ok(true)
}

fn read_or_zero(file: &File, mut piece: &mut [u8], mut at: u64) -> io::Result<()> {
    while !piece.is_empty() {
        match file.read_at(piece, at) {
            Ok(0) => {
                piece.fill(0);
                return Ok(());
            }
            Ok(count) => (piece, at) = (&mut piece[count..], at + count as u64),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Copies what a file holds beside it.
fn copy_aside(path: &Path, now: &File) -> io::Result<PathBuf> {
    let to = aside_of(path).map_err(io::Error::other)?;
    let copy = File::options().read(true).write(true).create_new(true).open(&to)?;
    contents::copy(now, &copy)?;
    copy.sync_all().map(|()| to)
}

/// Gives the file the contents, the mode and the time that it had.
fn put_back(now: &File, before: &Stamp, kept: &File) -> io::Result<()> {
    let mode = Permissions::from_mode(before.mode & 0o7777);
    // It was open for writing by this mode.
    fs::set_permissions(reach::through(now), mode)?;
    let file = File::from(reach::again(now, OFlags::RDWR)?);
    contents::overwrite(kept, &file)?;
    // A change of contents has cleared set-user-ID bits.
    fs::set_permissions(reach::through(now), Permissions::from_mode(before.mode & 0o7777))?;
    steps::set_time(&file, before.modified)?;
    file.sync_all()
}

/// Takes back what was added to a file's mode, if that is all that was done to it.
fn put_mode_back(path: &Path, what: &Stamp) -> io::Result<()> {
    let found = reach::find(path, false)?;
    let through = reach::through(&found);
    let now = Stamp::of(&fs::metadata(&through)?);
    match now.is(what) && now.mode == what.mode | 0o600 {
        true => fs::set_permissions(through, Permissions::from_mode(what.mode & 0o7777)),
        false => Ok(()),
    }
}

/// Whether there is a socket's file whose socket has gone, or goes in a moment: a process gives its
/// locks back a little before its sockets.
fn is_dead_socket(path: &Path) -> bool {
    let begin = Instant::now();
    loop {
        match is_refused(path) {
            Ok(false) if begin.elapsed() < LAST => std::thread::sleep(Duration::from_millis(2)),
            other => return other.unwrap_or(false),
        }
    }
}

/// Whether the socket at `path` has gone; an error where there is none.
fn is_refused(path: &Path) -> io::Result<bool> {
    if !path.symlink_metadata()?.file_type().is_socket() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let (folder, name) = split(path).ok_or(io::ErrorKind::InvalidInput)?;
    let folder = reach::find(folder, true)?;
    let address = SocketAddrUnix::new(reach::through(&folder).join(name))?;
    // Of a living socket of another type the kernel says that it is one (EPROTOTYPE).
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
    Ok(connect(&socket, &address) == Err(Errno::CONNREFUSED))
}
