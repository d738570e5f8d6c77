//! Names of contexts' functions from before CUDA 4, and reference counts from before CUDA 2.

use super::api::{self, destroy};
use super::{current, with_current};
use crate::ffi;
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUcontext, CUdevice};

pub(crate) unsafe fn cuCtxCreate(
    pctx: *mut CUcontext,
    flags: u32,
    dev: CUdevice,
) -> Result<(), CuError> {
    // SAFETY: `cuCtxCreate_v2` asks the same of these arguments as this call does.
    unsafe { api::cuCtxCreate_v2(pctx, flags, dev) }
}

pub(crate) unsafe fn cuCtxDestroy(ctx: CUcontext) -> Result<(), CuError> {
    destroy(ctx)
}

pub(crate) unsafe fn cuCtxPushCurrent(ctx: CUcontext) -> Result<(), CuError> {
    // SAFETY: `cuCtxPushCurrent_v2` asks the same of these arguments as this call does.
    unsafe { api::cuCtxPushCurrent_v2(ctx) }
}

pub(crate) unsafe fn cuCtxPopCurrent(pctx: *mut CUcontext) -> Result<(), CuError> {
    // SAFETY: `cuCtxPopCurrent_v2` asks the same of these arguments as this call does.
    unsafe { api::cuCtxPopCurrent_v2(pctx) }
}

/// The current context; its use count, which nothing reads, is not kept.
pub(crate) unsafe fn cuCtxAttach(pctx: *mut CUcontext, flags: u32) -> Result<(), CuError> {
    if flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(pctx, current()?.handle()) }
}

pub(crate) unsafe fn cuCtxDetach(ctx: CUcontext) -> Result<(), CuError> {
    if with_current(|top| top.is_some_and(|top| top.handle() == ctx)) {
        Ok(())
    } else {
        Err(CuError::INVALID_CONTEXT)
    }
}
