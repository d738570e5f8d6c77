//! Starting a CUDA runtime.

use crate::ProbeError;
use libloading::Library;
use serde::{Deserialize, Serialize};
use std::ffi::{CStr, c_char, c_void};
use std::path::Path;

/// A runtime that has started.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RuntimeReport {
    /// As cudaRuntimeGetVersion gives it: 1000 × major + 10 × minor.
    pub runtime_version: i32,
    pub driver_version: i32,
    pub devices: i32,
}

type GetInt = unsafe extern "C" fn(*mut i32) -> i32;

/// Loads the runtime at `path` and has it make its context on device 0.
pub fn start_runtime(path: &Path) -> Result<RuntimeReport, ProbeError> {
    // SAFETY: a runtime's initialisers are safe to run, as in every CUDA program.
    let library = unsafe { Library::new(path) }?;
    // SAFETY: cuda_runtime_api.h gives these names these types; the pointers do not outlive
    // `library`.
    let (runtime_version, driver_version, device_count, free, error_name) = unsafe {
        (
            *library.get::<GetInt>(b"cudaRuntimeGetVersion")?,
            *library.get::<GetInt>(b"cudaDriverGetVersion")?,
            *library.get::<GetInt>(b"cudaGetDeviceCount")?,
            *library.get::<unsafe extern "C" fn(*mut c_void) -> i32>(b"cudaFree")?,
            *library.get::<unsafe extern "C" fn(i32) -> *const c_char>(b"cudaGetErrorName")?,
        )
    };
    let check = |function, code| {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: the runtime gives a static string for every code.
        let name = unsafe {
            let name = error_name(code);
            (!name.is_null()).then(|| CStr::from_ptr(name).to_string_lossy().into_owned())
        };
        Err(ProbeError::Cuda { function, code, name })
    };
    let ask = |function, get: GetInt| {
        let mut value = 0;
        // SAFETY: the runtime stores one int.
        check(function, unsafe { get(&mut value) }).map(|()| value)
    };
    let report = RuntimeReport {
        runtime_version: ask("cudaRuntimeGetVersion", runtime_version)?,
        driver_version: ask("cudaDriverGetVersion", driver_version)?,
        devices: ask("cudaGetDeviceCount", device_count)?,
    };
    // SAFETY: freeing null is how programs make the runtime initialise itself.
    check("cudaFree", unsafe { free(std::ptr::null_mut()) })?;
    // Its exit handlers run at exit, so it must still be there.
    std::mem::forget(library);
    Ok(report)
}
