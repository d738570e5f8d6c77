//! The file by which a cache's bytes cross, where devices find it.

use kedge_cuda_types::arena::SHARED_BASE;
use kedge_holder::{PART, SLOTS};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Bytes of all slots.
pub(super) const LENGTH: u64 = PART * SLOTS as u64;

/// Memory that this process and a cache's daemon share, at the start of the shared arena. It is
/// there until the process ends.
#[derive(Debug)]
pub(super) struct Slots(OwnedFd);

impl Slots {
    /// Makes the file, which nobody can shorten, and maps it.
    pub(super) fn new() -> io::Result<Slots> {
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: a name that ends with NUL; what it returns is new, and ours alone.
        let file = unsafe {
            let fd = libc::memfd_create(c"kedge-slots".as_ptr(), flags);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            OwnedFd::from_raw_fd(fd)
        };
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        // SAFETY: plain calls on a descriptor of ours.
        let made = unsafe {
            libc::ftruncate(file.as_raw_fd(), LENGTH as libc::off_t) == 0
                && libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) == 0
        };
        if !made {
            return Err(io::Error::last_os_error());
        }
        let at = SHARED_BASE as usize as *mut libc::c_void;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE;
        // SAFETY: replaces nothing, or fails; the file cannot become shorter than the mapping, so
        // that no access to it faults.
        let got = unsafe { libc::mmap(at, LENGTH as usize, access, flags, file.as_raw_fd(), 0) };
        if got == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        if got != at {
            // A kernel older than 4.17 ignores the flag.
            return Err(io::ErrorKind::AddrInUse.into());
        }
        Ok(Slots(file))
    }

    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Returns where a slot is; it must be one.
    pub(super) fn address(&self, slot: u32) -> u64 {
        SHARED_BASE + u64::from(slot) * PART
    }
}
