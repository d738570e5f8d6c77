//! The attributes of memory pools, and the devices that may access their memory.

use super::super::{give, read};
use super::{Pool, by_handle};
use crate::session;
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::CUmemoryPool;
use kedge_cuda_types::memory::*;
use std::ffi::c_void;

pub(crate) unsafe fn cuMemPoolSetAttribute(
    pool: CUmemoryPool,
    attribute: u32,
    value: *mut c_void,
) -> Result<(), CuError> {
    let pool = by_handle(pool)?;
    // SAFETY: the caller passes NULL or a value of the attribute's type; this is for 64-bit ones.
    let word = |value: *mut c_void| unsafe { read(value.cast::<u64>()) };
    match attribute {
        CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES
        | CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC
        | CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES => {
            // SAFETY: the caller passes NULL or a value of the attribute's type, here a C int.
            let given = unsafe { read(value.cast::<u32>())? };
            pool.state().reuse[attribute as usize - 1] = given;
        }
        CU_MEMPOOL_ATTR_RELEASE_THRESHOLD => pool.state().release_threshold = word(value)?,
        // A high watermark can be reset to 0 alone, which makes it the current value.
        CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH | CU_MEMPOOL_ATTR_USED_MEM_HIGH if word(value)? != 0 => {
            return Err(CuError::INVALID_VALUE);
        }
        CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH => {
            let mut state = pool.state();
            state.reserved_high = state.reserved();
        }
        CU_MEMPOOL_ATTR_USED_MEM_HIGH => {
            let mut state = pool.state();
            state.used_high = state.used;
        }
        _ => return Err(CuError::INVALID_VALUE),
    }
    Ok(())
}

pub(crate) unsafe fn cuMemPoolGetAttribute(
    pool: CUmemoryPool,
    attribute: u32,
    value: *mut c_void,
) -> Result<(), CuError> {
    let pool = by_handle(pool)?;
    release_idle(&pool)?;
    let state = pool.state();
    let wide = match attribute {
        CU_MEMPOOL_ATTR_RELEASE_THRESHOLD => state.release_threshold,
        CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT => state.reserved(),
        CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH => state.reserved_high,
        CU_MEMPOOL_ATTR_USED_MEM_CURRENT => state.used,
        CU_MEMPOOL_ATTR_USED_MEM_HIGH => state.used_high,
        CU_MEMPOOL_ATTR_MAX_POOL_SIZE => pool.max_size,
        _ => {
            let narrow = match attribute {
                1..=3 => state.reuse[attribute as usize - 1],
                CU_MEMPOOL_ATTR_ALLOCATION_TYPE if pool.managed.is_some() => {
                    CU_MEM_ALLOCATION_TYPE_MANAGED
                }
                CU_MEMPOOL_ATTR_ALLOCATION_TYPE => CU_MEM_ALLOCATION_TYPE_PINNED,
                CU_MEMPOOL_ATTR_LOCATION_ID => pool.managed.map_or(pool.device, |at| at.id as u32),
                CU_MEMPOOL_ATTR_LOCATION_TYPE => {
                    pool.managed.map_or(CU_MEM_LOCATION_TYPE_DEVICE, |at| at.type_)
                }
                CU_MEMPOOL_ATTR_EXPORT_HANDLE_TYPES | CU_MEMPOOL_ATTR_HW_DECOMPRESS_ENABLED => 0,
                _ => return Err(CuError::INVALID_VALUE),
            };
            // SAFETY: the caller passes NULL or room for the attribute's type, here a C int.
            return unsafe { give(value.cast::<u32>(), narrow) };
        }
    };
    // SAFETY: the caller passes NULL or room for the attribute's type, here a 64-bit one.
    unsafe { give(value.cast::<u64>(), wide) }
}

/// Releases idle memory above the pool's threshold, as a synchronisation of the program would have
/// done on a real device, so that it is not counted.
fn release_idle(pool: &Pool) -> Result<(), CuError> {
    let keep = pool.state().release_threshold;
    pool.trim(keep).map(|_| ())
}

pub(crate) unsafe fn cuMemPoolSetAccess(
    pool: CUmemoryPool,
    map: *const CUmemAccessDesc,
    count: usize,
) -> Result<(), CuError> {
    let pool = by_handle(pool)?;
    for index in 0..count {
        // SAFETY: the caller passes an array of `count` elements, and `index` is below that.
        let desc = unsafe { read(map.wrapping_add(index))? };
        let device = desc.location.id;
        let known = matches!(
            desc.flags,
            CU_MEM_ACCESS_FLAGS_PROT_NONE | CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        );
        if desc.location.type_ != CU_MEM_LOCATION_TYPE_DEVICE || !known {
            return Err(CuError::INVALID_VALUE);
        }
        session::get()?.device(device)?;
        if device == pool.device as i32 && desc.flags == CU_MEM_ACCESS_FLAGS_PROT_NONE {
            return Err(CuError::INVALID_VALUE);
        }
        pool.state().access.insert(device, desc.flags);
    }
    Ok(())
}

pub(crate) unsafe fn cuMemPoolGetAccess(
    flags: *mut u32,
    pool: CUmemoryPool,
    location: *const CUmemLocation,
) -> Result<(), CuError> {
    let pool = by_handle(pool)?;
    // SAFETY: the caller passes NULL or a valid location.
    let at = unsafe { read(location)? };
    if at.type_ != CU_MEM_LOCATION_TYPE_DEVICE {
        return Err(CuError::INVALID_VALUE);
    }
    let access = match pool.state().access.get(&at.id) {
        _ if at.id == pool.device as i32 => CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        Some(&given) => given,
        None => CU_MEM_ACCESS_FLAGS_PROT_NONE,
    };
    // SAFETY: the caller passes NULL or room for the flags.
    unsafe { give(flags, access) }
}
