//! Opens and closes files of the mount.

use crate::backing::{self, by_descriptor};
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

/// The set-user-id bit.
const SET_USER: u32 = 0o4000;
/// The set-group-id bit, which counts together with the group's right to execute.
const SET_GROUP: u32 = 0o2010;

/// How a program opens a file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Opening {
    flags: OFlags,
}

impl Opening {
    /// Creates one of `open`'s flags.
    pub(crate) fn new(flags: i32) -> Opening {
        Opening { flags: OFlags::from_bits_retain(flags as u32) }
    }

    fn mode(self) -> OFlags {
        self.flags & OFlags::RWMODE
    }

    fn writes(self) -> bool {
        self.mode() != OFlags::RDONLY
    }

    /// Returns the flags for the file below: the cache itself sees to positions, appending and
    /// alignment.
    fn backing_flags(self, kernel_gathers: bool) -> OFlags {
        match self.mode() {
            // To write a part of a page, the kernel reads the page first.
            OFlags::WRONLY if kernel_gathers => OFlags::RDWR,
            mode => mode,
        }
    }

    /// Returns whether reads and writes bypass the kernel's page cache.
    ///
    /// Where the kernel gathers, it alone knows where a file ends: what has not come here yet would
    /// be missed by a read that did. It sees to O_DIRECT by itself then.
    fn is_direct(self, kernel_gathers: bool) -> bool {
        let sync = self.flags.intersects(OFlags::SYNC | OFlags::DSYNC);
        let direct = self.mode() == OFlags::WRONLY || self.flags.contains(OFlags::DIRECT);
        // The kernel syncs after a write (O_SYNC) only if that goes through its page cache.
        direct && !sync && !kernel_gathers
    }
}

impl Mount {
    /// Opens the file of node `id` for `caller`.
    ///
    /// # Errors
    /// What the file system below refuses.
    pub(crate) fn open_file(
        &self,
        caller: Caller,
        id: u64,
        opening: Opening,
    ) -> io::Result<(Handle, FopenFlags)> {
        let node = self.nodes.get(id)?;
        let gathers = self.engine.spec.kernel_gathers;
        // All groups from the start: an ACL may deny to one of them what it allows to others.
        let own = |flags| caller.run_with_groups(|| backing::reopen(&node.fd, flags));
        let file = match own(opening.backing_flags(gathers)) {
            // The caller may write but not read: the daemon opens the file for both, and what is
            // read goes into the kernel's page cache alone.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied && gathers => {
                own(opening.mode())?;
                backing::reopen(&node.fd, opening.backing_flags(gathers))?
            }
            other => other?,
        };
        self.opened(caller, &node, file, opening)
    }

    /// Creates a file in the folder of node `parent`, or opens the one there, for `caller`.
    ///
    /// # Errors
    /// What the file system below refuses; `ESTALE` if something other than a file is there.
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
        let flags = opening.backing_flags(gathers)
            | (opening.flags & OFlags::EXCL)
            | OFlags::CREATE
            | OFlags::NOFOLLOW
            // Opening a FIFO, which another node may have put there, would wait for its other end.
            | OFlags::NONBLOCK
            | OFlags::CLOEXEC;
        let mode = new_mode(&folder, mode, umask);
        let make = || Ok(rustix::fs::openat(&folder.fd, name, flags, mode)?);
        let file = caller.run_with_groups(make)?;
        if !rustix::fs::FileType::from_raw_mode(backing::stat(&file)?.st_mode).is_file() {
            return Err(rustix::io::Errno::STALE.into());
        }
        let path = by_descriptor(&file);
        let node = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let (node, stat) = self.nodes.enter(node, parent, name)?;
        let opened = self.opened(caller, &node, File::from(file), opening);
        // On an error the kernel never learns of the node, and would not forget it.
        let (handle, flags) = opened.inspect_err(|_| self.nodes.forget(node.id, 1))?;
        Ok((self.engine.attributes(&node, &stat), handle, flags))
    }

    /// Makes a handle of the file that was opened below, and the flags of the kernel's answer.
    fn opened(
        &self,
        caller: Caller,
        node: &Node,
        below: File,
        opening: Opening,
    ) -> io::Result<(Handle, FopenFlags)> {
        let gathers = self.engine.spec.kernel_gathers;
        let file = self.engine.file(&node.fd)?;
        let appends = opening.writes()
            && opening.flags.contains(OFlags::APPEND)
            && !opening.is_direct(gathers);
        {
            let mut state = file.lock();
            state.writers += u32::from(opening.writes());
            state.appenders += u32::from(appends);
        }
        let mut handle = Handle::new(file, below, caller.user, opening.writes());
        handle.appends = appends;
        let mut flags = FopenFlags::empty();
        if opening.is_direct(gathers) {
            flags |= FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES;
        } else if self.is_unchanged(node)? {
            flags |= FopenFlags::FOPEN_KEEP_CACHE;
        }
        Ok((handle, flags))
    }

    /// Returns whether a file has the time and length that it had when it was opened last.
    fn is_unchanged(&self, node: &Node) -> io::Result<bool> {
        let attributes = self.engine.attributes_of(node)?;
        let since = attributes.mtime.duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = (since.as_secs() as i64, since.subsec_nanos().into(), attributes.size);
        let before = lock(&node.opened).replace(now);
        Ok(before == Some(now))
    }

    /// Runs a call that takes a path, with the caller's rights.
    ///
    /// # Errors
    /// What the call fails with.
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

    /// Runs a call that takes a path and changes the file, with the caller's rights and all groups:
    /// members of the file's group keep its set-group-id bit.
    ///
    /// # Errors
    /// What the call fails with.
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
    /// Notes that a program has closed a descriptor of a file.
    pub(crate) fn close(self: &Arc<Engine>, handle: &Handle) {
        if handle.writes {
            let mut state = handle.file.lock();
            state.writers -= 1;
            state.appenders -= u32::from(handle.appends);
            if state.writers == 0 {
                self.scheduler().order.closed(handle.file.number);
            }
        }
        self.let_go(&handle.file);
    }

    /// Counts one opener less; discards an unlinked file that nobody has open, and forgets one that
    /// is all below.
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

    /// Clears the set-user-id and set-group-id bits of a file, as a write must.
    pub(crate) fn drop_privileges(&self, file: &CachedFile) {
        let Ok(stat) = backing::stat(&file.node) else { return };
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
