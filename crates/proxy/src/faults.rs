//! Sticky errors: which contexts are broken, for replies and for the client's shared table.

use crate::outlet::Outlet;
use kedge_cuda_types::CuError;
use kedge_protocol::CtxId;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

#[derive(Debug, Default)]
pub(crate) struct Faults {
    any: AtomicBool,
    by_context: Mutex<HashMap<CtxId, CuError>>,
}

impl Faults {
    /// Sets the context's error unless it has one: the first fault is the one that sticks. Whether
    /// it was the first.
    pub(crate) fn set(&self, outlet: &dyn Outlet, ctx: CtxId, error: CuError) -> bool {
        let mut map = self.by_context.lock().unwrap_or_else(PoisonError::into_inner);
        if map.contains_key(&ctx) {
            return false;
        }
        map.insert(ctx, error);
        outlet.set_sticky(ctx, error);
        self.any.store(true, Ordering::Release);
        true
    }

    pub(crate) fn clear(&self, outlet: &dyn Outlet, ctx: CtxId) {
        let mut map = self.by_context.lock().unwrap_or_else(PoisonError::into_inner);
        if map.remove(&ctx).is_some() {
            outlet.clear_sticky(ctx);
        }
    }

    /// All that are broken.
    pub(crate) fn all(&self) -> Vec<(CtxId, u32)> {
        let map = self.by_context.lock().unwrap_or_else(PoisonError::into_inner);
        map.iter().map(|(ctx, error)| (*ctx, error.0)).collect()
    }

    /// The context's sticky error, as a result.
    pub(crate) fn check(&self, ctx: Option<CtxId>) -> Result<(), CuError> {
        let (true, Some(ctx)) = (self.any.load(Ordering::Acquire), ctx) else { return Ok(()) };
        let map = self.by_context.lock().unwrap_or_else(PoisonError::into_inner);
        map.get(&ctx).map_or(Ok(()), |error| Err(*error))
    }
}
