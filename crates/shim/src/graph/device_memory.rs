//! `cuDeviceGetGraphMemAttribute` and its kin. A graph's memory is reserved by its nodes, so there
//! is no pool behind it whose size could be told or trimmed: it is part of what the device uses.

use crate::{ffi, session};
use kedge_cuda_types::CuError;
use kedge_cuda_types::graph::CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH;
use kedge_cuda_types::handle::CUdevice;

pub(crate) unsafe fn cuDeviceGetGraphMemAttribute(
    device: CUdevice,
    attribute: u32,
    value: *mut u64,
) -> Result<(), CuError> {
    session::get()?.device(device)?;
    if attribute > CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH {
        return Err(CuError::INVALID_VALUE);
    }
    let bytes = crate::memory::graph_bytes(device as u32);
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(value, bytes) }
}

/// Only the high-water marks can be set, and only back to zero.
pub(crate) unsafe fn cuDeviceSetGraphMemAttribute(
    device: CUdevice,
    attribute: u32,
    value: *mut u64,
) -> Result<(), CuError> {
    session::get()?.device(device)?;
    // SAFETY: the caller's value.
    let value = unsafe { ffi::read(value.cast_const()) }?;
    if matches!(attribute, 1 | 3) && value == 0 { Ok(()) } else { Err(CuError::INVALID_VALUE) }
}

pub(crate) unsafe fn cuDeviceGraphMemTrim(device: CUdevice) -> Result<(), CuError> {
    session::get()?.device(device).map(drop)
}
