//! Memory of graphs' allocation nodes.

use super::outlives;
use crate::memory::MEMORY;
use crate::memory::alloc::{release, take_device_memory};
use crate::memory::link::{current, post_alloc};
use crate::memory::table::{Allocation, Kind};
use kedge_cuda_types::CuError;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Reserves memory for a graph's allocation node, for the graph's life; [`graph_release`] ends it.
/// Launches make it valid and invalid by their `MemAlloc` and `MemFree` nodes.
pub(crate) fn graph_alloc(size: u64) -> Result<u64, CuError> {
    let current = current()?;
    let (addr, taken) = take_device_memory(current.device, size)?;
    MEMORY.record(&current, Kind::Graph, addr, size, taken);
    Ok(addr)
}

/// A word of device memory for a graph's life, valid at once; [`graph_release`] ends it.
pub(crate) fn graph_word() -> Result<u64, CuError> {
    const SIZE: u64 = 4;
    let addr = graph_alloc(SIZE)?;
    let word = post_alloc(current()?.ctx, addr, SIZE);
    word.map(|()| addr).inspect_err(|_| {
        // The first error is the one to tell.
        let _ = graph_release(addr);
    })
}

/// Bytes of the graph allocation at `addr`; INVALID_VALUE where there is none.
pub(crate) fn graph_allocation(addr: u64) -> Result<u64, CuError> {
    let table = MEMORY.table();
    let found = table.find(addr).filter(|found| found.base == addr && found.kind == Kind::Graph);
    found.map(|found| found.size).ok_or(CuError::INVALID_VALUE)
}

/// One more allocation node takes the memory at `addr`, after another has freed it: it is given
/// back when the last of them is gone.
pub(crate) fn graph_share(addr: u64) {
    *sharers().entry(addr).or_default() += 1;
}

/// For each address with several allocation nodes, how many there are besides the first.
static SHARERS: Mutex<BTreeMap<u64, usize>> = Mutex::new(BTreeMap::new());

fn sharers() -> MutexGuard<'static, BTreeMap<u64, usize>> {
    SHARERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether an allocation node besides the one that ends was at `addr`.
fn is_shared(addr: u64) -> bool {
    let mut sharers = sharers();
    let Some(others) = sharers.get_mut(&addr) else { return false };
    *others -= 1;
    if *others == 0 {
        sharers.remove(&addr);
    }
    true
}

/// The graph of an allocation node is gone, and no work uses its memory any longer; what a launch
/// has allocated and nothing has freed stays.
pub(crate) fn graph_release(addr: u64) -> Result<(), CuError> {
    if is_shared(addr) || outlives(addr) {
        return Ok(());
    }
    let graphs = |found: &Allocation| found.kind == Kind::Graph;
    let found = MEMORY.table_mut().remove(addr, graphs);
    found.map_or(Ok(()), |found| release(&found))
}
