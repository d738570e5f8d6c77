//! Sealed memfds and where they are mapped.

use crate::layout::{FILE_BYTES, HEADER_BYTES, Header, MAGIC, RING_BYTES, RING_WORDS};
use crate::{ConnectError, calls, error::SegmentError, limits};
use kedge_cuda_types::arena;
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// The seals that keep a hostile peer from making our mapping fault by truncating the file.
const SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
const MAPPED_BYTES: usize = HEADER_BYTES + RING_BYTES;

/// Makes a sparse memfd of `len` bytes that can never change its size.
pub(crate) fn sealed_memfd(name: &CStr, len: u64) -> io::Result<OwnedFd> {
    limits::check_file(len)?;
    // SAFETY: `name` is a NUL-terminated string.
    let fd =
        unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: memfd_create just returned this descriptor; nobody else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: `fd` is ours and open; the calls take numbers.
    let failed = unsafe {
        libc::ftruncate(fd.as_raw_fd(), len as libc::off_t) != 0
            || libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, SEALS) != 0
    };
    if failed { Err(io::Error::last_os_error()) } else { Ok(fd) }
}

/// Refuses a descriptor from a peer unless it is a memfd of exactly `len` bytes, sealed.
pub(crate) fn check_sealed(fd: BorrowedFd<'_>, len: u64) -> Result<(), SegmentError> {
    // SAFETY: `fd` is open while it is borrowed, and F_GET_SEALS takes no pointer.
    let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
    if seals < 0 || seals & SEALS != SEALS {
        return Err(SegmentError::NotSealed);
    }
    // SAFETY: `stat` is plain data, for which zero is a value; fstat fills it.
    let (status, stat) = unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        (libc::fstat(fd.as_raw_fd(), &mut stat), stat)
    };
    if status != 0 || stat.st_size as u64 != len {
        return Err(SegmentError::WrongSize { size: stat.st_size as u64, expected: len });
    }
    Ok(())
}

/// Refuses what is not a shared arena.
pub fn check_shared_arena(fd: BorrowedFd<'_>) -> Result<(), SegmentError> {
    check_sealed(fd, arena::SHARED_LEN)
}

/// The mapped header and ring.
#[derive(Debug)]
pub(crate) struct Segment {
    base: NonNull<u8>,
    fd: OwnedFd,
}

// SAFETY: the mapping lives as long as the value, is not tied to a thread, and is only reached
// through atomics.
unsafe impl Send for Segment {}
// SAFETY: what a shared reference reaches of the mapping is atomics alone.
unsafe impl Sync for Segment {}

impl Segment {
    /// Makes a fresh segment, for a client.
    pub(crate) fn create() -> io::Result<Segment> {
        let segment = Segment::map(Segment::file()?)?;
        segment.header().magic.store(MAGIC, Ordering::Relaxed);
        Ok(segment)
    }

    /// Returns the memfd of a fresh segment, without contents.
    fn file() -> io::Result<OwnedFd> {
        sealed_memfd(c"kedge-ring", FILE_BYTES)
    }

    /// Opens a segment that a client sent.
    pub(crate) fn open(fd: OwnedFd) -> Result<Segment, SegmentError> {
        check_sealed(fd.as_fd(), FILE_BYTES)?;
        let segment = Segment::map(fd).map_err(SegmentError::Map)?;
        if segment.header().magic.load(Ordering::Relaxed) != MAGIC {
            return Err(SegmentError::NotARing);
        }
        Ok(segment)
    }

    fn map(fd: OwnedFd) -> io::Result<Segment> {
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                MAPPED_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                0,
            )
        };
        match NonNull::new(base.cast::<u8>()) {
            Some(base) if base.as_ptr().cast() != libc::MAP_FAILED => Ok(Segment { base, fd }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    #[inline]
    pub(crate) fn header(&self) -> &Header {
        // SAFETY: page-aligned, HEADER_BYTES ≥ size_of::<Header>() are mapped while `self` lives,
        // every field is an atomic (so any content, changing at any time, is valid), and the file
        // cannot shrink under the mapping.
        unsafe { self.base.cast::<Header>().as_ref() }
    }

    #[inline]
    pub(crate) fn ring(&self) -> &[AtomicU64; RING_WORDS] {
        // SAFETY: the ring follows the header at a page boundary, mapped while `self` lives, and is
        // atomics alone, for which any content is valid.
        unsafe { self.base.add(HEADER_BYTES).cast().as_ref() }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: this mapping is ours and no reference into it outlives `self`.
        unsafe {
            libc::munmap(self.base.as_ptr().cast(), MAPPED_BYTES);
        }
    }
}

/// Maps a range of this process's address space, for good, at a fixed place.
fn map_fixed(
    what: &'static str,
    start: u64,
    len: u64,
    protection: libc::c_int,
    flags: libc::c_int,
    fd: libc::c_int,
) -> Result<(), ConnectError> {
    let flags = flags | libc::MAP_FIXED_NOREPLACE | libc::MAP_NORESERVE;
    // SAFETY: FIXED_NOREPLACE never replaces a mapping, so no memory of this process changes.
    let got = unsafe { libc::mmap(start as *mut _, len as usize, protection, flags, fd, 0) };
    if got as u64 == start {
        return Ok(());
    }
    if got != libc::MAP_FAILED {
        // An old kernel took the address as a hint.
        // SAFETY: the mapping that the call above made, which nobody knows of.
        unsafe { libc::munmap(got, len as usize) };
    } else {
        let source = io::Error::last_os_error();
        if source.raw_os_error() != Some(libc::EEXIST) {
            return Err(ConnectError::System { what, source });
        }
    }
    Err(ConnectError::AddressTaken { what, start, end: start + len })
}

/// Makes a memfd for a ring that is brought back: its contents are to be written into it.
pub fn create_ring() -> io::Result<OwnedFd> {
    Segment::file()
}

/// Makes a fresh shared arena.
pub fn create_shared_arena() -> io::Result<OwnedFd> {
    sealed_memfd(c"kedge-shared", arena::SHARED_LEN)
}

/// Maps the shared arena at [`arena::SHARED_BASE`], for the life of the process. The proxy calls
/// this with the descriptor that the client sent and [`Server::accept`](crate::Server::accept)
/// checked.
pub fn map_shared_arena(fd: BorrowedFd<'_>) -> Result<(), ConnectError> {
    map_fixed(
        "map the shared arena",
        arena::SHARED_BASE,
        arena::SHARED_LEN,
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_SHARED,
        fd.as_raw_fd(),
    )?;
    dont_dump(arena::SHARED_BASE, arena::SHARED_LEN);
    calls::arena_is_mapped();
    Ok(())
}

/// Keeps the device arenas' range free of anything else in the client: host and device addresses
/// never collide, and a host access to a device address faults as it does on a real GPU.
pub(crate) fn reserve_device_arenas() -> Result<(), ConnectError> {
    map_fixed(
        "reserve the device arenas",
        arena::DEVICE_BASE,
        arena::DEVICE_STRIDE * u64::from(arena::MAX_DEVICES),
        libc::PROT_NONE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        -1,
    )
}

/// Leaves a range out of core dumps, which need not hold half a terabyte of holes.
fn dont_dump(start: u64, len: u64) {
    // SAFETY: advice on a mapping that was just made here; it changes no content.
    unsafe {
        libc::madvise(start as *mut _, len as usize, libc::MADV_DONTDUMP);
    }
}
