//! cuStreamBeginCapture and its kin.

use super::machine::{Begin, Mode};
use super::{MODE, THREAD, with};
use crate::graph::{self, Edge};
use crate::per_thread::{self, AtEnd, PerThread};
use crate::stream::{self, Stream};
use crate::{callback, ffi};
use kedge_cuda_types::CuError;
use kedge_cuda_types::graph::{
    CU_STREAM_ADD_CAPTURE_DEPENDENCIES, CU_STREAM_SET_CAPTURE_DEPENDENCIES, CUgraphEdgeData,
};
use kedge_cuda_types::handle::{CUgraph, CUgraphNode, CUstream};
use std::ptr::{null, null_mut};
use std::sync::Arc;

fn begin(stream: CUstream, mode: u32, into: Option<(CUgraph, Vec<Edge>)>) -> Result<(), CuError> {
    callback::check_not_inside()?;
    let mode = Mode::from_raw(mode)?;
    let stream = stream::find(stream)?;
    if stream.is_legacy() {
        return Err(CuError::STREAM_CAPTURE_UNSUPPORTED);
    }
    let borrowed = into.is_some();
    let (graph, tips) = match into {
        Some(into) => into,
        None => (graph::create(), Vec::new()),
    };
    let thread = THREAD.with(|&thread| thread);
    let begin = Begin { mode, thread, graph, borrowed, tips };
    with(|captures| captures.begin(stream.member(), begin)).inspect_err(|_| {
        if !borrowed {
            let _ = graph::destroy(graph);
        }
    })
}

/// The function of CUDA 10.0 had no mode: every capture was global.
pub(crate) unsafe fn cuStreamBeginCapture(stream: CUstream) -> Result<(), CuError> {
    begin(stream, 0, None)
}

pub(crate) unsafe fn cuStreamBeginCapture_v2(stream: CUstream, mode: u32) -> Result<(), CuError> {
    begin(stream, mode, None)
}

pub(crate) unsafe fn cuStreamBeginCaptureToGraph(
    stream: CUstream,
    graph: CUgraph,
    dependencies: *const CUgraphNode,
    data: *const CUgraphEdgeData,
    count: usize,
    mode: u32,
) -> Result<(), CuError> {
    // SAFETY: `dependencies` has `count` values, and `data` is NULL or has as many: the API asks
    // that of the program.
    let tips = unsafe { graph::read_edges(dependencies, data, count) }?;
    graph::check_nodes(graph, &tips)?;
    begin(stream, mode, Some((graph, tips)))
}

pub(crate) unsafe fn cuStreamEndCapture(
    stream: CUstream,
    out: *mut CUgraph,
) -> Result<(), CuError> {
    callback::check_not_inside()?;
    let stream = stream::find(stream)?;
    let thread = THREAD.with(|&thread| thread);
    let ended = with(|captures| captures.end(stream.id(), thread, graph::ancestors))?;
    if ended.outcome.is_err() && !ended.borrowed {
        graph::destroy(ended.graph)?;
    }
    let graph = if ended.outcome.is_ok() { ended.graph } else { CUgraph::NULL };
    // SAFETY: `out` is NULL or valid for a write: the API asks that of the program.
    unsafe { ffi::write_optional(out, graph) };
    ended.outcome
}

/// Returns the calling thread's capture mode and takes the new one.
pub(crate) unsafe fn cuThreadExchangeStreamCaptureMode(mode: *mut u32) -> Result<(), CuError> {
    // SAFETY: `mode` is NULL or valid for a read: the API asks that of the program.
    let new = Mode::from_raw(unsafe { ffi::read(mode) }?)?;
    let old = MODE.replace(new) as u32;
    // SAFETY: `mode` is NULL or valid for a write: the API asks that of the program.
    unsafe { ffi::write(mode, old) }
}

thread_local! {
    /// What cuStreamGetCaptureInfo lends: "valid until the next call operating on the stream".
    static LENT: PerThread<(Vec<CUgraphNode>, Vec<CUgraphEdgeData>)> = const {
        PerThread::new((Vec::new(), Vec::new()))
    };
}

static END: AtEnd = AtEnd::new(|| per_thread::clear(&LENT));

/// Where cuStreamGetCaptureInfo stores its answers; each but the status may be NULL.
struct InfoOut {
    status: *mut u32,
    id: *mut u64,
    graph: *mut CUgraph,
    dependencies: *mut *const CUgraphNode,
    edges: *mut *const CUgraphEdgeData,
    count: *mut usize,
}

impl InfoOut {
    /// # Safety
    /// Every pointer is NULL or valid for a write.
    unsafe fn fill(self, stream: CUstream) -> Result<(), CuError> {
        if self.status.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        let stream = stream::find(stream)?;
        let info = super::info(&stream)?;
        let status = super::status(info.as_ref());
        // SAFETY: `status` is NULL or valid for a write, by this function's contract.
        unsafe { ffi::write(self.status, status) }?;
        let Some(info) = info.filter(|info| info.valid) else { return Ok(()) };
        let weighted = info.tips.iter().any(|tip| tip.data != CUgraphEdgeData::default());
        if weighted && self.edges.is_null() && !self.dependencies.is_null() {
            return Err(CuError::LOSSY_QUERY);
        }
        per_thread::change(&LENT, &END, |(nodes, data)| {
            *nodes = info.tips.iter().map(|tip| tip.node).collect();
            *data = info.tips.iter().map(|tip| tip.data).collect();
            // SAFETY: each pointer is NULL or valid for a write, by this function's contract.
            unsafe {
                ffi::write_optional(self.id, info.id);
                ffi::write_optional(self.graph, info.graph);
                ffi::write_optional(self.dependencies, nodes.as_ptr());
                ffi::write_optional(self.edges, data.as_ptr());
                ffi::write_optional(self.count, nodes.len());
            }
        });
        Ok(())
    }
}

pub(crate) unsafe fn cuStreamGetCaptureInfo(
    stream: CUstream,
    status: *mut u32,
    id: *mut u64,
) -> Result<(), CuError> {
    let (graph, dependencies) = (null_mut(), null_mut());
    let (edges, count) = (null_mut(), null_mut());
    let out = InfoOut { status, id, graph, dependencies, edges, count };
    // SAFETY: `out` holds pointers that are NULL or valid for a write: the API asks that of the
    // program.
    unsafe { out.fill(stream) }
}

pub(crate) unsafe fn cuStreamGetCaptureInfo_v2(
    stream: CUstream,
    status: *mut u32,
    id: *mut u64,
    graph: *mut CUgraph,
    dependencies: *mut *const CUgraphNode,
    count: *mut usize,
) -> Result<(), CuError> {
    let edges = null_mut();
    // SAFETY: each pointer is NULL or valid for a write: the API asks that of the program.
    unsafe { InfoOut { status, id, graph, dependencies, edges, count }.fill(stream) }
}

pub(crate) unsafe fn cuStreamGetCaptureInfo_v3(
    stream: CUstream,
    status: *mut u32,
    id: *mut u64,
    graph: *mut CUgraph,
    dependencies: *mut *const CUgraphNode,
    edges: *mut *const CUgraphEdgeData,
    count: *mut usize,
) -> Result<(), CuError> {
    // SAFETY: each pointer is NULL or valid for a write: the API asks that of the program.
    unsafe { InfoOut { status, id, graph, dependencies, edges, count }.fill(stream) }
}

pub(crate) unsafe fn cuStreamUpdateCaptureDependencies(
    stream: CUstream,
    dependencies: *const CUgraphNode,
    count: usize,
    flags: u32,
) -> Result<(), CuError> {
    let data = null();
    // SAFETY: `cuStreamUpdateCaptureDependencies_v2` asks the same of these arguments as this call
    // does.
    unsafe { cuStreamUpdateCaptureDependencies_v2(stream, dependencies, data, count, flags) }
}

pub(crate) unsafe fn cuStreamUpdateCaptureDependencies_v2(
    stream: CUstream,
    dependencies: *const CUgraphNode,
    data: *const CUgraphEdgeData,
    count: usize,
    flags: u32,
) -> Result<(), CuError> {
    // SAFETY: `dependencies` has `count` values, and `data` is NULL or has as many: the API asks
    // that of the program.
    let edges = unsafe { graph::read_edges(dependencies, data, count) }?;
    let stream: Arc<Stream> = stream::find(stream)?;
    with(|captures| {
        let (graph, _) = captures.tips(stream.id())?;
        graph::check_nodes(graph, &edges)?;
        match flags {
            CU_STREAM_ADD_CAPTURE_DEPENDENCIES => captures.add_tips(stream.id(), &edges),
            CU_STREAM_SET_CAPTURE_DEPENDENCIES => captures.set_tips(stream.id(), edges),
            _ => Err(CuError::INVALID_VALUE),
        }
    })
}
