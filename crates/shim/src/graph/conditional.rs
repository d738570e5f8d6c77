//! Conditional nodes: handles of conditions, and the bodies that they choose from.
//!
//! On a software device a handle is the address of its condition, a word of device memory, so that
//! kernels set it without asking anybody and checkpoints have it. A GPU's driver numbers the
//! conditions of a graph, its bodies' included, in the order of their making; so kernels find there
//! what they were given if they are counted here as the driver does.

use super::{Payload, world};
use crate::{callback, context, entry, ffi, memory, session};
use kedge_cuda_types::CuError;
use kedge_cuda_types::graph::{
    CU_GRAPH_COND_ASSIGN_DEFAULT, CU_GRAPH_COND_TYPE_IF, CU_GRAPH_COND_TYPE_SWITCH,
    CU_GRAPH_COND_TYPE_WHILE, CUDA_CONDITIONAL_NODE_PARAMS,
};
use kedge_cuda_types::handle::{CUcontext, CUgraph};
use kedge_protocol::{MAX_BODIES, MAX_CONDITIONS, StreamOp};
use std::sync::Arc;

/// The driver's versions since which there are conditional nodes, and those that choose one of
/// several bodies (CUDA's release notes).
const CONDITIONAL: u32 = 12030;
const CHOICES: u32 = 12080;

/// A condition, for as long as a graph knows it.
#[derive(Debug)]
pub(crate) struct Condition {
    /// An address, or a number below [`MAX_CONDITIONS`].
    pub(crate) handle: u64,
    /// What a launch of its graph sets it to.
    default: Option<u32>,
}

impl Condition {
    pub(crate) fn new(handle: u64, default: Option<u32>) -> Self {
        Self { handle, default }
    }

    /// What a launch begins with: nothing, where there is no default.
    pub(crate) fn reset(&self) -> StreamOp {
        match self.default {
            Some(value) if self.is_numbered() => {
                StreamOp::SetCondition { condition: self.handle, value }
            }
            Some(value) => {
                StreamOp::WriteValue { addr: self.handle, value: value.into(), wide: false }
            }
            None => StreamOp::Empty {},
        }
    }

    /// Whether it is the driver's, and cannot be changed once its graph can be launched.
    pub(crate) fn is_numbered(&self) -> bool {
        self.handle < MAX_CONDITIONS
    }

    /// Whether an executable graph that has this one can have `new` in its place. Without a default
    /// a condition is at first what it happens to be.
    pub(crate) fn can_become(&self, new: &Self) -> bool {
        let same =
            self.handle == new.handle && (new.default.is_none() || self.default == new.default);
        (!self.is_numbered() && !new.is_numbered()) || same
    }
}

impl Drop for Condition {
    fn drop(&mut self) {
        if self.is_numbered() {
            return;
        }
        let addr = self.handle;
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
    let ctx = context::by_handle_or_current(ctx)?;
    world::ask(|graphs| graphs.get(graph).map(drop))?;
    let default = (flags & CU_GRAPH_COND_ASSIGN_DEFAULT != 0).then_some(default);
    let session = session::get()?;
    let made = if session.device(ctx.ordinal() as i32)?.exact {
        add(graph, Condition::new(memory::graph_word()?, default))?
    } else if session.driver_version >= CONDITIONAL {
        world::ask(|graphs| graphs.next_condition(graph))
            .and_then(|handle| add(graph, Condition::new(handle, default)))?
    } else {
        return Err(entry::not_supported("a conditional graph node by a driver before CUDA 12.3"));
    };
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(handle, made) }
}

/// Has `graph` know a condition: its handle.
fn add(graph: CUgraph, condition: Condition) -> Result<u64, CuError> {
    let handle = condition.handle;
    let condition = Arc::new(condition);
    // A clone, so that one which finds its graph gone is not dropped inside of the lock.
    let known = Arc::clone(&condition);
    world::ask(|graphs| {
        graphs.get_mut(graph)?.conditions.push(known);
        Ok(handle)
    })
}

/// Refuses to copy a graph whose conditions are the driver's, as the driver does.
///
/// # Errors
/// NOT_SUPPORTED for such a graph.
pub(super) fn check_copy(graphs: &world::Graphs, graph: CUgraph) -> Result<(), CuError> {
    let numbered = graphs.get(graph)?.conditions.iter().any(|known| known.is_numbered());
    if numbered { Err(CuError::NOT_SUPPORTED) } else { Ok(()) }
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
    let chooses = kind == CU_GRAPH_COND_TYPE_SWITCH || size > 1;
    if condition < MAX_CONDITIONS && chooses && session::get()?.driver_version < CHOICES {
        return Err(entry::not_supported("a switch, or an else, by a driver before CUDA 12.8"));
    }
    world::ask(|graphs| {
        let mut known = graphs.get(graph)?.conditions.iter();
        if !known.any(|known| known.handle == condition) {
            return Err(CuError::INVALID_VALUE);
        }
        let bodies = (0..size).map(|_| graphs.create_body(graph)).collect::<Result<_, _>>()?;
        Ok(Payload::Conditional(Conditional { condition, kind, bodies }))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_driver_s_conditions_keep_their_number_and_their_default() {
        let numbered = Condition::new;
        let old = numbered(1, Some(5));
        assert!(old.can_become(&numbered(1, Some(5))));
        assert!(old.can_become(&numbered(1, None)), "it is then at first what it happens to be");
        for new in [numbered(1, Some(6)), numbered(2, Some(5))] {
            assert!(!old.can_become(&new), "{new:?}");
        }
        assert!(!numbered(1, None).can_become(&old), "it had no default");
        let reset = StreamOp::SetCondition { condition: 1, value: 5 };
        assert_eq!((old.reset(), numbered(1, None).reset()), (reset, StreamOp::Empty {}));
    }

    #[test]
    fn a_graph_with_the_driver_s_conditions_is_not_copied() {
        world::with(|graphs| {
            let graph = graphs.create();
            assert_eq!(check_copy(graphs, graph), Ok(()));
            let condition = Arc::new(Condition::new(1, None));
            graphs.get_mut(graph).unwrap().conditions.push(condition);
            assert_eq!(check_copy(graphs, graph), Err(CuError::NOT_SUPPORTED));
        });
    }
}
