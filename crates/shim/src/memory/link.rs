//! What memory needs of the rest of the shim.

use super::heap::Source;
use crate::{context, session, stream};
use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::device_of;
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

/// Calls of which none depends on another's reply, in one go: the outcome of each, in order.
pub(super) fn call_each(calls: &[Call]) -> Result<Vec<Result<(), CuError>>, CuError> {
    session::get()?.call_each(calls)
}

/// A call and its reply.
pub(super) fn ask<T: Wire>(call: &Call) -> Result<T, CuError> {
    session::get()?.call(call)
}

/// Waits until nothing that was posted so far still runs, in any context: then memory that the
/// program frees is in nobody's use. Sticky errors do not matter here.
pub(super) fn quiesce() -> Result<(), CuError> {
    let client = client()?;
    // A note of an earlier free is no work: the next free need not wait for it.
    if client.is_at_rest() {
        return Ok(());
    }
    for ctx in context::active() {
        let _ = ask::<Status>(&Call::CtxSync { ctx })?;
    }
    stream::flush_output();
    Ok(())
}

/// Whether a device checks every allocation, and so must be told of each. One that is not known yet
/// is taken to.
pub(super) fn is_exact(device: u32) -> bool {
    let session = session::get();
    session.and_then(|session| session.device(device as i32)).map_or(true, |device| device.exact)
}

/// Whether any device is exact: such devices place managed variables in the shared arena.
pub(super) fn any_exact() -> bool {
    session::get().map_or(true, |session| session.devices.iter().any(|device| device.exact))
}

/// Whether the device in whose arena an address lies is exact.
pub(crate) fn is_exact_at(addr: u64) -> bool {
    device_of(addr).is_none_or(is_exact)
}

/// Makes [addr, addr+size), a part of a slab, valid where the device wants to know.
pub(super) fn post_alloc(ctx: CtxId, addr: u64, size: u64) -> Result<(), CuError> {
    if is_exact_at(addr) { post(&Post::MemAlloc { ctx, addr, size }) } else { Ok(()) }
}

/// Ends what `post_alloc` made valid.
pub(super) fn post_free(addr: u64, size: u64) -> Result<(), CuError> {
    if is_exact_at(addr) { post(&Post::MemFree { addr, size }) } else { Ok(()) }
}

/// The proxy as the source of slabs.
pub(super) struct Proxy;

impl Source for Proxy {
    fn grant(&self, device: u32, addr: u64, bytes: u64) -> Result<(), CuError> {
        call(&Call::Grant { device, addr, bytes })
    }

    fn give_back(&self, device: u32, addr: u64, bytes: u64) -> Result<(), CuError> {
        call(&Call::Return { device, addr, bytes })
    }
}
