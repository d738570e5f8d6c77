//! cuStream* functions: creation, queries, waiting.

use super::{STREAMS, Stream, StreamKind, find, flush_output, new_stream_id, wait};
use crate::context::{self, Context, GREATEST_PRIORITY, LEAST_PRIORITY};
use crate::{callback, capture, event, ffi, memory, session};
use kedge_cuda_types::CuError;
use kedge_cuda_types::graph::CU_STREAM_NON_BLOCKING;
use kedge_cuda_types::handle::{CUcontext, CUdevice, CUevent, CUgreenCtx, CUstream};
use kedge_protocol::{Call, Post};
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

pub(crate) unsafe fn cuStreamCreate(out: *mut CUstream, flags: u32) -> Result<(), CuError> {
    // SAFETY: `cuStreamCreateWithPriority` asks the same of these arguments as this call does.
    unsafe { cuStreamCreateWithPriority(out, flags, 0) }
}

pub(crate) unsafe fn cuStreamCreateWithPriority(
    out: *mut CUstream,
    flags: u32,
    priority: i32,
) -> Result<(), CuError> {
    if out.is_null() || flags & !CU_STREAM_NON_BLOCKING != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let stream = create_in(&*context::current()?, flags, priority)?;
    // SAFETY: `out` is NULL or valid for a write: the API asks that of the program.
    unsafe { ffi::write(out, stream) }
}

/// A new stream of a context, green or not.
pub(crate) fn create_in(context: &Context, flags: u32, priority: i32) -> Result<CUstream, CuError> {
    callback::check_not_inside()?;
    let blocking = flags & CU_STREAM_NON_BLOCKING == 0;
    let priority = priority.clamp(GREATEST_PRIORITY, LEAST_PRIORITY);
    let id = new_stream_id();
    let ctx = context.id();
    // Before the handle exists, so that nothing can be enqueued to a stream the proxy does not
    // know.
    session::get()?.post(&Post::StreamCreate { stream: id, ctx, blocking, priority })?;
    let stream = STREAMS.insert_with(|handle| Stream {
        handle: CUstream(handle),
        id,
        ctx,
        context: context.handle(),
        device: context.ordinal(),
        kind: if blocking { StreamKind::Blocking } else { StreamKind::NonBlocking },
        priority,
        green: context.green(),
        attributes: Mutex::default(),
        has_attributes: AtomicBool::new(false),
        gone: AtomicBool::new(false),
    });
    stream.map(|stream| stream.handle).ok_or(CuError::OUT_OF_MEMORY)
}

pub(crate) unsafe fn cuStreamDestroy_v2(stream: CUstream) -> Result<(), CuError> {
    callback::check_not_inside()?;
    let stream = STREAMS.remove(stream.0).ok_or(CuError::INVALID_HANDLE)?;
    capture::stream_destroyed(stream.id);
    memory::paged::stream_destroyed(stream.id);
    session::get()?.post(&Post::StreamDestroy { stream: stream.id })
}

pub(crate) unsafe fn cuStreamDestroy(stream: CUstream) -> Result<(), CuError> {
    // SAFETY: it asks nothing of its caller.
    unsafe { cuStreamDestroy_v2(stream) }
}

pub(crate) unsafe fn cuStreamSynchronize(stream: CUstream) -> Result<(), CuError> {
    wait(stream)
}

/// NOT_READY while work is pending.
pub(crate) unsafe fn cuStreamQuery(stream: CUstream) -> Result<(), CuError> {
    callback::check_not_inside()?;
    let stream = find(stream)?;
    capture::check_wait(&stream)?;
    let session = session::get()?;
    if !session.client.is_idle() {
        session.call_status(&Call::StreamQuery { stream: stream.id })?;
    }
    flush_output();
    stream.check_sticky()
}

/// The flag `CU_EVENT_WAIT_EXTERNAL` makes a node of the wait where the stream captures.
pub(crate) unsafe fn cuStreamWaitEvent(
    stream: CUstream,
    event: CUevent,
    flags: u32,
) -> Result<(), CuError> {
    event::stream_wait(stream, event, flags)
}

pub(crate) unsafe fn cuStreamGetPriority(
    stream: CUstream,
    priority: *mut i32,
) -> Result<(), CuError> {
    let stream = find(stream)?;
    // SAFETY: `priority` is NULL or valid for a write: the API asks that of the program.
    unsafe { ffi::write(priority, stream.priority) }
}

pub(crate) unsafe fn cuStreamGetFlags(stream: CUstream, flags: *mut u32) -> Result<(), CuError> {
    let non_blocking = find(stream)?.kind == StreamKind::NonBlocking;
    // SAFETY: `flags` is NULL or valid for a write: the API asks that of the program.
    unsafe { ffi::write(flags, if non_blocking { CU_STREAM_NON_BLOCKING } else { 0 }) }
}

pub(crate) unsafe fn cuStreamGetId(stream: CUstream, id: *mut u64) -> Result<(), CuError> {
    let stream = find(stream)?;
    // SAFETY: `id` is NULL or valid for a write: the API asks that of the program.
    unsafe { ffi::write(id, u64::from(stream.id.0)) }
}

pub(crate) unsafe fn cuStreamGetDevice(
    stream: CUstream,
    device: *mut CUdevice,
) -> Result<(), CuError> {
    let stream = find(stream)?;
    // SAFETY: `device` is NULL or valid for a write: the API asks that of the program.
    unsafe { ffi::write(device, stream.device as CUdevice) }
}

pub(crate) unsafe fn cuStreamGetCtx(
    stream: CUstream,
    context: *mut CUcontext,
) -> Result<(), CuError> {
    let of = match stream {
        // The default streams of a green context are its primary context's, too.
        CUstream::NULL | CUstream::LEGACY | CUstream::PER_THREAD => context::current()?.handle(),
        _ => find(stream)?.context,
    };
    // SAFETY: `context` is NULL or valid for a write: the API asks that of the program.
    unsafe { ffi::write(context, of) }
}

pub(crate) unsafe fn cuStreamGetCtx_v2(
    stream: CUstream,
    context: *mut CUcontext,
    green: *mut CUgreenCtx,
) -> Result<(), CuError> {
    let its = find(stream)?.green;
    // SAFETY: `green` and `context` are NULL or valid for a write each: the API asks that of the
    // program.
    unsafe {
        ffi::write_optional(green, its);
        // Of the two, the one that the stream was made in.
        if its == CUgreenCtx::NULL {
            cuStreamGetCtx(stream, context)
        } else {
            ffi::write(context, CUcontext::NULL)
        }
    }
}

/// NULL where the stream belongs to no green context.
pub(crate) unsafe fn cuStreamGetGreenCtx(
    stream: CUstream,
    green: *mut CUgreenCtx,
) -> Result<(), CuError> {
    let its = find(stream)?.green;
    // SAFETY: `green` is NULL or valid for a write: the API asks that of the program.
    unsafe { ffi::write(green, its) }
}

pub(crate) unsafe fn cuStreamIsCapturing(
    stream: CUstream,
    status: *mut u32,
) -> Result<(), CuError> {
    let info = capture::info(&*find(stream)?)?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(status, capture::status(info.as_ref())) }
}
