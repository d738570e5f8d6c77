//! What a graph's node does, as the program gave it and as the device gets it.

use super::conditional::Conditional;
use super::kernel::Kernel;
use super::memory::{Allocation, Copied};
use crate::callback::HostNode;
use crate::{entry, event, memory, stream};
use kedge_cuda_types::CuError;
use kedge_cuda_types::graph::{
    CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, CU_GRAPH_NODE_TYPE_CONDITIONAL, CU_GRAPH_NODE_TYPE_EMPTY,
    CU_GRAPH_NODE_TYPE_EVENT_RECORD, CU_GRAPH_NODE_TYPE_GRAPH, CU_GRAPH_NODE_TYPE_HOST,
    CU_GRAPH_NODE_TYPE_KERNEL, CU_GRAPH_NODE_TYPE_MEM_ALLOC, CU_GRAPH_NODE_TYPE_MEM_FREE,
    CU_GRAPH_NODE_TYPE_MEMCPY, CU_GRAPH_NODE_TYPE_MEMSET, CU_GRAPH_NODE_TYPE_WAIT_EVENT,
    CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WAIT_VALUE_64,
    CU_STREAM_MEM_OP_WRITE_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_64, CUDA_MEMSET_NODE_PARAMS_v1,
    CUstreamBatchMemOpParams,
};
use kedge_cuda_types::handle::{CUdeviceptr, CUevent, CUgraph};
use kedge_protocol::{EventId, Place, StreamOp};
use std::sync::Arc;

#[derive(Debug, Clone)]
pub(crate) enum Payload {
    Empty,
    Kernel(Kernel),
    Memcpy(Copied),
    Memset {
        params: CUDA_MEMSET_NODE_PARAMS_v1,
        op: StreamOp,
    },
    Host(Arc<HostNode>),
    /// A child graph, owned by the node.
    Graph(CUgraph),
    Conditional(Conditional),
    EventRecord(CUevent, EventId),
    EventWait(CUevent, EventId),
    MemAlloc(Arc<Allocation>),
    MemFree {
        addr: CUdeviceptr,
        size: u64,
    },
    MemOps(Vec<CUstreamBatchMemOpParams>),
}

impl Payload {
    /// The node that a captured operation becomes.
    pub(crate) fn from_op(op: StreamOp) -> Result<Self, CuError> {
        Ok(match op {
            StreamOp::Empty {} => Self::Empty,
            StreamOp::Launch { launch } => Self::Kernel(Kernel::from_launch(launch)),
            StreamOp::Copy { .. } | StreamOp::CopyInline { .. } => {
                Self::Memcpy(Copied::captured(op))
            }
            StreamOp::Memset { dst, pitch, value, element, width, height } => {
                let (pitch, width, height) = (pitch as usize, width as usize, height as usize);
                let elementSize = element;
                let params =
                    CUDA_MEMSET_NODE_PARAMS_v1 { dst, pitch, value, elementSize, width, height };
                Self::Memset { params, op }
            }
            StreamOp::MemAlloc { addr, size } => {
                Self::MemAlloc(Arc::new(Allocation::captured(addr, size)))
            }
            StreamOp::MemFree { addr, size } => Self::MemFree { addr, size },
            StreamOp::WriteValue { addr, value, wide } => {
                let narrow = CU_STREAM_MEM_OP_WRITE_VALUE_32;
                let operation = if wide { CU_STREAM_MEM_OP_WRITE_VALUE_64 } else { narrow };
                Self::MemOps(vec![value_op(operation, addr, value, 0)])
            }
            StreamOp::WaitValue { addr, value, wide, mode } => {
                let narrow = CU_STREAM_MEM_OP_WAIT_VALUE_32;
                let operation = if wide { CU_STREAM_MEM_OP_WAIT_VALUE_64 } else { narrow };
                Self::MemOps(vec![value_op(operation, addr, value, mode)])
            }
            StreamOp::EventRecord { .. }
            | StreamOp::EventWait { .. }
            | StreamOp::Conditional { .. }
            | StreamOp::SetCondition { .. }
            | StreamOp::HostFn { .. }
            | StreamOp::Scatter { .. }
            | StreamOp::GraphLaunch { .. } => {
                entry::log_once(op.name(), || {
                    format!("capture of {} by its bare operation is not supported", op.name())
                });
                return Err(CuError::STREAM_CAPTURE_UNSUPPORTED);
            }
        })
    }

    /// The graphs that the node owns.
    pub(crate) fn children(&self) -> &[CUgraph] {
        match self {
            Self::Graph(child) => std::slice::from_ref(child),
            Self::Conditional(conditional) => &conditional.bodies,
            _ => &[],
        }
    }

    /// Whether a conditional node's body may have such a node.
    pub(crate) fn fits_in_body(&self) -> bool {
        use Payload::{Conditional, Empty, Graph, Kernel, Memcpy, Memset};
        matches!(self, Empty | Kernel(_) | Memcpy(_) | Memset { .. } | Graph(_) | Conditional(_))
    }

    /// Whether it copies from or to the program's private memory.
    pub(crate) fn is_private_copy(&self) -> bool {
        let Self::Memcpy(copied) = self else { return false };
        let StreamOp::Copy { copy } = &copied.op else { return false };
        [copy.src, copy.dst].iter().any(|place| matches!(place, Place::Client { .. }))
    }

    pub(crate) fn event_record(event: CUevent) -> Result<Self, CuError> {
        Ok(Self::EventRecord(event, event::id(event)?))
    }

    pub(crate) fn event_wait(event: CUevent) -> Result<Self, CuError> {
        Ok(Self::EventWait(event, event::id(event)?))
    }

    /// `CU_GRAPH_NODE_TYPE_*`.
    pub(crate) fn node_type(&self) -> u32 {
        match self {
            Self::Empty => CU_GRAPH_NODE_TYPE_EMPTY,
            Self::Kernel(_) => CU_GRAPH_NODE_TYPE_KERNEL,
            Self::Memcpy(_) => CU_GRAPH_NODE_TYPE_MEMCPY,
            Self::Memset { .. } => CU_GRAPH_NODE_TYPE_MEMSET,
            Self::Host(_) => CU_GRAPH_NODE_TYPE_HOST,
            Self::Graph(_) => CU_GRAPH_NODE_TYPE_GRAPH,
            Self::Conditional(_) => CU_GRAPH_NODE_TYPE_CONDITIONAL,
            Self::EventRecord(..) => CU_GRAPH_NODE_TYPE_EVENT_RECORD,
            Self::EventWait(..) => CU_GRAPH_NODE_TYPE_WAIT_EVENT,
            Self::MemAlloc(_) => CU_GRAPH_NODE_TYPE_MEM_ALLOC,
            Self::MemFree { .. } => CU_GRAPH_NODE_TYPE_MEM_FREE,
            Self::MemOps(_) => CU_GRAPH_NODE_TYPE_BATCH_MEM_OP,
        }
    }

    /// What the device does for this node, one after the other; at least one operation. A child
    /// graph is a place to stand on only: its nodes are flattened by instantiation.
    pub(crate) fn ops(&self) -> Result<Vec<StreamOp>, CuError> {
        let op = match self {
            Self::Kernel(kernel) => kernel.op(),
            Self::Memcpy(copied) => copied.op.clone(),
            Self::Memset { op, .. } => op.clone(),
            Self::Host(host) => StreamOp::HostFn { token: host.token },
            Self::EventRecord(_, event) => StreamOp::EventRecord { event: *event },
            Self::EventWait(_, event) => StreamOp::EventWait { event: *event },
            Self::MemOps(batch) => {
                let ops = stream::mem_ops(batch)?;
                return Ok(if ops.is_empty() { vec![StreamOp::Empty {}] } else { ops });
            }
            Self::MemAlloc(allocation) if memory::is_exact_at(allocation.params.dptr) => {
                allocation.op()
            }
            Self::MemFree { addr, size } if memory::is_exact_at(*addr) => {
                StreamOp::MemFree { addr: *addr, size: *size }
            }
            // Other devices need not be told: a graph's memory is theirs to use for its life.
            Self::MemAlloc(_) | Self::MemFree { .. } => StreamOp::Empty {},
            // Their graphs' own operations are instantiation's to find.
            Self::Empty | Self::Graph(_) | Self::Conditional(_) => StreamOp::Empty {},
        };
        Ok(vec![op])
    }
}

fn value_op(operation: u32, address: u64, value: u64, flags: u32) -> CUstreamBatchMemOpParams {
    let value_flags = u64::from(flags);
    CUstreamBatchMemOpParams { operation, address, value, value_flags, ..Default::default() }
}
