//! System calls that leave the program's errno alone.

use crate::parts::Parts;
use libc::{c_int, c_long};
use std::os::fd::{BorrowedFd, RawFd};

/// Sets errno to `why`, and returns -1 as a failed call does.
pub fn fail(why: c_int) -> libc::ssize_t {
    // SAFETY: the pointer is this thread's errno, which lives as long as the thread.
    unsafe { *libc::__errno_location() = why };
    -1
}

/// Makes a system call that writes no memory of this process. The result is the call's or its
/// error; errno stays as it was.
macro_rules! call {
    ($($argument:expr),*) => {{
        // SAFETY: the pointer is this thread's errno, which lives as long as the thread.
        let errno = unsafe { libc::__errno_location() };
        // SAFETY: `errno` is valid, as above.
        let before = unsafe { *errno };
        // SAFETY: the calls that this file makes write no memory of this process, and the kernel
        // checks the addresses that it reads.
        let result: c_long = unsafe { libc::syscall($($argument),*) };
        if result < 0 {
            // SAFETY: `errno` is valid, as above.
            Err(unsafe { std::mem::replace(&mut *errno, before) })
        } else {
            Ok(result)
        }
    }};
}

/// Moves a descriptor's position by `by` bytes, and returns the new one.
///
/// # Errors
/// The errno of `lseek`.
pub(crate) fn move_by(fd: RawFd, by: i64) -> Result<u64, c_int> {
    Ok(call!(libc::SYS_lseek, fd, by, libc::SEEK_CUR)?.cast_unsigned())
}

/// How much of a write was done.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Put {
    /// Bytes that the call was to write.
    pub(crate) asked: usize,
    /// Bytes that it wrote.
    pub(crate) done: usize,
}

/// Writes at offset `at` by one call: all parts, or else the rest of the part that `skip` bytes
/// lead into; `most` bytes at most.
///
/// # Errors
/// The errno of `pwrite` or `pwritev`.
pub(crate) fn put(
    fd: RawFd,
    parts: &Parts,
    skip: usize,
    most: usize,
    at: u64,
) -> Result<Put, c_int> {
    let one = match parts.whole(skip, most) {
        Some([one]) => *one,
        Some(all) => {
            let done = call!(libc::SYS_pwritev, fd, all.as_ptr(), all.len(), at, 0usize)?;
            return Ok(Put { asked: parts.length(), done: done as usize });
        }
        None => match parts.rest_at(skip, most) {
            Some(one) => one,
            None => return Ok(Put { asked: 0, done: 0 }),
        },
    };
    let done = call!(libc::SYS_pwrite64, fd, one.iov_base, one.iov_len, at)?;
    Ok(Put { asked: one.iov_len, done: done as usize })
}

/// Closes a descriptor of this library's own.
pub(crate) fn close(fd: RawFd) {
    let _ = call!(libc::SYS_close, fd);
}

/// Returns the time of CLOCK_MONOTONIC_COARSE, in milliseconds.
pub(crate) fn now() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes to `now` alone. It does not fail: Linux has the clock since 2.6.32.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &mut now) };
    let (seconds, nanoseconds) = (now.tv_sec.cast_unsigned(), now.tv_nsec.cast_unsigned());
    seconds.saturating_mul(1000).saturating_add(nanoseconds / 1_000_000)
}

/// Returns the largest size of a file that this process may write (RLIMIT_FSIZE), in bytes.
pub(crate) fn file_limit() -> u64 {
    rustix::process::getrlimit(rustix::process::Resource::Fsize).current.unwrap_or(u64::MAX)
}

/// Borrows one of the program's descriptors for a call; `None` for a negative number.
pub(crate) fn borrow<'a>(fd: RawFd) -> Option<BorrowedFd<'a>> {
    // SAFETY: the number is not -1, and callers only make system calls with it, which the kernel
    // refuses if it is not open. If the program closes or reuses it meanwhile, the call meets
    // another file, as a call of the program's own would.
    (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) })
}

/// Returns whether a descriptor's writes append (O_APPEND).
pub(crate) fn appends(fd: RawFd) -> bool {
    let flags = borrow(fd).and_then(|fd| rustix::fs::fcntl_getfl(fd).ok());
    flags.is_some_and(|flags| flags.contains(rustix::fs::OFlags::APPEND))
}

/// Has the kernel ask the daemon for a file's length, which ends the file's lease.
pub(crate) fn ask_for_length(fd: RawFd) {
    let _ = borrow(fd).map(rustix::fs::fstat);
}
