//! cuInit and cuDriverGetVersion.

use crate::{ffi, session};
use kedge_cuda_types::CuError;
use std::ffi::c_int;

/// What cuDriverGetVersion answers before cuInit: CUDA 13.0, whose export list this library has.
const DRIVER_VERSION: u32 = 13000;

pub(crate) unsafe fn cuInit(flags: u32) -> Result<(), CuError> {
    if flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    session::init()
}

/// Callable at any time, as CUDA documents.
pub(crate) unsafe fn cuDriverGetVersion(version: *mut c_int) -> Result<(), CuError> {
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(version, driver_version() as c_int) }
}

/// 1000 × major + 10 × minor.
pub(crate) fn driver_version() -> u32 {
    session::get().map_or(DRIVER_VERSION, |session| session.driver_version)
}
