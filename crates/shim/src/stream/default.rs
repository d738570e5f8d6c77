//! Default streams: a context's legacy stream, and each thread's own.

use super::{Stream, StreamKind, new_stream_id};
use crate::per_thread::{self, AtEnd, PerThread};
use crate::{capture, context, session};
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUgreenCtx, CUstream};
use kedge_protocol::{CtxId, Post, StreamId};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// One thread's view of one context.
struct Defaults {
    ctx: CtxId,
    legacy: Arc<Stream>,
    /// Made when the thread first uses it.
    own: Option<Own>,
}

/// A thread's default stream: it ends with the thread, its work does not.
struct Own(Arc<Stream>);

impl Drop for Own {
    fn drop(&mut self) {
        capture::stream_destroyed(self.0.id);
        if !self.0.gone.load(Ordering::Acquire)
            && let Ok(session) = session::get()
        {
            let _ = session.post(&Post::StreamDestroy { stream: self.0.id });
        }
    }
}

thread_local! {
    /// The context used last comes first.
    static DEFAULTS: PerThread<Vec<Defaults>> = const { PerThread::new(Vec::new()) };
}

static END: AtEnd = AtEnd::new(|| per_thread::clear(&DEFAULTS));

/// Every thread's own streams, to be told when their context goes.
static OWN: Mutex<Vec<Weak<Stream>>> = Mutex::new(Vec::new());

/// The current context's legacy stream.
#[inline]
pub(super) fn legacy() -> Result<Arc<Stream>, CuError> {
    legacy_of(&*context::current()?)
}

/// The legacy stream of any context.
pub(super) fn legacy_of(context: &context::Context) -> Result<Arc<Stream>, CuError> {
    with_defaults(context, |defaults| Ok(defaults.legacy.clone()))
}

/// The calling thread's default stream in the current context.
#[inline]
pub(super) fn per_thread() -> Result<Arc<Stream>, CuError> {
    with_defaults(&*context::current()?, |defaults| {
        if let Some(own) = &defaults.own {
            return Ok(own.0.clone());
        }
        let stream = create_own(&defaults.legacy)?;
        defaults.own = Some(Own(stream.clone()));
        Ok(stream)
    })
}

fn with_defaults<T>(
    context: &context::Context,
    f: impl FnOnce(&mut Defaults) -> Result<T, CuError>,
) -> Result<T, CuError> {
    let ctx = context.id();
    per_thread::change(&DEFAULTS, &END, |all| {
        match all.iter().position(|d| d.ctx == ctx) {
            Some(0) => {}
            Some(at) => all.swap(0, at),
            None => {
                all.retain(|d| !d.legacy.gone.load(Ordering::Acquire));
                let legacy = Arc::new(default_stream(context, CUstream::LEGACY));
                remember(&legacy);
                all.insert(0, Defaults { ctx, legacy, own: None });
            }
        }
        f(&mut all[0])
    })
}

fn default_stream(context: &context::Context, handle: CUstream) -> Stream {
    let (id, kind) = match handle {
        CUstream::LEGACY => (context.legacy(), StreamKind::Legacy),
        _ => (new_stream_id(), StreamKind::Blocking),
    };
    Stream {
        handle,
        id,
        ctx: context.id(),
        context: context.handle(),
        device: context.ordinal(),
        kind,
        priority: 0,
        green: CUgreenCtx::NULL,
        attributes: Mutex::default(),
        has_attributes: AtomicBool::new(false),
        gone: AtomicBool::new(false),
    }
}

fn create_own(legacy: &Stream) -> Result<Arc<Stream>, CuError> {
    let context = context::current()?;
    let stream = Arc::new(default_stream(&context, CUstream::PER_THREAD));
    session::get()?.post(&Post::StreamCreate {
        stream: stream.id,
        ctx: legacy.ctx,
        blocking: true,
        priority: 0,
    })?;
    remember(&stream);
    Ok(stream)
}

fn remember(stream: &Arc<Stream>) {
    let mut own = OWN.lock().unwrap_or_else(PoisonError::into_inner);
    own.retain(|stream| stream.strong_count() > 0);
    own.push(Arc::downgrade(stream));
}

/// The streams of `ctx` are gone with it.
pub(super) fn context_destroyed(ctx: CtxId) {
    let ids: Vec<StreamId> = {
        let own = OWN.lock().unwrap_or_else(PoisonError::into_inner);
        let of_ctx = own.iter().filter_map(Weak::upgrade).filter(|stream| stream.ctx == ctx);
        of_ctx
            .map(|stream| {
                stream.gone.store(true, Ordering::Release);
                stream.id
            })
            .collect()
    };
    ids.into_iter().for_each(capture::stream_destroyed);
}
