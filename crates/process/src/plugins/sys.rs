//! The few system calls that rustix does not have.

use rustix::fd::{AsFd, AsRawFd};
use std::cmp::Ordering;
use std::io;

const KCMP_FILE: i32 = 0;
const KCMP_FILES: i32 = 2;

fn kcmp(a: i32, b: i32, kind: i32, x: u64, y: u64) -> io::Result<Ordering> {
    // SAFETY: these kinds of kcmp take numbers only.
    match unsafe { libc::syscall(libc::SYS_kcmp, a, b, kind, x, y) } {
        0 => Ok(Ordering::Equal),
        1 => Ok(Ordering::Less),
        2 => Ok(Ordering::Greater),
        -1 => Err(io::Error::last_os_error()),
        _ => Err(io::Error::other("kcmp cannot order them")),
    }
}

/// Orders open file descriptions: equal if both descriptors are of the same one. The order means
/// nothing, but is total while nothing is closed.
pub(crate) fn compare_files(a: (i32, i32), b: (i32, i32)) -> io::Result<Ordering> {
    kcmp(a.0, b.0, KCMP_FILE, a.1 as u64, b.1 as u64)
}

/// Orders tables of descriptors: equal if both processes share one.
pub(crate) fn compare_tables(a: i32, b: i32) -> io::Result<Ordering> {
    kcmp(a, b, KCMP_FILES, 0, 0)
}

/// Whom O_ASYNC signals go to: `F_OWNER_TID`, `F_OWNER_PID` or `F_OWNER_PGRP`, and the id.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Owner {
    pub kind: i32,
    pub id: i32,
}

pub(crate) const F_SETSIG: i32 = 10;
const F_GETSIG: i32 = 11;
pub(crate) const F_SETOWN_EX: i32 = 15;
const F_GETOWN_EX: i32 = 16;

pub(crate) fn owner(fd: impl AsFd) -> io::Result<Owner> {
    let mut owner = Owner::default();
    // SAFETY: the kernel stores one structure of two ints.
    match unsafe { libc::fcntl(fd.as_fd().as_raw_fd(), F_GETOWN_EX, &raw mut owner) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(owner),
    }
}

/// The signal that O_ASYNC sends; 0 is SIGIO without details.
pub(crate) fn owner_signal(fd: impl AsFd) -> io::Result<i32> {
    // SAFETY: a plain call.
    match unsafe { libc::fcntl(fd.as_fd().as_raw_fd(), F_GETSIG) } {
        -1 => Err(io::Error::last_os_error()),
        signal => Ok(signal),
    }
}
