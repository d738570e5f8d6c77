//! The program's view of managed memory, its alias, and the userfaultfd that watches the view.

use super::lodged::{Lodged, Shown};
use super::marks::Marks;
use super::spans::Spans;
use crate::log;
use crate::memory::host::drop_pages;
use crate::memory::link::client;
use kedge_cuda_types::arena::{DEVICE_BASE, SHARED_BASE};
use kedge_pages::{Access, BLOCK, PAGE, Pages, Protection};
use kedge_transport::managed;
use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Faults of the kernel's own are not told: an ordinary user may have no others.
const USER_MODE_ONLY: i32 = 1;
/// `_IOWR(0xaa, 0x3f, struct uffdio_api)`, `_IOWR(0xaa, 0, struct uffdio_register)`,
/// `_IOR(0xaa, 1, struct uffdio_range)`, `_IOR(0xaa, 2, struct uffdio_range)` and
/// `_IOWR(0xaa, 7, struct uffdio_continue)`.
const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
const UFFDIO_UNREGISTER: libc::c_ulong = 0x8010_aa01;
const UFFDIO_WAKE: libc::c_ulong = 0x8010_aa02;
const UFFDIO_CONTINUE: libc::c_ulong = 0xc020_aa07;
const API: u64 = 0xaa;
const MISSING_SHMEM: u64 = 1 << 5;
const THREAD_ID: u64 = 1 << 8;
const MINOR_SHMEM: u64 = 1 << 10;
const WP_SHMEM: u64 = 1 << 12;
/// Register modes: pages that the file has not got, writes to those that are open for reading, and
/// pages that are not mapped.
const MODES: u64 = 1 | 2 | 4;
const CONTINUE_WP: u64 = 2;
const EVENT_FAULT: u64 = 0x12;
const FLAG_WRITE: u64 = 1;
const FLAG_WP: u64 = 2;
/// What the kernel is asked for.
const FEATURES: u64 = MISSING_SHMEM | THREAD_ID | MINOR_SHMEM | WP_SHMEM;
/// Bits of an entry of /proc/self/pagemap: the page is mapped; writes to it are faults.
const PRESENT: u64 = 1 << 63;
const PROTECTED: u64 = 1 << 57;
/// `MADV_DONTNEED_LOCKED` (Linux 5.18), which the crate of the C library does not name: what the
/// program has locked (mlock) is taken out of the view as well.
const DONTNEED: libc::c_int = 24;
/// How often a mapping is tried that somebody else begins to watch at the same moment.
const TRIES: u32 = 3;

/// Both mappings of the file that holds the host's pages.
#[derive(Debug)]
pub(super) struct View {
    file: OwnedFd,
    /// Where the alias of the first device's arena begins.
    alias: u64,
    uffd: OwnedFd,
    /// Where the view is.
    spans: Mutex<Spans>,
    /// Blocks whose pages are not in the file.
    pub(super) lodged: Mutex<Lodged>,
    /// What a checkpoint has to know of it.
    pub(super) marks: Marks,
}

/// A thread waits for a page.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fault {
    pub(super) address: u64,
    pub(super) write: bool,
    pub(super) thread: i32,
}

impl View {
    /// Makes a file for the pages of so many devices' arenas, and maps its alias.
    pub(super) fn new(devices: u32) -> io::Result<View> {
        let length = managed::length(devices);
        // SAFETY: the name is a C string.
        let file =
            owned(unsafe { libc::memfd_create(c"kedge-managed".as_ptr(), libc::MFD_CLOEXEC) })?;
        // SAFETY: the call touches no memory.
        checked(unsafe { libc::ftruncate(file.as_raw_fd(), length as i64) })?;
        let alias = map(ptr::null_mut(), length, file.as_fd(), 0)?;
        let ((uffd, all_faults), marks) = (watch()?, Marks::new(alias, devices));
        marks.ready(devices, uffd.as_raw_fd(), (FEATURES, MODES), all_faults);
        Ok(View { file, alias, uffd, spans: Mutex::default(), lodged: Mutex::default(), marks })
    }

    /// Returns where the byte at a device address is in the alias, or in the shared arena.
    pub(super) fn alias(&self, addr: u64) -> u64 {
        self.lodged().find(addr).unwrap_or(self.alias + (addr - DEVICE_BASE))
    }

    /// Divides bytes by where the host's pages are: address, length, and the address of these.
    pub(super) fn parts(&self, (addr, bytes): (u64, u64)) -> Vec<(u64, u64, u64)> {
        let end = addr + bytes;
        let parts = self.lodged().parts(&(addr / PAGE..end.div_ceil(PAGE)));
        let cut = |(pages, _): (Pages, Option<u64>)| {
            let from = addr.max(pages.start * PAGE);
            (from, end.min(pages.end * PAGE) - from, self.alias(from))
        };
        parts.into_iter().map(cut).collect()
    }

    /// Returns bytes of the host's, which lie where `parts` says.
    pub(super) fn read(&self, here: u64, bytes: usize) -> Vec<u8> {
        let mut read = vec![0; bytes];
        // SAFETY: the alias and the arena are mapped for good. The view is closed where these bytes
        // are to be on the device, so that nothing else writes them.
        unsafe { ptr::copy_nonoverlapping(here as *const u8, read.as_mut_ptr(), bytes) };
        read
    }

    pub(super) fn lodged(&self) -> MutexGuard<'_, Lodged> {
        self.lodged.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the pages of a block lie at an address of the shared arena from now on, whose bytes are
    /// zero. The view is closed, and goes on to be the file's until [`View::show_lodged`].
    pub(super) fn lodge(&self, pages: &Pages, arena: u64) {
        self.protect(pages, Protection::None);
        let (start, length) = extent(pages);
        let (first, end) = (start - DEVICE_BASE, start - DEVICE_BASE + length);
        let mut at = first;
        while let Some(from) = self.seek(at, libc::SEEK_DATA).filter(|from| *from < end) {
            at = self.seek(from, libc::SEEK_HOLE).unwrap_or(end).min(end);
            let (from, to) = (self.alias + from, arena + (from - first));
            let bytes = self.alias + at - from;
            // SAFETY: both are mapped for good: the alias, and a part of the arena that is this
            // block's alone. The view is closed, so nothing else writes these pages.
            unsafe { ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes as usize) };
        }
        self.punch(pages);
        self.lodged().insert(pages.start / BLOCK, arena, Shown::File);
    }

    /// Has the view show what is lodged of some pages, open for everything.
    pub(super) fn show_lodged(&self, pages: &Pages) -> io::Result<()> {
        let (start, length) = extent(pages);
        let block = pages.start / BLOCK;
        let Some((arena, shown)) = self.lodged().of(block) else { return Ok(()) };
        match shown {
            Shown::Open => return Ok(()),
            Shown::File => self.map_lodged(start, length, arena)?,
            Shown::Watched => {
                let mut range = [start, length];
                // SAFETY: the kernel reads two words.
                checked(unsafe {
                    libc::ioctl(self.uffd.as_raw_fd(), UFFDIO_UNREGISTER, range.as_mut_ptr())
                })?;
            }
        }
        self.lodged().insert(block, arena, Shown::Open);
        Ok(())
    }

    /// Has touches of what is lodged of some pages be faults from now on: they are closed.
    pub(super) fn watch_lodged(&self, pages: &Pages) -> io::Result<()> {
        let (start, length) = extent(pages);
        let block = pages.start / BLOCK;
        let Some((arena, shown)) = self.lodged().of(block) else { return Ok(()) };
        if shown != Shown::Watched {
            self.register(start, length, || self.map_lodged(start, length, arena))?;
            self.lodged().insert(block, arena, Shown::Watched);
        }
        // SAFETY: takes pages out of the view; the arena keeps their bytes.
        checked(unsafe { libc::madvise(start as *mut _, length as usize, DONTNEED) }).map(drop)
    }

    fn map_lodged(&self, start: u64, length: u64, arena: u64) -> io::Result<()> {
        let client = client().map_err(|error| io::Error::other(error.to_string()))?;
        map(start as *mut c_void, length, client.shared_fd(), arena - SHARED_BASE).map(drop)
    }

    /// Looks for data or a hole of the file's.
    fn seek(&self, at: u64, whence: i32) -> Option<u64> {
        // SAFETY: only moves the file's offset, which nobody uses.
        let found = unsafe { libc::lseek(self.file.as_raw_fd(), at as libc::off_t, whence) };
        u64::try_from(found).ok()
    }

    /// Watches a mapping, which `map` makes again if somebody else began to watch it first.
    fn register(
        &self,
        start: u64,
        length: u64,
        map: impl Fn() -> io::Result<()>,
    ) -> io::Result<()> {
        for tries in (0..TRIES).rev() {
            let mut request = [start, length, MODES, 0];
            // SAFETY: the kernel reads and writes four words.
            let watched = checked(unsafe {
                libc::ioctl(self.uffd.as_raw_fd(), UFFDIO_REGISTER, request.as_mut_ptr())
            });
            match watched {
                // Whoever follows what the job writes (a checkpoint) has met the new mapping first,
                // and does not meet another in its place.
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) && tries > 0 => map()?,
                watched => return watched.map(drop),
            }
        }
        Ok(())
    }

    /// Has the view hold some pages more, on which every access is a fault. It is mapped by large
    /// spans, since a process can have 65,530 mappings, and a program more allocations.
    pub(super) fn open(&self, pages: &Pages) -> io::Result<()> {
        let mut spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        let new = spans.enter(pages);
        let opened = new.iter().try_for_each(|span| self.map_span(span)).and_then(|()| {
            // The program, or `refuse`, may have taken access to these pages away.
            let (start, length) = extent(pages);
            let access = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: changes what a mapping of this view's own allows, where nothing is as yet.
            checked(unsafe { libc::mprotect(start as *mut _, length as usize, access) }).map(drop)
        });
        // Spans that were not mapped as yet are nothing afterwards, as before.
        opened.inspect_err(|_| spans.leave(pages).iter().for_each(unmap))
    }

    /// Maps a range of the view and watches it.
    fn map_span(&self, pages: &Pages) -> io::Result<()> {
        let (start, length) = extent(pages);
        let offset = start - DEVICE_BASE;
        let again = || map(start as *mut c_void, length, self.file.as_fd(), offset).map(drop);
        again()?;
        self.register(start, length, again)
    }

    /// Whether a page is missing in the view, or cannot be touched in this way there. Where that is
    /// not to be known, it is missing.
    pub(super) fn lacks(&self, page: u64, access: Access) -> bool {
        let mut word = [0; 8];
        let told = File::open("/proc/self/pagemap")
            .and_then(|entries| entries.read_exact_at(&mut word, page * 8));
        let word = u64::from_ne_bytes(word);
        told.is_err() || word & PRESENT == 0 || access == Access::Write && word & PROTECTED != 0
    }

    /// Ends the pages of an allocation in the view: they are nobody's.
    pub(super) fn close(&self, pages: &Pages) {
        let mut spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        spans.leave(pages).iter().for_each(unmap);
        self.lodged().remove(pages);
    }

    /// Has touches of a page that is nobody's be the program's own faults, as they are where
    /// nothing is mapped.
    pub(super) fn refuse(&self, page: u64) {
        let (start, length) = extent(&(page..page + 1));
        // SAFETY: takes access to a page that nobody has allocated.
        unsafe { libc::mprotect(start as *mut _, length as usize, libc::PROT_NONE) };
    }

    /// Changes what the view allows.
    pub(super) fn protect(&self, pages: &Pages, to: Protection) {
        let (start, length) = extent(pages);
        if to != Protection::None {
            for page in pages.clone() {
                // SAFETY: the alias is mapped for reading, and has the file make the page.
                unsafe { (self.alias(page * PAGE) as *const u8).read_volatile() };
            }
        }
        // SAFETY: takes pages out of the view; the file keeps their bytes.
        let taken = checked(unsafe { libc::madvise(start as *mut _, length as usize, DONTNEED) });
        // What the program has unmapped in between is passed over (ENOMEM).
        if let Err(error) = taken
            && error.raw_os_error() != Some(libc::ENOMEM)
        {
            log::line(&format!("managed memory: cannot close pages to the program: {error}"));
        }
        match to {
            Protection::None => {}
            Protection::Read => self.show(start, length, CONTINUE_WP),
            Protection::ReadWrite => self.show(start, length, 0),
        }
    }

    /// Maps pages of the file in the view.
    fn show(&self, start: u64, length: u64, mode: u64) {
        let mut done = 0;
        while done < length {
            let mut request = [start + done, length - done, mode, 0];
            // SAFETY: the kernel reads and writes four words.
            let shown = unsafe {
                libc::ioctl(self.uffd.as_raw_fd(), UFFDIO_CONTINUE, request.as_mut_ptr())
            };
            let mapped = request[3] as i64;
            done += u64::try_from(mapped).unwrap_or(0);
            // Interrupted, it goes on; a page that is there already is passed over.
            match io::Error::last_os_error().raw_os_error() {
                _ if shown == 0 => return,
                Some(libc::EAGAIN) => {}
                Some(libc::EEXIST) => done += PAGE,
                // The program has divided the mapping (mprotect), or has something else there.
                Some(libc::ENOENT) if length == PAGE => return,
                Some(libc::ENOENT) => {
                    for page in (start + done..start + length).step_by(PAGE as usize) {
                        self.show(page, PAGE, mode);
                    }
                    return;
                }
                _ => {
                    let error = io::Error::last_os_error();
                    return log::line(&format!("cannot show managed memory: {error}"));
                }
            }
        }
    }

    /// Gives the host's pages back; they are zero from now on.
    pub(super) fn forget(&self, pages: &Pages) {
        let parts = self.lodged().parts(pages);
        for (part, arena) in parts {
            match arena {
                None => self.punch(&part),
                Some(arena) => {
                    let (_, length) = extent(&part);
                    if let Err(error) = drop_pages(arena, length) {
                        log::line(&format!("cannot give host memory back: {error}"));
                    }
                }
            }
        }
    }

    /// Gives pages of the file back.
    fn punch(&self, pages: &Pages) {
        let (start, length) = extent(pages);
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let (offset, length) = ((start - DEVICE_BASE) as i64, length as i64);
        // SAFETY: the range is nobody's any longer.
        unsafe { libc::fallocate(self.file.as_raw_fd(), mode, offset, length) };
    }

    /// Lets the threads go on that wait for a page.
    pub(super) fn wake(&self, page: u64) {
        let mut range = [page * PAGE, PAGE];
        // SAFETY: the kernel reads two words. A refusal means that the view has ended there.
        unsafe { libc::ioctl(self.uffd.as_raw_fd(), UFFDIO_WAKE, range.as_mut_ptr()) };
    }

    /// Waits for the next fault; `None` where there will be none.
    pub(super) fn next_fault(&self) -> Option<Fault> {
        loop {
            let mut message = [0u64; 4];
            let into = message.as_mut_ptr().cast();
            // SAFETY: the kernel writes at most the 32 bytes of one message.
            let got = unsafe { libc::read(self.uffd.as_raw_fd(), into, size_of_val(&message)) };
            let again = [Some(libc::EAGAIN), Some(libc::EINTR)];
            match got {
                32 if message[0] & 0xff == EVENT_FAULT => {
                    let write = message[1] & (FLAG_WRITE | FLAG_WP) != 0;
                    let thread = message[3] as u32 as i32;
                    return Some(Fault { address: message[2], write, thread });
                }
                32 => {}
                _ if again.contains(&io::Error::last_os_error().raw_os_error()) => {}
                _ => return None,
            }
        }
    }
}

/// Makes a userfaultfd: of all faults if that is allowed, else of the program's own. Returns which
/// it is as well.
fn watch() -> io::Result<(OwnedFd, bool)> {
    let made = make(0).map(|uffd| (uffd, true)).or_else(|_| {
        log::line(
            "managed memory: system calls on pages that are on the device fail with EFAULT; they \
             work with CAP_SYS_PTRACE or vm.unprivileged_userfaultfd",
        );
        make(USER_MODE_ONLY).map(|uffd| (uffd, false))
    })?;
    agree(&made.0)?;
    Ok(made)
}

fn make(flags: i32) -> io::Result<OwnedFd> {
    // SAFETY: the call touches no memory.
    owned(unsafe { libc::syscall(libc::SYS_userfaultfd, flags | libc::O_CLOEXEC) } as i32)
}

/// Asks for what Linux 5.19 has.
fn agree(uffd: &OwnedFd) -> io::Result<()> {
    let mut request = [API, FEATURES, 0];
    // SAFETY: the kernel reads and writes three words.
    checked(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_API, request.as_mut_ptr()) }).map(drop)
}

/// Whether a userfaultfd of this process's may tell of the kernel's own faults, too.
pub(super) fn all_faults_are_told() -> bool {
    make(0).and_then(|uffd| agree(&uffd)).is_ok()
}

/// Maps a part of the file, in this process and in none of its children.
fn map(at: *mut c_void, length: u64, file: BorrowedFd<'_>, offset: u64) -> io::Result<u64> {
    let fixed = if at.is_null() { 0 } else { libc::MAP_FIXED };
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | fixed);
    let (length, offset) = (length as usize, offset as i64);
    let flags = flags | libc::MAP_NORESERVE;
    // SAFETY: at a fixed place, it replaces a part of what kedge keeps free for devices' addresses.
    let mapped = unsafe { libc::mmap(at, length, access, flags, file.as_raw_fd(), offset) };
    if mapped == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: advice on a mapping that was just made here; it changes no content.
    unsafe {
        libc::madvise(mapped, length, libc::MADV_DONTFORK);
        libc::madvise(mapped, length, libc::MADV_DONTDUMP);
    }
    Ok(mapped as u64)
}

/// Ends a span of the view: nothing is there any more, as before.
fn unmap(pages: &Pages) {
    let (start, length) = extent(pages);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    // SAFETY: replaces what kedge has mapped or reserved, into which nobody holds a reference.
    unsafe { libc::mmap(start as *mut _, length as usize, libc::PROT_NONE, flags, -1, 0) };
}

/// First address and length.
fn extent(pages: &Pages) -> (u64, u64) {
    (pages.start * PAGE, (pages.end - pages.start) * PAGE)
}

fn checked(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// The descriptor that a call has made.
fn owned(result: i32) -> io::Result<OwnedFd> {
    // SAFETY: a new descriptor, which is nobody else's.
    checked(result).map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    /// Where nothing else of these tests is.
    const FIRST: u64 = (DEVICE_BASE + (600 << 30)) / PAGE;

    fn mappings() -> usize {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let start = |line: &str| u64::from_str_radix(line.split('-').next().unwrap(), 16).unwrap();
        let mine = |line: &&str| line.contains(managed::NAME) && start(line) >= FIRST * PAGE;
        maps.lines().filter(|line| mine(line) && start(line) < DEVICE_BASE + (700 << 30)).count()
    }

    /// Whether a system call can read a page.
    fn is_readable(page: u64) -> bool {
        let (near, _far) = UnixStream::pair().unwrap();
        // SAFETY: the kernel reads one byte, or says that it cannot.
        unsafe { libc::write(near.as_raw_fd(), (page * PAGE) as *const _, 1) == 1 }
    }

    #[test]
    fn many_allocations_are_few_mappings_and_what_lies_between_is_nobody_s() {
        let view = match View::new(1) {
            Ok(view) => view,
            // Where userfaultfd is forbidden there is no such memory.
            Err(error) => {
                return kedge_left_out::left_out("managed memory by pages", &error.to_string());
            }
        };
        let pages = |index: u64| FIRST + 2 * index..FIRST + 2 * index + 1;
        (0..5000).for_each(|index| view.open(&pages(index)).unwrap());
        assert_eq!(mappings(), 1);
        view.protect(&pages(7), Protection::ReadWrite);
        let between = pages(7).end;
        view.refuse(between);
        assert!(is_readable(pages(7).start) && !is_readable(between));
        // It becomes somebody's.
        view.open(&(between..between + 1)).unwrap();
        view.protect(&(between..between + 1), Protection::Read);
        assert!(is_readable(between));
        assert_eq!(mappings(), 1);
        view.close(&(between..between + 1));
        (0..5000).for_each(|index| view.close(&pages(index)));
        assert_eq!(mappings(), 0);
        assert!(!is_readable(pages(7).start));
    }
}
