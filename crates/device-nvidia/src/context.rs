//! Contexts, and which one each of our threads has made current.

use crate::driver::{Driver, check};
use crate::stream::Stream;
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUcontext, CUdevice};
use kedge_protocol::CtxId;
use std::cell::Cell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// CU_CTX_MAP_HOST; the rest as the driver chooses.
const CONTEXT_FLAGS: u32 = 8;

/// A client's context: one of the driver's, so that an error that sticks stays in it.
pub(crate) struct Context {
    pub(crate) id: CtxId,
    pub(crate) raw: CUcontext,
    /// Ordinal, as the client counts.
    pub(crate) device: u32,
    driver: Arc<Driver>,
    streams: Mutex<Vec<Weak<Stream>>>,
}

thread_local! {
    static CURRENT: Cell<CUcontext> = const { Cell::new(CUcontext::NULL) };
}

impl Context {
    pub(crate) fn create(
        driver: &Arc<Driver>,
        id: CtxId,
        device: u32,
        on: CUdevice,
    ) -> Result<Arc<Context>, CuError> {
        let mut raw = CUcontext::NULL;
        // SAFETY: a live out pointer.
        check(unsafe { (driver.cuCtxCreate_v2)(&mut raw, CONTEXT_FLAGS, on) })?;
        CURRENT.set(raw);
        let (driver, streams) = (Arc::clone(driver), Mutex::default());
        Ok(Arc::new(Context { id, raw, device, driver, streams }))
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
        CURRENT.set(CUcontext::NULL);
        // SAFETY: called once, when the client has destroyed the context.
        check(unsafe { (self.driver.cuCtxDestroy_v2)(self.raw) })
    }
}
