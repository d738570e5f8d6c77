//! Contents that come back: what the job had written is found again, and what was written since
//! the checkpoint is moved aside, not lost.

use super::{Inode, split};
use crate::plugins::changes::folder;
use crate::plugins::contents;
use crate::plugins::error::{Context, PluginError, damaged};
use crate::plugins::sys;
use crate::plugins::world::World;
use rustix::fs::{CWD, Mode, OFlags, Timespec, Timestamps, fchmod, futimens, open, openat};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// What databases put beside a file, and would replay into it: SQLite's, by the end of their name.
pub(super) const COMPANIONS: [&str; 3] = ["-journal", "-wal", "-shm"];
/// Where shared memory has its names (shm_overview(7)).
const MEMORY: &str = "/dev/shm";
/// Most names that are tried for something moved aside.
const MAX_ASIDE: u32 = 10_000;

/// The companions of `path` that are there.
pub(super) fn companions(path: &Path) -> Vec<String> {
    let there = |end: &&&str| companion(path, end).symlink_metadata().is_ok();
    COMPANIONS.iter().filter(there).map(|end| (*end).to_owned()).collect()
}

fn companion(path: &Path, end: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(end);
    PathBuf::from(name)
}

/// Where all files of the image are now.
pub(super) fn names(inodes: &[Inode], world: &World) -> BTreeSet<PathBuf> {
    let named = inodes.iter().filter(|inode| !inode.unlinked);
    let paths = |inode: &'_ Inode| {
        let opened = inode.opened.iter().map(|opened| opened.path.0.clone());
        opened.chain([inode.path.0.clone()]).collect::<Vec<_>>()
    };
    named.flat_map(paths).map(|path| world.path(&path)).collect()
}

/// Puts the contents of `inode` back, if the image has them. The file, if it has no name.
pub(super) fn restore(
    inode: &Inode,
    names: &BTreeSet<PathBuf>,
    world: &mut World,
) -> Result<Option<File>, PluginError> {
    let path = world.path(&inode.path.0);
    if inode.if_gone && !is_gone(&path) {
        return Ok(None);
    }
    match &inode.contents {
        Some(name) if inode.mode & libc::S_IFMT == libc::S_IFREG => {
            let saved = world.content(name)?;
            if saved.metadata().to(|| format!("look at {name}"))?.len() != inode.size {
                return Err(damaged(format!("{name} has not {} bytes", inode.size)));
            }
            if inode.unlinked {
                return nameless(inode, &path, &saved).map(Some);
            }
            let put_back = named(inode, &path, &saved, world);
            if inode.if_gone {
                return without_it(inode, &path, put_back, world).map(|()| None);
            }
            put_back?;
            lead_aside(inode, &path, names, world).map(|()| None)
        }
        Some(_) => Err(damaged("contents of what is not a file")),
        None if inode.unlinked => nameless_directory(inode, &path).map(Some),
        None => Ok(None),
    }
}

/// Whether nothing is there, and something could be.
fn is_gone(path: &Path) -> bool {
    path.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// A program may well do without a file that it did not hold open: that it cannot be put back is told.
fn without_it(
    inode: &Inode,
    path: &Path,
    put_back: Result<(), PluginError>,
    world: &mut World,
) -> Result<(), PluginError> {
    match put_back {
        Err(why) if inode.opened.is_empty() => {
            world.note(format!("{}, a temporary file, is not there: {why}", path.display()));
            Ok(())
        }
        other => other,
    }
}

/// The folders of the image that are for the case that they are gone.
fn passing_folders(inodes: &[Inode]) -> impl Iterator<Item = &Inode> {
    let is = |inode: &&Inode| inode.if_gone && inode.mode & libc::S_IFMT == libc::S_IFDIR;
    inodes.iter().filter(is)
}

/// Makes those folders that are gone, for their owner alone; what cannot be made is told by what was in there.
pub(super) fn make_folders(inodes: &[Inode], world: &mut World) {
    let mut folders: Vec<PathBuf> =
        passing_folders(inodes).map(|inode| world.path(&inode.path.0)).collect();
    // Each before what it holds.
    folders.sort();
    for folder in folders.iter().filter(|folder| is_gone(folder)) {
        if fs::DirBuilder::new().mode(0o700).create(folder).is_ok() {
            world.made_folder(folder);
        }
    }
}

/// Gives them owner, mode and time: last, because what is put into them needs the one and changes the other.
pub(super) fn dress_folders(inodes: &[Inode], world: &mut World) {
    let mut folders: Vec<(PathBuf, &Inode)> =
        passing_folders(inodes).map(|inode| (world.path(&inode.path.0), inode)).collect();
    folders.retain(|(path, _)| world.has_made_folder(path));
    for (path, inode) in folders {
        let opened = open(&path, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
        let dressed = opened.to(|| "open it").and_then(|folder| dress(inode, &File::from(folder)));
        if let Err(why) = dressed {
            world.note(format!("{}, a temporary folder, is not as it was: {why}", path.display()));
        }
    }
}

/// A file without a name, best in the directory where it was.
fn nameless(inode: &Inode, path: &Path, saved: &File) -> Result<File, PluginError> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let make = |folder: &Path| open(folder, flags, Mode::RUSR | Mode::WUSR);
    let parent = path.parent().unwrap_or(Path::new("/"));
    let made = make(parent).or_else(|_| make(&std::env::temp_dir()));
    let file =
        File::from(made.to(|| format!("make a file without a name in {}", parent.display()))?);
    contents::copy(saved, &file).to(|| "copy a file out of the image")?;
    dress(inode, &file)?;
    Ok(file)
}

/// A directory that was removed while it was open.
fn nameless_directory(inode: &Inode, path: &Path) -> Result<File, PluginError> {
    if inode.mode & libc::S_IFMT != libc::S_IFDIR {
        return Err(damaged("a file without name and contents"));
    }
    let make = |folder: &Path| -> io::Result<File> {
        let name = folder.join(format!(".kedge-{}-{}", std::process::id(), inode.size));
        fs::create_dir(&name)?;
        let opened = openat(CWD, &name, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
        fs::remove_dir(&name)?;
        Ok(File::from(opened?))
    };
    let parent = path.parent().unwrap_or(Path::new("/"));
    make(parent).or_else(|_| make(&std::env::temp_dir())).to(|| "make a directory without a name")
}

/// Makes the file at `path` what it was.
fn named(inode: &Inode, path: &Path, saved: &File, world: &mut World) -> Result<(), PluginError> {
    let now = match File::open(path) {
        Ok(now) if is_unchanged(&now, saved, path)? => return Ok(()),
        Ok(now) if !now.metadata().is_ok_and(|metadata| metadata.is_file()) => {
            let what = format!("{} is another kind of file than it was", path.display());
            return Err(PluginError::Refused(what));
        }
        Ok(now) => Some(now),
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => None,
        Err(e) => return Err(e).to(|| format!("open {}", path.display())),
    };
    match now.filter(|now| is_itself(inode, now)) {
        // As it went on after the checkpoint, shared memory is of no more use than the rest that died.
        Some(_) if path.starts_with(MEMORY) => replace(inode, path, saved, true, world),
        // Programs know their files by inode: SQLite does.
        Some(now) if sys::nobody_writes(&now) => set_back(inode, path, &now, saved, world),
        _ => replace(inode, path, saved, false, world),
    }
}

fn is_itself(inode: &Inode, now: &File) -> bool {
    let found = now.metadata().map(|metadata| (metadata.dev(), metadata.ino()));
    found.is_ok_and(|found| found == inode.identity)
}

/// Gives the file its old contents, and a new one those that it has now.
fn set_back(
    inode: &Inode,
    path: &Path,
    now: &File,
    saved: &File,
    world: &mut World,
) -> Result<(), PluginError> {
    let file = match File::options().write(true).open(path) {
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
            return replace(inode, path, saved, false, world);
        }
        other => other.to(|| format!("write {}", path.display()))?,
    };
    let to = free_name(path, "kedge-aside")?;
    let mut options = File::options();
    let aside = options.read(true).write(true).create_new(true).mode(inode.mode & 0o777).open(&to);
    let aside = match aside {
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
            return overwrite(path, saved, world);
        }
        other => other.to(|| format!("create {}", to.display()))?,
    };
    world.temporary(&to);
    contents::copy(now, &aside).to(|| format!("copy {} aside", path.display()))?;
    world.overwritten(path, &to);
    rustix::fs::ftruncate(&file, 0)
        .map_err(io::Error::from)
        .and_then(|()| contents::copy(saved, &file))
        .to(|| format!("restore {}", path.display()))?;
    dress(inode, &file)?;
    let (path, to) = (path.display(), to.display());
    world.note(format!("{path} had changed since the checkpoint: what it held is in {to} now"));
    Ok(())
}

/// Puts a new file in the place of whatever has the name, if anything has: that is moved aside, unless it is `useless`.
fn replace(
    inode: &Inode,
    path: &Path,
    saved: &File,
    useless: bool,
    world: &mut World,
) -> Result<(), PluginError> {
    world.make_folders(path)?;
    let new = free_name(path, "kedge-new")?;
    let mut options = File::options();
    options.read(true).write(true).create_new(true).mode(0o600);
    let file = match options.open(&new) {
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
            return overwrite(path, saved, world);
        }
        other => other.to(|| format!("create {}", new.display()))?,
    };
    world.temporary(&new);
    contents::copy(saved, &file).to(|| format!("restore {}", path.display()))?;
    dress(inode, &file)?;
    if useless {
        let old = free_name(path, "kedge-old")?;
        world.rename(path, &old)?;
        world.useless(&old);
    } else {
        aside(path, world)?;
    }
    world.rename(&new, path)
}

fn is_unchanged(now: &File, saved: &File, path: &Path) -> Result<bool, PluginError> {
    if !now.metadata().is_ok_and(|metadata| metadata.is_file()) {
        return Ok(false);
    }
    contents::same(now, saved).to(|| format!("compare {} with the image", path.display()))
}

/// Gives a file its old contents whose folder is not ours: those that it has now are kept in a
/// folder of the user's own.
fn overwrite(path: &Path, saved: &File, world: &mut World) -> Result<(), PluginError> {
    let file = File::options().read(true).write(true).open(path);
    let file = file.to(|| format!("write {}", path.display()))?;
    let name = split(path).ok_or_else(|| damaged(format!("{}", path.display())))?.1;
    let to = free_name(&folder::make("kept")?.join(name), "kedge-aside")?;
    let mut options = File::options();
    let aside = options.read(true).write(true).create_new(true).mode(0o600).open(&to);
    let aside = aside.to(|| format!("create {}", to.display()))?;
    world.temporary(&to);
    contents::copy(&file, &aside).to(|| format!("copy {} to {}", path.display(), to.display()))?;
    world.overwritten(path, &to);
    rustix::fs::ftruncate(&file, 0)
        .map_err(io::Error::from)
        .and_then(|()| contents::copy(saved, &file))
        .to(|| format!("restore {}", path.display()))?;
    let (path, to) = (path.display(), to.display());
    world.note(format!("{path} had changed since the checkpoint: what it held is in {to} now"));
    Ok(())
}

/// Gives the file its owner, then its mode and the time of its last change.
///
/// Set-user-ID and set-group-ID bits lend the rights of the owner: they are set only on a file that
/// has the owner that it had, and after it got that owner, because a change of owner clears them.
fn dress(inode: &Inode, file: &File) -> Result<(), PluginError> {
    let owned = inode.owner.is_some_and(|owner| give_to(owner, file));
    // A temporary file that nobody holds open has no need to lend anybody's rights.
    let kept = if inode.if_gone || !owned { 0o1777 } else { 0o7777 };
    let mode = Mode::from_raw_mode(inode.mode & kept);
    fchmod(file, mode).to(|| "set a file's mode")?;
    let (tv_sec, nanoseconds) = inode.modified;
    if nanoseconds >= 1_000_000_000 {
        return Err(damaged("a file's time"));
    }
    let time = Timespec { tv_sec, tv_nsec: i64::from(nanoseconds) };
    let times = Timestamps { last_access: time, last_modification: time };
    futimens(file, &times).to(|| "set a file's time")
}

/// Makes user and group the file's owner; whether they are. An ordinary user may not give files
/// away, and has no need to: its files are its own.
fn give_to((user, group): (u32, u32), file: &File) -> bool {
    let _ = std::os::unix::fs::fchown(file, Some(user), Some(group));
    let now = file.metadata().map(|now| (now.uid(), now.gid()));
    now.is_ok_and(|now| now == (user, group))
}

/// Companions that came after the checkpoint would be replayed into the file as it is now.
fn lead_aside(
    inode: &Inode,
    path: &Path,
    names: &BTreeSet<PathBuf>,
    world: &mut World,
) -> Result<(), PluginError> {
    for end in COMPANIONS {
        let companion = companion(path, end);
        if !names.contains(&companion) && !inode.companions.iter().any(|known| known == end) {
            aside(&companion, world)?;
        }
    }
    Ok(())
}

/// Moves what is at `path`, if anything, to a name that is told to the user.
fn aside(path: &Path, world: &mut World) -> Result<(), PluginError> {
    if path.symlink_metadata().is_err() {
        return Ok(());
    }
    let to = free_name(path, "kedge-aside")?;
    world.rename(path, &to)?;
    let (path, to) = (path.display(), to.display());
    world.note(format!("{path} had changed since the checkpoint: it is {to} now"));
    Ok(())
}

/// PATH.WORD-N that does not exist.
fn free_name(path: &Path, word: &str) -> Result<PathBuf, PluginError> {
    let (folder, name) = split(path).ok_or_else(|| damaged(format!("{}", path.display())))?;
    let named = |number: u32| {
        let mut name = name.to_owned();
        name.push(format!(".{word}-{number}"));
        folder.join(name)
    };
    let free = (1..MAX_ASIDE).map(named).find(|path| path.symlink_metadata().is_err());
    free.ok_or_else(|| PluginError::Refused(format!("too many files {}.{word}-*", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::path::SavedPath;

    fn inode(owner: Option<(u32, u32)>) -> Inode {
        Inode {
            mode: libc::S_IFREG | 0o6755,
            size: 0,
            modified: (1, 2),
            unlinked: true,
            contents: None,
            if_gone: false,
            owner,
            companions: Vec::new(),
            path: SavedPath(PathBuf::from("/nowhere")),
            identity: (0, 0),
            opened: Vec::new(),
        }
    }

    fn dressed(owner: Option<(u32, u32)>) -> fs::Metadata {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let file = File::from(open(std::env::temp_dir(), flags, Mode::RUSR | Mode::WUSR).unwrap());
        dress(&inode(owner), &file).unwrap();
        file.metadata().unwrap()
    }

    #[test]
    fn set_user_id_bits_come_back_with_their_owner_alone() {
        let (user, group) = (rustix::process::geteuid(), rustix::process::getegid());
        let own = (user.as_raw(), group.as_raw());
        assert_eq!(dressed(Some(own)).mode() & 0o7777, 0o6755);
        assert_eq!(dressed(None).mode() & 0o7777, 0o755);
        // Root may give it to anybody, nobody else may.
        let other = dressed(Some((own.0 + 4321, own.1)));
        let given = other.uid() != own.0;
        assert_eq!(given, user.is_root());
        assert_eq!(other.mode() & 0o7777, if given { 0o6755 } else { 0o755 });
    }
}
