//! Which pool a device's stream-ordered allocations come from.

use super::{by_handle, device_pools};
use crate::memory::{give, read};
use crate::{entry, session};
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUdevice, CUmemoryPool};
use kedge_cuda_types::memory::*;

pub(crate) unsafe fn cuDeviceGetDefaultMemPool(
    pool: *mut CUmemoryPool,
    device: CUdevice,
) -> Result<(), CuError> {
    session::get()?.device(device)?;
    // SAFETY: `pool` is NULL or valid for a write: the API asks that of the program.
    unsafe { give(pool, device_pools(device as u32, |pools| pools.default)?) }
}

pub(crate) unsafe fn cuDeviceGetMemPool(
    pool: *mut CUmemoryPool,
    device: CUdevice,
) -> Result<(), CuError> {
    session::get()?.device(device)?;
    // SAFETY: `pool` is NULL or valid for a write: the API asks that of the program.
    unsafe { give(pool, device_pools(device as u32, |pools| pools.current)?) }
}

pub(crate) unsafe fn cuDeviceSetMemPool(
    device: CUdevice,
    pool: CUmemoryPool,
) -> Result<(), CuError> {
    session::get()?.device(device)?;
    let pool = by_handle(pool)?;
    if pool.device != device as u32 || pool.imported {
        return Err(CuError::INVALID_VALUE);
    }
    device_pools(pool.device, |pools| pools.current = pool.handle)
}

/// The device of a location whose pool is asked for.
///
/// # Safety
/// `location` is NULL or valid.
unsafe fn device_at(location: *const CUmemLocation, kind: u32) -> Result<CUdevice, CuError> {
    // SAFETY: `location` is NULL or valid for a read, by this function's contract.
    let at = unsafe { read(location)? };
    if at.type_ != CU_MEM_LOCATION_TYPE_DEVICE || kind != CU_MEM_ALLOCATION_TYPE_PINNED {
        return Err(entry::not_supported("a memory pool of host or managed memory"));
    }
    Ok(at.id)
}

pub(crate) unsafe fn cuMemGetDefaultMemPool(
    pool: *mut CUmemoryPool,
    location: *const CUmemLocation,
    kind: u32,
) -> Result<(), CuError> {
    // SAFETY: `location` is NULL or valid for a read, `pool` for a write: the API asks that of the
    // program.
    unsafe { cuDeviceGetDefaultMemPool(pool, device_at(location, kind)?) }
}

pub(crate) unsafe fn cuMemGetMemPool(
    pool: *mut CUmemoryPool,
    location: *const CUmemLocation,
    kind: u32,
) -> Result<(), CuError> {
    // SAFETY: `location` is NULL or valid for a read, `pool` for a write: the API asks that of the
    // program.
    unsafe { cuDeviceGetMemPool(pool, device_at(location, kind)?) }
}

pub(crate) unsafe fn cuMemSetMemPool(
    location: *const CUmemLocation,
    kind: u32,
    pool: CUmemoryPool,
) -> Result<(), CuError> {
    // SAFETY: `location` is NULL or valid for a read: the API asks that of the program; the pool's
    // handle is looked up.
    unsafe { cuDeviceSetMemPool(device_at(location, kind)?, pool) }
}
