//! Contents that come back: what the job had written is found again, and what was written since
//! the checkpoint is moved aside, not lost.

use super::Inode;
use crate::plugins::changes::{Dress, InPlace, Later, New, Old, Stamp, random_name, reach, split};
use crate::plugins::contents;
use crate::plugins::error::{Context, PluginError, damaged};
use crate::plugins::sys;
use crate::plugins::world::World;
use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, fchmod, mkdirat, openat, unlinkat};
use rustix::process::geteuid;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// What databases put beside a file, and would replay into it: SQLite's, by the end of their name.
pub(super) const COMPANIONS: [&str; 3] = ["-journal", "-wal", "-shm"];
/// Where shared memory has its names (shm_overview(7)).
const MEMORY: &str = "/dev/shm";

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

/// Sees to it that the contents of `inode` come back, if the image has them. The file, if it has no
/// name or is not, or not as yet, what has its name.
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
            let saved = (saved, world.options.folder.join(name));
            let put_back = named(inode, &path, saved, world);
            if inode.if_gone {
                without_it(inode, &path, put_back, world)?;
            } else {
                put_back?;
                lead_aside(inode, &path, names, world);
            }
            world.changes.home(&path).map(File::try_clone).transpose().to(|| "duplicate it")
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

/// A program may well do without a file that it did not hold open: that it cannot be put back is
/// told.
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

/// Makes those folders that are gone, for their owner alone; what cannot be made is told by what
/// was in there.
pub(super) fn make_folders(inodes: &[Inode], world: &mut World) {
    let mut folders: Vec<PathBuf> =
        passing_folders(inodes).map(|inode| world.path(&inode.path.0)).collect();
    // Each before what it holds.
    folders.sort();
    for folder in folders.iter().filter(|folder| is_gone(folder)) {
        if let Err(why) = world.changes.make(folder, FileType::Directory) {
            world.note(format!("{}, a temporary folder, is not there: {why}", folder.display()));
        }
    }
}

/// Gives them owner, mode and time: last, because what is put into them needs the one and changes
/// the other.
pub(super) fn dress_folders(inodes: &[Inode], world: &mut World) {
    let mut folders: Vec<(PathBuf, &Inode)> =
        passing_folders(inodes).map(|inode| (world.path(&inode.path.0), inode)).collect();
    folders.retain(|(path, _)| world.changes.has_made(path));
    for (path, inode) in folders {
        let dress = dress(inode);
        world.changes.later(Later::Folder { path, dress });
    }
}

/// A file without a name, best in the directory where it was.
fn nameless(inode: &Inode, path: &Path, saved: &File) -> Result<File, PluginError> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let make = |folder: &Path| -> io::Result<OwnedFd> {
        Ok(openat(reach::find(folder, true)?, ".", flags, Mode::RUSR | Mode::WUSR)?)
    };
    let parent = path.parent().unwrap_or(Path::new("/"));
    let made = make(parent).or_else(|_| make(&std::env::temp_dir()));
    let file =
        File::from(made.to(|| format!("make a file without a name in {}", parent.display()))?);
    contents::copy(saved, &file).to(|| "copy a file out of the image")?;
    dress(inode).put_on(&file, true)?;
    Ok(file)
}

/// A directory that was removed while it was open.
fn nameless_directory(inode: &Inode, path: &Path) -> Result<File, PluginError> {
    if inode.mode & libc::S_IFMT != libc::S_IFDIR {
        return Err(damaged("a file without name and contents"));
    }
    let make = |folder: &Path| -> io::Result<File> {
        let name = random_name(Path::new("folder"), "")?;
        let folder = reach::find(folder, true)?;
        mkdirat(&folder, &name, Mode::RWXU | Mode::RWXG | Mode::RWXO)?;
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = openat(&folder, &name, flags, Mode::empty());
        unlinkat(&folder, &name, AtFlags::REMOVEDIR)?;
        let opened = File::from(opened?);
        // Whoever may write in there could have exchanged it.
        match opened.metadata()?.uid() == geteuid().as_raw() {
            true => Ok(opened),
            false => Err(io::ErrorKind::PermissionDenied.into()),
        }
    };
    let parent = path.parent().unwrap_or(Path::new("/"));
    make(parent).or_else(|_| make(&std::env::temp_dir())).to(|| "make a directory without a name")
}

/// Contents in the image: the file, and its path.
type Contents = (File, PathBuf);

/// Sees to it that the file at `path` will be what it was.
fn named(
    inode: &Inode,
    path: &Path,
    saved: Contents,
    world: &mut World,
) -> Result<(), PluginError> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
    let now = match reach::open_at(path, flags).map(File::from) {
        Ok(now) if is_unchanged(&now, &saved.0, path)? => return Ok(()),
        Ok(now) if !now.metadata().is_ok_and(|metadata| metadata.is_file()) => {
            let what = format!("{} is another kind of file than it was", path.display());
            return Err(PluginError::Refused(what));
        }
        Ok(now) => Some(now),
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        // Its mode may be so; a link that is not followed is told.
        Err(e) if e.raw_os_error() == Some(libc::EACCES) => None,
        Err(e) => return Err(e).to(|| format!("open {}", path.display())),
    };
    let old = if inode.if_gone { Old::Stays } else { Old::Aside };
    match now.filter(|now| is_itself(inode, now)) {
        // As it went on after the checkpoint, shared memory is of no more use than the rest that
        // died.
        Some(_) if path.starts_with(MEMORY) => replace(inode, path, saved, Old::Useless, world),
        // Programs know their files by inode: SQLite does.
        Some(now) if sys::nobody_writes(&now) && !cuts_mapped(inode, path, &now, world) => {
            match reach::again(&now, OFlags::RDWR).map(File::from) {
                Ok(file) => in_place(inode, path, file, saved, world),
                Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                    replace(inode, path, saved, old, world)
                }
                Err(e) => Err(e).to(|| format!("write {}", path.display())),
            }
        }
        _ => replace(inode, path, saved, old, world),
    }
}

fn is_itself(inode: &Inode, now: &File) -> bool {
    let found = now.metadata().map(|metadata| (metadata.dev(), metadata.ino()));
    found.is_ok_and(|found| found == inode.identity)
}

/// Whether the job maps the file and it is shorter now: until it has its old contents, there would
/// be no memory where the job has some.
fn cuts_mapped(inode: &Inode, path: &Path, now: &File, world: &World) -> bool {
    let shorter = now.metadata().is_ok_and(|now| now.len() < inode.size);
    shorter && world.options.mapped.contains(path)
}

/// Keeps what the file, which is open for writing, holds now; leaves it to the end to give it its
/// old contents.
fn in_place(
    inode: &Inode,
    path: &Path,
    file: File,
    saved: Contents,
    world: &mut World,
) -> Result<(), PluginError> {
    let look = || format!("look at {}", path.display());
    let before = Stamp::of(&file.metadata().to(look)?);
    has_room(&file, &saved.0, path)?;
    let aside = match beside(path, world)? {
        Some(new) => (new, path.to_owned()),
        // The folder is somebody else's.
        None => elsewhere(path, world)?,
    };
    let (new, aside) = aside;
    new.keep(&file).to(|| format!("copy {} aside", path.display()))?;
    let mode = Mode::from_raw_mode(before.mode & 0o777);
    fchmod(&new.file, mode).to(|| format!("set the mode of {}", new.path.display()))?;
    world.changes.will_be(path, &file)?;
    let (path, kept, dress) = (path.to_owned(), new.path, dress(inode));
    let change = InPlace { path, file, before, kept, aside, saved, dress };
    world.changes.later(Later::InPlace(change));
    Ok(())
}

/// Whether there is room for what the file is to hold.
fn has_room(file: &File, saved: &File, path: &Path) -> Result<(), PluginError> {
    let what = || format!("look at {}", path.display());
    let taken = |file: &File| Ok::<_, PluginError>(file.metadata().to(what)?.blocks() * 512);
    let more = taken(saved)?.saturating_sub(taken(file)?);
    let room = rustix::fs::fstatvfs(file).to(what)?;
    match more > room.f_bavail.saturating_mul(room.f_frsize) {
        true => Err(io::Error::from(io::ErrorKind::StorageFull))
            .to(|| format!("restore {}, which takes {more} bytes more than now", path.display())),
        false => Ok(()),
    }
}

/// Makes a new file beside `path`; `None` where this user may not.
fn beside(path: &Path, world: &mut World) -> Result<Option<New>, PluginError> {
    match world.changes.make_file(path) {
        Ok(made) => made.map(Some),
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => Ok(None),
        Err(e) => Err(e).to(|| format!("make a file beside {}", path.display())),
    }
}

/// Makes one in a folder of the user's own: the file, and the path that it is to be named after.
fn elsewhere(path: &Path, world: &mut World) -> Result<(New, PathBuf), PluginError> {
    let name = split(path).ok_or_else(|| damaged(format!("{}", path.display())))?.1;
    let to = world.changes.kept_folder()?.join(name);
    let made = world.changes.make_file(&to);
    Ok((made.to(|| format!("make a file in {}", to.display()))??, to))
}

/// Makes a new file that is to take the place of whatever has the name, if anything has.
fn replace(
    inode: &Inode,
    path: &Path,
    saved: Contents,
    old: Old,
    world: &mut World,
) -> Result<(), PluginError> {
    world.make_folders(path)?;
    let Some(new) = beside(path, world)? else {
        let file = reach::open_at(path, OFlags::RDWR | OFlags::NONBLOCK).map(File::from);
        let file = file.to(|| format!("write {}", path.display()))?;
        return in_place(inode, path, file, saved, world);
    };
    contents::copy(&saved.0, &new.file).to(|| format!("restore {}", path.display()))?;
    dress(inode).put_on(&new.file, true)?;
    world.changes.will_be(path, &new.file)?;
    world.changes.later(Later::Place { new, path: path.to_owned(), old });
    Ok(())
}

fn is_unchanged(now: &File, saved: &File, path: &Path) -> Result<bool, PluginError> {
    if !now.metadata().is_ok_and(|metadata| metadata.is_file()) {
        return Ok(false);
    }
    contents::same(now, saved).to(|| format!("compare {} with the image", path.display()))
}

fn dress(inode: &Inode) -> Dress {
    // A temporary file that nobody holds open has no need to lend anybody's rights.
    let kept = if inode.if_gone { 0o1777 } else { 0o7777 };
    Dress { owner: inode.owner, mode: inode.mode & kept, modified: inode.modified }
}

/// Companions that came after the checkpoint would be replayed into the file as it was.
fn lead_aside(inode: &Inode, path: &Path, names: &BTreeSet<PathBuf>, world: &mut World) {
    for end in COMPANIONS {
        let path = companion(path, end);
        if !names.contains(&path) && !inode.companions.iter().any(|known| known == end) {
            world.changes.later(Later::Aside { path });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::path::ResolvedPath;

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
            path: ResolvedPath(PathBuf::from("/nowhere")),
            identity: (0, 0),
            opened: Vec::new(),
        }
    }

    fn dressed(owner: Option<(u32, u32)>) -> std::fs::Metadata {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let file = File::from(
            rustix::fs::open(std::env::temp_dir(), flags, Mode::RUSR | Mode::WUSR).unwrap(),
        );
        dress(&inode(owner)).put_on(&file, true).unwrap();
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
