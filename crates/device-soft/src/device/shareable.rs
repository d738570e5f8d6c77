//! Memory that other processes can map: sealed memfds, named after the device whose memory they
//! are.
//!
//! A slab is private memory until it is exported; then its content moves into a memfd that is
//! mapped in its place, while nothing runs.

use kedge_cuda_types::CuError;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// What the sizes of memory are multiples of.
const GRANULARITY: u64 = 2 << 20;
/// No device is larger.
const MAX_BYTES: u64 = 1 << 40;
/// Other processes map it, and must not fault because of what one of them does to its size.
const SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
const NAME: &str = "kedge-device-";
const PAGE: usize = 4096;

/// `size` zeroed bytes of the device of that number.
pub(super) fn create(number: u32, size: u64) -> io::Result<File> {
    sealed(&format!("{NAME}{number}\0"), size)
}

/// A sealed memfd; `name` ends with a NUL.
pub(super) fn sealed(name: &str, size: u64) -> io::Result<File> {
    let name = std::ffi::CStr::from_bytes_with_nul(name.as_bytes()).map_err(io::Error::other)?;
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: a NUL-terminated name.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: memfd_create has just made this descriptor, and nobody else owns it.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(size)?;
    // SAFETY: a plain call on a descriptor that we own.
    let rc = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SEALS) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(file) }
}

/// The size of a sealed memfd that another process has sent; INVALID_VALUE for anything else.
pub(super) fn sealed_size(fd: BorrowedFd<'_>) -> Result<u64, CuError> {
    // SAFETY: both structures are plain data, for which zero is a value; the calls fill them.
    let (seals, status, stat, kind) = unsafe {
        let (mut stat, mut kind): (libc::stat, libc::statfs) = std::mem::zeroed();
        let seals = libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS);
        let status =
            libc::fstat(fd.as_raw_fd(), &mut stat) | libc::fstatfs(fd.as_raw_fd(), &mut kind);
        (seals, status, stat, kind)
    };
    // A memfd of huge pages may have none when it is touched.
    let plain = status == 0 && kind.f_type == libc::TMPFS_MAGIC;
    let sealed = seals >= 0 && seals & SEALS == SEALS;
    if plain && sealed { Ok(stat.st_size as u64) } else { Err(CuError::INVALID_VALUE) }
}

/// The size of memory that another process has exported, and the number of its device, where its
/// name tells.
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

/// Backs [addr, addr+size) of a device arena by `file` (descriptor, offset), or by nothing.
pub(super) fn replace_pages(addr: u64, size: u64, file: Option<(i32, u64)>) -> Result<(), CuError> {
    let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let (flags, fd, offset) = match file {
        Some((fd, offset)) => (libc::MAP_SHARED, fd, offset),
        None => (private, -1, 0),
    };
    let (at, access) = (addr as usize as *mut libc::c_void, libc::PROT_READ | libc::PROT_WRITE);
    // SAFETY: the range lies in a device arena's client part (checked by the callers), which this
    // process has mapped and which nothing of Rust's refers to.
    let got = unsafe {
        libc::mmap(at, size as usize, access, flags | libc::MAP_FIXED, fd, offset as libc::off_t)
    };
    if got == libc::MAP_FAILED { Err(CuError::MAP_FAILED) } else { Ok(()) }
}

/// The exported slabs: address → (bytes, memory).
#[derive(Default)]
pub(super) struct ExportedSlabs(BTreeMap<u64, (u64, File)>);

impl ExportedSlabs {
    /// Whether an address lies in one.
    pub(super) fn hold(&self, addr: u64) -> bool {
        let before = self.0.range(..=addr).next_back();
        before.is_some_and(|(base, (size, _))| addr - base < *size)
    }

    /// (address, bytes) of each, in order.
    pub(super) fn ranges(&self) -> Vec<(u64, u64)> {
        self.0.iter().map(|(base, (size, _))| (*base, *size)).collect()
    }

    /// Reads memory of one of these; what was never written is not touched.
    pub(super) fn read(&self, addr: u64, out: &mut [u8]) -> io::Result<()> {
        use std::os::unix::fs::FileExt;
        match self.0.range(..=addr).next_back() {
            Some((base, (_, file))) => file.read_exact_at(out, addr - base),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    /// A descriptor of the slab [base, base+size) of the device of that number. Nothing may run
    /// that could touch it.
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

    /// The slab at `base` ends here, if it is one of these: other processes keep what they have
    /// mapped. Whether it was.
    pub(super) fn end(&mut self, base: u64) -> Result<bool, CuError> {
        let Some((size, _)) = self.0.remove(&base) else { return Ok(false) };
        replace_pages(base, size, None)?;
        // SAFETY: advice about our own mapping. A refusal costs only speed.
        unsafe { libc::madvise(base as usize as *mut _, size as usize, libc::MADV_HUGEPAGE) };
        Ok(true)
    }
}

/// Copies the pages of [base, base+size) that hold anything.
fn copy_to(file: &File, base: u64, size: u64) -> io::Result<()> {
    use std::os::unix::fs::FileExt;
    for offset in (0..size).step_by(PAGE) {
        // SAFETY: a page of a slab, mapped readable; nothing writes to it
        // (`ExportedSlabs::export`).
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
        // It could still shrink.
        // SAFETY: a NUL-terminated name; the descriptor is new.
        let open = unsafe {
            File::from_raw_fd(libc::memfd_create(c"kedge-device-0".as_ptr(), libc::MFD_CLOEXEC))
        };
        open.set_len(GRANULARITY).unwrap();
        assert_eq!(inspect(open.as_fd()), BAD);
    }
}
