//! Events.

use crate::capture::{self, Mark};
use crate::graph::Payload;
use crate::handle::{Kind, Table};
use crate::stream::{self, flush_output};
use crate::{callback, context, ffi, session};
use kedge_cuda_types::CuError;
use kedge_cuda_types::abi::CUipcEventHandle;
use kedge_cuda_types::graph::{
    CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING, CU_EVENT_INTERPROCESS,
    CU_EVENT_RECORD_EXTERNAL, CU_EVENT_WAIT_EXTERNAL,
};
use kedge_cuda_types::handle::{CUevent, CUstream};
use kedge_protocol::{Call, CtxId, Elapsed, EventId, PeerName, Post, StreamOp};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// An event: a place in a stream's order, on the device or in a capture.
#[derive(Debug)]
pub(crate) struct Event {
    id: EventId,
    ctx: CtxId,
    timing: bool,
    /// Other processes may record it as well.
    interprocess: bool,
    last: Mutex<Last>,
}

/// Where it was recorded last.
#[derive(Debug)]
enum Last {
    Never,
    /// On the device; the post of that number.
    Device(u64),
    Captured(Mark),
}

static EVENTS: Table<Event> = Table::new(Kind::Event);

impl Event {
    fn last(&self) -> MutexGuard<'_, Last> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether what it marks is known to be over without asking. CAPTURED_EVENT if it is a mark in
    /// a graph, which is never over; to ask spoils the capture.
    fn known_done(&self) -> Result<bool, CuError> {
        match *self.last() {
            Last::Never | Last::Device(_) if self.interprocess => Ok(false),
            Last::Never => Ok(true),
            Last::Device(post) => Ok(session::get()?.client.completed() >= post),
            Last::Captured(ref mark) => {
                capture::spoil(mark);
                Err(CuError::CAPTURED_EVENT)
            }
        }
    }

    /// Returns once the proxy has taken what was posted about an interprocess event: another
    /// process may be told of it now, by other ways, and must find it so.
    fn settle(&self) -> Result<(), CuError> {
        if self.interprocess { session::get()?.call_status(&Call::Ping {}) } else { Ok(()) }
    }

    fn check_sticky(&self) -> Result<(), CuError> {
        session::get()?.client.sticky(self.ctx).map_or(Ok(()), Err)
    }
}

fn find(event: CUevent) -> Result<Arc<Event>, CuError> {
    EVENTS.get(event.0).ok_or(CuError::INVALID_HANDLE)
}

/// The event's id, for a graph's node.
pub(crate) fn id(event: CUevent) -> Result<EventId, CuError> {
    find(event).map(|event| event.id)
}

pub(crate) unsafe fn cuEventCreate(out: *mut CUevent, flags: u32) -> Result<(), CuError> {
    let known = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
    let timing = flags & CU_EVENT_DISABLE_TIMING == 0;
    if flags & !known != 0 || (flags & CU_EVENT_INTERPROCESS != 0 && timing) {
        return Err(CuError::INVALID_VALUE);
    }
    let (id, ctx) = (new_id(), context::current()?.id());
    let interprocess = flags & CU_EVENT_INTERPROCESS != 0;
    session::get()?.post(&Post::EventCreate { event: id, ctx, timing, interprocess })?;
    let event = Event { id, ctx, timing, interprocess, last: Mutex::new(Last::Never) };
    let handle = EVENTS.insert(event).ok_or(CuError::OUT_OF_MEMORY)?;
    // SAFETY: `out` is NULL or valid for a write: the API asks that of the program.
    unsafe { ffi::write(out, CUevent(handle)) }
}

fn new_id() -> EventId {
    static LAST_ID: AtomicU32 = AtomicU32::new(0);
    EventId(LAST_ID.fetch_add(1, Ordering::Relaxed) + 1)
}

pub(crate) unsafe fn cuIpcGetEventHandle(
    out: *mut CUipcEventHandle,
    event: CUevent,
) -> Result<(), CuError> {
    let event = find(event)?;
    if !event.interprocess {
        return Err(CuError::INVALID_HANDLE);
    }
    let name: Result<PeerName, u32> =
        session::get()?.call(&Call::EventShare { event: event.id })?;
    // SAFETY: `out` is NULL or valid for a write: the API asks that of the program.
    unsafe { ffi::write(out, pack(&name.map_err(CuError)?)) }
}

pub(crate) unsafe fn cuIpcOpenEventHandle(
    out: *mut CUevent,
    handle: CUipcEventHandle,
) -> Result<(), CuError> {
    let name = unpack(&handle)?;
    let (id, ctx) = (new_id(), context::current()?.id());
    session::get()?.call_status(&Call::EventOpen { event: id, ctx, name })?;
    let last = Mutex::new(Last::Never);
    let event = Event { id, ctx, timing: false, interprocess: true, last };
    let Some(handle) = EVENTS.insert(event) else {
        session::get()?.post(&Post::EventDestroy { event: id })?;
        return Err(CuError::OUT_OF_MEMORY);
    };
    // SAFETY: `out` is NULL or valid for a write: the API asks that of the program.
    unsafe { ffi::write(out, CUevent(handle)) }
}

/// Ends a handle of an event.
const IPC_MAGIC: [u8; 32] = *b"kedge: an event of another one.\0";

fn pack(name: &PeerName) -> CUipcEventHandle {
    let mut bytes = [0; 64];
    bytes[..16].copy_from_slice(&name.proxy);
    bytes[16..32].copy_from_slice(&name.key);
    bytes[32..].copy_from_slice(&IPC_MAGIC);
    CUipcEventHandle(bytes)
}

/// INVALID_VALUE for bytes that `pack` has not made.
fn unpack(handle: &CUipcEventHandle) -> Result<PeerName, CuError> {
    let (mut proxy, mut key) = ([0; 16], [0; 16]);
    proxy.copy_from_slice(&handle.0[..16]);
    key.copy_from_slice(&handle.0[16..32]);
    let known = handle.0[32..] == IPC_MAGIC;
    if known { Ok(PeerName { proxy, key }) } else { Err(CuError::INVALID_VALUE) }
}

/// Work that waits for the event still does.
pub(crate) unsafe fn cuEventDestroy_v2(event: CUevent) -> Result<(), CuError> {
    let event = EVENTS.remove(event.0).ok_or(CuError::INVALID_HANDLE)?;
    session::get()?.post(&Post::EventDestroy { event: event.id })
}

pub(crate) unsafe fn cuEventDestroy(event: CUevent) -> Result<(), CuError> {
    // SAFETY: it asks nothing of its caller.
    unsafe { cuEventDestroy_v2(event) }
}

pub(crate) unsafe fn cuEventRecord(event: CUevent, stream: CUstream) -> Result<(), CuError> {
    record(event, stream, 0)
}

/// `CU_EVENT_RECORD_EXTERNAL`: where the stream captures, the graph records the event.
pub(crate) unsafe fn cuEventRecordWithFlags(
    event: CUevent,
    stream: CUstream,
    flags: u32,
) -> Result<(), CuError> {
    record(event, stream, flags)
}

fn record(handle: CUevent, stream: CUstream, flags: u32) -> Result<(), CuError> {
    if flags & !CU_EVENT_RECORD_EXTERNAL != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let event = find(handle)?;
    let stream = stream::open(stream)?;
    if stream.ctx() != event.ctx {
        return Err(CuError::INVALID_HANDLE);
    }
    let external = flags == CU_EVENT_RECORD_EXTERNAL;
    match capture::mark(&stream)? {
        Some(_) if external => {
            capture::append(&stream, Payload::event_record(handle)?)?;
        }
        Some(mark) => *event.last() = Last::Captured(mark),
        None => {
            // Under the lock: of two records, the one posted last is the one remembered.
            let mut last = event.last();
            stream.post(StreamOp::EventRecord { event: event.id })?;
            *last = Last::Device(session::get()?.client.posted());
            return event.settle();
        }
    }
    Ok(())
}

/// A graph that was just launched records the event.
pub(crate) fn recorded_by_graph(handle: CUevent) {
    if let (Ok(event), Ok(session)) = (find(handle), session::get()) {
        *event.last() = Last::Device(session.client.posted());
        // A proxy that is gone shows in the next call.
        let _ = event.settle();
    }
}

/// `cuStreamWaitEvent`: on the device, or by joining the event's capture.
pub(crate) fn stream_wait(stream: CUstream, handle: CUevent, flags: u32) -> Result<(), CuError> {
    if flags & !CU_EVENT_WAIT_EXTERNAL != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let event = find(handle)?;
    let stream = stream::open(stream)?;
    if flags == CU_EVENT_WAIT_EXTERNAL && capture::intercepts(&stream)? {
        return capture::append(&stream, Payload::event_wait(handle)?).map(drop);
    }
    let (mark, over) = match &*event.last() {
        Last::Captured(mark) => (Some(mark.clone()), false),
        Last::Never => (None, true),
        Last::Device(post) => (None, session::get()?.client.completed() >= *post),
    };
    // There is nothing to wait for, unless another process has recorded it since.
    if capture::wait(&stream, mark.as_ref())? || (over && !event.interprocess) {
        return Ok(());
    }
    stream.post(StreamOp::EventWait { event: event.id })?;
    event.settle()
}

/// NOT_READY while what it marks is pending.
pub(crate) unsafe fn cuEventQuery(event: CUevent) -> Result<(), CuError> {
    callback::check_not_inside()?;
    capture::check_unsafe()?;
    let event = find(event)?;
    if !event.known_done()? {
        session::get()?.call_status(&Call::EventQuery { event: event.id })?;
    }
    flush_output();
    event.check_sticky()
}

pub(crate) unsafe fn cuEventSynchronize(event: CUevent) -> Result<(), CuError> {
    callback::check_not_inside()?;
    capture::check_unsafe()?;
    let event = find(event)?;
    if event.known_done()? {
        flush_output();
        return event.check_sticky();
    }
    let outcome = session::get()?.call_status(&Call::EventSync { event: event.id });
    flush_output();
    outcome
}

/// Milliseconds between two recorded events. INVALID_HANDLE unless both were recorded with timing;
/// NOT_READY while one is pending.
pub(crate) unsafe fn cuEventElapsedTime_v2(
    milliseconds: *mut f32,
    start: CUevent,
    end: CUevent,
) -> Result<(), CuError> {
    if milliseconds.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let (start, end) = (find(start)?, find(end)?);
    for event in [&start, &end] {
        match *event.last() {
            Last::Device(_) if event.timing => {}
            Last::Captured(_) => return Err(CuError::CAPTURED_EVENT),
            _ => return Err(CuError::INVALID_HANDLE),
        }
    }
    if start.ctx != end.ctx {
        return Err(CuError::INVALID_HANDLE);
    }
    let call = Call::EventElapsed { start: start.id, end: end.id };
    let elapsed: Result<Elapsed, u32> = session::get()?.call(&call)?;
    let elapsed = elapsed.map_err(CuError)?;
    // SAFETY: `milliseconds` is NULL or valid for a write: the API asks that of the program.
    unsafe { ffi::write(milliseconds, elapsed.milliseconds) }
}

pub(crate) unsafe fn cuEventElapsedTime(
    milliseconds: *mut f32,
    start: CUevent,
    end: CUevent,
) -> Result<(), CuError> {
    // SAFETY: `cuEventElapsedTime_v2` asks the same of these arguments as this call does.
    unsafe { cuEventElapsedTime_v2(milliseconds, start, end) }
}

/// The events of a destroyed context are no longer known.
pub(crate) fn context_destroyed(ctx: CtxId) {
    EVENTS.remove_where(|event| event.ctx == ctx);
}
