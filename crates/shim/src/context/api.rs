//! cuCtx*: creation, the current context, queries, synchronisation.

use super::current::{pop, push};
use super::{CONTEXTS, Context, by_handle, by_handle_or_current};
use super::{current, current_or_dead, replace_current, with_current};
use crate::{entry, ffi, session, stream};
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUcontext, CUdevice};
use kedge_protocol::Call;
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// CUctx_flags that exist (CU_CTX_FLAGS_MASK).
const FLAGS_MASK: u32 = 0xff;
/// CU_CTX_SCHED_*: at most one of spin 1, yield 2, blocking sync 4.
const SCHED_MASK: u32 = 0x7;

pub(super) fn check_flags(flags: u32) -> Result<(), CuError> {
    let sched = flags & SCHED_MASK;
    if flags & !FLAGS_MASK != 0 || sched.count_ones() > 1 {
        return Err(CuError::INVALID_VALUE);
    }
    Ok(())
}

unsafe fn create(pctx: *mut CUcontext, flags: u32, device: CUdevice) -> Result<(), CuError> {
    if pctx.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    check_flags(flags)?;
    let ctx = Context::create(session::get()?, device, flags)?;
    push(ctx.clone());
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(pctx, ctx.handle()) }
}

pub(crate) unsafe fn cuCtxCreate_v2(
    pctx: *mut CUcontext,
    flags: u32,
    dev: CUdevice,
) -> Result<(), CuError> {
    // SAFETY: `pctx` is NULL or valid for a write: the API asks that of the program.
    unsafe { create(pctx, flags, dev) }
}

pub(crate) unsafe fn cuCtxCreate_v3(
    pctx: *mut CUcontext,
    _params: *mut c_void,
    num_params: c_int,
    flags: u32,
    dev: CUdevice,
) -> Result<(), CuError> {
    if num_params != 0 {
        return Err(CuError::UNSUPPORTED_EXEC_AFFINITY);
    }
    // SAFETY: `pctx` is NULL or valid for a write: the API asks that of the program.
    unsafe { create(pctx, flags, dev) }
}

/// `CUctxCreateParams`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct CtxCreateParams {
    exec_affinity: *const c_void,
    num_exec_affinity: c_int,
    cig: *const c_void,
}

pub(crate) unsafe fn cuCtxCreate_v4(
    pctx: *mut CUcontext,
    params: *const CtxCreateParams,
    flags: u32,
    dev: CUdevice,
) -> Result<(), CuError> {
    if !params.is_null() {
        // SAFETY: not NULL, so it is the structure that the API asks for.
        let params = unsafe { ffi::read(params)? };
        if params.num_exec_affinity != 0 {
            return Err(CuError::UNSUPPORTED_EXEC_AFFINITY);
        }
        if !params.cig.is_null() {
            return Err(entry::not_supported("cuCtxCreate_v4 with cigParams"));
        }
    }
    // SAFETY: `pctx` is NULL or valid for a write: the API asks that of the program.
    unsafe { create(pctx, flags, dev) }
}

pub(super) fn destroy(handle: CUcontext) -> Result<(), CuError> {
    let ctx = by_handle(handle)?;
    if ctx.primary {
        return Err(CuError::INVALID_CONTEXT);
    }
    CONTEXTS.remove(handle.0).ok_or(CuError::INVALID_CONTEXT)?;
    if with_current(|top| top.is_some_and(|top| Arc::ptr_eq(top, &ctx))) {
        pop()?;
    }
    finish(&ctx)?;
    ctx.deactivate(session::get()?)
}

/// Waits for a context's work before it goes, so that what it printed is seen.
pub(super) fn finish(ctx: &Context) -> Result<(), CuError> {
    if ctx.is_active() {
        // A fault is reported by later calls, and must not keep a context from being destroyed.
        let _ = session::get()?.call_status(&Call::CtxSync { ctx: ctx.id() });
        crate::stream::flush_output();
    }
    Ok(())
}

pub(crate) unsafe fn cuCtxDestroy_v2(ctx: CUcontext) -> Result<(), CuError> {
    destroy(ctx)
}

pub(crate) unsafe fn cuCtxPushCurrent_v2(ctx: CUcontext) -> Result<(), CuError> {
    push(by_handle(ctx)?);
    Ok(())
}

pub(crate) unsafe fn cuCtxPopCurrent_v2(pctx: *mut CUcontext) -> Result<(), CuError> {
    let ctx = pop()?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write_optional(pctx, ctx.handle()) };
    Ok(())
}

pub(crate) unsafe fn cuCtxSetCurrent(ctx: CUcontext) -> Result<(), CuError> {
    if with_current(|top| top.is_some_and(|top| top.handle() == ctx)) {
        return Ok(());
    }
    let ctx = if ctx.is_null() { None } else { Some(by_handle(ctx)?) };
    replace_current(ctx);
    Ok(())
}

pub(crate) unsafe fn cuCtxGetCurrent(pctx: *mut CUcontext) -> Result<(), CuError> {
    let handle = with_current(|top| top.map_or(CUcontext::NULL, |ctx| ctx.handle()));
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(pctx, handle) }
}

pub(crate) unsafe fn cuCtxGetDevice(device: *mut CUdevice) -> Result<(), CuError> {
    let ordinal = with_current(|top| top.map(|ctx| ctx.device)).ok_or(CuError::INVALID_CONTEXT)?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(device, ordinal as CUdevice) }
}

pub(crate) unsafe fn cuCtxGetDevice_v2(
    device: *mut CUdevice,
    ctx: CUcontext,
) -> Result<(), CuError> {
    let ctx = if ctx.is_null() { current_or_dead()? } else { by_handle(ctx)? };
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(device, ctx.device as CUdevice) }
}

pub(crate) unsafe fn cuCtxGetFlags(flags: *mut u32) -> Result<(), CuError> {
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(flags, current_or_dead()?.flags()) }
}

pub(crate) unsafe fn cuCtxSetFlags(flags: u32) -> Result<(), CuError> {
    check_flags(flags)?;
    current()?.flags.store(flags, Ordering::Relaxed);
    Ok(())
}

pub(crate) unsafe fn cuCtxGetId(ctx: CUcontext, id: *mut u64) -> Result<(), CuError> {
    let ctx = by_handle_or_current(ctx)?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(id, ctx.unique()) }
}

pub(crate) unsafe fn cuCtxGetApiVersion(ctx: CUcontext, version: *mut u32) -> Result<(), CuError> {
    /// The interface of today's contexts: 64-bit addresses, since CUDA 3.2.
    const API_VERSION: u32 = 3020;
    by_handle_or_current(ctx)?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(version, API_VERSION) }
}

/// Waits for all work of a context and writes out what its kernels printed.
pub(super) fn synchronize(ctx: &Context) -> Result<(), CuError> {
    let session = session::get()?;
    let ctx = ctx.id();
    crate::capture::check_wait_context(ctx)?;
    // An idle device is known without asking it.
    let result = match session.client.is_idle() && session.client.alive() {
        true => session.client.sticky(ctx).map_or(Ok(()), Err),
        false => session.call_status(&Call::CtxSync { ctx }),
    };
    crate::stream::flush_output();
    result
}

/// Waits as a copy between the devices of two contexts does: as both legacy streams would, and for
/// no stream that does not block, whichever context is current (driver 580 on two H200s).
///
/// # Errors
/// `INVALID_CONTEXT` for what is none, and what has broken one of them.
pub(crate) fn wait_for_both(contexts: [CUcontext; 2]) -> Result<(), CuError> {
    let [first, second] = contexts.map(by_handle_or_current);
    let (first, second) = (first?, second?);
    stream::wait_legacy(&first)?;
    if second.id() != first.id() { stream::wait_legacy(&second) } else { Ok(()) }
}

pub(crate) unsafe fn cuCtxSynchronize() -> Result<(), CuError> {
    synchronize(&*current()?)
}

pub(crate) unsafe fn cuCtxSynchronize_v2(ctx: CUcontext) -> Result<(), CuError> {
    synchronize(&*by_handle_or_current(ctx)?)
}
