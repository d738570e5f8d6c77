//! Settings of a context: limits, cache preferences, peers.

use super::{Context, by_handle, current};
use crate::{ffi, session};
use kedge_cuda_types::CuError;
use kedge_cuda_types::attribute as attr;
use kedge_cuda_types::handle::CUcontext;
use kedge_protocol::Call;
use std::collections::BTreeSet;
use std::ffi::c_int;

/// cuCtxGetStreamPriorityRange: the lowest priority, and the highest.
pub(crate) const LEAST_PRIORITY: c_int = 0;
pub(crate) const GREATEST_PRIORITY: c_int = -5;

#[derive(Debug, Default)]
pub(crate) struct Settings {
    cache_config: u32,
    /// Devices whose memory it may access.
    peers: BTreeSet<u32>,
}

pub(crate) unsafe fn cuCtxSetLimit(limit: u32, value: usize) -> Result<(), CuError> {
    let ctx = current()?.id();
    session::get()?.call_status(&Call::SetLimit { ctx, limit, value: value as u64 })
}

pub(crate) unsafe fn cuCtxGetLimit(value: *mut usize, limit: u32) -> Result<(), CuError> {
    let ctx = current()?.id();
    let set = session::get()?.call::<Result<u64, u32>>(&Call::Limit { ctx, limit })?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(value, set.map_err(CuError)? as usize) }
}

pub(crate) unsafe fn cuCtxGetCacheConfig(config: *mut u32) -> Result<(), CuError> {
    let value = current()?.settings().cache_config;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(config, value) }
}

pub(crate) unsafe fn cuCtxSetCacheConfig(config: u32) -> Result<(), CuError> {
    const PREFER_EQUAL: u32 = 3;
    if config > PREFER_EQUAL {
        return Err(CuError::INVALID_VALUE);
    }
    current()?.settings().cache_config = config;
    Ok(())
}

pub(crate) unsafe fn cuCtxGetSharedMemConfig(config: *mut u32) -> Result<(), CuError> {
    /// What devices have had since Maxwell.
    const FOUR_BYTE_BANKS: u32 = 1;
    current()?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(config, FOUR_BYTE_BANKS) }
}

pub(crate) unsafe fn cuCtxSetSharedMemConfig(config: u32) -> Result<(), CuError> {
    const EIGHT_BYTE_BANKS: u32 = 2;
    if config > EIGHT_BYTE_BANKS {
        return Err(CuError::INVALID_VALUE);
    }
    // A hint that no device since Maxwell follows.
    current().map(drop)
}

pub(crate) unsafe fn cuCtxGetStreamPriorityRange(
    least: *mut c_int,
    greatest: *mut c_int,
) -> Result<(), CuError> {
    current()?;
    // SAFETY: the caller's out pointers.
    unsafe {
        ffi::write_optional(least, LEAST_PRIORITY);
        ffi::write_optional(greatest, GREATEST_PRIORITY);
    }
    Ok(())
}

pub(crate) unsafe fn cuCtxResetPersistingL2Cache() -> Result<(), CuError> {
    current().map(drop)
}

/// `CUexecAffinityParam` for its only type, CU_EXEC_AFFINITY_TYPE_SM_COUNT.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ExecAffinity {
    kind: u32,
    sm_count: u32,
}

pub(crate) unsafe fn cuCtxGetExecAffinity(
    affinity: *mut ExecAffinity,
    kind: u32,
) -> Result<(), CuError> {
    const SM_COUNT: u32 = 0;
    if kind != SM_COUNT {
        return Err(CuError::INVALID_VALUE);
    }
    let sm_count = current()?.info()?.limit(attr::MULTIPROCESSOR_COUNT, 1);
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(affinity, ExecAffinity { kind, sm_count }) }
}

/// The current context, and the device of the context that it names as its peer.
fn peer(of: CUcontext) -> Result<(std::sync::Arc<Context>, u32), CuError> {
    let (ctx, peer) = (current()?, by_handle(of)?);
    if ctx.ordinal() == peer.ordinal() || !ctx.info()?.reaches(peer.info()?) {
        return Err(CuError::PEER_ACCESS_UNSUPPORTED);
    }
    Ok((ctx, peer.ordinal()))
}

pub(crate) unsafe fn cuCtxEnablePeerAccess(of: CUcontext, flags: u32) -> Result<(), CuError> {
    if flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let (ctx, device) = peer(of)?;
    if ctx.settings().peers.insert(device) {
        Ok(())
    } else {
        Err(CuError::PEER_ACCESS_ALREADY_ENABLED)
    }
}

pub(crate) unsafe fn cuCtxDisablePeerAccess(of: CUcontext) -> Result<(), CuError> {
    let (ctx, device) = peer(of)?;
    if ctx.settings().peers.remove(&device) {
        Ok(())
    } else {
        Err(CuError::PEER_ACCESS_NOT_ENABLED)
    }
}
