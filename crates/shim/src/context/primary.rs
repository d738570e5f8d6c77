//! cuDevicePrimaryCtx*: the context that the runtime API uses, one a device.

use super::api::{check_flags, finish};
use super::{Context, primary_of};
use crate::{ffi, session};
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUcontext, CUdevice};
use std::ffi::c_int;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How often each device's primary context is retained; held while one comes or goes.
fn retained() -> MutexGuard<'static, Vec<u32>> {
    static RETAINED: Mutex<Vec<u32>> = Mutex::new(Vec::new());
    RETAINED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn count(counts: &mut Vec<u32>, device: u32) -> &mut u32 {
    let index = device as usize;
    if counts.len() <= index {
        counts.resize(index + 1, 0);
    }
    &mut counts[index]
}

pub(crate) unsafe fn cuDevicePrimaryCtxRetain(
    pctx: *mut CUcontext,
    dev: CUdevice,
) -> Result<(), CuError> {
    primary_of(dev)?;
    if pctx.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(pctx, retain(dev)?.handle()) }
}

/// The primary context of a device, retained once more.
pub(crate) fn retain(dev: CUdevice) -> Result<Arc<Context>, CuError> {
    let ctx = primary_of(dev)?;
    let mut counts = retained();
    if !ctx.is_active() {
        ctx.activate(session::get()?)?;
    }
    *count(&mut counts, ctx.ordinal()) += 1;
    Ok(ctx)
}

pub(crate) unsafe fn cuDevicePrimaryCtxRelease_v2(dev: CUdevice) -> Result<(), CuError> {
    let ctx = primary_of(dev)?;
    let mut counts = retained();
    let count = count(&mut counts, ctx.ordinal());
    *count = count.checked_sub(1).ok_or(CuError::INVALID_CONTEXT)?;
    if *count == 0 {
        finish(&ctx)?;
        ctx.deactivate(session::get()?)?;
    }
    Ok(())
}

pub(crate) unsafe fn cuDevicePrimaryCtxReset_v2(dev: CUdevice) -> Result<(), CuError> {
    let ctx = primary_of(dev)?;
    let mut counts = retained();
    *count(&mut counts, ctx.ordinal()) = 0;
    finish(&ctx)?;
    ctx.deactivate(session::get()?)
}

pub(crate) unsafe fn cuDevicePrimaryCtxSetFlags_v2(
    dev: CUdevice,
    flags: u32,
) -> Result<(), CuError> {
    check_flags(flags)?;
    primary_of(dev)?.flags.store(flags, Ordering::Relaxed);
    Ok(())
}

pub(crate) unsafe fn cuDevicePrimaryCtxGetState(
    dev: CUdevice,
    flags: *mut u32,
    active: *mut c_int,
) -> Result<(), CuError> {
    let ctx = primary_of(dev)?;
    // SAFETY: the caller's out pointers.
    unsafe {
        ffi::write_optional(flags, ctx.flags());
        ffi::write_optional(active, c_int::from(ctx.is_active()));
    }
    Ok(())
}

// The names before CUDA 11, with the same meaning but for SetFlags.

pub(crate) unsafe fn cuDevicePrimaryCtxRelease(dev: CUdevice) -> Result<(), CuError> {
    // SAFETY: `cuDevicePrimaryCtxRelease_v2` asks the same of these arguments as this call does.
    unsafe { cuDevicePrimaryCtxRelease_v2(dev) }
}

pub(crate) unsafe fn cuDevicePrimaryCtxReset(dev: CUdevice) -> Result<(), CuError> {
    // SAFETY: `cuDevicePrimaryCtxReset_v2` asks the same of these arguments as this call does.
    unsafe { cuDevicePrimaryCtxReset_v2(dev) }
}

pub(crate) unsafe fn cuDevicePrimaryCtxSetFlags(dev: CUdevice, flags: u32) -> Result<(), CuError> {
    if primary_of(dev)?.is_active() {
        return Err(CuError::PRIMARY_CONTEXT_ACTIVE);
    }
    // SAFETY: `cuDevicePrimaryCtxSetFlags_v2` asks the same of these arguments as this call does.
    unsafe { cuDevicePrimaryCtxSetFlags_v2(dev, flags) }
}
