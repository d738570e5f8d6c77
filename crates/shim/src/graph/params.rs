//! What nodes do: asked, changed in a graph, changed in an executable graph.

use super::create::{batch, check_context, from_params, host, memcpy, memset};
use super::kernel::{Kernel, second_form};
use super::{Payload, exec, world};
use crate::{entry, ffi};
use kedge_cuda_types::CuError;
use kedge_cuda_types::graph::*;
use kedge_cuda_types::handle::{
    CUcontext, CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphExec, CUgraphNode,
};
use kedge_cuda_types::memory::CUDA_MEMCPY3D;

/// What a node of one type is made of; INVALID_VALUE for a node of another.
fn get<T>(node: CUgraphNode, pick: impl FnOnce(&mut Payload) -> Option<T>) -> Result<T, CuError> {
    world::ask(|graphs| pick(graphs.payload_mut(node)?).ok_or(CuError::INVALID_VALUE))
}

/// Gives a node new content of the type that it has.
fn set(node: CUgraphNode, payload: Payload) -> Result<(), CuError> {
    let old = world::ask(|graphs| {
        let slot = graphs.payload_mut(node)?;
        if slot.node_type() != payload.node_type() {
            return Err(CuError::INVALID_VALUE);
        }
        Ok(std::mem::replace(slot, payload))
    })?;
    // Outside of the lock.
    drop(old);
    Ok(())
}

fn exec_set(exec: CUgraphExec, node: CUgraphNode, payload: Payload) -> Result<(), CuError> {
    exec::find(exec)?.set(node, payload)
}

// Kernels.

fn kernel_params(node: CUgraphNode) -> Result<CUDA_KERNEL_NODE_PARAMS_v2, CuError> {
    get(node, |payload| match payload {
        Payload::Kernel(kernel) => Some(kernel.params()),
        _ => None,
    })
}

/// The arguments that `kernelParams` points to are the node's, and live until it is changed.
pub(crate) unsafe fn cuGraphKernelNodeGetParams(
    node: CUgraphNode,
    params: *mut CUDA_KERNEL_NODE_PARAMS_v1,
) -> Result<(), CuError> {
    let CUDA_KERNEL_NODE_PARAMS_v2 { mut v1, kern, .. } = kernel_params(node)?;
    if v1.func.is_null() {
        v1.func = CUfunction(kern.0);
    }
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(params, v1) }
}

pub(crate) unsafe fn cuGraphKernelNodeGetParams_v2(
    node: CUgraphNode,
    params: *mut CUDA_KERNEL_NODE_PARAMS_v2,
) -> Result<(), CuError> {
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(params, kernel_params(node)?) }
}

/// A kernel node's new content keeps the attributes of the old.
///
/// # Safety
/// As [`Kernel::from_params`].
unsafe fn kernel(
    attributes_of: CUgraphNode,
    params: &CUDA_KERNEL_NODE_PARAMS_v2,
) -> Result<Payload, CuError> {
    // SAFETY: `params` describe the kernel's parameters, by this function's contract.
    let mut new = unsafe { Kernel::from_params(params) }?;
    get(attributes_of, |payload| match payload {
        Payload::Kernel(old) => Some(new.copy_attributes(old)),
        _ => None,
    })??;
    Ok(Payload::Kernel(new))
}

pub(crate) unsafe fn cuGraphKernelNodeSetParams(
    node: CUgraphNode,
    params: *const CUDA_KERNEL_NODE_PARAMS_v1,
) -> Result<(), CuError> {
    // SAFETY: `params` is NULL or valid for a read, what it points to is as its function takes it:
    // the API asks that of the program.
    set(node, unsafe { kernel(node, &second_form(ffi::read(params)?)) }?)
}

pub(crate) unsafe fn cuGraphKernelNodeSetParams_v2(
    node: CUgraphNode,
    params: *const CUDA_KERNEL_NODE_PARAMS_v2,
) -> Result<(), CuError> {
    // SAFETY: `params` is NULL or valid for a read, what it points to is as its function takes it:
    // the API asks that of the program.
    set(node, unsafe { kernel(node, &ffi::read(params)?) }?)
}

pub(crate) unsafe fn cuGraphExecKernelNodeSetParams(
    exec: CUgraphExec,
    node: CUgraphNode,
    params: *const CUDA_KERNEL_NODE_PARAMS_v1,
) -> Result<(), CuError> {
    // SAFETY: `params` is NULL or valid for a read, what it points to is as its function takes it:
    // the API asks that of the program.
    exec_set(exec, node, unsafe { kernel(node, &second_form(ffi::read(params)?)) }?)
}

pub(crate) unsafe fn cuGraphExecKernelNodeSetParams_v2(
    exec: CUgraphExec,
    node: CUgraphNode,
    params: *const CUDA_KERNEL_NODE_PARAMS_v2,
) -> Result<(), CuError> {
    // SAFETY: `params` is NULL or valid for a read, what it points to is as its function takes it:
    // the API asks that of the program.
    exec_set(exec, node, unsafe { kernel(node, &ffi::read(params)?) }?)
}

// Copies and fills.

pub(crate) unsafe fn cuGraphMemcpyNodeGetParams(
    node: CUgraphNode,
    params: *mut CUDA_MEMCPY3D,
) -> Result<(), CuError> {
    let found = get(node, |payload| match payload {
        Payload::Memcpy(copied) => Some(copied.params()),
        _ => None,
    })?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(params, found) }
}

pub(crate) unsafe fn cuGraphMemcpyNodeSetParams(
    node: CUgraphNode,
    params: *const CUDA_MEMCPY3D,
) -> Result<(), CuError> {
    // SAFETY: `params` is NULL or valid for a read: the API asks that of the program.
    set(node, memcpy(unsafe { ffi::read(params) }?)?)
}

pub(crate) unsafe fn cuGraphExecMemcpyNodeSetParams(
    exec: CUgraphExec,
    node: CUgraphNode,
    params: *const CUDA_MEMCPY3D,
    ctx: CUcontext,
) -> Result<(), CuError> {
    check_context(ctx)?;
    // SAFETY: `params` is NULL or valid for a read: the API asks that of the program.
    exec_set(exec, node, memcpy(unsafe { ffi::read(params) }?)?)
}

pub(crate) unsafe fn cuGraphMemsetNodeGetParams(
    node: CUgraphNode,
    params: *mut CUDA_MEMSET_NODE_PARAMS_v1,
) -> Result<(), CuError> {
    let found = get(node, |payload| match payload {
        Payload::Memset { params, .. } => Some(*params),
        _ => None,
    })?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(params, found) }
}

pub(crate) unsafe fn cuGraphMemsetNodeSetParams(
    node: CUgraphNode,
    params: *const CUDA_MEMSET_NODE_PARAMS_v1,
) -> Result<(), CuError> {
    // SAFETY: `params` is NULL or valid for a read: the API asks that of the program.
    set(node, memset(unsafe { ffi::read(params) }?)?)
}

pub(crate) unsafe fn cuGraphExecMemsetNodeSetParams(
    exec: CUgraphExec,
    node: CUgraphNode,
    params: *const CUDA_MEMSET_NODE_PARAMS_v1,
    ctx: CUcontext,
) -> Result<(), CuError> {
    check_context(ctx)?;
    // SAFETY: `params` is NULL or valid for a read: the API asks that of the program.
    exec_set(exec, node, memset(unsafe { ffi::read(params) }?)?)
}

// Host functions.

pub(crate) unsafe fn cuGraphHostNodeGetParams(
    node: CUgraphNode,
    params: *mut CUDA_HOST_NODE_PARAMS_v1,
) -> Result<(), CuError> {
    let found = get(node, |payload| match payload {
        Payload::Host(host) => Some(host.host_fn),
        _ => None,
    })?;
    let found = CUDA_HOST_NODE_PARAMS_v1 { r#fn: Some(found.function), userData: found.user_data };
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(params, found) }
}

pub(crate) unsafe fn cuGraphHostNodeSetParams(
    node: CUgraphNode,
    params: *const CUDA_HOST_NODE_PARAMS_v1,
) -> Result<(), CuError> {
    // SAFETY: `params` is NULL or valid for a read: the API asks that of the program.
    set(node, host(unsafe { ffi::read(params) }?)?)
}

pub(crate) unsafe fn cuGraphExecHostNodeSetParams(
    exec: CUgraphExec,
    node: CUgraphNode,
    params: *const CUDA_HOST_NODE_PARAMS_v1,
) -> Result<(), CuError> {
    // SAFETY: `params` is NULL or valid for a read: the API asks that of the program.
    exec_set(exec, node, host(unsafe { ffi::read(params) }?)?)
}

// Child graphs.

/// The graph that comes back is the node's own.
pub(crate) unsafe fn cuGraphChildGraphNodeGetGraph(
    node: CUgraphNode,
    graph: *mut CUgraph,
) -> Result<(), CuError> {
    let found = get(node, |payload| match payload {
        Payload::Graph(child) => Some(*child),
        _ => None,
    })?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(graph, found) }
}

pub(crate) unsafe fn cuGraphExecChildGraphNodeSetParams(
    exec: CUgraphExec,
    node: CUgraphNode,
    child: CUgraph,
) -> Result<(), CuError> {
    exec::find(exec)?.set_child(node, child)
}

// Events.

fn event_of(node: CUgraphNode, record: bool) -> Result<CUevent, CuError> {
    get(node, |payload| match payload {
        Payload::EventRecord(event, _) if record => Some(*event),
        Payload::EventWait(event, _) if !record => Some(*event),
        _ => None,
    })
}

pub(crate) unsafe fn cuGraphEventRecordNodeGetEvent(
    node: CUgraphNode,
    event: *mut CUevent,
) -> Result<(), CuError> {
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(event, event_of(node, true)?) }
}

pub(crate) unsafe fn cuGraphEventRecordNodeSetEvent(
    node: CUgraphNode,
    event: CUevent,
) -> Result<(), CuError> {
    set(node, Payload::event_record(event)?)
}

pub(crate) unsafe fn cuGraphExecEventRecordNodeSetEvent(
    exec: CUgraphExec,
    node: CUgraphNode,
    event: CUevent,
) -> Result<(), CuError> {
    exec_set(exec, node, Payload::event_record(event)?)
}

pub(crate) unsafe fn cuGraphEventWaitNodeGetEvent(
    node: CUgraphNode,
    event: *mut CUevent,
) -> Result<(), CuError> {
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(event, event_of(node, false)?) }
}

pub(crate) unsafe fn cuGraphEventWaitNodeSetEvent(
    node: CUgraphNode,
    event: CUevent,
) -> Result<(), CuError> {
    set(node, Payload::event_wait(event)?)
}

pub(crate) unsafe fn cuGraphExecEventWaitNodeSetEvent(
    exec: CUgraphExec,
    node: CUgraphNode,
    event: CUevent,
) -> Result<(), CuError> {
    exec_set(exec, node, Payload::event_wait(event)?)
}

// Memory operations and allocations.

/// The array that comes back is the node's, and lives until it is changed.
pub(crate) unsafe fn cuGraphBatchMemOpNodeGetParams(
    node: CUgraphNode,
    params: *mut CUDA_BATCH_MEM_OP_NODE_PARAMS,
) -> Result<(), CuError> {
    let found = get(node, |payload| match payload {
        Payload::MemOps(batch) => Some(CUDA_BATCH_MEM_OP_NODE_PARAMS {
            ctx: CUcontext::NULL,
            count: batch.len() as u32,
            paramArray: batch.as_mut_ptr(),
            flags: 0,
        }),
        _ => None,
    })?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(params, found) }
}

pub(crate) unsafe fn cuGraphBatchMemOpNodeSetParams(
    node: CUgraphNode,
    params: *const CUDA_BATCH_MEM_OP_NODE_PARAMS,
) -> Result<(), CuError> {
    // SAFETY: `params` is NULL or valid for a read: the API asks that of the program. Its array has
    // as many operations as it says.
    set(node, unsafe { batch(ffi::read(params)?) }?)
}

pub(crate) unsafe fn cuGraphExecBatchMemOpNodeSetParams(
    exec: CUgraphExec,
    node: CUgraphNode,
    params: *const CUDA_BATCH_MEM_OP_NODE_PARAMS,
) -> Result<(), CuError> {
    // SAFETY: `params` is NULL or valid for a read: the API asks that of the program. Its array has
    // as many operations as it says.
    exec_set(exec, node, unsafe { batch(ffi::read(params)?) }?)
}

pub(crate) unsafe fn cuGraphMemAllocNodeGetParams(
    node: CUgraphNode,
    params: *mut CUDA_MEM_ALLOC_NODE_PARAMS,
) -> Result<(), CuError> {
    let found = get(node, |payload| match payload {
        Payload::MemAlloc(allocation) => Some(allocation.params),
        _ => None,
    })?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(params, found) }
}

pub(crate) unsafe fn cuGraphMemFreeNodeGetParams(
    node: CUgraphNode,
    dptr: *mut CUdeviceptr,
) -> Result<(), CuError> {
    let found = get(node, |payload| match payload {
        Payload::MemFree { addr, .. } => Some(*addr),
        _ => None,
    })?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(dptr, found) }
}

// Nodes of any type.

/// # Safety
/// `params` is NULL or points to a whole structure.
unsafe fn any(node: CUgraphNode, params: *const CUgraphNodeParams) -> Result<Payload, CuError> {
    // SAFETY: `params` is NULL or valid for a read, by this function's contract; its type says
    // which member is set.
    unsafe {
        let params = ffi::read(params)?;
        match params.type_ {
            CU_GRAPH_NODE_TYPE_KERNEL => kernel(node, &params.value.kernel),
            CU_GRAPH_NODE_TYPE_MEM_ALLOC | CU_GRAPH_NODE_TYPE_MEM_FREE => {
                Err(entry::not_supported("changing a graph's allocation node"))
            }
            _ => from_params(&params),
        }
    }
}

pub(crate) unsafe fn cuGraphNodeSetParams(
    node: CUgraphNode,
    params: *mut CUgraphNodeParams,
) -> Result<(), CuError> {
    // SAFETY: `params` is NULL or valid for a read: the API asks that of the program.
    set(node, unsafe { any(node, params) }?)
}

pub(crate) unsafe fn cuGraphExecNodeSetParams(
    exec: CUgraphExec,
    node: CUgraphNode,
    params: *mut CUgraphNodeParams,
) -> Result<(), CuError> {
    // SAFETY: `params` is NULL or valid for a read: the API asks that of the program; its type says
    // which member is set.
    unsafe {
        let given = ffi::read(params.cast_const())?;
        if given.type_ == CU_GRAPH_NODE_TYPE_GRAPH {
            return cuGraphExecChildGraphNodeSetParams(exec, node, given.value.graph.graph);
        }
        exec_set(exec, node, any(node, params)?)
    }
}
