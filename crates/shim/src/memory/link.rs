//! What memory needs of the rest of the shim.

use super::heap::Quota;
use crate::{context, session, stream};
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::CUcontext;
use kedge_protocol::{Call, CtxId, Post, Status};
use kedge_transport::Client;
use kedge_wire::Wire;

/// The calling thread's current context.
#[derive(Debug, Clone, Copy)]
pub(super) struct Current {
    pub(super) context: CUcontext,
    pub(super) ctx: CtxId,
    /// Device ordinal.
    pub(super) device: u32,
}

/// The current context; INVALID_CONTEXT where the thread has none.
pub(super) fn current() -> Result<Current, CuError> {
    let context = context::current()?;
    Ok(Current { context: context.handle(), ctx: context.id(), device: context.ordinal() })
}

/// The current context, or none, as the owner of something that lies on `device`.
pub(super) fn on_device(device: u32) -> Current {
    let none = Current { context: CUcontext::NULL, ctx: CtxId(0), device };
    current().map_or(none, |current| Current { device, ..current })
}

pub(super) fn client() -> Result<&'static Client, CuError> {
    Ok(&session::get()?.client)
}

pub(super) fn post(post: &Post) -> Result<(), CuError> {
    session::get()?.post(post)
}

/// A call whose reply is a plain outcome.
pub(super) fn call(call: &Call) -> Result<(), CuError> {
    session::get()?.call_status(call)
}

/// A call and its reply.
pub(super) fn ask<T: Wire>(call: &Call) -> Result<T, CuError> {
    session::get()?.call(call)
}

/// Waits until nothing that was posted so far still runs, in any context: then memory that the
/// program frees is in nobody's use. Sticky errors do not matter here.
pub(super) fn quiesce() -> Result<(), CuError> {
    let client = client()?;
    if client.is_idle() {
        return Ok(());
    }
    for ctx in context::active() {
        let _ = ask::<Status>(&Call::CtxSync { ctx })?;
    }
    stream::flush_output();
    Ok(())
}

/// The proxy as a source of quota.
pub(super) struct Proxy;

impl Quota for Proxy {
    fn grant(&self, device: u32, bytes: u64) -> Result<u64, CuError> {
        ask::<Result<u64, u32>>(&Call::Grant { device, bytes })?.map_err(CuError)
    }

    fn give_back(&self, device: u32, bytes: u64) -> Result<(), CuError> {
        call(&Call::Return { device, bytes })
    }
}
