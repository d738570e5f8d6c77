//! io_uring's system calls, and the memory that a ring shares with its programs (io_uring(7),
//! include/uapi/linux/io_uring.h).

use rustix::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::fs::{MemfdFlags, memfd_create};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, Read, Seek};
use std::sync::atomic::{AtomicU32, Ordering};

/// Most entries of a submission queue that the kernel makes (IORING_MAX_ENTRIES).
pub(super) const MAX_ENTRIES: u32 = 32768;
/// Most entries of a completion queue that the kernel makes (IORING_MAX_CQ_ENTRIES).
pub(super) const MAX_COMPLETIONS: u32 = 2 * MAX_ENTRIES;
/// Bytes of `struct io_uring_sqe` and `struct io_uring_cqe` without extensions.
pub(super) const SQE: u64 = 64;
pub(super) const CQE: u64 = 16;

/// Where the kernel has the queues and the requests mapped.
const RINGS: i64 = 0;
const REQUESTS: i64 = 0x1000_0000;

const SETUP_CQSIZE: u32 = 1 << 3;
const SETUP_SUBMIT_ALL: u32 = 1 << 7;
const ENTER_GETEVENTS: u32 = 1 << 0;
const ENTER_EXT_ARG: u32 = 1 << 3;
const REGISTER_EVENTFD: u32 = 4;
const REGISTER_PBUF_RING: u32 = 22;
const REGISTER_PBUF_STATUS: u32 = 26;
const REGISTER_NAPI: u32 = 27;

/// Where this kernel puts what in a ring's memory: offsets in bytes. It depends on the kernel
/// alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Layout {
    pub(super) sq_head: u32,
    pub(super) sq_tail: u32,
    pub(super) sq_entries: u32,
    pub(super) sq_dropped: u32,
    pub(super) cq_head: u32,
    pub(super) cq_tail: u32,
    pub(super) cq_entries: u32,
    pub(super) cq_overflow: u32,
    pub(super) cq_flags: u32,
    pub(super) cqes: u32,
}

impl Layout {
    fn of(params: &[u32; PARAMS]) -> Layout {
        Layout {
            sq_head: params[10],
            sq_tail: params[11],
            sq_entries: params[13],
            sq_dropped: params[15],
            cq_head: params[20],
            cq_tail: params[21],
            cq_entries: params[23],
            cq_overflow: params[24],
            cqes: params[25],
            cq_flags: params[26],
        }
    }

    /// Where the array of the submission queue begins: behind the completions, in a line of its
    /// own.
    pub(super) fn array(&self, completions: u32) -> u64 {
        const CACHE_LINE: u64 = 64;
        let end = u64::from(self.cqes) + u64::from(completions) * CQE;
        end.next_multiple_of(CACHE_LINE)
    }
}

/// Words of `struct io_uring_params`.
const PARAMS: usize = 30;

/// A ring of this process's.
#[derive(Debug)]
pub(super) struct Made {
    pub(super) fd: OwnedFd,
    pub(super) layout: Layout,
    /// Where its array begins.
    pub(super) array: u64,
}

/// Makes a ring with so many entries, both powers of two.
pub(super) fn set_up(entries: u32, completions: u32) -> io::Result<Made> {
    // With SUBMIT_ALL one bad request does not hold up the others. What a ring was made with is not
    // told; who did not ask for it is told of more requests at once than otherwise.
    match set_up_with(entries, completions, SETUP_CQSIZE | SETUP_SUBMIT_ALL) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            set_up_with(entries, completions, SETUP_CQSIZE)
        }
        other => other,
    }
}

fn set_up_with(entries: u32, completions: u32, flags: u32) -> io::Result<Made> {
    let mut params = [0u32; PARAMS];
    (params[1], params[2]) = (completions, flags);
    // SAFETY: the kernel reads and writes the structure, which is 120 bytes long.
    let fd = unsafe { libc::syscall(libc::SYS_io_uring_setup, entries, params.as_mut_ptr()) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor, and nobody else knows it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    if (params[0], params[1]) != (entries, completions) {
        return Err(io::Error::other("the kernel makes it of another size"));
    }
    let (layout, array) = (Layout::of(&params), u64::from(params[16]));
    Ok(Made { fd, layout, array })
}

/// Submits `count` requests; how many the kernel has taken.
pub(super) fn submit(ring: BorrowedFd<'_>, count: u32) -> io::Result<u32> {
    enter(ring, count, 0, 0, None)
}

/// Whether the kernel waits for completions where there are less than `completions`: rings that are
/// polled (IORING_SETUP_IOPOLL) do not. Errors name what else the ring is.
pub(super) fn waits(ring: BorrowedFd<'_>, completions: u32) -> io::Result<bool> {
    /// struct io_uring_getevents_arg: no signal mask, and no time at all.
    #[repr(C)]
    struct Argument {
        mask: u64,
        mask_size: u32,
        least: u32,
        time: u64,
    }
    let time = [0i64; 2];
    let at = (&raw const time).addr() as u64;
    let argument = Argument { mask: 0, mask_size: 0, least: 0, time: at };
    let argument = Some(((&raw const argument).cast::<libc::c_void>(), size_of::<Argument>()));
    match enter(ring, 0, completions, ENTER_GETEVENTS | ENTER_EXT_ARG, argument) {
        Err(error) if error.raw_os_error() == Some(libc::ETIME) => Ok(true),
        other => other.map(|_| false),
    }
}

fn enter(
    ring: BorrowedFd<'_>,
    submit: u32,
    wait: u32,
    flags: u32,
    argument: Option<(*const libc::c_void, usize)>,
) -> io::Result<u32> {
    let (at, bytes) = argument.unwrap_or((std::ptr::null(), 0));
    let call = libc::SYS_io_uring_enter;
    // SAFETY: the argument is a structure that outlives the call, or none; what requests of the
    // ring's point to is nothing: they are made in `turn`.
    let done = unsafe { libc::syscall(call, ring.as_raw_fd(), submit, wait, flags, at, bytes) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(done as u32) }
}

/// Asks to register an eventfd that is none: the error tells whether there is one (EBUSY), or none
/// (EBADF), or that this process may register nothing.
pub(super) fn ask_for_eventfd(ring: BorrowedFd<'_>) -> Option<i32> {
    let none = -1i32;
    register(ring, REGISTER_EVENTFD, (&raw const none).cast())
}

/// Asks to register what is nowhere for busy polls of networks: EFAULT, but EINVAL of a ring that
/// is polled, and of any ring on kernels before 6.9.
pub(super) fn ask_for_busy_polls(ring: BorrowedFd<'_>) -> Option<i32> {
    register(ring, REGISTER_NAPI, std::ptr::without_provenance(1))
}

/// Whether the group `group` has buffers. Kernels since 6.8 tell; of others, one more ring of
/// buffers is asked for, at an address where none can be.
pub(super) fn has_buffers(ring: BorrowedFd<'_>, group: u16) -> bool {
    /// struct io_uring_buf_status.
    #[repr(C)]
    struct Status {
        group: u32,
        head: u32,
        reserved: [u32; 8],
    }
    /// struct io_uring_buf_reg.
    #[repr(C)]
    struct Argument {
        address: u64,
        entries: u32,
        group: u16,
        flags: u16,
        reserved: [u64; 3],
    }
    let mut status = Status { group: group.into(), head: 0, reserved: [0; 8] };
    match register(ring, REGISTER_PBUF_STATUS, (&raw mut status).cast_const().cast()) {
        None => true,
        Some(libc::ENOENT) => false,
        // It knows no such question, or the group is of the older kind.
        Some(_) => {
            let address = 1 << 62;
            let argument = Argument { address, entries: 1, group, flags: 0, reserved: [0; 3] };
            let asked = register(ring, REGISTER_PBUF_RING, (&raw const argument).cast());
            asked == Some(libc::EEXIST)
        }
    }
}

/// The error of a registration of one thing; `None` if there was none.
fn register(ring: BorrowedFd<'_>, what: u32, argument: *const libc::c_void) -> Option<i32> {
    let call = libc::SYS_io_uring_register;
    // SAFETY: `argument` is the structure that `what` takes, which outlives the call, or no address
    // of this process's, which the kernel finds out.
    let done = unsafe { libc::syscall(call, ring.as_raw_fd(), what, argument, 1u32) };
    if done < 0 { io::Error::last_os_error().raw_os_error() } else { None }
}

/// A part of a ring's memory, mapped here.
#[derive(Debug)]
pub(super) struct Shared {
    at: *mut u8,
    bytes: usize,
}

impl Shared {
    /// Maps the queues of a ring.
    pub(super) fn queues(ring: BorrowedFd<'_>, bytes: u64) -> io::Result<Shared> {
        Shared::map(ring, RINGS, bytes)
    }

    /// Maps the requests of a ring.
    pub(super) fn requests(ring: BorrowedFd<'_>, bytes: u64) -> io::Result<Shared> {
        Shared::map(ring, REQUESTS, bytes)
    }

    fn map(ring: BorrowedFd<'_>, offset: i64, bytes: u64) -> io::Result<Shared> {
        let (bytes, both) = (bytes as usize, libc::PROT_READ | libc::PROT_WRITE);
        let (place, fd) = (std::ptr::null_mut(), ring.as_raw_fd());
        // SAFETY: a new mapping, where nothing is mapped.
        let at = unsafe { libc::mmap(place, bytes, both, libc::MAP_SHARED, fd, offset) };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Shared { at: at.cast(), bytes })
    }

    /// A word, which others change. It lies in the first page, which every ring has.
    fn word(&self, offset: u32) -> io::Result<&AtomicU32> {
        let inside = offset.is_multiple_of(4) && offset < 4096 && offset as usize + 4 <= self.bytes;
        if !inside {
            return Err(io::Error::other("the ring is laid out strangely"));
        }
        // SAFETY: the mapping is that long and lives as long as `self`; the word is aligned.
        Ok(unsafe { AtomicU32::from_ptr(self.at.add(offset as usize).cast()) })
    }

    pub(super) fn get(&self, offset: u32) -> io::Result<u32> {
        Ok(self.word(offset)?.load(Ordering::Acquire))
    }

    pub(super) fn set(&self, offset: u32, value: u32) -> io::Result<()> {
        self.word(offset)?.store(value, Ordering::Release);
        Ok(())
    }

    /// Copies `bytes` bytes from `offset` on, or fewer: as many as there is memory. By the kernel,
    /// which is told of memory that is not there by an error, and not by a signal.
    pub(super) fn read(&self, offset: u64, bytes: u64) -> io::Result<Vec<u8>> {
        let end = offset.saturating_add(bytes).min(self.bytes as u64);
        let mut file = File::from(memfd_create("kedge", MemfdFlags::CLOEXEC)?);
        let mut at = offset;
        while at < end {
            // SAFETY: the kernel reads from a range of the mapping, and fails where it has no
            // memory.
            let done = unsafe {
                let from = self.at.add(at as usize).cast::<libc::c_void>();
                libc::write(file.as_raw_fd(), from, (end - at) as usize)
            };
            match done {
                -1 if io::Error::last_os_error().raw_os_error() == Some(libc::EFAULT) => break,
                -1 => return Err(io::Error::last_os_error()),
                done => at += done as u64,
            }
        }
        let mut bytes = Vec::new();
        file.rewind()?;
        file.read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Copies `bytes` to `offset`. Of a ring of this process's own.
    pub(super) fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let end = offset.checked_add(bytes.len() as u64);
        if end.is_none_or(|end| end > self.bytes as u64) {
            return Err(io::Error::other("past the end of a ring"));
        }
        // SAFETY: the range lies in the mapping, all of which the kernel has memory for: this
        // process has made the ring. Nobody else reads it as yet.
        unsafe {
            let to = self.at.add(offset as usize);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
        Ok(())
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the mapping is this one's own, and nothing refers to it any more.
        unsafe { libc::munmap(self.at.cast(), self.bytes) };
    }
}
