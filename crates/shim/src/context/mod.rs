//! Contexts: what they are, and which are current.

mod api;
mod current;
mod legacy;
mod primary;
mod settings;

pub(crate) use api::*;
pub(crate) use current::{check_sticky, current, current_or_dead, replace_current, with_current};
pub(crate) use legacy::*;
pub(crate) use primary::*;
pub(crate) use settings::*;

use crate::handle::{Kind, Table};
use crate::session::{self, Device, Session};
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUcontext, CUgreenCtx};
use kedge_protocol::{Call, CtxId, Post, StreamId};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// A context. A primary context's object, and handle, last as long as the process; each time that
/// it is retained anew it gets another id, for the proxy knows nothing of what it was before.
#[derive(Debug)]
pub(crate) struct Context {
    handle: usize,
    device: u32,
    primary: bool,
    id: AtomicU32,
    legacy: AtomicU32,
    active: AtomicBool,
    /// What a green context's CUcontext stands for.
    green: Option<Green>,
    /// CUctx_flags.
    flags: AtomicU32,
    settings: Mutex<Settings>,
    #[cfg(feature = "private-tables")]
    pub(crate) storage: crate::private_tables::Storage,
}

/// A green context as a CUcontext: what is done in it is done in the primary context of its device,
/// and only who asks for the two can tell them apart.
#[derive(Debug)]
struct Green {
    handle: CUgreenCtx,
    primary: Arc<Context>,
}

static CONTEXTS: Table<Context> = Table::new(Kind::Context);

impl Context {
    fn new(handle: usize, device: u32, primary: bool, flags: u32) -> Self {
        Self {
            handle,
            device,
            primary,
            id: AtomicU32::new(0),
            legacy: AtomicU32::new(0),
            active: AtomicBool::new(false),
            green: None,
            flags: AtomicU32::new(flags),
            settings: Mutex::default(),
            #[cfg(feature = "private-tables")]
            storage: crate::private_tables::Storage::default(),
        }
    }

    /// Creates a context that is not primary, and does not make it current.
    fn create(session: &Session, device: i32, flags: u32) -> Result<Arc<Self>, CuError> {
        session.device(device)?;
        let ctx = CONTEXTS
            .insert_with(|handle| Self::new(handle, device as u32, false, flags))
            .ok_or(CuError::OUT_OF_MEMORY)?;
        match ctx.activate(session) {
            Ok(()) => Ok(ctx),
            Err(error) => {
                CONTEXTS.remove(ctx.handle);
                Err(error)
            }
        }
    }

    /// The CUcontext of a green context, in the primary context of its device.
    pub(crate) fn of_green(
        handle: CUgreenCtx,
        primary: Arc<Context>,
    ) -> Result<Arc<Self>, CuError> {
        let (device, flags) = (primary.device, primary.flags());
        let green = Some(Green { handle, primary });
        let made = CONTEXTS.insert_with(|handle| Self {
            green,
            active: AtomicBool::new(true),
            ..Self::new(handle, device, true, flags)
        });
        made.ok_or(CuError::OUT_OF_MEMORY)
    }

    /// The green context is gone, and its CUcontext with it.
    pub(crate) fn end_green(&self) {
        self.active.store(false, Ordering::Release);
        CONTEXTS.remove(self.handle);
        self.clear_storage();
    }

    /// The green context whose CUcontext it is, or NULL.
    pub(crate) fn green(&self) -> CUgreenCtx {
        self.green.as_ref().map_or(CUgreenCtx::NULL, |green| green.handle)
    }

    fn clear_storage(&self) {
        #[cfg(feature = "private-tables")]
        self.storage.clear(self.handle);
    }

    /// Has the proxy make the context, under a new id.
    fn activate(&self, session: &Session) -> Result<(), CuError> {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let legacy = crate::stream::new_stream_id();
        session.call_status(&Call::CtxCreate { ctx: CtxId(id), device: self.device, legacy })?;
        self.id.store(id, Ordering::Relaxed);
        self.legacy.store(legacy.0, Ordering::Relaxed);
        self.active.store(true, Ordering::Release);
        Ok(())
    }

    /// Ends the context's life in the proxy, and that of all that belongs to it.
    fn deactivate(&self, session: &Session) -> Result<(), CuError> {
        if !self.active.swap(false, Ordering::AcqRel) {
            return Ok(());
        }
        self.clear_storage();
        for other in CONTEXTS.all() {
            if other.green.as_ref().is_some_and(|green| std::ptr::eq(&*green.primary, self)) {
                other.clear_storage();
            }
        }
        let ctx = self.id();
        crate::memory::context_destroyed(ctx);
        crate::module::context_destroyed(ctx);
        crate::stream::context_destroyed(ctx);
        *self.settings() = Settings::default();
        session.post(&Post::CtxDestroy { ctx })
    }

    pub(crate) fn handle(&self) -> CUcontext {
        CUcontext(self.handle)
    }

    /// The proxy's name for it.
    #[inline]
    pub(crate) fn id(&self) -> CtxId {
        match &self.green {
            None => CtxId(self.id.load(Ordering::Relaxed)),
            Some(green) => green.primary.id(),
        }
    }

    /// What tells it from every other context of the process.
    pub(crate) fn unique(&self) -> u64 {
        match &self.green {
            None => self.id().0.into(),
            // Ids have 32 bits, and handles more.
            Some(_) => self.handle as u64,
        }
    }

    /// Its legacy default stream.
    #[inline]
    pub(crate) fn legacy(&self) -> StreamId {
        match &self.green {
            None => StreamId(self.legacy.load(Ordering::Relaxed)),
            Some(green) => green.primary.legacy(),
        }
    }

    /// The ordinal of its device.
    #[inline]
    pub(crate) fn ordinal(&self) -> u32 {
        self.device
    }

    /// What its device is.
    pub(crate) fn info(&self) -> Result<&'static Device, CuError> {
        session::get()?.device(self.device as i32)
    }

    /// Created, or retained, and not destroyed or reset since.
    #[inline]
    pub(crate) fn is_active(&self) -> bool {
        let of_green = |green: &Green| green.primary.is_active();
        self.active.load(Ordering::Acquire) && self.green.as_ref().is_none_or(of_green)
    }

    pub(crate) fn flags(&self) -> u32 {
        self.flags.load(Ordering::Relaxed)
    }

    fn settings(&self) -> std::sync::MutexGuard<'_, Settings> {
        let of = self.green.as_ref().map_or(self, |green| &*green.primary);
        of.settings.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The context that a handle names, active or not. INVALID_CONTEXT for anything else.
pub(crate) fn by_handle(handle: CUcontext) -> Result<Arc<Context>, CuError> {
    CONTEXTS.get(handle.0).ok_or(CuError::INVALID_CONTEXT)
}

/// The context that `handle` names, or the current one for NULL.
pub(crate) fn by_handle_or_current(handle: CUcontext) -> Result<Arc<Context>, CuError> {
    if handle.is_null() { current() } else { by_handle(handle) }
}

/// Every active context; green ones are parts of their devices' primary contexts.
pub(crate) fn active() -> Vec<CtxId> {
    let all = CONTEXTS.all();
    all.iter().filter(|ctx| ctx.green.is_none() && ctx.is_active()).map(|ctx| ctx.id()).collect()
}

/// The active context of that id.
pub(crate) fn by_id(id: CtxId) -> Option<Arc<Context>> {
    let mut all = CONTEXTS.all().into_iter();
    all.find(|ctx| ctx.green.is_none() && ctx.is_active() && ctx.id() == id)
}

/// The primary context of a device, active or not; its handle never changes.
pub(crate) fn primary_of(device: i32) -> Result<Arc<Context>, CuError> {
    static PRIMARY: OnceLock<Vec<OnceLock<Arc<Context>>>> = OnceLock::new();
    let session = session::get()?;
    session.device(device)?;
    let all = PRIMARY.get_or_init(|| session.devices.iter().map(|_| OnceLock::new()).collect());
    let slot = all.get(device as usize).ok_or(CuError::INVALID_DEVICE)?;
    if let Some(ctx) = slot.get() {
        return Ok(ctx.clone());
    }
    let made = CONTEXTS
        .insert_with(|handle| Context::new(handle, device as u32, true, 0))
        .ok_or(CuError::OUT_OF_MEMORY)?;
    let kept = slot.get_or_init(|| made.clone());
    if !Arc::ptr_eq(kept, &made) {
        CONTEXTS.remove(made.handle);
    }
    Ok(kept.clone())
}
