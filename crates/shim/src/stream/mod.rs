//! Streams: the one door through which stream-ordered work passes.

use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::CUstream;
use kedge_protocol::{StreamId, StreamOp};

/// Runs `op` in `stream`'s order, or appends it to the graph that the stream captures. NULL,
/// `LEGACY` and `PER_THREAD` mean default streams of the current context.
pub(crate) fn enqueue(_stream: CUstream, _op: StreamOp) -> Result<(), CuError> {
    Err(CuError::NOT_INITIALIZED)
}

/// The stream's id, for calls that do not enqueue.
pub(crate) fn resolve(_stream: CUstream) -> Result<StreamId, CuError> {
    Err(CuError::NOT_INITIALIZED)
}

/// Waits until all work enqueued to `stream` is done and writes out what kernels printed. The
/// context's sticky error, if there is one. 900 or 906 where a capture forbids to wait.
pub(crate) fn wait(_stream: CUstream) -> Result<(), CuError> {
    Err(CuError::NOT_INITIALIZED)
}

/// Whether `enqueue` would append a node instead of running: then a copy must not carry bytes
/// (`CopyInline`), and the caller must not wait.
pub(crate) fn is_capturing(_stream: CUstream) -> Result<bool, CuError> {
    Ok(false)
}

/// Writes what device printf and assert have produced through the program's own stdio. Every
/// synchronising function calls it after its wait.
pub(crate) fn flush_output() {}

/// An id that no stream has: for a new context's legacy stream.
pub(crate) fn new_stream_id() -> StreamId {
    StreamId(0)
}

/// Forgets the streams, events and captures of a destroyed context.
pub(crate) fn context_destroyed(_ctx: kedge_protocol::CtxId) {}
