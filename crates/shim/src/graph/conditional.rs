//! Conditional nodes: handles of conditions, and the bodies that they choose from.
//!
//! A handle is the address of its condition, a word of device memory, so that kernels set it without
//! asking anybody and checkpoints have it.

use super::{Payload, world};
use crate::{callback, context, entry, ffi, memory};
use kedge_cuda_types::CuError;
use kedge_cuda_types::graph::{
    CU_GRAPH_COND_ASSIGN_DEFAULT, CU_GRAPH_COND_TYPE_IF, CU_GRAPH_COND_TYPE_SWITCH,
    CU_GRAPH_COND_TYPE_WHILE, CUDA_CONDITIONAL_NODE_PARAMS,
};
use kedge_cuda_types::handle::{CUcontext, CUgraph};
use kedge_protocol::{MAX_BODIES, StreamOp};
use std::sync::Arc;

/// A condition, for as long as a graph knows it.
#[derive(Debug)]
pub(crate) struct Condition {
    pub(crate) addr: u64,
    /// What a launch of its graph sets it to.
    default: Option<u32>,
}

impl Condition {
    /// What a launch begins with: nothing, where there is no default.
    pub(crate) fn reset(&self) -> StreamOp {
        match self.default {
            Some(value) => {
                StreamOp::WriteValue { addr: self.addr, value: value.into(), wide: false }
            }
            None => StreamOp::Empty {},
        }
    }
}

impl Drop for Condition {
    fn drop(&mut self) {
        let addr = self.addr;
        callback::after_device(move || {
            // Fails only where the proxy is gone, and the memory with it.
            let _ = memory::graph_release(addr);
        });
    }
}

/// A node that executes one of its bodies, or one again and again.
#[derive(Debug, Clone)]
pub(crate) struct Conditional {
    pub(crate) condition: u64,
    /// `CU_GRAPH_COND_TYPE_*`.
    pub(crate) kind: u32,
    /// Owned by the node. The program keeps the address of the array.
    pub(crate) bodies: Box<[CUgraph]>,
}

impl Conditional {
    /// Whether the two differ in their conditions and in their bodies' content at most.
    pub(crate) fn alike(&self, other: &Self) -> bool {
        (self.kind, self.bodies.len()) == (other.kind, other.bodies.len())
    }

    /// The same node, which looks at another condition.
    pub(crate) fn with_condition(&self, condition: u64) -> Self {
        Self { condition, ..self.clone() }
    }
}

pub(crate) unsafe fn cuGraphConditionalHandleCreate(
    handle: *mut u64,
    graph: CUgraph,
    ctx: CUcontext,
    default: u32,
    flags: u32,
) -> Result<(), CuError> {
    if handle.is_null() || flags & !CU_GRAPH_COND_ASSIGN_DEFAULT != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    context::by_handle_or_current(ctx)?;
    world::ask(|graphs| graphs.get(graph).map(drop))?;
    let addr = memory::graph_word()?;
    let default = (flags & CU_GRAPH_COND_ASSIGN_DEFAULT != 0).then_some(default);
    let condition = Arc::new(Condition { addr, default });
    if !memory::is_exact_at(addr) {
        return Err(entry::not_supported("a conditional graph node on a real GPU"));
    }
    // A clone, so that one which finds its graph gone is not dropped inside of the lock.
    let known = Arc::clone(&condition);
    world::ask(|graphs| {
        graphs.get_mut(graph)?.conditions.push(known);
        Ok(())
    })?;
    drop(condition);
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(handle, addr) }
}

/// A conditional node of `graph`, with new bodies, which are empty.
pub(super) fn node(
    graph: CUgraph,
    params: &CUDA_CONDITIONAL_NODE_PARAMS,
) -> Result<Payload, CuError> {
    let CUDA_CONDITIONAL_NODE_PARAMS { handle: condition, type_: kind, size, ctx, .. } = *params;
    context::by_handle_or_current(ctx)?;
    let most = match kind {
        CU_GRAPH_COND_TYPE_IF => 2,
        CU_GRAPH_COND_TYPE_WHILE => 1,
        CU_GRAPH_COND_TYPE_SWITCH => MAX_BODIES,
        _ => return Err(CuError::INVALID_VALUE),
    };
    if size == 0 || size as usize > most {
        return Err(CuError::INVALID_VALUE);
    }
    world::ask(|graphs| {
        let mut known = graphs.get(graph)?.conditions.iter();
        if !known.any(|known| known.addr == condition) {
            return Err(CuError::INVALID_VALUE);
        }
        let bodies = (0..size).map(|_| graphs.create_owned()).collect();
        Ok(Payload::Conditional(Conditional { condition, kind, bodies }))
    })
}
