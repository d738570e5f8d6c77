//! Opening and closing of files.

use crate::below::{self, by_descriptor};
use crate::caller::Caller;
use crate::engine::Engine;
use crate::file::{CachedFile, Handle};
use crate::mount::Mount;
use crate::names::new_mode;
use crate::nodes::Node;
use crate::tier::lock;
use fuser::{FileAttr, FopenFlags};
use rustix::fs::{Mode, OFlags};
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::UNIX_EPOCH;

/// Bits by which a program takes another user's rights: set-user-id, set-group-id.
const SET_USER: u32 = 0o4000;
const SET_GROUP: u32 = 0o2010;

/// How a program opens a file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Opening {
    flags: OFlags,
}

impl Opening {
    pub(crate) fn new(flags: i32) -> Opening {
        Opening { flags: OFlags::from_bits_retain(flags as u32) }
    }

    fn mode(self) -> OFlags {
        self.flags & OFlags::RWMODE
    }

    fn writes(self) -> bool {
        self.mode() != OFlags::RDONLY
    }

    /// Returns how the file below is opened: positions, appending and alignment are the cache's.
    fn below(self, kernel_gathers: bool) -> OFlags {
        match self.mode() {
            // The kernel reads the rest of a page of which a part was written.
            OFlags::WRONLY if kernel_gathers => OFlags::RDWR,
            mode => mode,
        }
    }

    /// Returns whether writes come here at once and not through the kernel's pages.
    fn is_direct(self, kernel_gathers: bool) -> bool {
        let sync = self.flags.intersects(OFlags::SYNC | OFlags::DSYNC);
        // Only the way through its pages has the kernel sync after a write.
        let direct = self.mode() == OFlags::WRONLY && !kernel_gathers;
        (direct || self.flags.contains(OFlags::DIRECT)) && !sync
    }
}

impl Mount {
    pub(crate) fn open_file(
        &self,
        caller: Caller,
        id: u64,
        opening: Opening,
    ) -> io::Result<(Handle, FopenFlags)> {
        let node = self.nodes.get(id)?;
        let gathers = self.engine.spec.kernel_gathers;
        // With all groups from the start: an ACL below may allow others what it denies a group.
        let own = |flags| caller.run_with_groups(|| below::reopen(&node.fd, flags));
        let file = match own(opening.below(gathers)) {
            // The kernel has checked that the caller may write; only its pages see what is read.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied && gathers => {
                own(opening.mode())?;
                below::reopen(&node.fd, opening.below(gathers))?
            }
            other => other?,
        };
        self.opened(caller, &node, file, opening)
    }

    pub(crate) fn create_file(
        &self,
        caller: Caller,
        parent: u64,
        name: &OsStr,
        (mode, umask): (u32, u32),
        opening: Opening,
    ) -> io::Result<(FileAttr, Handle, FopenFlags)> {
        let folder = self.nodes.get(parent)?;
        let gathers = self.engine.spec.kernel_gathers;
        let flags = opening.below(gathers)
            | (opening.flags & OFlags::EXCL)
            | OFlags::CREATE
            | OFlags::NOFOLLOW
            // Another node may have put a queue there, which would wait for its other end.
            | OFlags::NONBLOCK
            | OFlags::CLOEXEC;
        let mode = new_mode(&folder, mode, umask);
        let make = || Ok(rustix::fs::openat(&folder.fd, name, flags, mode)?);
        let file = caller.run_with_groups(make)?;
        if !rustix::fs::FileType::from_raw_mode(below::stat(&file)?.st_mode).is_file() {
            return Err(rustix::io::Errno::STALE.into());
        }
        let path = by_descriptor(&file);
        let node = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let (node, stat) = self.nodes.enter(node, parent, name)?;
        let opened = self.opened(caller, &node, File::from(file), opening);
        // The kernel is not told of it then.
        let (handle, flags) = opened.inspect_err(|_| self.nodes.forget(node.id, 1))?;
        Ok((self.engine.attributes(&node, &stat), handle, flags))
    }

    fn opened(
        &self,
        caller: Caller,
        node: &Node,
        below: File,
        opening: Opening,
    ) -> io::Result<(Handle, FopenFlags)> {
        let gathers = self.engine.spec.kernel_gathers;
        let file = self.engine.file(&node.fd)?;
        file.lock().writers += u32::from(opening.writes());
        let handle = Handle::new(file, below, caller.user, opening.writes());
        let mut flags = FopenFlags::empty();
        if opening.is_direct(gathers) {
            flags |= FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES;
        } else if self.is_unchanged(node)? {
            flags |= FopenFlags::FOPEN_KEEP_CACHE;
        }
        Ok((handle, flags))
    }

    /// Returns whether a file is what it was when it was opened last.
    fn is_unchanged(&self, node: &Node) -> io::Result<bool> {
        let attributes = self.engine.attributes_of(node)?;
        let since = attributes.mtime.duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = (since.as_secs() as i64, since.subsec_nanos().into(), attributes.size);
        let before = lock(&node.opened).replace(now);
        Ok(before == Some(now))
    }

    /// Calls what only takes paths, with the caller's rights.
    pub(crate) fn with_path<R>(
        &self,
        caller: Caller,
        id: u64,
        call: impl Fn(&Path) -> rustix::io::Result<R>,
    ) -> io::Result<R> {
        let node = self.nodes.get(id)?;
        let path: PathBuf = by_descriptor(&node.fd);
        caller.run(|| Ok(call(&path)?))
    }

    /// The same of what changes something: a group's members may keep a set-group-id bit.
    pub(crate) fn change_path(
        &self,
        caller: Caller,
        id: u64,
        call: impl Fn(&Path) -> rustix::io::Result<()>,
    ) -> io::Result<()> {
        let node = self.nodes.get(id)?;
        let path: PathBuf = by_descriptor(&node.fd);
        caller.run_with_groups(|| Ok(call(&path)?))
    }
}

impl Engine {
    /// Notes that a program has closed a file.
    pub(crate) fn close(self: &Arc<Engine>, handle: &Handle) {
        if handle.writes {
            let mut state = handle.file.lock();
            state.writers -= 1;
            if state.writers == 0 {
                self.desk().order.closed(handle.file.number);
            }
        }
        self.let_go(&handle.file);
    }

    /// Notes that one less has a file open.
    pub(crate) fn let_go(self: &Arc<Engine>, file: &Arc<CachedFile>) {
        let (unused, orphan) = {
            let state = file.lock();
            (file.opens.fetch_sub(1, Ordering::SeqCst) == 1, state.orphan)
        };
        if unused && orphan {
            let (engine, file) = (self.clone(), file.clone());
            self.pool.run(file.user, move || engine.discard(&file));
        } else if unused {
            self.forget_if_done(file);
        }
    }

    /// Takes the bits away by which a program has its owner's rights, before others change it.
    pub(crate) fn drop_privileges(&self, file: &CachedFile) {
        let Ok(stat) = below::stat(&file.node) else { return };
        let mut mode = stat.st_mode & 0o7777 & !SET_USER;
        if mode & SET_GROUP == SET_GROUP {
            mode &= !0o2000;
        }
        if mode != stat.st_mode & 0o7777 {
            let path = by_descriptor(&file.node);
            // A file below that keeps them is not changed by this write before it is drained.
            let _ = rustix::fs::chmod(path, Mode::from_raw_mode(mode));
        }
    }
}
