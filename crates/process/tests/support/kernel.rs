//! What the running kernel has. A test that needs what it lacks says so: one that did not run is no
//! pass.
#![allow(unreachable_pub, dead_code, reason = "each test program uses its part of it")]

use kedge_left_out::left_out;
use std::os::fd::AsRawFd;

/// Whether the kernel tells which pages were written (PAGEMAP_SCAN), without which images are full
/// ones. Says so if not.
pub fn tells_writes() -> bool {
    const PAGEMAP_SCAN: libc::c_ulong = 0xc060_6610;
    let pagemap = std::fs::File::open("/proc/self/pagemap").unwrap();
    let mut request = [0u64; 12];
    // SAFETY: the kernel reads the request, finds its size wrong, and writes nothing.
    let result = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, request.as_mut_ptr()) };
    let error = std::io::Error::last_os_error().raw_os_error();
    had(result == 0 || error != Some(libc::ENOTTY), "PAGEMAP_SCAN", "6.7")
}

/// Whether the descriptors of a process whose first thread has ended can be had (PIDFD_THREAD).
/// Says so if not.
pub fn reaches_threads() -> bool {
    // SAFETY: what it returns is a new descriptor, or none.
    let made = unsafe { libc::syscall(libc::SYS_pidfd_open, libc::getpid(), libc::O_EXCL) };
    if made >= 0 {
        // SAFETY: it has just been made, and is nobody else's.
        unsafe { libc::close(made as i32) };
    }
    had(made >= 0, "PIDFD_THREAD", "6.9")
}

fn had(there: bool, what: &str, since: &str) -> bool {
    if !there {
        left_out(what, &format!("this kernel has none (Linux {since})"));
    }
    there
}
