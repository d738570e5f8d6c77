//! Stream-ordered memory: `cuMemAllocAsync`, `cuMemFreeAsync` and the pools behind them.
//!
//! A pool's memory comes from its device's heap and stays with the pool when it is freed. The
//! address is chosen at the call; that it may be used, and no longer, travels in stream order. A
//! freed block goes to its own stream at once, and to others when the free is known to be complete.

mod attribute;
mod cache;
mod choice;
mod graph;
mod graph_use;
mod managed;
mod ordered;
mod share;

pub(crate) use attribute::*;
pub(crate) use choice::*;
pub(crate) use graph::*;
pub(crate) use graph_use::*;
pub(super) use managed::freed as managed_freed;
pub(crate) use ordered::*;
pub(crate) use share::*;

use super::link::{Proxy, client, quiesce};
use super::{MEMORY, give, read};
use crate::handle::{Kind as Handles, Table};
use crate::{entry, session};
use cache::Cache;
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::CUmemoryPool;
use kedge_cuda_types::memory::*;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A memory pool.
#[derive(Debug)]
pub(super) struct Pool {
    handle: CUmemoryPool,
    /// Device ordinal.
    device: u32,
    /// A device's own, which is never destroyed.
    is_default: bool,
    /// Bytes; 0: no limit of its own.
    max_size: u64,
    /// What names it in all processes, where others may open it.
    shared: Option<u64>,
    /// It is another process's: nothing can be allocated from it.
    imported: bool,
    /// Its memory is managed, and best at this place.
    managed: Option<CUmemLocation>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    cache: Cache,
    /// Bytes in live allocations, and the most since that was reset.
    used: u64,
    used_high: u64,
    reserved_high: u64,
    /// Bytes that may stay cached when the program synchronises.
    release_threshold: u64,
    /// `CU_MEMPOOL_ATTR_REUSE_*`, remembered: reuse is always as safe as the strictest of them.
    reuse: [u32; 3],
    /// The handle's life has ended, and the last allocation ends the pool's.
    destroyed: bool,
    /// `CU_MEM_ACCESS_FLAGS_*` of other devices.
    access: BTreeMap<i32, u32>,
}

static POOLS: Table<Pool> = Table::new(Handles::MemoryPool);

impl Pool {
    fn new(handle: usize, device: u32, is_default: bool, max_size: u64) -> Self {
        let state = State { reuse: [1; 3], ..State::default() };
        let handle = CUmemoryPool(handle);
        let (shared, imported, managed) = (None, false, None);
        let state = Mutex::new(state);
        Self { handle, device, is_default, max_size, shared, imported, managed, state }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the pool within its own limit when it takes `size` bytes more; OUT_OF_MEMORY if it
    /// cannot.
    fn make_room(&self, size: u64) -> Result<(), CuError> {
        if self.max_size == 0 {
            return Ok(());
        }
        let before = self.max_size.checked_sub(size).ok_or(CuError::OUT_OF_MEMORY)?;
        if self.state().reserved() > before {
            self.trim(before)?;
        }
        if self.state().reserved() > before { Err(CuError::OUT_OF_MEMORY) } else { Ok(()) }
    }

    /// Gives cached memory that nothing uses back to the device's heap until the pool has no more
    /// than `keep` bytes, used ones included. Whether there was anything to give.
    fn trim(&self, keep: u64) -> Result<bool, CuError> {
        self.trim_completed(keep, client()?.completed())
    }

    /// As `trim`, where everything up to `completed` is known to be over.
    fn trim_completed(&self, keep: u64, completed: u64) -> Result<bool, CuError> {
        let blocks = {
            let mut state = self.state();
            let cached = keep.saturating_sub(state.used);
            state.cache.trim(cached, completed)
        };
        for block in &blocks {
            MEMORY.heap(self.device)?.put(block.addr, block.size, &Proxy)?;
        }
        Ok(!blocks.is_empty())
    }
}

impl State {
    fn reserved(&self) -> u64 {
        self.used + self.cache.bytes()
    }

    fn took(&mut self, bytes: u64) {
        self.used += bytes;
        self.used_high = self.used_high.max(self.used);
        self.reserved_high = self.reserved_high.max(self.reserved());
    }
}

fn by_handle(handle: CUmemoryPool) -> Result<Arc<Pool>, CuError> {
    let pool = POOLS.get(handle.0).ok_or(CuError::INVALID_VALUE)?;
    if pool.state().destroyed { Err(CuError::INVALID_VALUE) } else { Ok(pool) }
}

/// Each device's own pool, and the one that `cuMemAllocAsync` uses.
#[derive(Debug, Clone, Copy)]
struct DevicePools {
    default: CUmemoryPool,
    current: CUmemoryPool,
}

fn device_pools<T>(
    device: u32,
    use_them: impl FnOnce(&mut DevicePools) -> T,
) -> Result<T, CuError> {
    static ALL: Mutex<BTreeMap<u32, DevicePools>> = Mutex::new(BTreeMap::new());
    session::get()?.device(device as i32)?;
    let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    let pools = match all.entry(device) {
        Entry::Occupied(known) => known.into_mut(),
        Entry::Vacant(new) => {
            let made = POOLS.insert_with(|handle| Pool::new(handle, device, true, 0));
            let default = made.ok_or(CuError::OUT_OF_MEMORY)?.handle;
            new.insert(DevicePools { default, current: default })
        }
    };
    Ok(use_them(pools))
}

fn current_pool(device: u32) -> Result<Arc<Pool>, CuError> {
    by_handle(device_pools(device, |pools| pools.current)?)
}

/// Gives back what the device's pools keep, and waits for it. Whether there was anything.
pub(super) fn reclaim(device: u32) -> Result<bool, CuError> {
    let pools = POOLS.all();
    let mut pools = pools.iter().filter(|pool| pool.device == device);
    if !pools.clone().any(|pool| pool.state().cache.bytes() > 0) {
        return Ok(false);
    }
    let posted = client()?.posted();
    quiesce()?;
    pools.try_fold(false, |any, pool| Ok(pool.trim_completed(0, posted)? || any))
}

/// Gives back what a synchronisation would have released by now, in all pools of a device.
pub(super) fn trim_idle(device: u32) {
    for pool in POOLS.all().iter().filter(|pool| pool.device == device) {
        let keep = pool.state().release_threshold;
        // Fails only where the proxy is gone.
        let _ = pool.trim(keep);
    }
}

/// Ends a destroyed pool without allocations.
fn end(pool: &Pool) -> Result<(), CuError> {
    let posted = client()?.posted();
    quiesce()?;
    pool.trim_completed(0, posted)?;
    POOLS.remove(pool.handle.0);
    Ok(())
}

pub(crate) unsafe fn cuMemPoolCreate(
    pool: *mut CUmemoryPool,
    props: *const CUmemPoolProps,
) -> Result<(), CuError> {
    // SAFETY: `props` is NULL or valid for a read: the API asks that of the program.
    let props = unsafe { read(props)? };
    if !pool.is_null() && props.allocType == CU_MEM_ALLOCATION_TYPE_MANAGED {
        // SAFETY: `pool` is NULL or valid for a write: the API asks that of the program.
        return unsafe { give(pool, managed::create(&props)?) };
    }
    if pool.is_null() || props.allocType != CU_MEM_ALLOCATION_TYPE_PINNED {
        return Err(CuError::INVALID_VALUE);
    }
    share::check_kinds(props.handleTypes)?;
    if props.location.type_ != CU_MEM_LOCATION_TYPE_DEVICE {
        return Err(entry::not_supported("a memory pool of host memory"));
    }
    session::get()?.device(props.location.id)?;
    let (device, max_size) = (props.location.id as u32, props.maxSize as u64);
    let shared = match props.handleTypes {
        CU_MEM_HANDLE_TYPE_NONE => None,
        _ => Some(share::new_tag()?),
    };
    let made =
        POOLS.insert_with(|handle| Pool { shared, ..Pool::new(handle, device, false, max_size) });
    // SAFETY: `pool` is NULL or valid for a write: the API asks that of the program.
    unsafe { give(pool, made.ok_or(CuError::OUT_OF_MEMORY)?.handle) }
}

pub(crate) unsafe fn cuMemPoolDestroy(pool: CUmemoryPool) -> Result<(), CuError> {
    let pool = by_handle(pool)?;
    if pool.is_default {
        return Err(CuError::INVALID_VALUE);
    }
    device_pools(pool.device, |pools| {
        if pools.current == pool.handle {
            pools.current = pools.default;
        }
    })?;
    let last = {
        let mut state = pool.state();
        state.destroyed = true;
        state.used == 0
    };
    if last { end(&pool) } else { Ok(()) }
}

pub(crate) unsafe fn cuMemPoolTrimTo(pool: CUmemoryPool, keep: usize) -> Result<(), CuError> {
    let pool = by_handle(pool)?;
    pool.trim(keep as u64).map(|_| ())
}
