//! Memory that a graph has freed serves its later allocations, as CUDA's graphs do: a captured loop
//! of allocations and frees needs the memory of one round.

use super::payload::Payload;
use super::world;
use crate::context;
use crate::memory::{graph_alloc, graph_share};
use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::device_of;
use kedge_cuda_types::handle::{CUgraph, CUgraphNode};
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Held from when an address is chosen until its node is in the graph: nobody else chooses it.
pub(crate) type Reusing = MutexGuard<'static, ()>;

pub(crate) fn reusing() -> Reusing {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An address for an allocation of `size` bytes by a node of `graph` behind `dependencies`, on the
/// current context's device.
///
/// # Errors
/// OUT_OF_MEMORY, and where there is no context.
pub(crate) fn alloc(
    _alone: &Reusing,
    graph: CUgraph,
    dependencies: Vec<CUgraphNode>,
    size: u64,
) -> Result<u64, CuError> {
    let device = context::current()?.ordinal();
    match freed_before(graph, dependencies, size, device) {
        Some(addr) => {
            graph_share(addr);
            Ok(addr)
        }
        None => graph_alloc(size),
    }
}

/// The memory of an allocation node of that size whose every use is over before a node behind
/// `dependencies` runs: as many nodes free it among those that come before as nodes of the graph
/// allocate it.
fn freed_before(
    graph: CUgraph,
    dependencies: Vec<CUgraphNode>,
    size: u64,
    device: u32,
) -> Option<u64> {
    world::with(|graphs| {
        let nodes = &graphs.get(graph).ok()?.nodes;
        let mut allocated: HashMap<u64, usize> = HashMap::new();
        let mut frees = false;
        for (_, node) in nodes.iter() {
            match &node.payload {
                Payload::MemAlloc(allocation) if allocation.params.bytesize as u64 == size => {
                    *allocated.entry(allocation.params.dptr).or_default() += 1;
                }
                Payload::MemFree { size: freed, .. } => frees |= *freed == size,
                _ => {}
            }
        }
        if !frees {
            return None;
        }
        let ancestors = nodes.ancestors(dependencies);
        for (handle, node) in nodes.iter() {
            if let Payload::MemFree { addr, .. } = node.payload
                && ancestors.contains(&handle)
                && let Some(left) = allocated.get_mut(&addr)
            {
                *left = left.saturating_sub(1);
            }
        }
        let free = |(addr, left): (u64, usize)| {
            (left == 0 && device_of(addr) == Some(device)).then_some(addr)
        };
        allocated.into_iter().filter_map(free).min()
    })
}
