//! Functions of executable graphs.

use super::exec::{self, UPDATED};
use super::flatten::Unfit;
use crate::{ffi, stream};
use kedge_cuda_types::CuError;
use kedge_cuda_types::graph::{
    CUDA_GRAPH_INSTANTIATE_ERROR, CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE,
    CUDA_GRAPH_INSTANTIATE_NODE_OPERATION_NOT_SUPPORTED, CUDA_GRAPH_INSTANTIATE_PARAMS,
    CUDA_GRAPH_INSTANTIATE_SUCCESS, CUgraphExecUpdateResultInfo,
};
use kedge_cuda_types::handle::{CUgraph, CUgraphExec, CUgraphNode, CUstream};
use std::ffi::c_char;

/// The first form: an error's node, and a text in `log`.
pub(crate) unsafe fn cuGraphInstantiate(
    out: *mut CUgraphExec,
    graph: CUgraph,
    error_node: *mut CUgraphNode,
    log: *mut c_char,
    log_size: usize,
) -> Result<(), CuError> {
    if out.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let (node, text, outcome) = match exec::instantiate(graph, 0) {
        Ok(exec) => (CUgraphNode::NULL, String::new(), Ok(exec)),
        Err(Unfit { node, error, cycle }) => {
            let why =
                if cycle { "its dependencies form a cycle".into() } else { error.to_string() };
            (node, format!("the graph cannot be instantiated: {why}"), Err(error))
        }
    };
    // SAFETY: the caller's out pointers, and `log_size` bytes at `log`.
    unsafe {
        ffi::write_optional(error_node, node);
        write_text(&text, log, log_size);
        ffi::write(out, outcome?)
    }
}

/// Stores as much of a text as fits, and its NUL.
///
/// # Safety
/// `to` is NULL or valid for writes of `size` bytes.
unsafe fn write_text(text: &str, to: *mut c_char, size: usize) {
    if to.is_null() || size == 0 {
        return;
    }
    let len = text.len().min(size - 1);
    // SAFETY: `to` has room for `len + 1` bytes, by this function's contract.
    unsafe {
        to.copy_from_nonoverlapping(text.as_ptr().cast(), len);
        to.add(len).write(0);
    }
}

pub(crate) unsafe fn cuGraphInstantiate_v2(
    out: *mut CUgraphExec,
    graph: CUgraph,
    error_node: *mut CUgraphNode,
    log: *mut c_char,
    log_size: usize,
) -> Result<(), CuError> {
    // SAFETY: `cuGraphInstantiate` asks the same of these arguments as this call does.
    unsafe { cuGraphInstantiate(out, graph, error_node, log, log_size) }
}

pub(crate) unsafe fn cuGraphInstantiateWithFlags(
    out: *mut CUgraphExec,
    graph: CUgraph,
    flags: u64,
) -> Result<(), CuError> {
    if out.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let exec = exec::instantiate(graph, flags).map_err(|unfit| unfit.error)?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(out, exec) }
}

/// Reports a failure's kind and node in `params` as well.
pub(crate) unsafe fn cuGraphInstantiateWithParams(
    out: *mut CUgraphExec,
    graph: CUgraph,
    params: *mut CUDA_GRAPH_INSTANTIATE_PARAMS,
) -> Result<(), CuError> {
    // SAFETY: `params` is NULL or valid for a read: the API asks that of the program.
    let mut answer = unsafe { ffi::read(params) }?;
    if out.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let outcome = exec::instantiate(graph, answer.flags);
    (answer.result_out, answer.hErrNode_out) = match &outcome {
        Ok(_) => (CUDA_GRAPH_INSTANTIATE_SUCCESS, CUgraphNode::NULL),
        Err(unfit) if unfit.cycle => (CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE, unfit.node),
        Err(unfit) if unfit.error == CuError::NOT_SUPPORTED => {
            (CUDA_GRAPH_INSTANTIATE_NODE_OPERATION_NOT_SUPPORTED, unfit.node)
        }
        Err(unfit) => (CUDA_GRAPH_INSTANTIATE_ERROR, unfit.node),
    };
    // SAFETY: `params` and `out` are NULL or valid for a write each: the API asks that of the
    // program.
    unsafe {
        ffi::write(params, answer)?;
        ffi::write(out, outcome.map_err(|unfit| unfit.error)?)
    }
}

pub(crate) unsafe fn cuGraphExecGetFlags(
    exec: CUgraphExec,
    flags: *mut u64,
) -> Result<(), CuError> {
    let exec = exec::find(exec)?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(flags, exec.flags) }
}

/// An executable graph is in the proxy from the start.
pub(crate) unsafe fn cuGraphUpload(exec: CUgraphExec, stream: CUstream) -> Result<(), CuError> {
    let exec = exec::find(exec)?;
    stream::find(stream)?;
    exec.map(false);
    Ok(())
}

pub(crate) unsafe fn cuGraphLaunch(exec: CUgraphExec, stream: CUstream) -> Result<(), CuError> {
    exec::launch(exec, stream)
}

pub(crate) unsafe fn cuGraphExecDestroy(exec: CUgraphExec) -> Result<(), CuError> {
    exec::destroy(exec)
}

pub(crate) unsafe fn cuGraphExecUpdate_v2(
    exec: CUgraphExec,
    graph: CUgraph,
    info: *mut CUgraphExecUpdateResultInfo,
) -> Result<(), CuError> {
    let outcome = exec::find(exec)?.update(graph);
    let (outcome, told) = match outcome {
        Ok(()) => (Ok(()), UPDATED),
        Err((error, told)) => (Err(error), told),
    };
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(info, told) }?;
    outcome
}

pub(crate) unsafe fn cuGraphExecUpdate(
    exec: CUgraphExec,
    graph: CUgraph,
    error_node: *mut CUgraphNode,
    result: *mut u32,
) -> Result<(), CuError> {
    let mut info = UPDATED;
    // SAFETY: `info` lives across the call.
    let outcome = unsafe { cuGraphExecUpdate_v2(exec, graph, &mut info) };
    // SAFETY: the caller's out pointers.
    unsafe {
        ffi::write_optional(error_node, info.errorNode);
        ffi::write(result, info.result)?;
    }
    outcome
}

pub(crate) unsafe fn cuGraphNodeSetEnabled(
    exec: CUgraphExec,
    node: CUgraphNode,
    enabled: u32,
) -> Result<(), CuError> {
    exec::find(exec)?.set_enabled(node, enabled != 0)
}

pub(crate) unsafe fn cuGraphNodeGetEnabled(
    exec: CUgraphExec,
    node: CUgraphNode,
    enabled: *mut u32,
) -> Result<(), CuError> {
    let found = exec::find(exec)?.is_enabled(node)?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(enabled, found.into()) }
}
