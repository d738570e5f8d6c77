//! Graph nodes that move, fill and allocate memory.

use crate::entry;
use kedge_cuda_types::CuError;
use kedge_cuda_types::graph::CUDA_MEM_ALLOC_NODE_PARAMS;
use kedge_cuda_types::memory::CUDA_MEMCPY3D;
use kedge_protocol::StreamOp;

/// A copy: what the device does, and how the program described it (a captured copy: not at all).
#[derive(Debug, Clone)]
pub(crate) struct Copied {
    pub(crate) op: StreamOp,
    pub(crate) params: Option<CUDA_MEMCPY3D>,
}

impl Copied {
    /// A copy node's operation. Private memory is read and written when the graph runs.
    pub(crate) fn new(params: &CUDA_MEMCPY3D) -> Result<Self, CuError> {
        let _ = params;
        Err(entry::not_supported("a copy node built by hand"))
    }
}

/// A graph's own memory: there as long as a graph that allocates it, or an executable of one.
#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) params: CUDA_MEM_ALLOC_NODE_PARAMS,
}
