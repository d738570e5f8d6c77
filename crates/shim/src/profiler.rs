//! cuProfiler*: accepted, for there is no profiler to start.

use kedge_cuda_types::CuError;
use std::ffi::c_char;

pub(crate) unsafe fn cuProfilerInitialize(
    _config: *const c_char,
    _output: *const c_char,
    _mode: u32,
) -> Result<(), CuError> {
    Ok(())
}

pub(crate) unsafe fn cuProfilerStart() -> Result<(), CuError> {
    Ok(())
}

pub(crate) unsafe fn cuProfilerStop() -> Result<(), CuError> {
    Ok(())
}
