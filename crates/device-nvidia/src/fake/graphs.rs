//! Graphs of the fake driver: nothing of them is executed.

use super::{Fake, OK, with};
use kedge_cuda_types::graph::{CUDA_MEMSET_NODE_PARAMS_v1, CUgraphEdgeData, CUgraphNodeParams};
use kedge_cuda_types::handle::*;
use std::ffi::c_uint;

// SAFETY of all that follows: called by the code under test as the driver would be, with pointers
// that are live where the driver's must be.

pub(super) unsafe extern "C" fn graph(out: *mut CUgraph, _: c_uint) -> u32 {
    // SAFETY: the code under test passes a live place for what it asks for.
    unsafe { out.write(CUgraph(with(Fake::id))) };
    OK
}

pub(super) unsafe extern "C" fn forget_graph(_: CUgraph) -> u32 {
    OK
}

pub(super) unsafe extern "C" fn forget_exec(_: CUgraphExec) -> u32 {
    with(|fake| fake.ended += 1);
    OK
}

fn node_of(graph: CUgraph) -> CUgraphNode {
    with(|fake| {
        let node = fake.id();
        fake.nodes.insert(node, graph.0);
        CUgraphNode(node)
    })
}

/// Numbered from 1 in each graph.
pub(super) unsafe extern "C" fn condition(
    out: *mut u64,
    graph: CUgraph,
    _: CUcontext,
    default: c_uint,
    flags: c_uint,
) -> u32 {
    let number = with(|fake| {
        let known = fake.conditions.entry(graph.0).or_default();
        known.push((default, flags != 0));
        known.len() as u64
    });
    // SAFETY: the code under test passes a live place for what it asks for.
    unsafe { out.write(number) };
    OK
}

pub(super) unsafe extern "C" fn conditional(
    out: *mut CUgraphNode,
    graph: CUgraph,
    _: *const CUgraphNode,
    _: *const CUgraphEdgeData,
    _: usize,
    params: *mut CUgraphNodeParams,
) -> u32 {
    // SAFETY: the code under test passes live parameters, of a conditional node.
    let asked = unsafe { &mut (*params).value.conditional };
    asked.phGraph_out = with(|fake| {
        let bodies = (0..asked.size).map(|_| CUgraph(fake.id())).collect();
        fake.bodies.insert(asked.handle, bodies);
        fake.bodies.get_mut(&asked.handle).map_or(std::ptr::null_mut(), |all| all.as_mut_ptr())
    });
    // SAFETY: the code under test passes a live place for what it asks for.
    unsafe { out.write(node_of(graph)) };
    OK
}

pub(super) unsafe extern "C" fn fill_node(
    out: *mut CUgraphNode,
    graph: CUgraph,
    _: *const CUgraphNode,
    _: usize,
    _: *const CUDA_MEMSET_NODE_PARAMS_v1,
    _: CUcontext,
) -> u32 {
    // SAFETY: the code under test passes a live place for what it asks for.
    unsafe { out.write(node_of(graph)) };
    OK
}

pub(super) unsafe extern "C" fn empty_node(
    out: *mut CUgraphNode,
    graph: CUgraph,
    _: *const CUgraphNode,
    _: usize,
) -> u32 {
    // SAFETY: the code under test passes a live place for what it asks for.
    unsafe { out.write(node_of(graph)) };
    OK
}

pub(super) unsafe extern "C" fn instantiate(out: *mut CUgraphExec, _: CUgraph, flags: u64) -> u32 {
    // SAFETY: the code under test passes a live place for what it asks for.
    unsafe { out.write(CUgraphExec(with(Fake::id))) };
    with(|fake| fake.instantiated = flags);
    OK
}

pub(super) unsafe extern "C" fn set_fill(
    _: CUgraphExec,
    _: CUgraphNode,
    _: *const CUDA_MEMSET_NODE_PARAMS_v1,
    _: CUcontext,
) -> u32 {
    OK
}

pub(super) unsafe extern "C" fn enable(_: CUgraphExec, node: CUgraphNode, on: c_uint) -> u32 {
    with(|fake| if on != 0 { fake.disabled.remove(&node.0) } else { fake.disabled.insert(node.0) });
    OK
}
