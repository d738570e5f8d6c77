//! Contexts, and which one each of our threads has made current.

use crate::bells::Bells;
use crate::driver::{Driver, check};
use crate::stream::Stream;
use crate::window::Window;
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUcontext, CUdevice, CUstream};
use kedge_protocol::CtxId;
use std::cell::Cell;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, Weak};

/// CU_CTX_MAP_HOST; the rest as the driver chooses.
const CONTEXT_FLAGS: u32 = 8;
/// CU_STREAM_NON_BLOCKING.
const NON_BLOCKING: u32 = 1;

/// A client's context: one of the driver's, so that an error that sticks stays in it.
pub(crate) struct Context {
    pub(crate) id: CtxId,
    pub(crate) raw: CUcontext,
    /// Ordinal, as the client counts.
    pub(crate) device: u32,
    driver: Arc<Driver>,
    /// Through which short waits are heard of.
    pub(crate) bells: Arc<Bells>,
    streams: Mutex<Vec<Weak<Stream>>>,
    /// Gone as soon as the context is.
    own: RwLock<Option<OwnStreams>>,
}

/// The backend's own streams in a context, for snapshots. They are made with the context, used or
/// not: where the driver places what comes later depends on what was made before, and must be the
/// same in a restarted job.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OwnStreams {
    /// Copies inside of the device.
    pub(crate) inside: CUstream,
    /// Copies over the bus.
    pub(crate) bus: CUstream,
}

/// A context that lives as long as this does.
pub(crate) struct Held<'a>(RwLockReadGuard<'a, Option<OwnStreams>>);

impl Held<'_> {
    pub(crate) fn streams(&self) -> OwnStreams {
        self.0.unwrap_or(OwnStreams { inside: CUstream::NULL, bus: CUstream::NULL })
    }
}

thread_local! {
    static CURRENT: Cell<CUcontext> = const { Cell::new(CUcontext::NULL) };
}

/// A context that the client has not named yet, with our own streams in it.
pub(crate) struct Unnamed {
    raw: CUcontext,
    own: OwnStreams,
}

/// What contexts take, in which the driver places modules' variables: of the process, as its
/// addresses are.
static ADDRESSES: LazyLock<Mutex<Window>> =
    LazyLock::new(|| Mutex::new(Window::new(0x7e80_0000_0000, 2048)));

impl Unnamed {
    /// Makes one, which is the calling thread's then.
    pub(crate) fn create(driver: &Driver, on: CUdevice) -> Result<Unnamed, CuError> {
        let mut raw = CUcontext::NULL;
        let mut window = ADDRESSES.lock().unwrap_or_else(PoisonError::into_inner);
        let top = window.range().end;
        // SAFETY: a live out pointer.
        let made = window
            .holds(top, || check(unsafe { (driver.cuCtxCreate_v2)(&mut raw, CONTEXT_FLAGS, on) }));
        drop(window);
        made?;
        CURRENT.set(raw);
        let own = own_streams(driver).inspect_err(|_| {
            // SAFETY: made above, known to nobody.
            unsafe { (driver.cuCtxDestroy_v2)(raw) };
            CURRENT.set(CUcontext::NULL);
        })?;
        Ok(Unnamed { raw, own })
    }

    /// It is the client's from now on.
    pub(crate) fn named(self, driver: &Arc<Driver>, id: CtxId, device: u32) -> Arc<Context> {
        let (bells, streams) = (Bells::new(driver), Mutex::default());
        let driver = Arc::clone(driver);
        let Unnamed { raw, own } = self;
        Arc::new(Context { id, raw, device, driver, bells, streams, own: RwLock::new(Some(own)) })
    }

    /// Ends it.
    pub(crate) fn destroy(self, driver: &Driver) {
        // SAFETY: made by `create`, and known to nobody else.
        unsafe { (driver.cuCtxDestroy_v2)(self.raw) };
        CURRENT.set(CUcontext::NULL);
    }
}

impl Context {
    pub(crate) fn create(
        driver: &Arc<Driver>,
        id: CtxId,
        device: u32,
        on: CUdevice,
    ) -> Result<Arc<Context>, CuError> {
        Ok(Unnamed::create(driver, on)?.named(driver, id, device))
    }

    /// Makes this context the calling thread's, and keeps it from being destroyed meanwhile.
    ///
    /// # Errors
    /// CONTEXT_IS_DESTROYED, and what the driver answers.
    pub(crate) fn hold(&self) -> Result<Held<'_>, CuError> {
        let held = Held(self.own.read().unwrap_or_else(PoisonError::into_inner));
        if held.0.is_none() {
            return Err(CuError::CONTEXT_IS_DESTROYED);
        }
        self.enter()?;
        Ok(held)
    }

    /// Makes this context the calling thread's.
    #[inline]
    pub(crate) fn enter(&self) -> Result<(), CuError> {
        if CURRENT.get() == self.raw {
            return Ok(());
        }
        // SAFETY: the context lives: `destroy` takes the last of it.
        check(unsafe { (self.driver.cuCtxSetCurrent)(self.raw) })?;
        CURRENT.set(self.raw);
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Weak<Stream>>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn adopt(&self, stream: &Arc<Stream>) {
        let mut streams = self.lock();
        streams.retain(|known| known.strong_count() > 0);
        streams.push(Arc::downgrade(stream));
    }

    /// Its streams that exist now.
    pub(crate) fn streams(&self) -> Vec<Arc<Stream>> {
        self.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// Ends the driver's context with everything in it.
    pub(crate) fn destroy(&self) -> Result<(), CuError> {
        let mut own = self.own.write().unwrap_or_else(PoisonError::into_inner);
        *own = None;
        CURRENT.set(CUcontext::NULL);
        // SAFETY: called once, when the client has destroyed the context.
        check(unsafe { (self.driver.cuCtxDestroy_v2)(self.raw) })
    }
}

/// The current context's [`OwnStreams`].
fn own_streams(driver: &Driver) -> Result<OwnStreams, CuError> {
    let create = || {
        let mut raw = CUstream::NULL;
        // SAFETY: a live out pointer. 0 is the lowest priority.
        check(unsafe { (driver.cuStreamCreateWithPriority)(&mut raw, NON_BLOCKING, 0) })?;
        Ok(raw)
    };
    Ok(OwnStreams { inside: create()?, bus: create()? })
}

/// The contexts that exist.
#[derive(Default)]
pub(crate) struct Live(Mutex<Known>);

#[derive(Default)]
struct Known {
    /// The client's.
    contexts: Vec<Arc<Context>>,
    /// Made for snapshots, on devices where the client has none any more.
    own: Vec<Arc<Context>>,
}

/// A name for our own context on a device, which the client does not use: its names count from 1.
const fn own_name(device: u32) -> CtxId {
    CtxId(u32::MAX - device)
}

impl Live {
    fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, context: &Arc<Context>) {
        self.lock().contexts.push(Arc::clone(context));
    }

    pub(crate) fn remove(&self, id: CtxId) {
        self.lock().contexts.retain(|context| context.id != id);
    }

    /// The client's.
    pub(crate) fn all(&self) -> Vec<Arc<Context>> {
        self.lock().contexts.clone()
    }

    /// A context on a device: the client's oldest, or one made for this.
    pub(crate) fn on(
        &self,
        driver: &Arc<Driver>,
        device: u32,
        raw: CUdevice,
    ) -> Result<Arc<Context>, CuError> {
        let client = self.lock().contexts.iter().find(|context| context.device == device).cloned();
        client.map_or_else(|| self.apart(driver, device, raw), Ok)
    }

    /// A context on a device that is not the client's.
    pub(crate) fn apart(
        &self,
        driver: &Arc<Driver>,
        device: u32,
        raw: CUdevice,
    ) -> Result<Arc<Context>, CuError> {
        let mut known = self.lock();
        if let Some(context) = known.own.iter().find(|context| context.device == device) {
            return Ok(Arc::clone(context));
        }
        let context = Context::create(driver, own_name(device), device, raw)?;
        known.own.push(Arc::clone(&context));
        Ok(context)
    }
}
