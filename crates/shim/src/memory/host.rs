//! Pinned host memory: in the shared arena, at one address for host and device.

use super::link::{call, client, current, post, quiesce};
use super::shared::PAGE;
use super::table::{Allocation, Kind};
use super::{MEMORY, give};
use crate::capture;
use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::SHARED_BASE;
use kedge_cuda_types::handle::CUdeviceptr;
use kedge_cuda_types::memory::*;
use kedge_protocol::{Call, Post};
use std::ffi::c_void;
use std::os::fd::AsRawFd;

/// Allocates `size` bytes of the shared arena that devices can access.
pub(super) fn alloc(kind: Kind, size: u64) -> Result<u64, CuError> {
    let current = current()?;
    if size == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    capture::check_unsafe()?;
    let (addr, taken) = MEMORY.shared.take(size)?;
    if let Err(error) = call(&Call::Share { addr, size }) {
        MEMORY.shared.put(addr, taken);
        return Err(error);
    }
    MEMORY.record(&current, kind, addr, size, taken);
    Ok(addr)
}

/// Gives pinned or managed memory back that no work uses any longer.
pub(super) fn release(found: &Allocation) -> Result<(), CuError> {
    post(&Post::Unshare { addr: found.base, size: found.size })?;
    drop_pages(found.base, found.taken)?;
    MEMORY.shared.put(found.base, found.taken);
    Ok(())
}

/// Returns the physical pages of a range of the shared arena to the system; ranges that share their
/// pages with others keep them.
pub(super) fn drop_pages(addr: u64, size: u64) -> Result<(), CuError> {
    if !(addr | size).is_multiple_of(PAGE) {
        return Ok(());
    }
    let fd = client()?.shared_fd().as_raw_fd();
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    let (offset, size) = ((addr - SHARED_BASE) as libc::off_t, size as libc::off_t);
    // SAFETY: the range is nobody's any longer. A refusal only keeps memory that would be free.
    unsafe { libc::fallocate(fd, mode, offset, size) };
    Ok(())
}

const HOST_ALLOC_FLAGS: u32 =
    CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;

pub(crate) unsafe fn cuMemHostAlloc(
    pp: *mut *mut c_void,
    bytesize: usize,
    flags: u32,
) -> Result<(), CuError> {
    if pp.is_null() || flags & !HOST_ALLOC_FLAGS != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let addr = alloc(Kind::Pinned { flags }, bytesize as u64)?;
    // SAFETY: `pp` is NULL or valid for a write: the API asks that of the program.
    unsafe { give(pp, addr as usize as *mut c_void) }
}

pub(crate) unsafe fn cuMemAllocHost_v2(
    pp: *mut *mut c_void,
    bytesize: usize,
) -> Result<(), CuError> {
    // SAFETY: `cuMemHostAlloc` asks the same of these arguments as this call does.
    unsafe { cuMemHostAlloc(pp, bytesize, CU_MEMHOSTALLOC_DEVICEMAP) }
}

pub(crate) unsafe fn cuMemFreeHost(p: *mut c_void) -> Result<(), CuError> {
    if p.is_null() {
        return Ok(());
    }
    capture::check_unsafe()?;
    let pinned = |found: &Allocation| matches!(found.kind, Kind::Pinned { .. });
    let found = MEMORY.table_mut().remove(p as u64, pinned).ok_or(CuError::INVALID_VALUE)?;
    quiesce()?;
    release(&found)
}

pub(crate) unsafe fn cuMemHostGetDevicePointer_v2(
    pdptr: *mut CUdeviceptr,
    p: *mut c_void,
    flags: u32,
) -> Result<(), CuError> {
    if flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let table = MEMORY.table();
    let (found, addr) = table.resolve(p as u64).ok_or(CuError::INVALID_VALUE)?;
    if found.on_device() {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: `pdptr` is NULL or valid for a write: the API asks that of the program.
    unsafe { give(pdptr, found.kernel_address(addr)) }
}

pub(crate) unsafe fn cuMemHostGetFlags(flags: *mut u32, p: *mut c_void) -> Result<(), CuError> {
    let table = MEMORY.table();
    let (found, _) = table.resolve(p as u64).ok_or(CuError::INVALID_VALUE)?;
    match found.kind {
        // All pinned memory is mapped for devices, whether or not that was asked for.
        Kind::Pinned { flags: given } | Kind::Registered { flags: given, .. } => {
            // SAFETY: `flags` is NULL or valid for a write: the API asks that of the program.
            unsafe { give(flags, given | CU_MEMHOSTALLOC_DEVICEMAP) }
        }
        _ => Err(CuError::INVALID_VALUE),
    }
}
