//! userfaultfd: minor faults of shared memory, served in the thread itself (SIGBUS mode) or by a
//! thread of kedge's own.

use crate::Way;
use crate::memory::{Memory, PAGE, on_signal, page_of, pin};
use std::cell::UnsafeCell;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

const USER_MODE_ONLY: i32 = 1;
/// `_IOWR(0xaa, 0x3f, struct uffdio_api)`, `_IOWR(0xaa, 0, struct uffdio_register)` and
/// `_IOWR(0xaa, 7, struct uffdio_continue)`.
const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
const UFFDIO_CONTINUE: libc::c_ulong = 0xc020_aa07;
const API: u64 = 0xaa;
const SIGBUS: u64 = 1 << 7;
const MINOR_SHMEM: u64 = 1 << 10;
const MODE_MINOR: u64 = 4;

struct Uffd {
    name: String,
    served: &'static Served,
}

struct Served {
    memory: Memory,
    uffd: OwnedFd,
    /// Whether a thread that spins is to end.
    over: AtomicBool,
}

static IN_THREAD: OnceLock<&'static Served> = OnceLock::new();

/// Watches a new memory's view.
fn served(flags: i32, features: u64) -> Result<&'static Served, String> {
    let refused = |what: &str| format!("userfaultfd, {what}: {}", io::Error::last_os_error());
    // SAFETY: the call touches no memory.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags | libc::O_CLOEXEC) };
    if fd < 0 {
        return Err(refused("to have one"));
    }
    // SAFETY: new and nobody else's.
    let uffd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    let memory = Memory::new(crate::ROW);
    (0..memory.pages).for_each(|page| memory.fill(page));
    let mut api = [API, MINOR_SHMEM | features, 0];
    let mut register = [memory.view as u64, (memory.pages * PAGE) as u64, MODE_MINOR, 0];
    // SAFETY: the kernel reads and writes three and four words.
    let outcome = unsafe {
        libc::ioctl(fd as i32, UFFDIO_API, api.as_mut_ptr())
            | libc::ioctl(fd as i32, UFFDIO_REGISTER, register.as_mut_ptr())
    };
    if outcome != 0 {
        return Err(refused("minor faults of shared memory"));
    }
    Ok(Box::leak(Box::new(Served { memory, uffd, over: AtomicBool::new(false) })))
}

impl Served {
    fn serve(&self, page: usize) {
        let count = self.memory.fetch(page);
        let at = self.memory.at(page) as u64;
        let mut request = [at, (count * PAGE) as u64, 0, 0];
        // SAFETY: the kernel reads and writes four words.
        unsafe { libc::ioctl(self.uffd.as_raw_fd(), UFFDIO_CONTINUE, request.as_mut_ptr()) };
    }

    /// Serves faults until all is over.
    fn run(&self, core: Option<usize>, spin: bool) {
        core.into_iter().for_each(pin);
        while !self.over.load(Ordering::Relaxed) {
            let mut message = [0u64; 4];
            // SAFETY: the kernel writes at most the 32 bytes of one message.
            let got = unsafe { libc::read(self.uffd.as_raw_fd(), message.as_mut_ptr().cast(), 32) };
            if got == 32 {
                self.serve((message[2] as usize - self.memory.view as usize) / PAGE);
            } else if spin {
                std::hint::spin_loop();
            }
        }
    }
}

extern "C" fn serve_sigbus(_: i32, info: *mut libc::siginfo_t, _: *mut UnsafeCell<u8>) {
    if let Some(served) = IN_THREAD.get() {
        served.serve(page_of(&served.memory, info));
    }
}

pub(crate) fn in_thread() -> Result<Box<dyn Way>, String> {
    let served = served(USER_MODE_ONLY, SIGBUS)?;
    let served = IN_THREAD.get_or_init(|| served);
    on_signal(libc::SIGBUS, serve_sigbus);
    Ok(Box::new(Uffd { name: "userfaultfd + SIGBUS".into(), served }))
}

/// A thread serves, on a core of its own or not; `kernel`: faults inside system calls as well.
pub(crate) fn thread(
    how: &str,
    core: Option<usize>,
    spin: bool,
    kernel: bool,
) -> Result<Box<dyn Way>, String> {
    let flags = if kernel { 0 } else { USER_MODE_ONLY } | if spin { libc::O_NONBLOCK } else { 0 };
    let served = served(flags, 0)?;
    std::thread::spawn(move || served.run(core, spin));
    Ok(Box::new(Uffd { name: format!("thread {how}"), served }))
}

impl Way for Uffd {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn memory(&self) -> &Memory {
        &self.served.memory
    }

    fn read_ahead(&self, most: usize) {
        self.served.memory.set_ahead(most);
    }

    fn invalidate(&self, first: usize, count: usize) {
        self.served.memory.drop_pages(first, count);
    }
}

impl Drop for Uffd {
    fn drop(&mut self) {
        self.served.over.store(true, Ordering::Relaxed);
    }
}
