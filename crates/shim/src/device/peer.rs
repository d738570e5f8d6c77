//! What two devices can do with each other's memory.

use crate::{ffi, session};
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::CUdevice;
use std::ffi::c_int;

/// Devices of one place share one address space: each reaches every other.
fn connected(a: CUdevice, b: CUdevice) -> Result<bool, CuError> {
    let session = session::get()?;
    let (one, other) = (session.device(a)?, session.device(b)?);
    Ok(a != b && one.reaches(other))
}

pub(crate) unsafe fn cuDeviceCanAccessPeer(
    can: *mut c_int,
    dev: CUdevice,
    peer: CUdevice,
) -> Result<(), CuError> {
    let connected = connected(dev, peer)?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(can, c_int::from(connected)) }
}

pub(crate) unsafe fn cuDeviceGetP2PAttribute(
    value: *mut c_int,
    attribute: u32,
    src: CUdevice,
    dst: CUdevice,
) -> Result<(), CuError> {
    /// CUdevice_P2PAttribute.
    const PERFORMANCE_RANK: u32 = 1;
    const ACCESS_SUPPORTED: u32 = 2;
    const NATIVE_ATOMIC_SUPPORTED: u32 = 3;
    const ARRAY_ACCESS_SUPPORTED: u32 = 4;
    const ONLY_PARTIAL_NATIVE_ATOMIC_SUPPORTED: u32 = 5;
    let connected = connected(src, dst)?;
    if src == dst {
        return Err(CuError::INVALID_DEVICE);
    }
    let answer = match attribute {
        ACCESS_SUPPORTED | NATIVE_ATOMIC_SUPPORTED | ARRAY_ACCESS_SUPPORTED => {
            c_int::from(connected)
        }
        PERFORMANCE_RANK | ONLY_PARTIAL_NATIVE_ATOMIC_SUPPORTED => 0,
        _ => return Err(CuError::INVALID_VALUE),
    };
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(value, answer) }
}
