//! `cuDeviceGetGraphMemAttribute` and its kin.

use crate::{ffi, memory, session};
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::CUdevice;

/// `CUgraphMem_attribute`: used and reserved bytes, and the most since that was reset.
const USED: u32 = 0;
const USED_HIGH: u32 = 1;
const RESERVED: u32 = 2;
const RESERVED_HIGH: u32 = 3;

pub(crate) unsafe fn cuDeviceGetGraphMemAttribute(
    device: CUdevice,
    attribute: u32,
    value: *mut u64,
) -> Result<(), CuError> {
    session::get()?.device(device)?;
    let counters = memory::graph_counters(device as u32);
    let bytes = match attribute {
        USED => counters.used,
        USED_HIGH => counters.used_high,
        RESERVED => counters.reserved,
        RESERVED_HIGH => counters.reserved_high,
        _ => return Err(CuError::INVALID_VALUE),
    };
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
    if value != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    match attribute {
        USED_HIGH => memory::change_graph_counters(device as u32, |c| c.used_high = 0),
        RESERVED_HIGH => memory::change_graph_counters(device as u32, |c| c.reserved_high = 0),
        _ => return Err(CuError::INVALID_VALUE),
    }
    Ok(())
}

/// What is not used is the device's again at once: only the counter keeps it.
pub(crate) unsafe fn cuDeviceGraphMemTrim(device: CUdevice) -> Result<(), CuError> {
    session::get()?.device(device)?;
    memory::change_graph_counters(device as u32, |counters| counters.reserved = 0);
    Ok(())
}
