//! The driver's own checkpoint of a process (cuCheckpointProcess*), which `kedge bench checkpoint`
//! is compared with.

use crate::ProbeError;
use libloading::{Library, Symbol};
use serde::{Deserialize, Serialize};
use std::ffi::{CStr, c_char, c_void};
use std::time::Instant;

/// Seconds that each step took. The process stands still from the first to the last.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct DriverTimes {
    pub lock: f64,
    pub checkpoint: f64,
    pub restore: f64,
    pub unlock: f64,
}

type Step = unsafe extern "C" fn(i32, *mut c_void) -> i32;

/// Takes the devices' memory of the process `pid` away and gives it back.
pub fn checkpoint_by_driver(pid: i32) -> Result<DriverTimes, ProbeError> {
    // SAFETY: a driver's initialisers are safe to run, as in every CUDA program.
    let driver = unsafe { Library::new("libcuda.so.1") }?;
    // SAFETY: cuda.h gives this name this type; it takes flags, which must be 0.
    let code = unsafe {
        let init: Symbol<'_, unsafe extern "C" fn(u32) -> i32> = driver.get(b"cuInit")?;
        init(0)
    };
    check(&driver, "cuInit", code)?;
    Ok(DriverTimes {
        lock: step(&driver, "cuCheckpointProcessLock", pid)?,
        checkpoint: step(&driver, "cuCheckpointProcessCheckpoint", pid)?,
        restore: step(&driver, "cuCheckpointProcessRestore", pid)?,
        unlock: step(&driver, "cuCheckpointProcessUnlock", pid)?,
    })
}

/// Seconds that it takes.
fn step(driver: &Library, name: &'static str, pid: i32) -> Result<f64, ProbeError> {
    let begin = Instant::now();
    // SAFETY: cuda.h gives these four this type, with a process id and arguments that may be null;
    // no memory of this process is handed over.
    let code = unsafe {
        let step: Symbol<'_, Step> = driver.get(name.as_bytes())?;
        step(pid, std::ptr::null_mut())
    };
    check(driver, name, code)?;
    Ok(begin.elapsed().as_secs_f64())
}

fn check(driver: &Library, function: &'static str, code: i32) -> Result<(), ProbeError> {
    if code == 0 {
        return Ok(());
    }
    let mut name: *const c_char = std::ptr::null();
    // SAFETY: cuda.h gives this name this type; it stores a pointer to a static string, or null.
    let name = unsafe {
        let named: Symbol<'_, unsafe extern "C" fn(i32, *mut *const c_char) -> i32> =
            driver.get(b"cuGetErrorName")?;
        named(code, &mut name);
        (!name.is_null()).then(|| CStr::from_ptr(name).to_string_lossy().into_owned())
    };
    Err(ProbeError::Cuda { function, code, name })
}
