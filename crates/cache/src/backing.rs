//! The folder below: reached by the descriptor that was opened before the mount.

use crate::caller::Caller;
use crate::tier::lock;
use rustix::fs::{
    AtFlags, CWD, Mode, OFlags, ResolveFlags, Stat, StatxFlags, Timespec, Timestamps, UTIME_NOW,
    UTIME_OMIT,
};
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// How old a word on free space may be.
const FRESH: Duration = Duration::from_millis(200);
/// Space that is left free below, and what part of all at most.
const MARGIN: u64 = 16 << 20;
const MARGIN_PART: u64 = 100;

/// What is promised of the space below.
#[derive(Debug)]
struct Space {
    free: u64,
    margin: u64,
    asked: Option<Instant>,
    promised: u64,
}

/// The folder below.
#[derive(Debug)]
pub(crate) struct BackingFolder {
    pub(crate) root: OwnedFd,
    /// Its path as the kernel has it.
    prefix: Vec<u8>,
    /// The mount that it is on.
    mount: u64,
    space: Mutex<Space>,
    /// Whether each part is synced before it counts as drained: what such a file system keeps at
    /// this node until then, others do not see.
    pub(crate) keeps_writes: bool,
}

/// File systems that keep what was written at this node until a sync or close: NFS, SMB, 9p, AFS,
/// and whatever is in user space, as `statfs` tells them.
const KEEP_WRITES: [u64; 7] =
    [0x6969, 0x517b, 0xfe53_4d42, 0xff53_4d42, 0x0102_1997, 0x5346_414f, 0x6573_5546];

/// Returns the path by which a descriptor is opened anew.
pub(crate) fn by_descriptor(fd: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

/// Changes when a file was changed last, and nothing else of it.
pub(crate) fn touch(fd: &OwnedFd) -> io::Result<()> {
    let stat = stat(fd)?;
    let times = Timestamps {
        last_access: Timespec { tv_sec: stat.st_atime, tv_nsec: stat.st_atime_nsec as _ },
        last_modification: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
    };
    let (path, none) = (by_descriptor(fd), AtFlags::empty());
    let set = || Ok(rustix::fs::utimensat(CWD, &path, &times, none)?);
    match Caller::run_as_owner(&stat, set) {
        // Of a file of others, who may write it may set both times to now alone.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
            let now = Timestamps { last_access: now, last_modification: now };
            Ok(rustix::fs::utimensat(CWD, &path, &now, none)?)
        }
        other => other,
    }
}

/// Opens what a path descriptor stands for.
pub(crate) fn reopen(fd: &OwnedFd, flags: OFlags) -> io::Result<File> {
    let flags = flags | OFlags::CLOEXEC | OFlags::NOCTTY;
    Ok(File::from(rustix::fs::open(by_descriptor(fd), flags, Mode::empty())?))
}

/// Opens a name in a folder, which may be a link, as a path descriptor.
pub(crate) fn path_descriptor(folder: &OwnedFd, name: &OsStr) -> io::Result<OwnedFd> {
    let bytes = name.as_bytes();
    if bytes.is_empty() || bytes == b"." || bytes == b".." || bytes.contains(&b'/') {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(folder, name, flags, Mode::empty())?)
}

/// Returns what the file system below knows of a path descriptor.
pub(crate) fn stat(fd: &OwnedFd) -> io::Result<Stat> {
    Ok(rustix::fs::statat(fd, "", AtFlags::EMPTY_PATH)?)
}

/// Returns the mount that a path descriptor is on; its device where the kernel does not tell.
fn mount_of(fd: &OwnedFd) -> io::Result<u64> {
    let known = rustix::fs::statx(fd, "", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID);
    match known {
        Ok(known) if StatxFlags::from_bits_retain(known.stx_mask).contains(StatxFlags::MNT_ID) => {
            Ok(known.stx_mnt_id)
        }
        _ => Ok(stat(fd)?.st_dev),
    }
}

/// Returns when a file was made, in nanoseconds since 1970; 0 where the file system does not say.
pub(crate) fn birth(fd: &OwnedFd) -> u64 {
    let Ok(stat) = rustix::fs::statx(fd, "", AtFlags::EMPTY_PATH, StatxFlags::BTIME) else {
        return 0;
    };
    if !StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::BTIME) {
        return 0;
    }
    let seconds = u64::try_from(stat.stx_btime.tv_sec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(stat.stx_btime.tv_nsec.into())
}

/// Returns whether something is there and cannot be opened in that way; folders are never written.
fn is_refused(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::IsADirectory)
}

impl BackingFolder {
    /// Opens the folder. Whatever is mounted over it later is not seen by this descriptor.
    pub(crate) fn open(under: &Path) -> io::Result<BackingFolder> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(under, flags, Mode::empty())?;
        let prefix = std::fs::read_link(by_descriptor(&root))?.as_os_str().as_bytes().to_vec();
        let mount = mount_of(&root)?;
        let space = Space { free: 0, margin: 0, asked: None, promised: 0 };
        let kind = rustix::fs::fstatfs(&root)?.f_type as u64;
        let keeps_writes = KEEP_WRITES.contains(&(kind & u64::from(u32::MAX)));
        Ok(BackingFolder { root, prefix, mount, space: Mutex::new(space), keeps_writes })
    }

    /// Has the disk have a file or folder, whatever its mode lets the daemon do: where neither its
    /// owner nor the daemon may open it, all of the file system is synced.
    pub(crate) fn sync(&self, node: &OwnedFd) -> io::Result<()> {
        let owner = stat(node)?;
        let open = |flags| Caller::run_as_owner(&owner, || reopen(node, flags));
        let opened = match open(OFlags::RDONLY) {
            Err(error) if is_refused(&error) => open(OFlags::WRONLY),
            other => other,
        };
        match opened {
            Err(error) if is_refused(&error) => {}
            other => return other?.sync_all(),
        }
        match reopen(&self.root, OFlags::RDONLY | OFlags::DIRECTORY) {
            Ok(root) if self.contains(node) => Ok(rustix::fs::syncfs(root)?),
            _ => {
                rustix::fs::sync();
                Ok(())
            }
        }
    }

    /// Returns whether a file is on the folder's own mount. What is mounted beneath is not looked
    /// at when a killed daemon's files are looked for: another mount may be there by then.
    pub(crate) fn contains(&self, fd: &OwnedFd) -> bool {
        mount_of(fd).is_ok_and(|mount| mount == self.mount)
    }

    /// Returns the name of a file from the folder on, as it is now.
    pub(crate) fn name_of(&self, fd: &OwnedFd) -> io::Result<Vec<u8>> {
        let path = std::fs::read_link(by_descriptor(fd))?;
        let name = path.as_os_str().as_bytes().strip_prefix(&self.prefix[..]);
        let name = name.and_then(|name| name.strip_prefix(b"/")).ok_or(io::ErrorKind::NotFound)?;
        Ok(name.to_vec())
    }

    /// Finds a file by its name from the folder on; no link is followed, and no mount entered.
    pub(crate) fn find(&self, name: &[u8]) -> io::Result<OwnedFd> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH
            | ResolveFlags::NO_SYMLINKS
            | ResolveFlags::NO_MAGICLINKS
            | ResolveFlags::NO_XDEV;
        Ok(rustix::fs::openat2(&self.root, name, flags, Mode::empty(), resolve)?)
    }

    /// Lists a folder: the number of each entry, whether it is a folder, if the file system tells
    /// (or may be one), and its name.
    pub(crate) fn list(&self, name: &[u8]) -> io::Result<Vec<(u64, bool, Vec<u8>)>> {
        let folder = match name {
            [] => self.root.try_clone()?,
            name => self.find(name)?,
        };
        let folder = OwnedFd::from(reopen(&folder, OFlags::RDONLY | OFlags::DIRECTORY)?);
        let mut entries = Vec::new();
        for entry in rustix::fs::Dir::new(folder)? {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." {
                let kinds = [rustix::fs::FileType::Directory, rustix::fs::FileType::Unknown];
                let is_folder = kinds.contains(&entry.file_type());
                entries.push((entry.ino(), is_folder, name.to_vec()));
            }
        }
        Ok(entries)
    }

    /// Promises space to a write, if it is there.
    pub(crate) fn promise(&self, bytes: u64) -> bool {
        let mut space = lock(&self.space);
        let fits = |space: &Space| space.promised + bytes + space.margin <= space.free;
        if space.asked.is_none_or(|asked| asked.elapsed() > FRESH) || !fits(&space) {
            let Ok(stat) = rustix::fs::fstatvfs(&self.root) else { return false };
            space.free = stat.f_bavail.saturating_mul(stat.f_frsize);
            let all = stat.f_blocks.saturating_mul(stat.f_frsize);
            space.margin = MARGIN.min(all / MARGIN_PART);
            space.asked = Some(Instant::now());
        }
        let fits = fits(&space);
        if fits {
            space.promised += bytes;
        }
        fits
    }

    /// Promises space for what is held already.
    pub(crate) fn promise_held(&self, bytes: u64) {
        lock(&self.space).promised += bytes;
    }

    /// Takes a promise back: the bytes are below, or need not be there any more.
    pub(crate) fn settle(&self, bytes: u64) {
        let mut space = lock(&self.space);
        space.promised = space.promised.saturating_sub(bytes);
        // They may have used up what was free at the last look.
        space.free = space.free.saturating_sub(bytes);
    }

    /// Returns how much is promised.
    pub(crate) fn promised(&self) -> u64 {
        lock(&self.space).promised
    }
}
