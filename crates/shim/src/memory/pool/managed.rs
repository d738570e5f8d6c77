//! Pools of managed memory. What is allocated is valid at once, and freed when the stream has come
//! to it: managed memory lies in the arena that host and devices share, where nothing is kept for a
//! pool.

use super::{POOLS, Pool, end};
use crate::memory::table::{Allocation, Kind};
use crate::memory::{host, managed};
use crate::{entry, session, stream};
use kedge_cuda_types::CuError;
use kedge_cuda_types::attribute::CONCURRENT_MANAGED_ACCESS;
use kedge_cuda_types::handle::{CUmemoryPool, CUstream};
use kedge_cuda_types::memory::*;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Which pool an address is of.
fn owners() -> MutexGuard<'static, BTreeMap<u64, CUmemoryPool>> {
    static OWNERS: Mutex<BTreeMap<u64, CUmemoryPool>> = Mutex::new(BTreeMap::new());
    OWNERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes the pool. What cuda.h demands of such pools: no handles, no size of their own.
pub(super) fn create(props: &CUmemPoolProps) -> Result<CUmemoryPool, CuError> {
    let at = props.location;
    if props.handleTypes != CU_MEM_HANDLE_TYPE_NONE || props.maxSize != 0 || props.usage != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    if at.type_ != CU_MEM_LOCATION_TYPE_INVALID {
        managed::check_location(at)?;
    }
    let devices = &session::get()?.devices;
    if devices.iter().any(|device| device.limit(CONCURRENT_MANAGED_ACCESS, 0) == 0) {
        return Err(CuError::NOT_SUPPORTED);
    }
    let device = if at.type_ == CU_MEM_LOCATION_TYPE_DEVICE { at.id as u32 } else { 0 };
    let managed = Some(at);
    let made = POOLS.insert_with(|handle| Pool { managed, ..Pool::new(handle, device, false, 0) });
    Ok(made.ok_or(CuError::OUT_OF_MEMORY)?.handle)
}

/// Allocates from such a pool.
///
/// # Errors
/// NOT_SUPPORTED where the stream captures.
pub(super) fn alloc(
    pool: &Pool,
    at: CUmemLocation,
    size: u64,
    stream: CUstream,
) -> Result<u64, CuError> {
    if stream::is_capturing(stream)? {
        return Err(entry::not_supported("an allocation of managed memory in a graph"));
    }
    let addr = host::alloc(Kind::Managed { flags: CU_MEM_ATTACH_GLOBAL }, size)?;
    owners().insert(addr, pool.handle);
    pool.state().took(size);
    managed::prefer(addr, at);
    Ok(addr)
}

pub(super) fn is_pooled(addr: u64) -> bool {
    owners().contains_key(&addr)
}

/// Managed memory is free again: its pool's, if it was one's.
pub(in crate::memory) fn freed(found: &Allocation) {
    let Some(pool) = owners().remove(&found.base).and_then(|handle| POOLS.get(handle.0)) else {
        return;
    };
    let last = {
        let mut state = pool.state();
        state.used -= found.size;
        state.destroyed && state.used == 0
    };
    if last {
        // Fails only where the proxy is gone, and the memory with it.
        let _ = end(&pool);
    }
}
