//! Streams: the one door through which stream-ordered work passes.
//!
//! Whoever has work for a stream calls [`enqueue`]. It finds the stream, refuses what a sticky
//! error or a capture forbids, and posts the operation, or appends it to the graph that the stream
//! captures. Nothing here holds a lock while it waits.

mod api;
mod attribute;
mod default;
mod mem_op;
mod output;

pub(crate) use crate::memory::cuStreamAttachMemAsync;
pub(crate) use api::*;
pub(crate) use attribute::*;
pub(crate) use mem_op::*;
pub(crate) use output::flush_output;

use crate::capture::{self, Member};
use crate::context::Context;
use crate::graph::Payload;
use crate::handle::{Kind, Table};
use crate::{callback, memory, session};
use attribute::Attributes;
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUcontext, CUgraph, CUgraphNode, CUgreenCtx, CUstream};
use kedge_protocol::{Call, CtxId, Launch, Post, StreamId, StreamOp};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

/// A stream, created by the program or a default one.
#[derive(Debug)]
pub(crate) struct Stream {
    handle: CUstream,
    id: StreamId,
    ctx: CtxId,
    context: CUcontext,
    /// Ordinal.
    device: u32,
    kind: StreamKind,
    priority: i32,
    /// The green context that it was made in, or NULL.
    green: CUgreenCtx,
    attributes: Mutex<Attributes>,
    has_attributes: AtomicBool,
    /// Its context was destroyed.
    gone: AtomicBool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StreamKind {
    /// The context's legacy default stream.
    Legacy,
    /// Ordered with the legacy stream.
    Blocking,
    NonBlocking,
}

static STREAMS: Table<Stream> = Table::new(Kind::Stream);

impl Stream {
    pub(crate) fn ctx(&self) -> CtxId {
        self.ctx
    }

    pub(crate) fn id(&self) -> StreamId {
        self.id
    }

    pub(crate) fn is_legacy(&self) -> bool {
        self.kind == StreamKind::Legacy
    }

    /// What capture has to know of it.
    pub(crate) fn member(&self) -> Member {
        let blocking = self.kind == StreamKind::Blocking;
        Member { stream: self.id, ctx: self.ctx, blocking }
    }

    /// Sends `op` to the device, capture or not.
    #[inline]
    pub(crate) fn post(&self, op: StreamOp) -> Result<(), CuError> {
        memory::shadow::push(self.ctx, self.id)?;
        if memory::paged::in_use() {
            return memory::paged::post(self.id, op);
        }
        session::get()?.post(&Post::Enqueue { stream: self.id, op })
    }

    /// The context's error, if a fault has set one.
    #[inline]
    fn check_sticky(&self) -> Result<(), CuError> {
        session::get()?.client.sticky(self.ctx).map_or(Ok(()), Err)
    }

    /// As [`enqueue`], for a launch of the kernel of `ctx`, which the stream's attributes steer.
    ///
    /// # Errors
    /// `INVALID_HANDLE` for the kernel of another context.
    pub(crate) fn launch(&self, ctx: CtxId, mut launch: Launch) -> Result<(), CuError> {
        callback::check_not_inside()?;
        self.check_sticky()?;
        if self.ctx != ctx {
            return Err(CuError::INVALID_HANDLE);
        }
        let captured = capture::intercepts(self)?;
        self.add_hints(&mut launch, captured)?;
        let op = StreamOp::Launch { launch };
        if captured {
            capture::append(self, Payload::from_op(op)?).map(drop)
        } else {
            self.post(op)
        }
    }

    /// Waits for everything enqueued before.
    fn synchronize(&self) -> Result<(), CuError> {
        let session = session::get()?;
        let outcome = if session.client.is_idle() {
            Ok(())
        } else {
            session.call_status(&Call::StreamSync { stream: self.id })
        };
        flush_output();
        outcome.and_then(|()| self.check_sticky())
    }
}

/// Runs `op` in `stream`'s order, or appends it to the graph that the stream captures. NULL,
/// `LEGACY` and `PER_THREAD` mean default streams of the current context.
pub(crate) fn enqueue(stream: CUstream, op: StreamOp) -> Result<(), CuError> {
    let stream = open(stream)?;
    if capture::intercepts(&stream)? {
        capture::append(&stream, Payload::from_op(op)?).map(drop)
    } else {
        stream.post(op)
    }
}

/// As [`enqueue`], where running and capturing differ: exactly one of the two is called.
pub(crate) fn submit(
    stream: CUstream,
    run: impl FnOnce(&Stream) -> Result<(), CuError>,
    node: impl FnOnce() -> Result<Payload, CuError>,
) -> Result<(), CuError> {
    let stream = open(stream)?;
    if capture::intercepts(&stream)? {
        capture::append(&stream, node()?).map(drop)
    } else {
        run(&stream)
    }
}

/// The stream, if work may be given to it now.
#[inline]
pub(crate) fn open(stream: CUstream) -> Result<Arc<Stream>, CuError> {
    callback::check_not_inside()?;
    let stream = find(stream)?;
    stream.check_sticky()?;
    Ok(stream)
}

/// The stream that a handle names. INVALID_HANDLE if there is none, INVALID_CONTEXT for a default
/// stream without a current context.
#[inline]
pub(crate) fn find(stream: CUstream) -> Result<Arc<Stream>, CuError> {
    match stream {
        CUstream::NULL | CUstream::LEGACY => default::legacy(),
        CUstream::PER_THREAD => default::per_thread(),
        _ => STREAMS.get(stream.0).ok_or(CuError::INVALID_HANDLE),
    }
}

/// The stream's id, for calls that do not enqueue.
pub(crate) fn resolve(stream: CUstream) -> Result<StreamId, CuError> {
    find(stream).map(|stream| stream.id)
}

/// Waits until all work enqueued to `stream` is done and writes out what kernels printed. The
/// context's sticky error, if there is one. 900 or 906 where a capture forbids to wait.
pub(crate) fn wait(stream: CUstream) -> Result<(), CuError> {
    callback::check_not_inside()?;
    let stream = find(stream)?;
    capture::check_wait(&stream)?;
    stream.synchronize()
}

/// As [`wait`], for the legacy stream of any context, which waits for its blocking streams.
pub(crate) fn wait_legacy(context: &Context) -> Result<(), CuError> {
    callback::check_not_inside()?;
    let stream = default::legacy_of(context)?;
    capture::check_wait(&stream)?;
    stream.synchronize()
}

/// Whether `enqueue` would append a node instead of running: then a copy must not carry bytes
/// (`CopyInline`), and the caller must not wait.
pub(crate) fn is_capturing(stream: CUstream) -> Result<bool, CuError> {
    Ok(capture::any() && capture::is_capturing(find(stream)?.id))
}

/// The graph that `stream` captures into, and the nodes that its next one goes behind.
pub(crate) fn captured_into(stream: CUstream) -> Result<(CUgraph, Vec<CUgraphNode>), CuError> {
    let info = capture::info(&*find(stream)?)?.ok_or(CuError::ILLEGAL_STATE)?;
    Ok((info.graph, info.tips.iter().map(|tip| tip.node).collect()))
}

/// An id that no stream has: for a new context's legacy stream.
pub(crate) fn new_stream_id() -> StreamId {
    static LAST: AtomicU32 = AtomicU32::new(0);
    StreamId(LAST.fetch_add(1, Ordering::Relaxed) + 1)
}

/// Forgets the streams, events and captures of a destroyed context.
pub(crate) fn context_destroyed(ctx: CtxId) {
    for stream in STREAMS.remove_where(|stream| stream.ctx == ctx) {
        stream.gone.store(true, Ordering::Release);
        capture::stream_destroyed(stream.id);
    }
    default::context_destroyed(ctx);
    crate::event::context_destroyed(ctx);
    crate::graph::context_destroyed(ctx);
}
