//! A userfaultfd that tells which pages a process waits for, and what it does with its memory
//! meanwhile.

use crate::inject::{Parasite, checked};
use crate::{EngineError, Thread};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// From linux/userfaultfd.h: `_IOWR(0xaa, number, structure)`.
const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
/// `_IOR`, this one.
const UFFDIO_WAKE: libc::c_ulong = 0x8010_aa02;
const UFFDIO_COPY: libc::c_ulong = 0xc028_aa03;
const UFFDIO_ZEROPAGE: libc::c_ulong = 0xc020_aa04;
const API: u64 = 0xaa;
const MODE_MISSING: u64 = 1;
/// Forks, moves, drops, unmappings.
const EVENTS: u64 = 1 << 1 | 1 << 2 | 1 << 3 | 1 << 6;
const MESSAGE: usize = 32;
const PAGE: u64 = 4096;

/// What the kernel tells.
#[derive(Debug)]
pub(super) enum Told {
    /// Somebody waits for this page.
    Fault(u64),
    /// A child was made: what tells of it.
    Fork(Missing),
    Moved {
        from: u64,
        to: u64,
        length: u64,
    },
    /// Memory was dropped or unmapped.
    Gone {
        start: u64,
        end: u64,
    },
}

#[derive(Debug)]
pub(super) struct Missing(OwnedFd);

impl Missing {
    /// Makes one in a process that nobody knows yet.
    pub(super) fn of(thread: &mut Thread, parasite: Parasite) -> Result<Missing, EngineError> {
        let pid = thread.pid();
        let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64;
        let refused = |error: io::Error| {
            EngineError::unsupported(
                pid,
                format!(
                    "its memory cannot come later ({error}), because that takes the right to follow faults \
                 inside the kernel and forks (CAP_SYS_PTRACE): restart it as root, or without --lazy"
                ),
            )
        };
        let made = thread.call(parasite.entry(), libc::SYS_userfaultfd, &[flags])?;
        if made < 0 {
            return Err(refused(io::Error::from_raw_os_error(-made as i32)));
        }
        let missing = Missing(taken(pid, made as RawFd)?);
        let closed = thread.call(parasite.entry(), libc::SYS_close, &[made as u64])?;
        checked(pid, "close what watches it", closed)?;
        let mut request = [API, EVENTS, 0];
        missing.ioctl(UFFDIO_API, &mut request).map_err(refused)?;
        Ok(missing)
    }

    pub(super) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    fn ioctl<const N: usize>(
        &self,
        request: libc::c_ulong,
        words: &mut [u64; N],
    ) -> io::Result<()> {
        // SAFETY: each request is made with as many words as its structure has; what they point to
        // is only read, by the kernel, and lives through the call.
        let result = unsafe { libc::ioctl(self.fd(), request, words.as_mut_ptr()) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    pub(super) fn watch(&self, (start, end): (u64, u64)) -> io::Result<()> {
        self.ioctl(UFFDIO_REGISTER, &mut [start, end - start, MODE_MISSING, 0])
    }

    /// Puts `bytes` at `address`, where there is nothing yet: how many of them. Pages that are
    /// there already stay as they are, and places that are no more are passed over.
    pub(super) fn put(&self, address: u64, bytes: &[u8]) -> Put {
        let from = bytes.as_ptr() as u64;
        let mut request = [address, from, bytes.len() as u64, 0, 0];
        let result = self.ioctl(UFFDIO_COPY, &mut request);
        Put::of(result, request[4] as i64, bytes.len() as u64)
    }

    /// The same with a page of zeros.
    pub(super) fn put_zeros(&self, address: u64) -> Put {
        let mut request = [address & !(PAGE - 1), PAGE, 0, 0];
        let result = self.ioctl(UFFDIO_ZEROPAGE, &mut request);
        Put::of(result, request[3] as i64, PAGE)
    }

    /// Has whoever waits for this page look again: it is there.
    pub(super) fn wake(&self, address: u64) {
        // Nobody may wait.
        let _ = self.ioctl(UFFDIO_WAKE, &mut [address & !(PAGE - 1), PAGE]);
    }

    /// What it has to tell now, if anything.
    pub(super) fn told(&self) -> io::Result<Option<Told>> {
        let mut message = [0u64; MESSAGE / 8];
        // SAFETY: the kernel stores at most as many bytes as the array has.
        let count = unsafe { libc::read(self.fd(), message.as_mut_ptr().cast(), MESSAGE) };
        if count < 0 {
            let error = io::Error::last_os_error();
            let none = error.kind() == io::ErrorKind::WouldBlock;
            return if none { Ok(None) } else { Err(error) };
        }
        if count as usize != MESSAGE {
            return Ok(None);
        }
        let [first, a, b, c] = message;
        Ok(match first as u8 {
            0x12 => Some(Told::Fault(b)),
            // SAFETY: the kernel has just made this descriptor for this process.
            0x13 => Some(Told::Fork(Missing(unsafe { OwnedFd::from_raw_fd(a as u32 as RawFd) }))),
            0x14 => Some(Told::Moved { from: a, to: b, length: c }),
            0x15 | 0x16 => Some(Told::Gone { start: a, end: b }),
            _ => None,
        })
    }
}

/// How far a page has come.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Put {
    /// So many bytes are there.
    Done(u64),
    /// The first page is there already.
    There,
    /// The program is changing its memory: what it does has to be heard first.
    Later,
    /// There is no such memory any more, or no such process.
    Gone,
    Failed(i32),
}

impl Put {
    fn of(result: io::Result<()>, done: i64, all: u64) -> Put {
        match result {
            Ok(()) => Put::Done(all),
            // Part of it, before something was in the way.
            Err(_) if done > 0 => Put::Done(done as u64),
            Err(error) => match error.raw_os_error().unwrap_or(0) {
                libc::EEXIST => Put::There,
                libc::EAGAIN => Put::Later,
                libc::ENOENT | libc::ESRCH => Put::Gone,
                other => Put::Failed(other),
            },
        }
    }
}

/// The descriptor `fd` of the process `pid`.
fn taken(pid: libc::pid_t, fd: RawFd) -> Result<OwnedFd, EngineError> {
    crate::track::taken(pid, fd)
}
