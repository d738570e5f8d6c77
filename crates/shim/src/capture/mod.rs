//! Stream capture: which streams record instead of run, and what that forbids to everything else.
//!
//! The rules are in [`machine`]; here they meet streams, threads and graphs. While no capture is
//! under way, one atomic load is all that any call pays.

mod api;
mod machine;

pub(crate) use api::*;
pub(crate) use machine::{Info, Mark, Member};

use crate::graph::{self, Edge, Payload};
use crate::stream::Stream;
use kedge_cuda_types::CuError;
use kedge_cuda_types::graph::{
    CU_STREAM_CAPTURE_STATUS_ACTIVE, CU_STREAM_CAPTURE_STATUS_INVALIDATED,
    CU_STREAM_CAPTURE_STATUS_NONE,
};
use kedge_cuda_types::handle::CUgraphNode;
use kedge_protocol::{CtxId, StreamId};
use machine::{Captures, Mode, Thread};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

static CAPTURES: Mutex<Option<Captures>> = Mutex::new(None);
/// How many captures are under way.
static ACTIVE: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static MODE: Cell<Mode> = const { Cell::new(Mode::Global) };
    static THREAD: Thread = {
        static LAST: AtomicU64 = AtomicU64::new(0);
        LAST.fetch_add(1, Ordering::Relaxed)
    };
}

/// Whether any stream captures.
#[inline]
pub(crate) fn any() -> bool {
    ACTIVE.load(Ordering::Acquire) != 0
}

/// Works on the captures. Graphs may be locked inside, never the other way round.
fn with<T>(f: impl FnOnce(&mut Captures) -> T) -> T {
    let mut guard = CAPTURES.lock().unwrap_or_else(PoisonError::into_inner);
    let captures = guard.get_or_insert_with(Captures::default);
    let result = f(captures);
    ACTIVE.store(captures.len(), Ordering::Release);
    result
}

/// Whether work for `stream` goes into a graph. An error where a capture forbids it altogether.
#[inline]
pub(crate) fn intercepts(stream: &Stream) -> Result<bool, CuError> {
    if !any() {
        return Ok(false);
    }
    check_legacy(stream)?;
    Ok(is_capturing(stream.id()))
}

/// Whether the stream takes part in a capture.
pub(crate) fn is_capturing(stream: StreamId) -> bool {
    with(|captures| captures.is_capturing(stream))
}

/// The capture that `stream` takes part in. IMPLICIT for a legacy stream that is closed; a question
/// spoils no capture.
pub(crate) fn info(stream: &Stream) -> Result<Option<Info>, CuError> {
    if !any() {
        return Ok(None);
    }
    with(|captures| {
        if stream.is_legacy() && captures.legacy_is_closed(stream.ctx()) {
            return Err(CuError::STREAM_CAPTURE_IMPLICIT);
        }
        Ok(captures.info(stream.id()))
    })
}

/// `CUstreamCaptureStatus`.
pub(crate) fn status(info: Option<&Info>) -> u32 {
    match info {
        None => CU_STREAM_CAPTURE_STATUS_NONE,
        Some(info) if info.valid => CU_STREAM_CAPTURE_STATUS_ACTIVE,
        Some(_) => CU_STREAM_CAPTURE_STATUS_INVALIDATED,
    }
}

/// Adds a node to the graph that `stream` captures, behind the stream's last one.
pub(crate) fn append(stream: &Stream, payload: Payload) -> Result<CUgraphNode, CuError> {
    with(|captures| {
        let (graph, tips) = captures.tips(stream.id())?;
        let node = graph::add_node(graph, tips, payload)?;
        captures.set_tips(stream.id(), vec![Edge::from(node)])?;
        Ok(node)
    })
}

/// Where `stream`'s capture stands, for an event recorded on it; None if it does not capture.
pub(crate) fn mark(stream: &Stream) -> Result<Option<Mark>, CuError> {
    if !intercepts(stream)? {
        return Ok(None);
    }
    with(|captures| captures.mark(stream.id())).map(Some)
}

/// `stream` waits for an event recorded at `mark`, or outside of any capture. True: the capture has
/// taken note, and the device is not to wait.
pub(crate) fn wait(stream: &Stream, mark: Option<&Mark>) -> Result<bool, CuError> {
    if !any() {
        return if mark.is_some() { Err(CuError::CAPTURED_EVENT) } else { Ok(false) };
    }
    check_legacy(stream)?;
    with(|captures| captures.wait(stream.member(), mark))
}

/// Invalidates the capture that `mark` belongs to, if it still goes on.
pub(crate) fn spoil(mark: &Mark) {
    with(|captures| captures.spoil(mark));
}

/// To be asked first by a call that CUDA names "potentially unsafe" under capture (cuMemAlloc,
/// cuMemFree, cuMemHostAlloc, cuModuleUnload, cuEventQuery …): STREAM_CAPTURE_UNSUPPORTED, and the
/// captures in its way are invalidated, unless the thread's capture mode allows it.
#[inline]
pub(crate) fn check_unsafe() -> Result<(), CuError> {
    if !any() {
        return Ok(());
    }
    with(|captures| captures.check_unsafe(THREAD.with(|&thread| thread), MODE.get()))
}

/// To be asked before waiting for `stream`, or asking whether it is done.
#[inline]
pub(crate) fn check_wait(stream: &Stream) -> Result<(), CuError> {
    if !any() {
        return Ok(());
    }
    check_legacy(stream)?;
    with(|captures| captures.check_stream(stream.id()))
}

/// To be asked before waiting for all of a context's streams.
pub(crate) fn check_wait_context(ctx: CtxId) -> Result<(), CuError> {
    check_unsafe()?;
    if any() { with(|captures| captures.check_context(ctx)) } else { Ok(()) }
}

/// The legacy stream is closed while a stream captures that is ordered with it.
fn check_legacy(stream: &Stream) -> Result<(), CuError> {
    if !stream.is_legacy() {
        return Ok(());
    }
    with(|captures| captures.check_legacy(stream.ctx()))
}

/// A destroyed stream cannot be joined any more.
pub(crate) fn stream_destroyed(stream: StreamId) {
    if any()
        && let Some(graph) = with(|captures| captures.stream_destroyed(stream))
    {
        let _ = graph::destroy(graph);
    }
}
