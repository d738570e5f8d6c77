//! Device memory: `cuMemAlloc` and its kin, and `cuMemFree` for every kind of memory.

use super::link::{Current, Proxy, ask, call, current, is_exact, post_alloc, post_free, quiesce};
use super::ranges::GRANULE;
use super::table::{Allocation, Kind};
use super::{MEMORY, array, give, host, ipc, managed, paged, pool, shadow, texture};
use crate::{capture, session};
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUcontext, CUdeviceptr};
use kedge_cuda_types::memory::CU_MEMHOSTALLOC_PORTABLE;
use kedge_protocol::{Call, CtxId, GlobalInfo, Status};
use std::sync::Arc;

/// Takes device memory. Before it gives up, it reclaims what pools keep, and has managed memory go
/// to the host.
pub(super) fn take_device_memory(device: u32, size: u64) -> Result<(u64, u64), CuError> {
    let heap = MEMORY.heap(device)?;
    let mut outcome = heap.take(size, &Proxy);
    if outcome == Err(CuError::OUT_OF_MEMORY) && pool::reclaim(device)? {
        outcome = heap.take(size, &Proxy);
    }
    let has_it = size <= session::get()?.device(device as i32)?.total_memory;
    let _claim = (outcome == Err(CuError::OUT_OF_MEMORY) && has_it).then(paged::claim);
    while outcome == Err(CuError::OUT_OF_MEMORY) && has_it && paged::give_way(device, size)? {
        outcome = heap.take(size, &Proxy);
    }
    outcome
}

fn alloc(size: u64) -> Result<u64, CuError> {
    let current = current()?;
    if size == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    capture::check_unsafe()?;
    let (addr, taken) = take_device_memory(current.device, size)?;
    MEMORY.record(&current, Kind::Device, addr, size, taken);
    post_alloc(current.ctx, addr, size)?;
    Ok(addr)
}

pub(crate) unsafe fn cuMemAlloc_v2(dptr: *mut CUdeviceptr, bytesize: usize) -> Result<(), CuError> {
    if dptr.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let addr = alloc(bytesize as u64)?;
    // SAFETY: `dptr` is NULL or valid for a write: the API asks that of the program.
    unsafe { give(dptr, addr) }
}

pub(crate) unsafe fn cuMemAllocPitch_v2(
    dptr: *mut CUdeviceptr,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element_size: u32,
) -> Result<(), CuError> {
    let usable = matches!(element_size, 4 | 8 | 16) && width > 0 && height > 0;
    if dptr.is_null() || pitch.is_null() || !usable {
        return Err(CuError::INVALID_VALUE);
    }
    let row = width.checked_next_multiple_of(GRANULE as usize).ok_or(CuError::OUT_OF_MEMORY)?;
    let addr = alloc(row.checked_mul(height).ok_or(CuError::OUT_OF_MEMORY)? as u64)?;
    // SAFETY: `pitch` and `dptr` are NULL or valid for a write each: the API asks that of the
    // program.
    unsafe {
        give(pitch, row)?;
        give(dptr, addr)
    }
}

/// Frees memory of any kind that the reference allows here. As CUDA does, it waits for all work
/// that was submitted before.
pub(crate) unsafe fn cuMemFree_v2(dptr: CUdeviceptr) -> Result<(), CuError> {
    if dptr == 0 {
        return Ok(());
    }
    capture::check_unsafe()?;
    if let Some(found) = graphs_own(dptr) {
        // The graph keeps the address for its next launch.
        quiesce()?;
        post_free(found.base, found.size)?;
        return if pool::graph_freed(found.base) {
            pool::graph_release(found.base)
        } else {
            Ok(())
        };
    }
    let pooled = |found: &Arc<Allocation>| found.kind == Kind::Peer { pooled: true };
    if MEMORY.table().find(dptr).is_some_and(pooled) {
        return ipc::close(dptr);
    }
    let may_free = |found: &Allocation| {
        matches!(found.kind, Kind::Device | Kind::Pool(_) | Kind::Managed { .. })
    };
    // Out of the table first: of two threads that free one pointer, one must fail.
    let found = MEMORY.table_mut().remove(dptr, may_free).ok_or(CuError::INVALID_VALUE)?;
    quiesce()?;
    release(&found)
}

/// The graph's allocation that begins at `base`.
fn graphs_own(base: u64) -> Option<Arc<Allocation>> {
    let found = MEMORY.table().find(base).cloned()?;
    (found.base == base && found.kind == Kind::Graph).then_some(found)
}

/// Gives the device all memory back that this process holds in reserve, for what the device places
/// itself: CUDA arrays, modules. What managed memory has there goes to the host, and stays there
/// until the claim that this returns is dropped.
pub(crate) fn surrender_reserve(device: u32) -> Result<paged::Claim, CuError> {
    pool::reclaim(device)?;
    MEMORY.heap(device)?.surrender(&Proxy)?;
    let claim = paged::claim();
    paged::give_way(device, u64::MAX)?;
    Ok(claim)
}

/// A call for memory that the device itself places. What this process holds in reserve may be what
/// the device lacks.
pub(super) fn call_for_memory(device: u32, wanted: &Call) -> Result<(), CuError> {
    match call(wanted) {
        Err(CuError::OUT_OF_MEMORY) => {
            let _claim = surrender_reserve(device)?;
            call(wanted)
        }
        outcome => outcome,
    }
}

/// Gives back an allocation that no work uses any longer.
pub(super) fn release(found: &Arc<Allocation>) -> Result<(), CuError> {
    match found.kind {
        Kind::Device | Kind::Graph => {
            if found.kind == Kind::Graph {
                pool::graph_gone(found.base);
            }
            post_free(found.base, found.size)?;
            MEMORY.heap(found.device)?.put(found.base, found.taken, &Proxy)
        }
        Kind::Pool(handle) => {
            post_free(found.base, found.size)?;
            pool::freed_for_all(handle, found)
        }
        Kind::Managed { .. } => {
            managed::forget(found);
            if paged::is_paged(found.base) { paged::release(found) } else { host::release(found) }
        }
        Kind::Pinned { .. } => host::release(found),
        Kind::Registered { .. } | Kind::Mapping(_) | Kind::Peer { .. } | Kind::Variable { .. } => {
            Ok(())
        }
    }
}

/// Frees what a context that is gone has allocated. Its modules' variables go with their modules.
pub(crate) fn context_destroyed(ctx: CtxId) {
    let portable = |flags: u32| flags & CU_MEMHOSTALLOC_PORTABLE != 0;
    let dies = |found: &Allocation| match found.kind {
        Kind::Device | Kind::Pool(_) | Kind::Managed { .. } | Kind::Graph => true,
        Kind::Pinned { flags } => !portable(flags),
        _ => false,
    };
    // Nothing of the context may still run when its memory is used for something else.
    let _ = ask::<Status>(&Call::CtxSync { ctx });
    let mut table = MEMORY.table_mut();
    let bases: Vec<u64> = table
        .iter()
        .filter(|found| found.ctx == ctx && dies(found))
        .map(|found| found.base)
        .collect();
    let dead: Vec<_> = bases.iter().filter_map(|&base| table.remove(base, |_| true)).collect();
    drop(table);
    shadow::context_destroyed(ctx);
    paged::context_destroyed(ctx);
    array::forget_context(ctx);
    texture::forget_context(ctx);
    for found in dead {
        // Fails only where the proxy is gone, and then there is nothing left to free.
        let _ = release(&found);
    }
}

/// A variable of a module in that context can be copied to and asked about from now on.
///
/// # Errors
/// NOT_SUPPORTED for a managed variable that cannot have a shadow here.
pub(crate) fn variable_found(
    context: CUcontext,
    ctx: CtxId,
    device: u32,
    variable: &GlobalInfo,
) -> Result<(), CuError> {
    if variable.size > 0 {
        if variable.managed && !is_exact(device) {
            shadow::create(ctx, variable)?;
        }
        let current = Current { context, ctx, device };
        let kind = Kind::Variable { managed: variable.managed };
        MEMORY.record(&current, kind, variable.addr, variable.size, variable.size);
    }
    Ok(())
}

/// The module of these variables is gone.
pub(crate) fn variables_gone<'a>(variables: impl Iterator<Item = &'a GlobalInfo>) {
    let mut table = MEMORY.table_mut();
    for variable in variables {
        table.remove(variable.addr, |found| matches!(found.kind, Kind::Variable { .. }));
        if variable.managed {
            shadow::remove(variable);
        }
    }
}

pub(crate) unsafe fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Result<(), CuError> {
    let device = current()?.device;
    pool::trim_idle(device);
    let spare = MEMORY.heap(device)?.spare();
    let grantable = ask::<Result<u64, u32>>(&Call::MemFree { device })?.map_err(CuError)?;
    // SAFETY: `free` and `total` are NULL or valid for a write each: the API asks that of the
    // program.
    unsafe {
        if !free.is_null() {
            give(free, (grantable + spare) as usize)?;
        }
        if !total.is_null() {
            give(total, session::get()?.device(device as i32)?.total_memory as usize)?;
        }
    }
    Ok(())
}

pub(crate) unsafe fn cuMemGetAddressRange_v2(
    base: *mut CUdeviceptr,
    size: *mut usize,
    dptr: CUdeviceptr,
) -> Result<(), CuError> {
    let found = MEMORY.table().find(dptr).cloned().ok_or(CuError::NOT_FOUND)?;
    // SAFETY: `base` and `size` are NULL or valid for a write each: the API asks that of the
    // program.
    unsafe {
        if !base.is_null() {
            give(base, found.base)?;
        }
        if !size.is_null() {
            give(size, found.size as usize)?;
        }
    }
    Ok(())
}
