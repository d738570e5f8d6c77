//! Which blocks of the devices' memory were written since an earlier snapshot: the kernel keeps
//! account (userfaultfd's WP_ASYNC, Linux 6.7), and nothing waits for anybody. All is written
//! before it is first asked.

use kedge_cuda_types::arena::{DEVICE_STRIDE, Windows, device_base};
use kedge_device::digest::BLOCK;
use kedge_pagemap::{Run, Scanner, Wanted};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

const PAGE: u64 = 4096;
/// What changes are told apart by: pieces begin at any address, so their blocks have parts of
/// several.
const GRAIN: u64 = 64 << 10;

/// Only faults of user mode would be told; none are, and so an ordinary user may have it.
const USER_MODE_ONLY: i32 = 1;
/// `_IOWR(0xaa, 0x3f, struct uffdio_api)` and `_IOWR(0xaa, 0, struct uffdio_register)`.
const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
const API: u64 = 0xaa;
const WP_UNPOPULATED: u64 = 1 << 13;
const WP_ASYNC: u64 = 1 << 15;
const MODE_WP: u64 = 2;

/// Whether writes are followed: from the first snapshot on that has one to build on.
#[derive(Default)]
pub(in crate::device) enum Following {
    #[default]
    NotYet,
    By(Box<Writes>),
    /// This system does not.
    Cannot,
}

impl Following {
    /// Returns what follows writes in the arenas of these devices, if anything can.
    pub(super) fn start(&mut self, windows: Windows) -> Option<&mut Writes> {
        if matches!(self, Following::NotYet) {
            let arena = |index| (device_base(index), device_base(index) + DEVICE_STRIDE);
            let follows = Writes::of(windows.iter().map(arena));
            *self = follows.map_or(Following::Cannot, |writes| Following::By(Box::new(writes)));
        }
        match self {
            Following::By(writes) => Some(writes),
            Following::NotYet | Following::Cannot => None,
        }
    }
}

/// Follows what is written.
pub(in crate::device) struct Writes {
    /// What watches the memory for as long as it is open.
    watch: OwnedFd,
    scanner: Scanner,
    /// How often it has looked.
    looks: u64,
    /// The look that found each grain written last, by its number in the address space.
    last: HashMap<u64, u64>,
}

impl Writes {
    /// Follows what is written in `arenas`.
    ///
    /// # Errors
    /// What the system says where it does not watch, or tells nothing.
    fn of(arenas: impl IntoIterator<Item = Run>) -> io::Result<Writes> {
        let watch = watch()?;
        for arena in arenas {
            // As a whole: parts would be mappings of their own. Where it has a part that cannot be
            // watched, each run is tried.
            let _ = register(watch.as_raw_fd(), arena);
        }
        let scanner = Scanner::of(std::process::id() as libc::pid_t)?;
        Ok(Writes { watch, scanner, looks: 0, last: HashMap::new() })
    }

    /// Looks at runs (address, length) of private memory, to which nobody writes meanwhile: the
    /// number of this look.
    pub(super) fn look(&mut self, runs: &[(u64, u64)]) -> u64 {
        self.looks += 1;
        for &(addr, bytes) in runs {
            let range = (addr / PAGE * PAGE, (addr + bytes).next_multiple_of(PAGE));
            // Of what cannot be watched all counts as written.
            let written = self.written(range).unwrap_or_else(|_| vec![range]);
            for (from, to) in written {
                self.last
                    .extend((from / GRAIN..to.div_ceil(GRAIN)).map(|grain| (grain, self.looks)));
            }
        }
        self.looks
    }

    /// The pages of a range that were written since they were asked for last, or never were.
    fn written(&mut self, range: Run) -> io::Result<Vec<Run>> {
        match self.scanner.runs(range, &Wanted::written(true)) {
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
                // A part is new, or mapped anew. What the kernel has protected before it found that
                // it has not told.
                register(self.watch.as_raw_fd(), range)?;
                self.scanner.runs(range, &Wanted::written(true))?;
                Ok(vec![range])
            }
            told => told,
        }
    }

    /// The look that found each block of a piece written last.
    pub(super) fn last(&self, addr: u64, bytes: u64) -> Vec<u64> {
        let of_block = |from: u64| {
            let to = (from + BLOCK).min(addr + bytes);
            let grains =
                (from / GRAIN..to.div_ceil(GRAIN)).filter_map(|grain| self.last.get(&grain));
            grains.copied().max().unwrap_or(0)
        };
        (addr..addr + bytes).step_by(BLOCK as usize).map(of_block).collect()
    }
}

/// Makes what watches memory of this process.
fn watch() -> io::Result<OwnedFd> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | USER_MODE_ONLY;
    // SAFETY: userfaultfd takes flags alone.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    let fd = RawFd::try_from(fd).ok().filter(|fd| *fd >= 0).ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the call has returned a descriptor that is nobody else's.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut request = [API, WP_ASYNC | WP_UNPOPULATED, 0];
    // SAFETY: the kernel reads and writes the three words of struct uffdio_api.
    let answered = unsafe { libc::ioctl(fd.as_raw_fd(), UFFDIO_API, request.as_mut_ptr()) };
    if answered < 0 { Err(io::Error::last_os_error()) } else { Ok(fd) }
}

/// Has a range of this process's memory watched.
fn register(watch: RawFd, (start, end): Run) -> io::Result<()> {
    let mut request = [start, end - start, MODE_WP, 0];
    // SAFETY: the kernel reads and writes the four words of struct uffdio_register. Watched memory
    // is used as before: with WP_ASYNC the kernel itself lets a write go on.
    let answered = unsafe { libc::ioctl(watch, UFFDIO_REGISTER, request.as_mut_ptr()) };
    if answered < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_test_memory::{Room, scans};

    /// A block's pages.
    const PAGES: u64 = BLOCK / PAGE;

    #[test]
    fn blocks_tell_when_they_were_written_last() {
        if !scans() {
            return;
        }
        let room = Room::new();
        let (start, end) = room.range();
        let mut writes = Writes::of([room.range()]).unwrap();
        (0..4 * PAGES).for_each(|page| room.touch(page));
        let piece = (start + PAGE, 3 * BLOCK + 100);
        assert_eq!(writes.last(piece.0, piece.1), [0; 4]);
        assert_eq!(writes.look(&[piece]), 1);
        assert_eq!(writes.last(piece.0, piece.1), [1; 4], "all is written before it is asked");
        room.touch(PAGES + 40);
        assert_eq!(writes.look(&[piece]), 2);
        assert_eq!(writes.last(piece.0, piece.1), [1, 2, 1, 1]);
        assert_eq!(writes.look(&[piece]), 3);
        assert_eq!(writes.last(piece.0, piece.1), [1, 2, 1, 1]);
        // What was given back to the system, or mapped anew, counts as written.
        // SAFETY: a page of the room, which this test alone uses.
        unsafe { libc::madvise(start as usize as *mut _, PAGE as usize, libc::MADV_DONTNEED) };
        room.map_anew(3 * PAGES);
        writes.look(&[(start, 2 * BLOCK), (start + 3 * BLOCK, BLOCK)]);
        assert_eq!(writes.last(start, 4 * BLOCK), [4, 2, 1, 4]);
        // What the kernel had protected before it came to what it does not watch.
        room.touch(1);
        room.map_anew(5);
        writes.look(&[(start, end - start)]);
        assert_eq!(writes.last(start, 4 * BLOCK), [5; 4]);
    }
}
