//! Operations on names: they happen below, at once, with the caller's rights.

use crate::backing::{self, by_descriptor};
use crate::caller::Caller;
use crate::drain::timespec;
use crate::engine::{Engine, identity};
use crate::file::{CachedFile, Key, State};
use crate::journal::Record;
use crate::mount::Mount;
use crate::nodes::{Node, Nodes};
use crate::spec::Fsync;
use crate::tier::lock;
use fuser::{FileAttr, FileType, INodeNo, RenameFlags, TimeOrNow};
use rustix::fs::{AtFlags, Dir, Mode, OFlags, Stat, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// After so long, kernels have had the disk have what was written.
const SETTLED: Duration = Duration::from_secs(120);

/// What setattr changes beside the size.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    pub(crate) mode: Option<u32>,
    pub(crate) user: Option<u32>,
    pub(crate) group: Option<u32>,
    pub(crate) accessed: Option<TimeOrNow>,
    pub(crate) modified: Option<TimeOrNow>,
}

/// An open folder: its entries are read as they are asked for.
#[derive(Debug)]
pub(crate) struct Folder {
    dir: Dir,
    /// The position of the next entry.
    at: i64,
    /// Who opened it.
    pub(crate) user: u32,
}

impl Folder {
    /// Hands entries from a position on to `take`, each with the position behind it, until that
    /// returns that it has enough.
    pub(crate) fn read(
        &mut self,
        from: i64,
        mut take: impl FnMut(u64, i64, FileType, &[u8]) -> bool,
    ) -> io::Result<()> {
        if from == 0 {
            // What is there by now.
            self.dir.rewind();
        } else if from != self.at {
            self.dir.seek(from)?;
        }
        self.at = from;
        while let Some(entry) = self.dir.next() {
            let entry = entry?;
            let kind = kind(entry.file_type().as_raw_mode());
            let (next, name) = (entry.offset(), entry.file_name().to_bytes());
            if take(entry.ino(), next, kind, name) {
                // The one that did not fit is the next one's first.
                return Ok(self.dir.seek(self.at)?);
            }
            self.at = next;
        }
        Ok(())
    }
}

fn key_of(stat: &Stat) -> Key {
    (stat.st_dev, stat.st_ino)
}

fn time(seconds: i64, nanos: u64) -> SystemTime {
    let whole = Duration::from_secs(seconds.unsigned_abs());
    let second =
        if seconds < 0 { UNIX_EPOCH.checked_sub(whole) } else { UNIX_EPOCH.checked_add(whole) };
    second.unwrap_or(UNIX_EPOCH) + Duration::from_nanos(nanos)
}

fn kind(mode: u32) -> FileType {
    match rustix::fs::FileType::from_raw_mode(mode) {
        rustix::fs::FileType::Directory => FileType::Directory,
        rustix::fs::FileType::Symlink => FileType::Symlink,
        rustix::fs::FileType::Fifo => FileType::NamedPipe,
        rustix::fs::FileType::Socket => FileType::Socket,
        rustix::fs::FileType::CharacterDevice => FileType::CharDevice,
        rustix::fs::FileType::BlockDevice => FileType::BlockDevice,
        _ => FileType::RegularFile,
    }
}

/// Returns a file's attributes as the folder below has them.
fn attributes_below(node: &Node, stat: &Stat) -> FileAttr {
    FileAttr {
        ino: INodeNo(node.id),
        size: stat.st_size as u64,
        blocks: stat.st_blocks as u64,
        atime: time(stat.st_atime, stat.st_atime_nsec),
        mtime: time(stat.st_mtime, stat.st_mtime_nsec),
        ctime: time(stat.st_ctime, stat.st_ctime_nsec),
        crtime: UNIX_EPOCH,
        kind: kind(stat.st_mode),
        perm: (stat.st_mode & 0o7777) as u16,
        nlink: stat.st_nlink as u32,
        uid: stat.st_uid,
        gid: stat.st_gid,
        rdev: stat.st_rdev as u32,
        blksize: stat.st_blksize as u32,
        flags: 0,
    }
}

impl Engine {
    /// Returns a file's attributes: those below, but what the cache knows better.
    pub(crate) fn attributes(&self, node: &Node, stat: &Stat) -> FileAttr {
        if kind(stat.st_mode) != FileType::RegularFile {
            return attributes_below(node, stat);
        }
        let file = self.known(key_of(stat));
        let state = file.as_ref().map(|file| file.lock());
        // Asked once more, as nothing is drained now: a drain that has ended since then had given
        // the file a time of its own for a while.
        let now = backing::stat(&node.fd);
        let mut attributes = attributes_below(node, now.as_ref().unwrap_or(stat));
        let Some(state) = state else { return attributes };
        attributes.size = attributes.size.max(state.end());
        attributes.blocks += state.extents.unwritten().div_ceil(512);
        if let Some(written) = state.written {
            attributes.mtime = written;
            attributes.ctime = attributes.ctime.max(written);
        }
        attributes
    }

    pub(crate) fn attributes_of(&self, node: &Node) -> io::Result<FileAttr> {
        Ok(self.attributes(node, &backing::stat(&node.fd)?))
    }

    pub(crate) fn change(&self, caller: Caller, node: &Node, changes: &Changes) -> io::Result<()> {
        let path = by_descriptor(&node.fd);
        if let Some(mode) = changes.mode {
            let mode = Mode::from_raw_mode(mode & 0o7777);
            caller.run_with_groups(|| Ok(rustix::fs::chmod(&path, mode)?))?;
        }
        if changes.user.is_some() || changes.group.is_some() {
            let user = changes.user.map(rustix::fs::Uid::from_raw);
            let group = changes.group.map(rustix::fs::Gid::from_raw);
            let flags = AtFlags::EMPTY_PATH;
            caller.run(|| Ok(rustix::fs::chownat(&node.fd, "", user, group, flags)?))?;
            self.owner_changed(key_of(&backing::stat(&node.fd)?));
        }
        if changes.accessed.is_some() || changes.modified.is_some() {
            self.change_times(caller, node, changes)?;
        }
        Ok(())
    }

    fn change_times(&self, caller: Caller, node: &Node, changes: &Changes) -> io::Result<()> {
        let special = |tv_nsec| Timespec { tv_sec: 0, tv_nsec };
        let times = Timestamps {
            last_access: match changes.accessed {
                None => special(UTIME_OMIT),
                Some(TimeOrNow::Now) => special(UTIME_NOW),
                Some(TimeOrNow::SpecificTime(time)) => timespec(time),
            },
            last_modification: match changes.modified {
                None => special(UTIME_OMIT),
                Some(TimeOrNow::Now) => special(UTIME_NOW),
                Some(TimeOrNow::SpecificTime(time)) => timespec(time),
            },
        };
        let path = by_descriptor(&node.fd);
        caller
            .run(|| Ok(rustix::fs::utimensat(rustix::fs::CWD, &path, &times, AtFlags::empty())?))?;
        if let Some(modified) = changes.modified
            && let Some(file) = self.known(key_of(&backing::stat(&node.fd)?))
        {
            let mut state = file.lock();
            // It counts after the drain, too.
            if !state.extents.is_clean() {
                state.written = Some(match modified {
                    TimeOrNow::Now => SystemTime::now(),
                    TimeOrNow::SpecificTime(time) => time,
                });
            }
        }
        Ok(())
    }

    /// Has the journals know a file's owner: after a crash, no other's file is taken for it.
    fn owner_changed(&self, key: Key) {
        let _world = self.world.read();
        let Some(file) = self.known(key) else { return };
        let mut state = file.lock();
        let Ok(stat) = backing::stat(&file.node) else { return };
        if state.path.is_empty() || state.orphan || stat.st_uid == state.owner {
            return;
        }
        state.owner = stat.st_uid;
        self.tell_identity(&file, &state);
    }

    /// Writes what is known of a file into the journals of the tiers that have something of it.
    fn tell_identity(&self, file: &CachedFile, state: &State) {
        for tier in (0..self.tiers.len()).filter(|tier| state.shadows[*tier].is_some()) {
            self.note_freed(tier, &Record::File(file.number, identity(file, state)));
        }
        self.tell_partner_identity(file, state);
    }
}

impl Mount {
    /// Finds a name, for the kernel.
    pub(crate) fn look_up(&self, parent: u64, name: &OsStr) -> io::Result<FileAttr> {
        let parent = self.nodes.get(parent)?;
        let fd = backing::path_descriptor(&parent.fd, name)?;
        let (node, stat) = self.nodes.enter(fd, parent.id, name)?;
        Ok(self.engine.attributes(&node, &stat))
    }

    pub(crate) fn attributes_by_id(&self, id: u64) -> io::Result<FileAttr> {
        let node = self.nodes.get(id)?;
        self.engine.attributes_of(&node)
    }

    /// Makes a name with `make`, which is given the parent and the new one's mode, and looks it up.
    ///
    /// As the folder below may have a default ACL, which counts in place of the umask, the kernel
    /// leaves both to whoever makes the file.
    pub(crate) fn make(
        &self,
        caller: Caller,
        parent: u64,
        name: &OsStr,
        (mode, umask): (u32, u32),
        make: impl Fn(&Node, Mode) -> rustix::io::Result<()>,
    ) -> io::Result<FileAttr> {
        let folder = self.nodes.get(parent)?;
        let mode = new_mode(&folder, mode, umask);
        caller.make(mode, || Ok(make(&folder, mode)?))?;
        self.look_up(parent, name)
    }

    pub(crate) fn remove(
        &self,
        caller: Caller,
        parent: u64,
        name: &OsStr,
        flags: AtFlags,
    ) -> io::Result<()> {
        let parent = self.nodes.get(parent)?;
        let key = rustix::fs::statat(&parent.fd, name, AtFlags::SYMLINK_NOFOLLOW);
        caller.run(|| Ok(rustix::fs::unlinkat(&parent.fd, name, flags)?))?;
        if let Ok(stat) = key {
            self.engine.name_is_gone(key_of(&stat), &parent.fd);
        }
        Ok(())
    }

    pub(crate) fn open_folder(&self, caller: Caller, id: u64) -> io::Result<Folder> {
        let node = self.nodes.get(id)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let folder = caller.run(|| backing::reopen(&node.fd, flags))?;
        let dir = Dir::new(std::os::fd::OwnedFd::from(folder))?;
        Ok(Folder { dir, at: 0, user: caller.user })
    }

    pub(crate) fn link_to(
        &self,
        caller: Caller,
        node: &Node,
        to: &Node,
        name: &OsStr,
    ) -> io::Result<()> {
        let path = by_descriptor(&node.fd);
        let (here, flags) = (rustix::fs::CWD, AtFlags::SYMLINK_FOLLOW);
        caller.run(|| Ok(rustix::fs::linkat(here, &path, &to.fd, name, flags)?))
    }

    pub(crate) fn target(&self, id: u64) -> io::Result<Vec<u8>> {
        let node = self.nodes.get(id)?;
        Ok(rustix::fs::readlinkat(&node.fd, "", Vec::new())?.into_bytes())
    }
}

/// A name that becomes another one.
#[derive(Debug)]
pub(crate) struct Rename {
    from: (Arc<Node>, OsString),
    to: (Arc<Node>, OsString),
    flags: RenameFlags,
}

impl Rename {
    pub(crate) fn new(
        nodes: &Nodes,
        (parent, name): (u64, &OsStr),
        (new_parent, new_name): (u64, &OsStr),
        flags: RenameFlags,
    ) -> io::Result<Rename> {
        let from = (nodes.get(parent)?, name.to_owned());
        let to = (nodes.get(new_parent)?, new_name.to_owned());
        Ok(Rename { from, to, flags })
    }

    /// Returns the file that takes the name of another one, which is gone then, and must be durable
    /// before; `None` if it takes none, or is as it was for a while, or nothing is made durable and
    /// nothing was lost.
    pub(crate) fn replacement(&self, engine: &Engine) -> Option<OwnedFd> {
        let plain = engine.spec.fsync == Fsync::Memory && lock(&engine.broken).files == 0;
        if plain || self.flags.contains(RenameFlags::RENAME_NOREPLACE) {
            return None;
        }
        let file = |(folder, name): &(Arc<Node>, OsString)| {
            let stat = rustix::fs::statat(&folder.fd, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
            (kind(stat.st_mode) == FileType::RegularFile).then_some(stat)
        };
        let (renamed, replaced) = (file(&self.from)?, file(&self.to)?);
        if key_of(&renamed) == key_of(&replaced) {
            return None;
        }
        let node = backing::path_descriptor(&self.from.0.fd, &self.from.1).ok()?;
        if engine.spec.fsync == Fsync::Memory {
            let lost = |file: Arc<CachedFile>| !file.lock().broken.is_empty();
            return engine.known(key_of(&renamed)).is_some_and(lost).then_some(node);
        }
        (!engine.is_settled(&node, SETTLED)).then_some(node)
    }
}

impl Engine {
    /// Returns whether all of a file is below and nothing of it lost, has something there, and has
    /// been the same for longer than `since`.
    pub(crate) fn is_settled(&self, node: &OwnedFd, since: Duration) -> bool {
        let Ok(stat) = backing::stat(node) else { return false };
        // What a tier has was not written below: nothing there says when.
        let held = |file: Arc<CachedFile>| {
            let state = file.lock();
            !state.extents.is_clean() || !state.broken.is_empty()
        };
        if self.known(key_of(&stat)).is_some_and(held) {
            return false;
        }
        // It may have been drained since the first look.
        let Ok(stat) = backing::stat(node) else { return false };
        let changed = time(stat.st_ctime, stat.st_ctime_nsec);
        stat.st_size > 0 && changed.elapsed().is_ok_and(|passed| passed > since)
    }

    /// Renames, with the caller's rights.
    pub(crate) fn rename(
        self: &Arc<Engine>,
        caller: Caller,
        Rename { from: (from, name), to: (to, new_name), flags, .. }: &Rename,
    ) -> io::Result<()> {
        let replaced = rustix::fs::statat(&to.fd, new_name, AtFlags::SYMLINK_NOFOLLOW);
        let flags = rustix::fs::RenameFlags::from_bits_retain(flags.bits());
        caller.run(|| Ok(rustix::fs::renameat_with(&from.fd, name, &to.fd, new_name, flags)?))?;
        if let Ok(stat) = replaced {
            self.name_is_gone(key_of(&stat), &to.fd);
        }
        let moved = rustix::fs::statat(&to.fd, new_name, AtFlags::SYMLINK_NOFOLLOW);
        let exchanged = rustix::fs::statat(&from.fd, name, AtFlags::SYMLINK_NOFOLLOW);
        self.names_changed(&[moved.ok(), exchanged.ok()]);
        Ok(())
    }

    /// Drops what is held of a file if its last name, in `folder`, is gone and nobody has it open.
    ///
    /// What a local disk has of it goes later: after a power cut, the name may be there again.
    pub(crate) fn name_is_gone(self: &Arc<Engine>, key: Key, folder: &Arc<OwnedFd>) {
        let Some(file) = self.known(key) else { return };
        if !backing::stat(&file.node).is_ok_and(|stat| stat.st_nlink == 0) {
            return;
        }
        let unused = {
            let _world = self.world.read();
            let mut state = file.lock();
            state.orphan = true;
            self.partner_forgets(&file, &mut state);
            let (durable, memory): (Vec<_>, Vec<_>) = (0..self.tiers.len())
                .filter(|tier| state.shadows[*tier].is_some())
                .partition(|tier| self.tiers[*tier].is_durable());
            state.gone_from = (!durable.is_empty()).then(|| folder.clone());
            // A daemon that is killed from now on leaves nothing of it to recover.
            for tier in memory {
                self.note_freed(tier, &Record::Drop(file.number));
            }
            for tier in durable {
                self.note_freed(tier, &Record::Gone(file.number));
            }
            !file.is_open()
        };
        if unused {
            // A part on its way below may take long to get there.
            let engine = self.clone();
            self.pool.run(file.user, move || engine.discard(&file));
        }
    }

    /// Has the journals know files by the names that they have now, after these were renamed.
    ///
    /// A folder takes what is in it along; then all files are looked at.
    fn names_changed(&self, renamed: &[Option<Stat>]) {
        let _world = self.world.read();
        let renamed: Vec<&Stat> = renamed.iter().flatten().collect();
        let folder = renamed.iter().any(|stat| kind(stat.st_mode) == FileType::Directory);
        let files: Vec<_> = match folder {
            true => lock(&self.files).by_number.values().cloned().collect(),
            false => renamed.iter().filter_map(|stat| self.known(key_of(stat))).collect(),
        };
        for file in files {
            let mut state = file.lock();
            if state.path.is_empty() || state.orphan {
                continue;
            }
            let Ok(path) = self.below.name_of(&file.node) else { continue };
            if path != state.path {
                state.path = path;
                self.tell_identity(&file, &state);
            }
        }
    }
}

/// Returns the mode of something new in a folder: a default ACL there counts in place of the umask.
pub(crate) fn new_mode(folder: &Node, mode: u32, umask: u32) -> Mode {
    let path = by_descriptor(&folder.fd);
    let acl = rustix::fs::getxattr_query(&path, "system.posix_acl_default");
    let inherits = acl.is_ok_and(|length| length > 0);
    Mode::from_raw_mode(if inherits { mode & 0o7777 } else { mode & 0o7777 & !umask })
}

/// Makes a symbolic link.
pub(crate) fn symlink(folder: &Node, name: &OsStr, target: &Path) -> rustix::io::Result<()> {
    rustix::fs::symlinkat(target, &folder.fd, name)
}
