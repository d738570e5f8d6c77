//! The fake driver's device memory: files in memory, mapped at the device's addresses.

use super::{INVALID, INVALID_HANDLE, OK, OUT_OF_MEMORY, with};
use kedge_cuda_types::memory::*;
use std::ffi::{c_int, c_uint, c_void};

// SAFETY of all that follows: called by the code under test as the driver would be, with pointers
// that are live where the driver's must be; device addresses are this process's own.

pub(super) unsafe extern "C" fn reserve(
    out: *mut u64,
    size: usize,
    _: usize,
    want: u64,
    _: u64,
) -> u32 {
    let fixed = if want == 0 { 0 } else { libc::MAP_FIXED_NOREPLACE };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | fixed;
    // SAFETY: a new mapping where nothing is.
    let at = unsafe { libc::mmap(want as *mut _, size, libc::PROT_NONE, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        return OUT_OF_MEMORY;
    }
    with(|fake| fake.reserved.insert(at as u64, size));
    // SAFETY: the code under test passes a live place for what it asks for.
    unsafe { *out = at as u64 };
    OK
}

pub(super) unsafe extern "C" fn free_addresses(at: u64, size: usize) -> u32 {
    if with(|fake| fake.reserved.remove(&at)) != Some(size) {
        return INVALID;
    }
    // SAFETY: reserved above.
    unsafe { libc::munmap(at as *mut _, size) };
    OK
}

pub(super) unsafe extern "C" fn create(
    out: *mut u64,
    size: usize,
    _: *const CUmemAllocationProp,
    _: u64,
) -> u32 {
    if with(|fake| fake.used() + size as u64 > fake.memory) {
        return OUT_OF_MEMORY;
    }
    // SAFETY: the name is a C string, and the others act on the descriptor that the first has just
    // made.
    let fd = unsafe {
        let fd = libc::memfd_create(c"fake".as_ptr(), 0);
        libc::ftruncate(fd, size as libc::off_t);
        fd
    };
    let raw = with(|fake| {
        let raw = fake.id() as u64;
        fake.created.insert(raw, (fd, size as u64));
        raw
    });
    // SAFETY: the code under test passes a live place for what it asks for.
    unsafe { *out = raw };
    OK
}

pub(super) unsafe extern "C" fn release(raw: u64) -> u32 {
    let Some((fd, _)) = with(|fake| fake.created.remove(&raw)) else { return INVALID_HANDLE };
    // SAFETY: a descriptor of `create`.
    unsafe { libc::close(fd) };
    OK
}

pub(super) unsafe extern "C" fn export(out: *mut c_void, raw: u64, _: c_uint, _: u64) -> u32 {
    let Some((fd, _)) = with(|fake| fake.created.get(&raw).copied()) else { return INVALID_HANDLE };
    // SAFETY: a descriptor of `create`; the caller wants an int.
    unsafe { *out.cast() = libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
    OK
}

pub(super) unsafe extern "C" fn import(out: *mut u64, fd: *mut c_void, _: c_uint) -> u32 {
    // SAFETY: the calls act on the caller's open descriptor and store into `stat`, a local for
    // which zeros are a value.
    let (fd, size) = unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        let fd = libc::fcntl(fd as usize as c_int, libc::F_DUPFD_CLOEXEC, 0);
        (fd, if libc::fstat(fd, &mut stat) == 0 { stat.st_size as u64 } else { 0 })
    };
    if fd < 0 {
        return INVALID;
    }
    let raw = with(|fake| {
        let raw = fake.id() as u64;
        fake.created.insert(raw, (fd, size));
        raw
    });
    // SAFETY: the code under test passes a live place for what it asks for.
    unsafe { *out = raw };
    OK
}

pub(super) unsafe extern "C" fn map(at: u64, size: usize, offset: usize, raw: u64, _: u64) -> u32 {
    let (protection, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
    let Some((fd, _)) = with(|fake| fake.created.get(&raw).copied()) else { return INVALID_HANDLE };
    // SAFETY: inside of a reservation.
    let mapped =
        unsafe { libc::mmap(at as *mut _, size, protection, flags, fd, offset as libc::off_t) };
    if mapped == libc::MAP_FAILED {
        return INVALID;
    }
    with(|fake| fake.mapped.insert(at, (size as u64, raw)));
    OK
}

pub(super) unsafe extern "C" fn unmap(at: u64, size: usize) -> u32 {
    if with(|fake| fake.mapped.remove(&at)).map(|(bytes, _)| bytes) != Some(size as u64) {
        return INVALID;
    }
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: mapped above.
    unsafe { libc::mmap(at as *mut _, size, libc::PROT_NONE, flags, -1, 0) };
    OK
}

pub(super) unsafe extern "C" fn access(
    at: u64,
    size: usize,
    _: *const CUmemAccessDesc,
    _: usize,
) -> u32 {
    // All of the range is mapped.
    let mapped = with(|fake| {
        let inside = fake.mapped.iter().filter(|(start, _)| (at..at + size as u64).contains(start));
        inside.map(|(_, (bytes, _))| *bytes).sum::<u64>()
    });
    if mapped == size as u64 { OK } else { INVALID }
}

pub(super) unsafe extern "C" fn info(free: *mut usize, total: *mut usize) -> u32 {
    // SAFETY: the code under test passes live places for both.
    with(|fake| unsafe {
        *free = fake.memory.saturating_sub(fake.used()) as usize;
        *total = fake.memory as usize;
    });
    OK
}
