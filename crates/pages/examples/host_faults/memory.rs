//! The memory that is served, and the plainest way to serve it: mprotect and SIGSEGV.

use crate::Way;
use std::cell::UnsafeCell;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

pub(crate) const PAGE: usize = 4096;

/// A sparse file in memory that is mapped twice.
pub(crate) struct Memory {
    pub(crate) view: *mut u8,
    pub(crate) alias: *mut u8,
    pub(crate) pages: usize,
    /// Where fetches copy from.
    source: Vec<u8>,
    ahead: Ahead,
}

/// Read-ahead that doubles while the touches go on where the last one ended.
#[derive(Default)]
struct Ahead {
    most: AtomicUsize,
    next: AtomicUsize,
    length: AtomicUsize,
}

// SAFETY: the mappings live until the process ends, and are only reached by raw accesses.
unsafe impl Sync for Memory {}
// SAFETY: the mappings live until the process ends, and are tied to no thread.
unsafe impl Send for Memory {}

impl Memory {
    pub(crate) fn new(pages: usize) -> Memory {
        // SAFETY: the name is a C string.
        let fd = unsafe { libc::memfd_create(c"pages".as_ptr(), libc::MFD_CLOEXEC) };
        assert!(fd >= 0, "memfd_create");
        // SAFETY: `fd` is new and nobody else's.
        let file = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: the call touches no memory.
        assert_eq!(unsafe { libc::ftruncate(fd, (pages * PAGE) as i64) }, 0);
        let (view, alias) = (map(fd, pages, true), map(fd, pages, true));
        drop(file);
        Memory::of(view, alias, pages)
    }

    pub(crate) fn of(view: *mut u8, alias: *mut u8, pages: usize) -> Memory {
        Memory { view, alias, pages, source: vec![7; PAGE], ahead: Ahead::default() }
    }

    pub(crate) fn at(&self, page: usize) -> *mut u8 {
        assert!(page < self.pages);
        self.view.wrapping_add(page * PAGE)
    }

    /// Reads the page through the view.
    pub(crate) fn check(&self, page: usize) {
        // SAFETY: `page` is one of the view's (`at`), whose faults are served.
        assert_eq!(unsafe { self.at(page).wrapping_add(99).read_volatile() }, 7);
    }

    pub(crate) fn touch(&self, page: usize) {
        // SAFETY: `page` is one of the view's (`at`), whose faults are served.
        unsafe { self.at(page).read_volatile() };
    }

    /// Copies the page's bytes from elsewhere, through the alias.
    pub(crate) fn fill(&self, page: usize) {
        assert!(page < self.pages);
        let to = self.alias.wrapping_add(page * PAGE);
        // SAFETY: the alias is mapped for writing and nobody holds a reference into it.
        unsafe { to.copy_from_nonoverlapping(self.source.as_ptr(), PAGE) };
    }

    pub(crate) fn set_ahead(&self, most: usize) {
        self.ahead.most.store(most, Ordering::Relaxed);
        self.ahead.length.store(1, Ordering::Relaxed);
        self.ahead.next.store(usize::MAX, Ordering::Relaxed);
    }

    /// Fetches what a fault wants, and returns how many pages that is.
    pub(crate) fn fetch(&self, page: usize) -> usize {
        let Ahead { most, next, length } = &self.ahead;
        let most = most.load(Ordering::Relaxed);
        let in_order = next.load(Ordering::Relaxed) == page;
        let count = if in_order { (2 * length.load(Ordering::Relaxed)).min(most) } else { 1 };
        let count = count.min(self.pages - page);
        length.store(count, Ordering::Relaxed);
        next.store(page + count, Ordering::Relaxed);
        (page..page + count).for_each(|page| self.fill(page));
        count
    }

    pub(crate) fn drop_pages(&self, page: usize, count: usize) {
        // SAFETY: drops pages of the view, whose bytes the file keeps.
        unsafe { libc::madvise(self.at(page).cast(), count * PAGE, libc::MADV_DONTNEED) };
    }

    pub(crate) fn protect(&self, page: usize, count: usize, to: i32) -> bool {
        // SAFETY: changes the view alone, into which nobody holds a reference.
        unsafe { libc::mprotect(self.at(page).cast(), count * PAGE, to) == 0 }
    }

    /// What `write(2)` says of a page that has not been fetched.
    pub(crate) fn written(&self, page: usize) -> String {
        // SAFETY: the name is a C string; `fd` is new.
        let out = unsafe { OwnedFd::from_raw_fd(libc::memfd_create(c"out".as_ptr(), 0)) };
        let begin = std::time::Instant::now();
        // SAFETY: the kernel checks the address.
        let count = unsafe { libc::write(out.as_raw_fd(), self.at(page).cast(), PAGE) };
        let micros = begin.elapsed().as_secs_f64() * 1e6;
        match count {
            4096 => format!("works, {micros:.1} µs"),
            _ => io::Error::last_os_error().to_string(),
        }
    }
}

pub(crate) fn map(fd: RawFd, pages: usize, shared: bool) -> *mut u8 {
    let flags = if shared { libc::MAP_SHARED } else { libc::MAP_PRIVATE };
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping that replaces none.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), pages * PAGE, access, flags, fd, 0) };
    assert_ne!(at, libc::MAP_FAILED, "{}", io::Error::last_os_error());
    at.cast()
}

pub(crate) fn pin(core: usize) {
    // SAFETY: all zeros are a valid set, and the call reads no more than it.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &set);
    }
}

struct Segv(&'static Memory);
/// What the handler serves.
static SERVED: AtomicPtr<Memory> = AtomicPtr::new(std::ptr::null_mut());

pub(crate) fn segv() -> Result<Box<dyn Way>, String> {
    let memory: &'static Memory = Box::leak(Box::new(Memory::new(crate::ROW)));
    SERVED.store(std::ptr::from_ref(memory).cast_mut(), Ordering::Release);
    memory.protect(0, memory.pages, libc::PROT_NONE);
    on_signal(libc::SIGSEGV, serve_segv);
    Ok(Box::new(Segv(memory)))
}

/// Has `handler` take a signal in the thread that it is for.
pub(crate) fn on_signal(
    signal: i32,
    handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut UnsafeCell<u8>),
) {
    // SAFETY: all zeros are a valid action, whose handler has the signature that SA_SIGINFO wants.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
        libc::sigaction(signal, &action, std::ptr::null_mut());
    }
}

/// Returns the page of a memory that a fault is for.
pub(crate) fn page_of(memory: &Memory, info: *mut libc::siginfo_t) -> usize {
    // SAFETY: the kernel fills the information of a fault.
    let at = unsafe { (*info).si_addr() } as usize;
    let page = at.wrapping_sub(memory.view as usize) / PAGE;
    if page >= memory.pages {
        // SAFETY: ends the process, which has a defect of its own.
        unsafe { libc::_exit(99) };
    }
    page
}

extern "C" fn serve_segv(_: i32, info: *mut libc::siginfo_t, _: *mut UnsafeCell<u8>) {
    // SAFETY: `segv` stored a reference that lives for ever, before it set this handler.
    let memory = unsafe { &*SERVED.load(Ordering::Acquire) };
    let page = page_of(memory, info);
    let count = memory.fetch(page);
    memory.protect(page, count, libc::PROT_READ);
}

impl Way for Segv {
    fn name(&self) -> String {
        "mprotect + SIGSEGV".into()
    }

    fn memory(&self) -> &Memory {
        self.0
    }

    fn read_ahead(&self, most: usize) {
        self.0.set_ahead(most);
    }

    fn invalidate(&self, first: usize, count: usize) {
        self.0.protect(first, count, libc::PROT_NONE);
    }
}
