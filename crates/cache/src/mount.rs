//! The mount: what the kernel asks, and who answers.

use crate::backing;
use crate::caller::Caller;
use crate::engine::Engine;
use crate::file::Handle;
use crate::keep;
use crate::names::{self, Changes, Folder, Rename};
use crate::nodes::Nodes;
use crate::open::Opening;
use crate::tier::lock;
use crate::write::Write;
use fuser::*;
use kedge_cache_lease::{BYTES, REQUEST};
use rustix::fs::{AtFlags, FallocateFlags};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

/// How long the kernel may trust what it was told of a file.
const TTL: Duration = Duration::from_secs(1);
const GENERATION: Generation = Generation(0);
/// Requests that the kernel has on their way at once.
const BACKGROUND: u16 = 64;
/// One user has no more than one of so many of the daemon's descriptors.
const PART_OF_ONE: usize = 4;
const SEEK_DATA: i32 = 3;
const SEEK_HOLE: i32 = 4;

thread_local! {
    /// What reads are answered from: a new one for each would be zeroed, page by page.
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// The file system that programs see.
#[derive(Debug)]
pub(crate) struct Mount {
    pub(crate) engine: Arc<Engine>,
    pub(crate) nodes: Arc<Nodes>,
    handles: RwLock<HashMap<u64, Arc<Handle>>>,
    folders: Mutex<HashMap<u64, Arc<Mutex<Folder>>>>,
    next: AtomicU64,
    /// Descriptors that each user has open here.
    open: Mutex<HashMap<u32, usize>>,
    descriptors: usize,
    /// By which the kernel is told, once there is a session.
    pub(crate) kernel: Arc<OnceLock<Notifier>>,
}

fn caller(request: &Request) -> Caller {
    Caller { user: request.uid(), group: request.gid(), process: request.pid() }
}

impl Mount {
    /// A file system of a daemon that may have so many descriptors.
    pub(crate) fn new(engine: Arc<Engine>, descriptors: u64) -> io::Result<Mount> {
        let nodes = Arc::new(Nodes::new(engine.below.root.try_clone()?)?);
        let (handles, folders) = (RwLock::default(), Mutex::default());
        let (open, next) = (Mutex::default(), AtomicU64::new(1));
        let descriptors = usize::try_from(descriptors).unwrap_or(usize::MAX);
        let kernel = Arc::default();
        Ok(Mount { engine, nodes, handles, folders, next, open, descriptors, kernel })
    }

    /// Counts one more descriptor of a user.
    ///
    /// # Errors
    /// If they have too many: others are to have some as well.
    fn count(&self, user: u32) -> io::Result<()> {
        let mut open = lock(&self.open);
        let own = open.entry(user).or_default();
        if user != 0 && *own >= self.descriptors / PART_OF_ONE {
            return Err(rustix::io::Errno::NFILE.into());
        }
        *own += 1;
        Ok(())
    }

    fn uncount(&self, user: u32) {
        let mut open = lock(&self.open);
        if let Some(own) = open.get_mut(&user) {
            *own -= 1;
            if *own == 0 {
                open.remove(&user);
            }
        }
    }

    pub(crate) fn handle(&self, number: FileHandle) -> io::Result<Arc<Handle>> {
        let handles = self.handles.read().unwrap_or_else(PoisonError::into_inner);
        handles.get(&number.0).cloned().ok_or(rustix::io::Errno::BADF.into())
    }

    fn add_handle(&self, handle: Handle) -> FileHandle {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let mut handles = self.handles.write().unwrap_or_else(PoisonError::into_inner);
        handles.insert(number, Arc::new(handle));
        FileHandle(number)
    }

    fn close(&self, number: FileHandle) {
        let mut handles = self.handles.write().unwrap_or_else(PoisonError::into_inner);
        let Some(handle) = handles.remove(&number.0) else { return };
        drop(handles);
        self.engine.close(&handle);
        self.uncount(handle.user);
    }

    /// Returns which file below the cache is asked of by an attribute; `None` if it is the file's
    /// own, for which nothing is looked up here.
    fn asked_of(&self, ino: INodeNo, name: &OsStr) -> Option<crate::file::Key> {
        let node = keep::is_of_cache(name).then(|| self.nodes.get(ino.0))?;
        let stat = backing::stat(&node.ok()?.fd).ok()?;
        Some((stat.st_dev, stat.st_ino))
    }

    /// Runs what may take long on another thread, so that others are answered meanwhile.
    fn aside(
        &self,
        user: u32,
        reply: ReplyEmpty,
        work: impl FnOnce(&Arc<Engine>) -> io::Result<()> + Send + 'static,
    ) {
        let engine = self.engine.clone();
        self.engine.pool.run(user, move || answer(reply, work(&engine)));
    }
}

fn answer(reply: ReplyEmpty, result: io::Result<()>) {
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(error.into()),
    }
}

fn answer_entry(reply: ReplyEntry, result: io::Result<FileAttr>) {
    match result {
        Ok(attributes) => reply.entry(&TTL, &attributes, GENERATION),
        Err(error) => reply.error(error.into()),
    }
}

fn answer_attributes(reply: ReplyAttr, result: io::Result<FileAttr>) {
    match result {
        Ok(attributes) => reply.attr(&TTL, &attributes),
        Err(error) => reply.error(error.into()),
    }
}

fn answer_xattr(reply: ReplyXattr, size: u32, result: io::Result<Vec<u8>>) {
    match result {
        Ok(value) if size == 0 => reply.size(value.len() as u32),
        Ok(value) if value.len() <= size as usize => reply.data(&value),
        Ok(_) => reply.error(Errno::ERANGE),
        Err(error) => reply.error(error.into()),
    }
}

impl Filesystem for Mount {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let mut wanted = InitFlags::FUSE_HANDLE_KILLPRIV_V2
            | InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP
            | InitFlags::FUSE_PARALLEL_DIROPS
            // The kernel asks for ACLs, and leaves it to the folder below what a new file has.
            | InitFlags::FUSE_POSIX_ACL
            | InitFlags::FUSE_DONT_MASK
            | InitFlags::FUSE_ASYNC_DIO;
        if self.engine.spec.kernel_gathers {
            wanted |= InitFlags::FUSE_WRITEBACK_CACHE;
        }
        // What an old kernel does not have, it does in another way.
        let _ = config.add_capabilities(wanted & config.capabilities());
        let _ = config.set_max_background(BACKGROUND);
        let _ = config.set_max_write(1 << 20);
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        answer_entry(reply, self.look_up(parent.0, name));
    }

    fn forget(&self, _: &Request, ino: INodeNo, nlookup: u64) {
        self.nodes.forget(ino.0, nlookup);
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        answer_attributes(reply, self.attributes_by_id(ino.0));
    }

    fn setattr(
        &self,
        req: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        user: Option<u32>,
        group: Option<u32>,
        size: Option<u64>,
        accessed: Option<TimeOrNow>,
        modified: Option<TimeOrNow>,
        _: Option<SystemTime>,
        fh: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let changes = Changes { mode, user, group, accessed, modified };
        let (engine, caller) = (self.engine.clone(), caller(req));
        let node = match self.nodes.get(ino.0) {
            Ok(node) => node,
            Err(error) => return reply.error(error.into()),
        };
        let Some(size) = size else {
            let changed = engine.change(caller, &node, &changes);
            return answer_attributes(reply, changed.and_then(|()| engine.attributes_of(&node)));
        };
        let handle = fh.and_then(|fh| self.handle(fh).ok()).filter(|handle| handle.writes);
        self.engine.pool.run(caller.user, move || {
            let result = engine.resize(caller, &node, size, handle).and_then(|()| {
                engine.change(caller, &node, &changes)?;
                engine.attributes_of(&node)
            });
            answer_attributes(reply, result);
        });
    }

    fn readlink(&self, _: &Request, ino: INodeNo, reply: ReplyData) {
        match self.target(ino.0) {
            Ok(target) => reply.data(&target),
            Err(error) => reply.error(error.into()),
        }
    }

    fn mknod(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        let kind = rustix::fs::FileType::from_raw_mode(mode);
        let made = self.make(caller(req), parent.0, name, (mode, umask), |folder, mode| {
            rustix::fs::mknodat(&folder.fd, name, kind, mode, rdev.into())
        });
        answer_entry(reply, made);
    }

    fn mkdir(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        let made = self.make(caller(req), parent.0, name, (mode, umask), |folder, mode| {
            rustix::fs::mkdirat(&folder.fd, name, mode)
        });
        answer_entry(reply, made);
    }

    fn unlink(&self, req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        answer(reply, self.remove(caller(req), parent.0, name, AtFlags::empty()));
    }

    fn rmdir(&self, req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        answer(reply, self.remove(caller(req), parent.0, name, AtFlags::REMOVEDIR));
    }

    fn symlink(&self, req: &Request, parent: INodeNo, name: &OsStr, to: &Path, reply: ReplyEntry) {
        let made = self.make(caller(req), parent.0, name, (0, 0), |folder, _| {
            names::symlink(folder, name, to)
        });
        answer_entry(reply, made);
    }

    fn rename(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let (from, to) = ((parent.0, name), (newparent.0, newname));
        let rename = match Rename::new(&self.nodes, from, to, flags) {
            Ok(rename) => rename,
            Err(error) => return reply.error(error.into()),
        };
        let caller = caller(req);
        let engine = &self.engine;
        match rename.replacement(engine) {
            None => answer(reply, engine.rename(caller, &rename)),
            Some(node) => self.aside(caller.user, reply, move |engine| {
                engine.persist_replacement(&node)?;
                engine.rename(caller, &rename)
            }),
        }
    }

    fn link(&self, req: &Request, ino: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let result = self.nodes.get(ino.0).and_then(|node| {
            let to = self.nodes.get(parent.0)?;
            self.link_to(caller(req), &node, &to, name)?;
            self.look_up(parent.0, name)
        });
        answer_entry(reply, result);
    }

    fn open(&self, req: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let opened = self.count(req.uid()).and_then(|()| {
            let opened = self.open_file(caller(req), ino.0, Opening::new(flags.0));
            opened.inspect_err(|_| self.uncount(req.uid()))
        });
        match opened {
            Ok((handle, flags)) => reply.opened(self.add_handle(handle), flags),
            Err(error) => reply.error(error.into()),
        }
    }

    fn create(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let (opening, mode) = (Opening::new(flags), (mode, umask));
        let created = self.count(req.uid()).and_then(|()| {
            let created = self.create_file(caller(req), parent.0, name, mode, opening);
            created.inspect_err(|_| self.uncount(req.uid()))
        });
        match created {
            Ok((attributes, handle, flags)) => {
                let handle = self.add_handle(handle);
                reply.created(&TTL, &attributes, GENERATION, handle, flags);
            }
            Err(error) => reply.error(error.into()),
        }
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let handle = match self.handle(fh) {
            Ok(handle) => handle,
            Err(error) => return reply.error(error.into()),
        };
        BUFFER.with_borrow_mut(|buffer| {
            buffer.resize(buffer.len().max(size as usize), 0);
            match self.engine.read_now(&handle, offset, &mut buffer[..size as usize]) {
                Ok(Some(length)) => return reply.data(&buffer[..length]),
                Ok(None) => {}
                Err(error) => return reply.error(error.into()),
            }
            let engine = self.engine.clone();
            self.engine.pool.run(handle.user, move || {
                let mut buffer = vec![0; size as usize];
                match engine.read(&handle, offset, &mut buffer) {
                    Ok(length) => reply.data(&buffer[..length]),
                    Err(error) => reply.error(error.into()),
                }
            });
        });
    }

    fn write(
        &self,
        req: &Request,
        _: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let handle = match self.handle(fh) {
            Ok(handle) => handle,
            Err(error) => return reply.error(error.into()),
        };
        if write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID) {
            self.engine.drop_privileges(&handle.file);
        }
        // Pages that the kernel kept have their offset, and the user who opened the file.
        let from_pages = write_flags.contains(WriteFlags::FUSE_WRITE_CACHE);
        let user = if from_pages { handle.user } else { req.uid() };
        // As it is by now: a program may change that of an open file. With its own pages, the
        // kernel knows where a file ends.
        let appends = rustix::fs::OFlags::from_bits_retain(flags.0 as u32)
            .contains(rustix::fs::OFlags::APPEND);
        let append = appends && !from_pages && !self.engine.spec.kernel_gathers;
        let (length, writer) = (data.len() as u64, u64::from(req.pid()));
        let write = Write { handle, offset, length, append, user, writer };
        let done = move |result: io::Result<u32>| match result {
            Ok(written) => reply.written(written),
            Err(error) => reply.error(error.into()),
        };
        self.engine.write(write, data, Box::new(done));
    }

    fn flush(&self, req: &Request, _: INodeNo, fh: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        let handle = match self.handle(fh) {
            Ok(handle) => handle,
            Err(error) => return reply.error(error.into()),
        };
        if !handle.writes {
            return reply.ok();
        }
        if self.engine.spec.close_drains {
            return self.aside(req.uid(), reply, move |engine| {
                engine.drain_file(&handle.file)?;
                engine.settle_partner(&handle.file)?;
                handle.file.lock().tell_trouble()
            });
        }
        answer(reply, handle.file.lock().tell_trouble());
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        fh: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        self.close(fh);
        reply.ok();
    }

    fn fsync(&self, req: &Request, _: INodeNo, fh: FileHandle, _: bool, reply: ReplyEmpty) {
        match self.handle(fh) {
            Ok(handle) => self.aside(req.uid(), reply, move |engine| engine.fsync(&handle)),
            Err(error) => reply.error(error.into()),
        }
    }

    fn opendir(&self, req: &Request, ino: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let opened = self.count(req.uid()).and_then(|()| {
            let opened = self.open_folder(caller(req), ino.0);
            opened.inspect_err(|_| self.uncount(req.uid()))
        });
        match opened {
            Ok(folder) => {
                let number = self.next.fetch_add(1, Ordering::Relaxed);
                lock(&self.folders).insert(number, Arc::new(Mutex::new(folder)));
                reply.opened(FileHandle(number), FopenFlags::empty());
            }
            Err(error) => reply.error(error.into()),
        }
    }

    fn readdir(
        &self,
        _: &Request,
        _: INodeNo,
        fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let folder = lock(&self.folders).get(&fh.0).cloned();
        let Some(folder) = folder else { return reply.error(Errno::EBADF) };
        let read = lock(&folder).read(offset as i64, |ino, next, kind, name| {
            reply.add(INodeNo(ino), next as u64, kind, OsStr::from_bytes(name))
        });
        match read {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error.into()),
        }
    }

    fn releasedir(&self, _: &Request, _: INodeNo, fh: FileHandle, _: OpenFlags, reply: ReplyEmpty) {
        let folder = lock(&self.folders).remove(&fh.0);
        if let Some(folder) = folder {
            self.uncount(lock(&folder).user);
        }
        reply.ok();
    }

    fn fsyncdir(&self, req: &Request, ino: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        let (node, engine) = (self.nodes.get(ino.0), self.engine.clone());
        self.aside(req.uid(), reply, move |_| {
            // Names that its files have now.
            engine.tell_partner();
            backing::reopen(&node?.fd, rustix::fs::OFlags::RDONLY)?.sync_all()
        });
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        let Ok(stat) = rustix::fs::fstatvfs(&self.engine.below.root) else {
            return reply.error(Errno::EIO);
        };
        let promised = self.engine.below.promised().div_ceil(stat.f_frsize.max(1));
        let left = |blocks: u64| blocks.saturating_sub(promised);
        let (free, available) = (left(stat.f_bfree), left(stat.f_bavail));
        let (size, name, part) = (stat.f_bsize as u32, stat.f_namemax as u32, stat.f_frsize as u32);
        reply.statfs(stat.f_blocks, free, available, stat.f_files, stat.f_ffree, size, name, part);
    }

    fn setxattr(
        &self,
        req: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        if let Some(key) = self.asked_of(ino, name)
            && let Some(done) = self.engine.told(key, name, value)
        {
            return answer(reply, done);
        }
        let flags = rustix::fs::XattrFlags::from_bits_retain(flags as u32);
        answer(
            reply,
            self.change_path(caller(req), ino.0, |path| {
                rustix::fs::setxattr(path, name, value, flags)
            }),
        );
    }

    fn getxattr(&self, req: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        if let Some(key) = self.asked_of(ino, name)
            && let Some(value) = self.engine.asked(key, name)
        {
            return answer_xattr(reply, size, Ok(value));
        }
        let value = self.with_path(caller(req), ino.0, |path| {
            let mut value = vec![0; rustix::fs::getxattr_query(path, name)?];
            let length = rustix::fs::getxattr(path, name, &mut value[..])?;
            value.truncate(length);
            Ok(value)
        });
        answer_xattr(reply, size, value);
    }

    fn listxattr(&self, req: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        let names = self.with_path(caller(req), ino.0, |path| {
            let mut names = vec![0; rustix::fs::listxattr_query(path)?];
            let length = rustix::fs::listxattr(path, &mut names[..])?;
            names.truncate(length);
            Ok(names)
        });
        answer_xattr(reply, size, names);
    }

    fn removexattr(&self, req: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        answer(
            reply,
            self.change_path(caller(req), ino.0, |path| rustix::fs::removexattr(path, name)),
        );
    }

    fn fallocate(
        &self,
        req: &Request,
        _: INodeNo,
        fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let handle = match self.handle(fh) {
            Ok(handle) => handle,
            Err(error) => return reply.error(error.into()),
        };
        let mode = FallocateFlags::from_bits_retain(mode as u32);
        let caller = caller(req);
        self.aside(caller.user, reply, move |engine| {
            engine.allocate(&handle.file, caller, &handle.below, mode, offset, length)
        });
    }

    fn ioctl(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        _: IoctlFlags,
        cmd: u32,
        in_data: &[u8],
        out_size: u32,
        reply: ReplyIoctl,
    ) {
        let asked = kedge_cache_lease::decode_ask(in_data);
        let Some(ask) = asked.filter(|_| cmd == REQUEST && out_size as usize == BYTES) else {
            return reply.error(Errno::ENOTTY);
        };
        match self.handle(fh).and_then(|handle| self.lease(req.uid(), ino, &handle, &ask)) {
            Ok(lease) => reply.ioctl(0, &lease),
            Err(error) => reply.error(error.into()),
        }
    }

    fn lseek(
        &self,
        req: &Request,
        _: INodeNo,
        fh: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        if self.engine.spec.kernel_gathers {
            // What the kernel has gathered is data that is not known here: to it, all is data.
            return reply.error(Errno::ENOSYS);
        }
        if ![SEEK_DATA, SEEK_HOLE].contains(&whence) || offset < 0 {
            return reply.error(Errno::EINVAL);
        }
        let (engine, handle) = (self.engine.clone(), self.handle(fh));
        self.engine.pool.run(req.uid(), move || {
            let data = whence == SEEK_DATA;
            let found = handle
                .and_then(|handle| engine.seek(&handle.file, &handle.below, offset as u64, data));
            match found {
                Ok(at) => reply.offset(at as i64),
                Err(error) => reply.error(error.into()),
            }
        });
    }
}
