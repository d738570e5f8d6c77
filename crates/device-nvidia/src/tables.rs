//! What the client has named, and the driver's objects behind it.

use crate::arena::Arena;
use crate::context::Context;
use crate::copies::{self, Arrays};
use crate::drafts::Drafts;
use crate::driver::Driver;
use crate::graph_copies::StagedCopy;
use crate::graphs::{Graph, Node};
use crate::host_call::HostCall;
use crate::host_memory::HostMemory;
use crate::modules::Module;
use crate::seams;
use crate::stream::{Event, Stream};
use crate::textures::Textures;
use kedge_cuda_types::CuError;
use kedge_cuda_types::graph::{
    CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WAIT_VALUE_64,
    CU_STREAM_MEM_OP_WRITE_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_64, CUDA_MEMSET_NODE_PARAMS_v1,
    CUstreamBatchMemOpParams,
};
use kedge_device::Host;
use kedge_protocol::{CtxId, EventId, GraphExecId, ModuleId, Place, StreamId, StreamOp};
use rustc_hash::FxHashMap;
use std::collections::HashMap;
use std::sync::Arc;

pub(crate) struct Tables {
    pub(crate) contexts: FxHashMap<CtxId, Arc<Context>>,
    pub(crate) streams: FxHashMap<StreamId, Arc<Stream>>,
    pub(crate) events: FxHashMap<EventId, Arc<Event>>,
    pub(crate) modules: FxHashMap<ModuleId, Module>,
    pub(crate) graphs: FxHashMap<GraphExecId, Graph>,
    pub(crate) drafts: Drafts,
    pub(crate) textures: Textures,
    pub(crate) arena: Arena,
    pub(crate) host_memory: HostMemory,
    driver: Arc<Driver>,
}

impl Tables {
    pub(crate) fn new(driver: &Arc<Driver>, arena: Arena) -> Tables {
        Tables {
            contexts: FxHashMap::default(),
            streams: FxHashMap::default(),
            events: FxHashMap::default(),
            modules: FxHashMap::default(),
            graphs: FxHashMap::default(),
            drafts: Drafts::default(),
            textures: Textures::default(),
            arena,
            host_memory: HostMemory::new(driver),
            driver: Arc::clone(driver),
        }
    }

    pub(crate) fn context(&self, id: CtxId) -> Result<&Arc<Context>, CuError> {
        self.contexts.get(&id).ok_or(CuError::INVALID_CONTEXT)
    }

    pub(crate) fn stream(&self, id: StreamId) -> Result<&Arc<Stream>, CuError> {
        self.streams.get(&id).ok_or(CuError::INVALID_HANDLE)
    }

    pub(crate) fn event(&self, id: EventId) -> Result<&Arc<Event>, CuError> {
        self.events.get(&id).ok_or(CuError::INVALID_HANDLE)
    }

    pub(crate) fn module(&self, id: ModuleId) -> Result<&Module, CuError> {
        self.modules.get(&id).ok_or(CuError::INVALID_HANDLE)
    }

    /// Forgets what went with a context, which the driver has destroyed or is about to.
    pub(crate) fn forget_context(&mut self, ctx: CtxId) {
        self.graphs.retain(|_, graph| graph.ctx.id != ctx);
        self.drafts.retain(|_, draft| draft.ctx.id != ctx);
        self.textures.forget_context(ctx);
        self.modules.retain(|_, module| module.ctx.id != ctx);
        self.events.retain(|_, event| event.ctx.id != ctx);
        self.streams.retain(|_, stream| stream.ctx.id != ctx);
    }

    /// An operation as a graph's node. The graph's context is current.
    pub(crate) fn node<'a>(
        &'a self,
        op: &'a StreamOp,
        host: &Arc<dyn Host>,
    ) -> Result<Node<'a>, CuError> {
        Ok(match op {
            StreamOp::Empty {}
            | StreamOp::MemAlloc { .. }
            | StreamOp::MemFree { .. }
            | StreamOp::SetCondition { .. } => Node::Empty,
            StreamOp::Launch { launch } => {
                let kernel = self.module(launch.kernel.module)?.kernel(launch.kernel.index)?;
                Node::Kernel(kernel, launch)
            }
            StreamOp::Copy { copy } => match (copy.src, copy.dst) {
                (Place::Client { .. }, _) | (_, Place::Client { .. }) => {
                    Node::Staged(StagedCopy::new(&self.driver, host, copy, &self.textures)?)
                }
                _ => {
                    let pieces = seams::copies(copy, &self.host_memory.seams(copy)).into_iter();
                    let raw = |piece| Ok(Node::Copy(copies::raw(&piece, &self.textures)?));
                    Node::of(pieces.map(raw).collect::<Result<_, CuError>>()?)
                }
            },
            StreamOp::CopyInline { .. }
            | StreamOp::Scatter { .. }
            | StreamOp::GraphLaunch { .. }
            | StreamOp::Conditional { .. } => {
                return Err(CuError::NOT_SUPPORTED);
            }
            StreamOp::Memset { dst, pitch, value, element, width, height } => {
                let fill = fill(*dst, *pitch, *value, *element, *width, *height);
                let seams = self.host_memory.seams(&seams::filled(&fill));
                Node::of(seams::fills(&fill, &seams).into_iter().map(Node::Fill).collect())
            }
            StreamOp::EventRecord { event } => Node::Record(self.event(*event)?),
            StreamOp::EventWait { event } => Node::Wait(self.event(*event)?.raw),
            StreamOp::HostFn { token } => Node::Host(HostCall::new(host, *token)),
            StreamOp::WriteValue { addr, value, wide } => {
                let narrow = CU_STREAM_MEM_OP_WRITE_VALUE_32;
                let kind = if *wide { CU_STREAM_MEM_OP_WRITE_VALUE_64 } else { narrow };
                Node::Memory(memory(kind, *addr, *value, 0))
            }
            StreamOp::WaitValue { addr, value, wide, mode } => {
                let narrow = CU_STREAM_MEM_OP_WAIT_VALUE_32;
                let kind = if *wide { CU_STREAM_MEM_OP_WAIT_VALUE_64 } else { narrow };
                Node::Memory(memory(kind, *addr, *value, *mode))
            }
        })
    }
}

fn memory(operation: u32, address: u64, value: u64, mode: u32) -> CUstreamBatchMemOpParams {
    let value_flags = u64::from(mode);
    CUstreamBatchMemOpParams { operation, address, value, value_flags, ..Default::default() }
}

pub(crate) fn fill(
    dst: u64,
    pitch: u64,
    value: u32,
    element: u32,
    width: u64,
    height: u64,
) -> CUDA_MEMSET_NODE_PARAMS_v1 {
    CUDA_MEMSET_NODE_PARAMS_v1 {
        dst,
        pitch: pitch as usize,
        value,
        elementSize: element,
        width: width as usize,
        height: height as usize,
    }
}

/// The arrays that a copy names, for a thread that does not hold the tables.
pub(crate) fn arrays_of(
    copy: &kedge_protocol::Copy3d,
    arrays: &impl Arrays,
) -> Result<HashMap<kedge_protocol::ArrayId, kedge_cuda_types::handle::CUarray>, CuError> {
    let mut found = HashMap::new();
    for place in [copy.src, copy.dst] {
        if let Place::Array { array, .. } = place {
            found.insert(array, arrays.array(array)?);
        }
    }
    Ok(found)
}
