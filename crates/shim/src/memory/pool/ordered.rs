//! Allocating and freeing in a stream's order.

use super::cache::Block;
use super::managed;
use super::{POOLS, Pool, by_handle, current_pool, device_pools, end};
use super::{graph_freed, graph_release};
use crate::graph::{Payload, reuse};
use crate::memory::alloc::{cuMemFree_v2, take_device_memory};
use crate::memory::link::{client, current, is_exact_at};
use crate::memory::table::{Allocation, Kind};
use crate::memory::{MEMORY, give, ipc};
use crate::{callback, context, entry, stream};
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUdeviceptr, CUmemoryPool, CUstream};
use kedge_protocol::StreamOp;

/// Makes a range valid, or no longer, in `stream`'s order: a node where the stream captures, else a
/// message where the device wants to know.
fn tell(stream: CUstream, addr: u64, op: &StreamOp) -> Result<(), CuError> {
    let post = |stream: &stream::Stream| {
        if is_exact_at(addr) { stream.post(op.clone()) } else { Ok(()) }
    };
    stream::submit(stream, post, || Payload::from_op(op.clone()))
}

/// Allocates from a pool in `stream`'s order; NULL for no bytes.
fn alloc_from(pool: &Pool, size: u64, stream: CUstream) -> Result<u64, CuError> {
    let current = current()?;
    if pool.imported {
        return Err(CuError::INVALID_VALUE);
    }
    if size == 0 {
        // As the driver, which checks the stream all the same.
        return stream::resolve(stream).map(|_| 0);
    }
    if let Some(at) = pool.managed {
        return managed::alloc(pool, at, size, stream);
    }
    if stream::is_capturing(stream)? {
        let alone = reuse::reusing();
        let (graph, tips) = stream::captured_into(stream)?;
        let addr = reuse::alloc(&alone, graph, tips, size)?;
        tell(stream, addr, &StreamOp::MemAlloc { addr, size })?;
        return Ok(addr);
    }
    let (addr, taken) = match take_cached(pool, size, stream)? {
        Some(block) => (block.addr, block.size),
        None => {
            pool.make_room(size)?;
            take_device_memory(pool.device, size)?
        }
    };
    pool.state().took(taken);
    MEMORY.record(&current, Kind::Pool(pool.handle), addr, size, taken);
    tell(stream, addr, &StreamOp::MemAlloc { addr, size })?;
    Ok(addr)
}

fn take_cached(pool: &Pool, size: u64, stream: CUstream) -> Result<Option<Block>, CuError> {
    let id = stream::resolve(stream)?;
    let completed = client()?.completed();
    Ok(pool.state().cache.take(size, id, completed))
}

pub(crate) unsafe fn cuMemAllocAsync(
    dptr: *mut CUdeviceptr,
    bytesize: usize,
    stream: CUstream,
) -> Result<(), CuError> {
    let pool = current_pool(context::current()?.ordinal())?;
    if dptr.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let addr = alloc_from(&pool, bytesize as u64, stream)?;
    // SAFETY: `dptr` is NULL or valid for a write: the API asks that of the program.
    unsafe { give(dptr, addr) }
}

pub(crate) unsafe fn cuMemAllocFromPoolAsync(
    dptr: *mut CUdeviceptr,
    bytesize: usize,
    pool: CUmemoryPool,
    stream: CUstream,
) -> Result<(), CuError> {
    let pool = by_handle(pool)?;
    if dptr.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let addr = alloc_from(&pool, bytesize as u64, stream)?;
    // SAFETY: `dptr` is NULL or valid for a write: the API asks that of the program.
    unsafe { give(dptr, addr) }
}

pub(crate) unsafe fn cuMemFreeAsync(dptr: CUdeviceptr, stream: CUstream) -> Result<(), CuError> {
    if dptr == 0 {
        return Ok(());
    }
    let id = stream::resolve(stream)?;
    let in_graph = stream::is_capturing(stream)?;
    let found = MEMORY.table().find(dptr).cloned().filter(|found| found.base == dptr);
    let found = found.ok_or(CuError::INVALID_VALUE)?;
    let free = StreamOp::MemFree { addr: found.base, size: found.size };
    match found.kind {
        // The graph keeps the address for its next launch.
        Kind::Graph => {
            tell(stream, found.base, &free)?;
            if !in_graph && graph_freed(found.base) {
                let addr = found.base;
                callback::after_device(move || {
                    // Fails only where the proxy is gone, and the memory with it.
                    let _ = graph_release(addr);
                });
            }
            Ok(())
        }
        _ if in_graph => {
            Err(entry::not_supported("freeing in a graph what was not allocated in one"))
        }
        Kind::Pool(_) | Kind::Device => {
            let ours = |other: &Allocation| other.id == found.id;
            MEMORY.table_mut().remove(dptr, ours).ok_or(CuError::INVALID_VALUE)?;
            tell(stream, found.base, &free)?;
            let freed_at = client()?.posted();
            let (addr, size) = (found.base, found.taken);
            keep(&found, Block { addr, size, stream: Some(id), freed_at })
        }
        // Later than the program asked for, which it cannot tell.
        Kind::Managed { .. } if managed::is_pooled(dptr) => {
            stream::wait(stream)?;
            // SAFETY: it reads nothing.
            unsafe { cuMemFree_v2(dptr) }
        }
        Kind::Peer { pooled: true } => {
            stream::wait(stream)?;
            ipc::close(dptr)
        }
        _ => Err(CuError::INVALID_VALUE),
    }
}

/// Puts a freed block where the next allocation finds it: in its pool, or in the device's own.
fn keep(found: &Allocation, block: Block) -> Result<(), CuError> {
    let own = match found.kind {
        Kind::Pool(handle) => POOLS.get(handle.0),
        _ => None,
    };
    let (pool, was_used) = match own {
        Some(pool) => (pool, block.size),
        None => {
            (POOLS.get(device_pools(found.device, |p| p.default)?.0).ok_or(CuError::UNKNOWN)?, 0)
        }
    };
    let last = {
        let mut state = pool.state();
        state.used -= was_used;
        state.cache.put(block);
        state.destroyed && state.used == 0
    };
    if last { end(&pool) } else { Ok(()) }
}

/// `cuMemFree` of pool memory: everything that used it is over.
pub(in crate::memory) fn freed_for_all(
    handle: CUmemoryPool,
    found: &Allocation,
) -> Result<(), CuError> {
    debug_assert_eq!(found.kind, Kind::Pool(handle));
    keep(found, Block { addr: found.base, size: found.taken, stream: None, freed_at: 0 })
}
