//! Two userfaultfds that watch another process's memory for writes. The kernel itself lets a write
//! go on and clears the page's mark (WP_ASYNC, Linux 6.7). Nobody reads the one for private memory;
//! of shared memory more is to be known ([`heard`](super::heard)).

use super::heard::{Listener, Source};
use crate::freeze::beside;
use crate::home::Ways;
use crate::inject::checked;
use crate::maps::Mapping;
use crate::{EngineError, Thread};
use libc::pid_t;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// Only faults of user mode would be told; none are, and so an ordinary user may have it.
const USER_MODE_ONLY: u64 = 1;
/// `_IOWR(0xaa, 0x3f, struct uffdio_api)` and `_IOWR(0xaa, 0, struct uffdio_register)`.
const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
/// `_IOR(0xaa, 1, struct uffdio_range)`.
const UFFDIO_UNREGISTER: libc::c_ulong = 0x8010_aa01;
/// The kernel walks what is watched no more, with all of the process's mappings locked: a
/// millisecond's worth at a time.
const PIECE: u64 = 32 << 20;
/// Most pieces of one mapping: reservations are large, and little of them is there.
const MAX_PIECES: u64 = 1024;
const API: u64 = 0xaa;
const EVENT_REMAP: u64 = 1 << 2;
const EVENT_REMOVE: u64 = 1 << 3;
const WP_UNPOPULATED: u64 = 1 << 13;
const WP_ASYNC: u64 = 1 << 15;
const MODE_WP: u64 = 2;

/// What watches the memory of one process. If it is closed, nothing is watched any more, and the
/// program goes on as before.
#[derive(Debug)]
pub(super) struct Watch {
    private: OwnedFd,
    /// Of a process that has shared memory.
    shared: Option<Source>,
}

impl Watch {
    /// Makes one for the private memory of the stopped process of `leader`.
    pub(super) fn of(leader: &mut Thread) -> Result<Watch, EngineError> {
        Ok(Watch { private: made(leader, 0)?, shared: None })
    }

    /// Has it watch shared memory, too; the stopped process of `leader` is `pid`.
    pub(super) fn hear(
        &mut self,
        pid: pid_t,
        leader: &mut Thread,
        listener: &Listener,
    ) -> Result<(), EngineError> {
        if self.shared.is_none() {
            self.shared = Some(listener.add(pid, made(leader, EVENT_REMAP | EVENT_REMOVE)?));
        }
        Ok(())
    }

    /// Watches the mapping from now on; `false` if it cannot be watched or is there no more.
    pub(super) fn add(&self, mapping: &Mapping) -> bool {
        let mut request = [mapping.start, mapping.len(), MODE_WP, 0];
        self.with(mapping, |fd| {
            // SAFETY: the kernel reads and writes four words.
            unsafe { libc::ioctl(fd, UFFDIO_REGISTER, request.as_mut_ptr()) == 0 }
        })
    }

    /// Watches the mapping no more.
    pub(super) fn remove(&self, mapping: &Mapping) {
        let piece = PIECE.max((mapping.len() / MAX_PIECES).next_multiple_of(PIECE));
        for start in (mapping.start..mapping.end).step_by(piece as usize) {
            let mut range = [start, piece.min(mapping.end - start)];
            self.with(mapping, |fd| {
                // SAFETY: the kernel reads two words. What it does not let go of now, it does when
                // this is closed.
                unsafe { libc::ioctl(fd, UFFDIO_UNREGISTER, range.as_mut_ptr()) == 0 }
            });
        }
    }

    /// Has `ask` ask what watches the mapping; `false` if nothing does.
    fn with(&self, mapping: &Mapping, ask: impl FnOnce(RawFd) -> bool) -> bool {
        match &self.shared {
            _ if !mapping.shared => ask(self.private.as_raw_fd()),
            Some(shared) => shared.fd().is_some_and(|fd| ask(fd.as_raw_fd())),
            None => false,
        }
    }
}

/// Makes a userfaultfd in the stopped process of `leader`, and takes it out of there. The program
/// never has it: the call is made beside it.
fn made(leader: &mut Thread, events: u64) -> Result<OwnedFd, EngineError> {
    let ways = Ways::of(leader.pid())?;
    let led = ways.lead(leader);
    let made = led.and_then(|()| beside(leader, &ways, |beside| make(beside, ways.out(), events)));
    let closed = ways.close(std::iter::once(leader));
    let watch = made?;
    closed.map(|()| watch)
}

/// One that tells `events`.
fn make(beside: &mut Thread, entry: u64, events: u64) -> Result<OwnedFd, EngineError> {
    let pid = beside.pid();
    let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64 | USER_MODE_ONLY;
    let made = beside.call(entry, libc::SYS_userfaultfd, &[flags])?;
    let made = checked(pid, "watch its memory", made)?;
    let watch = taken(pid, made as RawFd)?;
    let mut request = [API, WP_ASYNC | WP_UNPOPULATED | events, 0];
    // SAFETY: the kernel reads and writes three words.
    let result = unsafe { libc::ioctl(watch.as_raw_fd(), UFFDIO_API, request.as_mut_ptr()) };
    if result < 0 { Err(EngineError::last(pid, "watch its memory for writes")) } else { Ok(watch) }
}

/// The descriptor `fd` of the process `pid`.
pub(crate) fn taken(pid: libc::pid_t, fd: RawFd) -> Result<OwnedFd, EngineError> {
    let failed = |source| EngineError::System { pid, what: "take its descriptor", source };
    let own = |result: libc::c_long| {
        if result < 0 {
            return Err(failed(io::Error::last_os_error()));
        }
        // SAFETY: what these calls return is a new descriptor, which is nobody else's.
        Ok(unsafe { OwnedFd::from_raw_fd(result as RawFd) })
    };
    // SAFETY: pidfd_open takes two numbers.
    let process = own(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })?;
    // SAFETY: `process` is open, and pidfd_getfd takes numbers.
    own(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), fd, 0) })
}
