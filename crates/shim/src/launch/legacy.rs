//! Launches as before CUDA 4: shape and parameters are set on the function, one by one.

use super::api::launch_buffer;
use crate::function;
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUfunction, CUstream};
use kedge_protocol::{Dim3, MAX_PARAM_BYTES};
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::{LazyLock, Mutex, PoisonError};

#[derive(Debug, Clone)]
struct State {
    block: Dim3,
    shared_bytes: u32,
    params: Vec<u8>,
}

/// Changes what is set on a function. INVALID_HANDLE for what is none.
fn change<T>(
    function: CUfunction,
    f: impl FnOnce(&mut State) -> Result<T, CuError>,
) -> Result<T, CuError> {
    static STATES: LazyLock<Mutex<HashMap<CUfunction, State>>> = LazyLock::new(Mutex::default);
    function::resolve(function)?;
    let mut states = STATES.lock().unwrap_or_else(PoisonError::into_inner);
    let fresh = || State { block: Dim3 { x: 1, y: 1, z: 1 }, shared_bytes: 0, params: Vec::new() };
    f(states.entry(function).or_insert_with(fresh))
}

fn unsigned(value: c_int) -> Result<u32, CuError> {
    u32::try_from(value).map_err(|_| CuError::INVALID_VALUE)
}

pub(crate) unsafe fn cuFuncSetBlockShape(
    function: CUfunction,
    x: c_int,
    y: c_int,
    z: c_int,
) -> Result<(), CuError> {
    let block = Dim3 { x: unsigned(x)?, y: unsigned(y)?, z: unsigned(z)? };
    change(function, |state| {
        state.block = block;
        Ok(())
    })
}

pub(crate) unsafe fn cuFuncSetSharedSize(function: CUfunction, bytes: u32) -> Result<(), CuError> {
    change(function, |state| {
        state.shared_bytes = bytes;
        Ok(())
    })
}

pub(crate) unsafe fn cuParamSetSize(function: CUfunction, bytes: u32) -> Result<(), CuError> {
    let len = bytes as usize;
    if len > MAX_PARAM_BYTES {
        return Err(CuError::INVALID_VALUE);
    }
    change(function, |state| {
        state.params.resize(len, 0);
        Ok(())
    })
}

fn set(function: CUfunction, offset: c_int, bytes: &[u8]) -> Result<(), CuError> {
    let start = unsigned(offset)? as usize;
    let end = start.saturating_add(bytes.len());
    if end > MAX_PARAM_BYTES {
        return Err(CuError::INVALID_VALUE);
    }
    change(function, |state| {
        if state.params.len() < end {
            state.params.resize(end, 0);
        }
        state.params[start..end].copy_from_slice(bytes);
        Ok(())
    })
}

pub(crate) unsafe fn cuParamSeti(
    function: CUfunction,
    offset: c_int,
    value: u32,
) -> Result<(), CuError> {
    set(function, offset, &value.to_le_bytes())
}

pub(crate) unsafe fn cuParamSetf(
    function: CUfunction,
    offset: c_int,
    value: f32,
) -> Result<(), CuError> {
    set(function, offset, &value.to_le_bytes())
}

pub(crate) unsafe fn cuParamSetv(
    function: CUfunction,
    offset: c_int,
    value: *mut c_void,
    bytes: u32,
) -> Result<(), CuError> {
    // SAFETY: the caller's value of that size.
    let bytes = unsafe { crate::ffi::read_array(value.cast::<u8>().cast_const(), bytes as usize)? };
    set(function, offset, &bytes)
}

fn launch(function: CUfunction, x: c_int, y: c_int, stream: CUstream) -> Result<(), CuError> {
    let mut state = change(function, |state| Ok(state.clone()))?;
    launch_buffer(function, (x, y), state.block, state.shared_bytes, stream, &mut state.params)
}

pub(crate) unsafe fn cuLaunch(function: CUfunction) -> Result<(), CuError> {
    launch(function, 1, 1, CUstream::LEGACY)
}

pub(crate) unsafe fn cuLaunchGrid(
    function: CUfunction,
    width: c_int,
    height: c_int,
) -> Result<(), CuError> {
    launch(function, width, height, CUstream::LEGACY)
}

pub(crate) unsafe fn cuLaunchGridAsync(
    function: CUfunction,
    width: c_int,
    height: c_int,
    stream: CUstream,
) -> Result<(), CuError> {
    launch(function, width, height, stream)
}
