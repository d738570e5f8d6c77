//! Graphs of the fake driver: nothing of them is executed.

use super::{Fake, OK, with};
use kedge_cuda_types::graph::CUDA_MEMSET_NODE_PARAMS_v1;
use kedge_cuda_types::handle::*;
use std::ffi::c_uint;

// SAFETY of all that follows: called by the code under test as the driver would be, with pointers
// that are live where the driver's must be.

pub(super) unsafe extern "C" fn graph(out: *mut CUgraph, _: c_uint) -> u32 {
    // SAFETY: see above.
    unsafe { out.write(CUgraph(with(Fake::id))) };
    OK
}

pub(super) unsafe extern "C" fn forget_graph(_: CUgraph) -> u32 {
    OK
}

pub(super) unsafe extern "C" fn forget_exec(_: CUgraphExec) -> u32 {
    OK
}

pub(super) unsafe extern "C" fn fill_node(
    out: *mut CUgraphNode,
    _: CUgraph,
    _: *const CUgraphNode,
    _: usize,
    _: *const CUDA_MEMSET_NODE_PARAMS_v1,
    _: CUcontext,
) -> u32 {
    // SAFETY: see above.
    unsafe { out.write(CUgraphNode(with(Fake::id))) };
    OK
}

pub(super) unsafe extern "C" fn empty_node(
    out: *mut CUgraphNode,
    _: CUgraph,
    _: *const CUgraphNode,
    _: usize,
) -> u32 {
    // SAFETY: see above.
    unsafe { out.write(CUgraphNode(with(Fake::id))) };
    OK
}

pub(super) unsafe extern "C" fn instantiate(out: *mut CUgraphExec, _: CUgraph, flags: u64) -> u32 {
    // SAFETY: see above.
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
