//! Adding nodes.

use super::kernel::{Kernel, second_form};
use super::memory::{Allocation, Copied};
use super::{Payload, add_node, conditional, discard_children, read_edges, reuse, world};
use crate::callback::{HostFn, HostNode};
use crate::{context, entry, ffi, memory, stream};
use kedge_cuda_types::CuError;
use kedge_cuda_types::graph::*;
use kedge_cuda_types::handle::{CUcontext, CUdeviceptr, CUevent, CUgraph, CUgraphNode};
use kedge_cuda_types::memory::CUDA_MEMCPY3D;
use std::ptr::null;
use std::sync::Arc;

/// Adds a node and stores its handle.
///
/// # Safety
/// `out` is NULL or valid for a write; `dependencies` is valid for `count` reads.
unsafe fn add(
    out: *mut CUgraphNode,
    graph: CUgraph,
    dependencies: *const CUgraphNode,
    count: usize,
    payload: Payload,
) -> Result<(), CuError> {
    // SAFETY: the arrays have `count` values, and `out` is NULL or valid for a write, by this
    // function's contract.
    unsafe { add_with_data(out, graph, dependencies, null(), count, payload) }
}

/// # Safety
/// As [`add`], and `data` is NULL or valid for `count` reads.
unsafe fn add_with_data(
    out: *mut CUgraphNode,
    graph: CUgraph,
    dependencies: *const CUgraphNode,
    data: *const CUgraphEdgeData,
    count: usize,
    payload: Payload,
) -> Result<(), CuError> {
    if out.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: `dependencies` has `count` values, and `data` is NULL or has as many, by this
    // function's contract.
    let edges = unsafe { read_edges(dependencies, data, count) }?;
    let node = add_node(graph, &edges, payload)?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(out, node) }
}

/// A fill node's content, checked.
pub(super) fn memset(params: CUDA_MEMSET_NODE_PARAMS_v1) -> Result<Payload, CuError> {
    let CUDA_MEMSET_NODE_PARAMS_v1 { dst, pitch, value, elementSize, width, height } = params;
    let op = memory::memset_op(dst, pitch, value, elementSize, width, height)?;
    Ok(Payload::Memset { params, op })
}

pub(super) fn memcpy(params: CUDA_MEMCPY3D) -> Result<Payload, CuError> {
    Copied::new(params).map(Payload::Memcpy)
}

pub(super) fn host(params: CUDA_HOST_NODE_PARAMS_v1) -> Result<Payload, CuError> {
    let function = params.r#fn.ok_or(CuError::INVALID_VALUE)?;
    HostNode::new(HostFn { function, user_data: params.userData }).map(Payload::Host)
}

pub(super) fn mem_ops(batch: Vec<CUstreamBatchMemOpParams>) -> Result<Payload, CuError> {
    stream::mem_ops(&batch)?;
    Ok(Payload::MemOps(batch))
}

fn mem_free(addr: CUdeviceptr) -> Result<Payload, CuError> {
    Ok(Payload::MemFree { addr, size: memory::graph_allocation(addr)? })
}

/// A child graph is copied into its node.
fn child(graph: CUgraph) -> Result<CUgraph, CuError> {
    world::ask(|graphs| {
        if graphs.allocates(graph) {
            return Err(entry::not_supported("a child graph that allocates memory"));
        }
        conditional::check_copy(graphs, graph)?;
        graphs.duplicate(graph, true)
    })
}

/// INVALID_CONTEXT unless `ctx` is NULL, for the current one, or a context.
pub(super) fn check_context(ctx: CUcontext) -> Result<(), CuError> {
    context::by_handle_or_current(ctx).map(drop)
}

pub(crate) unsafe fn cuGraphAddKernelNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    dependencies: *const CUgraphNode,
    count: usize,
    params: *const CUDA_KERNEL_NODE_PARAMS_v1,
) -> Result<(), CuError> {
    // SAFETY: `params` is NULL or valid for a read, what it points to is as its function takes it,
    // `dependencies` has `count` values, and `out` is NULL or valid for a write: the API asks that
    // of the program.
    unsafe {
        let kernel = Kernel::from_params(&second_form(ffi::read(params)?))?;
        add(out, graph, dependencies, count, Payload::Kernel(kernel))
    }
}

pub(crate) unsafe fn cuGraphAddKernelNode_v2(
    out: *mut CUgraphNode,
    graph: CUgraph,
    dependencies: *const CUgraphNode,
    count: usize,
    params: *const CUDA_KERNEL_NODE_PARAMS_v2,
) -> Result<(), CuError> {
    // SAFETY: `params` is NULL or valid for a read, what it points to is as its function takes it,
    // `dependencies` has `count` values, and `out` is NULL or valid for a write: the API asks that
    // of the program.
    unsafe {
        let kernel = Kernel::from_params(&ffi::read(params)?)?;
        add(out, graph, dependencies, count, Payload::Kernel(kernel))
    }
}

pub(crate) unsafe fn cuGraphAddMemcpyNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    dependencies: *const CUgraphNode,
    count: usize,
    params: *const CUDA_MEMCPY3D,
    ctx: CUcontext,
) -> Result<(), CuError> {
    check_context(ctx)?;
    // SAFETY: `params` is NULL or valid for a read, `dependencies` has `count` values, and `out` is
    // NULL or valid for a write: the API asks that of the program.
    unsafe { add(out, graph, dependencies, count, memcpy(ffi::read(params)?)?) }
}

pub(crate) unsafe fn cuGraphAddMemsetNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    dependencies: *const CUgraphNode,
    count: usize,
    params: *const CUDA_MEMSET_NODE_PARAMS_v1,
    ctx: CUcontext,
) -> Result<(), CuError> {
    check_context(ctx)?;
    // SAFETY: `params` is NULL or valid for a read, `dependencies` has `count` values, and `out` is
    // NULL or valid for a write: the API asks that of the program.
    unsafe { add(out, graph, dependencies, count, memset(ffi::read(params)?)?) }
}

pub(crate) unsafe fn cuGraphAddHostNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    dependencies: *const CUgraphNode,
    count: usize,
    params: *const CUDA_HOST_NODE_PARAMS_v1,
) -> Result<(), CuError> {
    // SAFETY: `params` is NULL or valid for a read, `dependencies` has `count` values, and `out` is
    // NULL or valid for a write: the API asks that of the program.
    unsafe { add(out, graph, dependencies, count, host(ffi::read(params)?)?) }
}

pub(crate) unsafe fn cuGraphAddChildGraphNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    dependencies: *const CUgraphNode,
    count: usize,
    original: CUgraph,
) -> Result<(), CuError> {
    let copy = child(original)?;
    // SAFETY: `dependencies` has `count` values, and `out` is NULL or valid for a write: the API
    // asks that of the program.
    let added = unsafe { add(out, graph, dependencies, count, Payload::Graph(copy)) };
    added.inspect_err(|_| discard_children(&[copy]))
}

pub(crate) unsafe fn cuGraphAddEmptyNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    dependencies: *const CUgraphNode,
    count: usize,
) -> Result<(), CuError> {
    // SAFETY: `dependencies` has `count` values, and `out` is NULL or valid for a write: the API
    // asks that of the program.
    unsafe { add(out, graph, dependencies, count, Payload::Empty) }
}

pub(crate) unsafe fn cuGraphAddEventRecordNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    dependencies: *const CUgraphNode,
    count: usize,
    event: CUevent,
) -> Result<(), CuError> {
    // SAFETY: `dependencies` has `count` values, and `out` is NULL or valid for a write: the API
    // asks that of the program.
    unsafe { add(out, graph, dependencies, count, Payload::event_record(event)?) }
}

pub(crate) unsafe fn cuGraphAddEventWaitNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    dependencies: *const CUgraphNode,
    count: usize,
    event: CUevent,
) -> Result<(), CuError> {
    // SAFETY: `dependencies` has `count` values, and `out` is NULL or valid for a write: the API
    // asks that of the program.
    unsafe { add(out, graph, dependencies, count, Payload::event_wait(event)?) }
}

pub(crate) unsafe fn cuGraphAddBatchMemOpNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    dependencies: *const CUgraphNode,
    count: usize,
    params: *const CUDA_BATCH_MEM_OP_NODE_PARAMS,
) -> Result<(), CuError> {
    // SAFETY: `params` is NULL or valid for a read, its array has as many operations as it says,
    // `dependencies` has `count` values, and `out` is NULL or valid for a write: the API asks that
    // of the program.
    unsafe { add(out, graph, dependencies, count, batch(ffi::read(params)?)?) }
}

/// # Safety
/// `params` describe an array of operations.
pub(super) unsafe fn batch(params: CUDA_BATCH_MEM_OP_NODE_PARAMS) -> Result<Payload, CuError> {
    check_context(params.ctx)?;
    // SAFETY: the array has as many operations as `params` says, by this function's contract.
    mem_ops(unsafe { stream::read_batch(params.paramArray, params.count) }?)
}

/// Stores in `params` the address that every launch allocates.
pub(crate) unsafe fn cuGraphAddMemAllocNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    dependencies: *const CUgraphNode,
    count: usize,
    params: *mut CUDA_MEM_ALLOC_NODE_PARAMS,
) -> Result<(), CuError> {
    // SAFETY: `params` is NULL or valid for a read, `dependencies` has `count` values, and `out` is
    // NULL or valid for a write: the API asks that of the program.
    unsafe {
        let asked = ffi::read(params)?;
        let dptr = add_allocation(out, graph, dependencies, null(), count, asked)?;
        (&raw mut (*params).dptr).write_unaligned(dptr);
    }
    Ok(())
}

/// Adds an allocation node, and gives its address.
///
/// # Safety
/// As [`add_with_data`].
unsafe fn add_allocation(
    out: *mut CUgraphNode,
    graph: CUgraph,
    dependencies: *const CUgraphNode,
    data: *const CUgraphEdgeData,
    count: usize,
    params: CUDA_MEM_ALLOC_NODE_PARAMS,
) -> Result<CUdeviceptr, CuError> {
    let alone = reuse::reusing();
    // SAFETY: the caller's array.
    let before = unsafe { ffi::read_array(dependencies, count) }?;
    let allocation = Allocation::new(params, |size| reuse::alloc(&alone, graph, before, size))?;
    let dptr = allocation.params.dptr;
    let payload = Payload::MemAlloc(Arc::new(allocation));
    // SAFETY: the arrays have `count` values, and `out` is NULL or valid for a write, by this
    // function's contract.
    unsafe { add_with_data(out, graph, dependencies, data, count, payload) }?;
    Ok(dptr)
}

pub(crate) unsafe fn cuGraphAddMemFreeNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    dependencies: *const CUgraphNode,
    count: usize,
    dptr: CUdeviceptr,
) -> Result<(), CuError> {
    // SAFETY: `dependencies` has `count` values, and `out` is NULL or valid for a write: the API
    // asks that of the program.
    unsafe { add(out, graph, dependencies, count, mem_free(dptr)?) }
}

pub(crate) unsafe fn cuGraphAddNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    dependencies: *const CUgraphNode,
    count: usize,
    params: *mut CUgraphNodeParams,
) -> Result<(), CuError> {
    // SAFETY: `cuGraphAddNode_v2` asks the same of these arguments as this call does.
    unsafe { cuGraphAddNode_v2(out, graph, dependencies, null(), count, params) }
}

pub(crate) unsafe fn cuGraphAddNode_v2(
    out: *mut CUgraphNode,
    graph: CUgraph,
    dependencies: *const CUgraphNode,
    data: *const CUgraphEdgeData,
    count: usize,
    params: *mut CUgraphNodeParams,
) -> Result<(), CuError> {
    // SAFETY: `params` is NULL or valid for a read: the API asks that of the program.
    let given = unsafe { ffi::read(params) }?;
    if given.type_ == CU_GRAPH_NODE_TYPE_GRAPH {
        // SAFETY: the type says which member of the union is set.
        let copy = child(unsafe { given.value.graph.graph })?;
        let payload = Payload::Graph(copy);
        // SAFETY: `dependencies` and `data` are NULL or have `count` values, and `out` is NULL or
        // valid for a write: the API asks that of the program.
        let added = unsafe { add_with_data(out, graph, dependencies, data, count, payload) };
        return added.inspect_err(|_| discard_children(&[copy]));
    }
    if given.type_ == CU_GRAPH_NODE_TYPE_CONDITIONAL {
        // SAFETY: the type says which member of the union is set.
        let payload = conditional::node(graph, unsafe { &given.value.conditional })?;
        let children = payload.children().to_vec();
        // SAFETY: `dependencies` and `data` are NULL or have `count` values, and `out` is NULL or
        // valid for a write: the API asks that of the program.
        let added = unsafe { add_with_data(out, graph, dependencies, data, count, payload) };
        added.inspect_err(|_| discard_children(&children))?;
        // SAFETY: `params` is valid for a write: the API asks that of the program; the node has
        // just been stored in `out`.
        return unsafe { tell_bodies(*out, params) };
    }
    if given.type_ == CU_GRAPH_NODE_TYPE_MEM_ALLOC {
        // SAFETY: the type says which member of the union is set; `params` was readable as a
        // structure of the caller's, which CUDA may write; the caller's arrays.
        return unsafe {
            let asked = given.value.alloc;
            let address = add_allocation(out, graph, dependencies, data, count, asked)?;
            (&raw mut (*params).value.alloc.dptr).write_unaligned(address);
            Ok(())
        };
    }
    // SAFETY: the type says which member of `given` is set, and what that points to is valid: the
    // API asks that of the program.
    let payload = unsafe { from_params(&given) }?;
    // SAFETY: `dependencies` and `data` are NULL or have `count` values, and `out` is NULL or valid
    // for a write: the API asks that of the program.
    unsafe { add_with_data(out, graph, dependencies, data, count, payload) }
}

/// Stores where a conditional node keeps the handles of its bodies: they stay there for its life.
///
/// # Safety
/// `params` is valid for writes.
unsafe fn tell_bodies(node: CUgraphNode, params: *mut CUgraphNodeParams) -> Result<(), CuError> {
    let bodies = world::ask(|graphs| match graphs.payload_mut(node)? {
        Payload::Conditional(conditional) => Ok(conditional.bodies.as_mut_ptr()),
        _ => Err(CuError::INVALID_VALUE),
    })?;
    // SAFETY: `params` is valid for a write, and of a conditional node, by this function's
    // contract.
    unsafe { (&raw mut (*params).value.conditional.phGraph_out).write_unaligned(bodies) };
    Ok(())
}

/// The content of a node that has no graphs of its own.
///
/// # Safety
/// The member of the union that the type selects is set, and what it points to is valid.
pub(super) unsafe fn from_params(params: &CUgraphNodeParams) -> Result<Payload, CuError> {
    let value = &params.value;
    // SAFETY: the type says which member is set, by this function's contract.
    unsafe {
        Ok(match params.type_ {
            CU_GRAPH_NODE_TYPE_KERNEL => Payload::Kernel(Kernel::from_params(&value.kernel)?),
            CU_GRAPH_NODE_TYPE_MEMCPY => memcpy(value.memcpy.copyParams)?,
            CU_GRAPH_NODE_TYPE_MEMSET => memset(value.memset.v1)?,
            CU_GRAPH_NODE_TYPE_HOST => host(value.host.v1)?,
            CU_GRAPH_NODE_TYPE_EMPTY => Payload::Empty,
            CU_GRAPH_NODE_TYPE_WAIT_EVENT => Payload::event_wait(value.eventWait)?,
            CU_GRAPH_NODE_TYPE_EVENT_RECORD => Payload::event_record(value.eventRecord.event)?,
            CU_GRAPH_NODE_TYPE_MEM_ALLOC => {
                Payload::MemAlloc(Arc::new(Allocation::new(value.alloc, memory::graph_alloc)?))
            }
            CU_GRAPH_NODE_TYPE_MEM_FREE => mem_free(value.free)?,
            CU_GRAPH_NODE_TYPE_BATCH_MEM_OP => batch(value.memOp)?,
            _ => return Err(entry::not_supported("a graph node of this type")),
        })
    }
}
