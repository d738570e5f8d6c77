//! The calls of mq_overview(7).

use rustix::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::ffi::CString;
use std::io;
use std::ptr::null;

fn result(value: i64) -> io::Result<i64> {
    if value < 0 { Err(io::Error::last_os_error()) } else { Ok(value) }
}

fn attributes() -> libc::mq_attr {
    // SAFETY: zeros are a valid structure of numbers.
    unsafe { std::mem::zeroed() }
}

/// Most messages, and most bytes of one.
pub(super) fn limits(fd: impl AsFd) -> io::Result<(i64, i64)> {
    all(fd).map(|found| (found.mq_maxmsg, found.mq_msgsize))
}

/// How many messages wait.
pub(super) fn waiting(fd: impl AsFd) -> io::Result<i64> {
    all(fd).map(|found| found.mq_curmsgs)
}

fn all(fd: impl AsFd) -> io::Result<libc::mq_attr> {
    let mut found = attributes();
    // SAFETY: the kernel stores the structure.
    result(unsafe {
        let none = null::<libc::mq_attr>();
        libc::syscall(libc::SYS_mq_getsetattr, fd.as_fd().as_raw_fd(), none, &raw mut found)
    })?;
    Ok(found)
}

/// Makes one of that name, without its slash; never an old one.
pub(super) fn make(name: &CString, most: i64, longest: i64) -> io::Result<OwnedFd> {
    let mut wanted = attributes();
    (wanted.mq_maxmsg, wanted.mq_msgsize) = (most, longest);
    let flags = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL | libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: name and structure live through the call, which returns a new descriptor.
    unsafe {
        let number = libc::SYS_mq_open;
        let fd = result(libc::syscall(number, name.as_ptr(), flags, 0o600, &raw const wanted))?;
        Ok(OwnedFd::from_raw_fd(fd as i32))
    }
}

pub(super) fn unlink(name: &CString) -> io::Result<()> {
    // SAFETY: the name lives through the call.
    result(unsafe { libc::syscall(libc::SYS_mq_unlink, name.as_ptr()) }).map(drop)
}

/// Takes the next message, which is not longer than `buffer`: its length and priority; `None` if
/// there is none.
pub(super) fn take(fd: impl AsFd, buffer: &mut [u8]) -> io::Result<Option<(usize, u32)>> {
    let mut priority = 0u32;
    let (number, fd) = (libc::SYS_mq_timedreceive, fd.as_fd().as_raw_fd());
    let none = null::<libc::timespec>();
    // SAFETY: the kernel stores at most as many bytes as there are, and the priority.
    let taken = result(unsafe {
        libc::syscall(number, fd, buffer.as_mut_ptr(), buffer.len(), &raw mut priority, none)
    });
    match taken {
        Err(e) if e.raw_os_error() == Some(libc::EAGAIN) => Ok(None),
        other => Ok(Some((other? as usize, priority))),
    }
}

pub(super) fn put(fd: impl AsFd, bytes: &[u8], priority: u32) -> io::Result<()> {
    let (number, fd) = (libc::SYS_mq_timedsend, fd.as_fd().as_raw_fd());
    let none = null::<libc::timespec>();
    // SAFETY: the kernel reads so many bytes.
    result(unsafe { libc::syscall(number, fd, bytes.as_ptr(), bytes.len(), priority, none) })
        .map(drop)
}
