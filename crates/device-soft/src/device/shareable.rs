//! Device memory that other processes can map: sealed memfds, whose names tell the device.
//!
//! A slab is private memory until it is exported. Then, while nothing runs, its content moves into
//! a memfd that is mapped in its place.

use kedge_cuda_types::CuError;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Sizes of exported memory are multiples of this, in bytes.
const GRANULARITY: u64 = 2 << 20;
/// The largest size of exported memory, in bytes: no device has more.
const MAX_BYTES: u64 = 1 << 40;
/// Seals that fix the size: no process can make another one that maps the memory fault.
const SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
const NAME: &str = "kedge-device-";
const PAGE: usize = 4096;

/// Creates `size` zeroed bytes of memory of device `number`.
pub(super) fn create(number: u32, size: u64) -> io::Result<File> {
    sealed(&format!("{NAME}{number}\0"), size)
}

/// Creates a sealed memfd of `size` bytes; `name` ends with a NUL.
pub(super) fn sealed(name: &str, size: u64) -> io::Result<File> {
    let name = std::ffi::CStr::from_bytes_with_nul(name.as_bytes()).map_err(io::Error::other)?;
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: `name` is a C string that lives until the call returns.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: memfd_create has just made this descriptor, and nothing else owns it.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(size)?;
    // SAFETY: `file` owns the descriptor, and F_ADD_SEALS takes an integer.
    let rc = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SEALS) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(file) }
}

/// Returns the size of a sealed memfd that another process has sent, in bytes.
///
/// # Errors
/// INVALID_VALUE for any other file, and for a memfd of huge pages.
pub(super) fn sealed_size(fd: BorrowedFd<'_>) -> Result<u64, CuError> {
    // SAFETY: both structures are plain data, for which zeros are a value; the calls write to them
    // alone, and `fd` is open as long as it is borrowed.
    let (seals, status, stat, kind) = unsafe {
        let (mut stat, mut kind): (libc::stat, libc::statfs) = std::mem::zeroed();
        let seals = libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS);
        let status =
            libc::fstat(fd.as_raw_fd(), &mut stat) | libc::fstatfs(fd.as_raw_fd(), &mut kind);
        (seals, status, stat, kind)
    };
    // A memfd of huge pages faults when it is touched and none are left.
    let plain = status == 0 && kind.f_type == libc::TMPFS_MAGIC;
    let sealed = seals >= 0 && seals & SEALS == SEALS;
    if plain && sealed { Ok(stat.st_size as u64) } else { Err(CuError::INVALID_VALUE) }
}

/// Returns the size in bytes of memory that another process has exported, and its device's number
/// if its name tells one.
///
/// # Errors
/// INVALID_VALUE for a file that no export makes.
pub(super) fn inspect(fd: BorrowedFd<'_>) -> Result<(u64, Option<u32>), CuError> {
    let size = sealed_size(fd)?;
    if size == 0 || size > MAX_BYTES || !size.is_multiple_of(GRANULARITY) {
        return Err(CuError::INVALID_VALUE);
    }
    let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap_or_default();
    let link = link.to_string_lossy();
    let number = link.strip_prefix("/memfd:").and_then(|name| name.strip_prefix(NAME));
    let number = number.and_then(|rest| rest.split(' ').next()?.parse().ok());
    Ok((size, number))
}

/// Maps `file` (descriptor, offset) at [addr, addr+size) of a device arena, or zeroed private
/// memory if it is `None`.
///
/// # Errors
/// MAP_FAILED if the kernel refuses.
pub(super) fn replace_pages(addr: u64, size: u64, file: Option<(i32, u64)>) -> Result<(), CuError> {
    let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let (flags, fd, offset) = match file {
        Some((fd, offset)) => (libc::MAP_SHARED, fd, offset),
        None => (private, -1, 0),
    };
    let (at, access) = (addr as usize as *mut libc::c_void, libc::PROT_READ | libc::PROT_WRITE);
    // SAFETY: callers check that the range lies in the client's part of a device arena; that is
    // mapped for device memory alone, and no Rust reference points into it.
    let got = unsafe {
        libc::mmap(at, size as usize, access, flags | libc::MAP_FIXED, fd, offset as libc::off_t)
    };
    if got == libc::MAP_FAILED { Err(CuError::MAP_FAILED) } else { Ok(()) }
}

/// The exported slabs: address → (bytes, memfd).
#[derive(Default)]
pub(super) struct ExportedSlabs(BTreeMap<u64, (u64, File)>);

impl ExportedSlabs {
    /// Returns whether an address lies in an exported slab.
    pub(super) fn hold(&self, addr: u64) -> bool {
        let before = self.0.range(..=addr).next_back();
        before.is_some_and(|(base, (size, _))| addr - base < *size)
    }

    /// Returns (address, bytes) of each slab, in order.
    pub(super) fn ranges(&self) -> Vec<(u64, u64)> {
        self.0.iter().map(|(base, (size, _))| (*base, *size)).collect()
    }

    /// Reads memory of an exported slab, without making pages that were never written.
    ///
    /// # Errors
    /// The address is in no exported slab, or the slab ends before `out` is full.
    pub(super) fn read(&self, addr: u64, out: &mut [u8]) -> io::Result<()> {
        use std::os::unix::fs::FileExt;
        match self.0.range(..=addr).next_back() {
            Some((base, (_, file))) => file.read_exact_at(out, addr - base),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    /// Returns a descriptor of the slab [base, base+size) of device `number`; the first export
    /// moves the slab into a memfd. Nothing may run that could touch it.
    ///
    /// # Errors
    /// OUT_OF_MEMORY, MAP_FAILED or OPERATING_SYSTEM if the system refuses something.
    pub(super) fn export(&mut self, base: u64, size: u64, number: u32) -> Result<OwnedFd, CuError> {
        let failed = |_| CuError::OPERATING_SYSTEM;
        let (_, file) = match self.0.entry(base) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let file = create(number, size).map_err(|_| CuError::OUT_OF_MEMORY)?;
                copy_to(&file, base, size).map_err(|_| CuError::OUT_OF_MEMORY)?;
                replace_pages(base, size, Some((file.as_raw_fd(), 0)))?;
                entry.insert((size, file))
            }
        };
        Ok(file.try_clone().map_err(failed)?.into())
    }

    /// Ends the export of the slab at `base`, and returns whether it was exported. Other processes
    /// keep what they have mapped.
    ///
    /// # Errors
    /// MAP_FAILED if the kernel refuses to map private memory there.
    pub(super) fn end(&mut self, base: u64) -> Result<bool, CuError> {
        let Some((size, _)) = self.0.remove(&base) else { return Ok(false) };
        replace_pages(base, size, None)?;
        // SAFETY: the range was mapped just above, and the advice changes no content. A refusal
        // costs speed alone.
        unsafe { libc::madvise(base as usize as *mut _, size as usize, libc::MADV_HUGEPAGE) };
        Ok(true)
    }
}

/// Copies the pages of [base, base+size) that are not all zeros.
fn copy_to(file: &File, base: u64, size: u64) -> io::Result<()> {
    use std::os::unix::fs::FileExt;
    for offset in (0..size).step_by(PAGE) {
        // SAFETY: the page belongs to a slab, which is mapped readable, and nothing that could
        // write to it runs (`ExportedSlabs::export`).
        let page =
            unsafe { std::slice::from_raw_parts((base + offset) as usize as *const u8, PAGE) };
        if page.iter().any(|byte| *byte != 0) {
            file.write_all_at(page, offset)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn memory_tells_its_size_and_device() {
        let file = create(3, 2 * GRANULARITY).unwrap();
        assert_eq!(inspect(file.as_fd()), Ok((2 * GRANULARITY, Some(3))));
        let other = sealed("other\0", GRANULARITY).unwrap();
        assert_eq!(inspect(other.as_fd()), Ok((GRANULARITY, None)));
    }

    #[test]
    fn hostile_descriptors_are_refused() {
        const BAD: Result<(u64, Option<u32>), CuError> = Err(CuError::INVALID_VALUE);
        let (reader, _writer) = io::pipe().unwrap();
        assert_eq!(inspect(reader.as_fd()), BAD);
        assert_eq!(inspect(File::open("/dev/zero").unwrap().as_fd()), BAD);
        assert_eq!(inspect(File::open("/proc/self/exe").unwrap().as_fd()), BAD);
        for size in [0, 4096, GRANULARITY + 4096, MAX_BYTES + GRANULARITY] {
            assert_eq!(inspect(create(0, size).unwrap().as_fd()), BAD, "{size}");
        }
        // A memfd without seals could still shrink.
        // SAFETY: the name is a C string, and nothing else owns the new descriptor.
        let open = unsafe {
            File::from_raw_fd(libc::memfd_create(c"kedge-device-0".as_ptr(), libc::MFD_CLOEXEC))
        };
        open.set_len(GRANULARITY).unwrap();
        assert_eq!(inspect(open.as_fd()), BAD);
    }
}
