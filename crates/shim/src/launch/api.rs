//! cuLaunchKernel and its kin.

use super::{Attributes, Params, Shape, prepare};
use crate::entry::default_stream;
use crate::{event, ffi, function, stream};
use kedge_cuda_types::CuError;
use kedge_cuda_types::graph::CUlaunchConfig;
use kedge_cuda_types::handle::{CUfunction, CUstream};
use kedge_protocol::Dim3;
use std::ffi::{c_int, c_void};

/// # Safety
/// `params` are valid for the function's parameters.
unsafe fn launch(
    function: CUfunction,
    shape: Shape,
    stream: CUstream,
    params: Params,
    attributes: &Attributes,
) -> Result<(), CuError> {
    let (handle, stream) = (stream, stream::find(stream)?);
    let function = function::resolve_in(function, stream.ctx())?;
    // SAFETY: `params` are as `prepare` asks, by this function's contract.
    let launch = unsafe { prepare(&function, shape, params, attributes)? };
    stream.launch(function.ctx(), launch)?;
    match attributes.event {
        // SAFETY: handles are checked.
        Some(event) => unsafe { event::cuEventRecord(event, handle) },
        None => Ok(()),
    }
}

pub(crate) unsafe fn cuLaunchKernel(
    function: CUfunction,
    grid_x: u32,
    grid_y: u32,
    grid_z: u32,
    block_x: u32,
    block_y: u32,
    block_z: u32,
    shared_bytes: u32,
    stream: CUstream,
    kernel_params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Result<(), CuError> {
    let shape = Shape {
        grid: Dim3 { x: grid_x, y: grid_y, z: grid_z },
        block: Dim3 { x: block_x, y: block_y, z: block_z },
        shared_bytes,
    };
    let params = Params { kernel_params, extra };
    // SAFETY: the caller's parameters.
    unsafe { launch(function, shape, stream, params, &Attributes::default()) }
}

pub(crate) unsafe fn cuLaunchKernelEx(
    config: *const CUlaunchConfig,
    function: CUfunction,
    kernel_params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Result<(), CuError> {
    // SAFETY: the caller's configuration and its attributes.
    let (config, attributes) = unsafe {
        let config = ffi::read(config)?;
        (config, Attributes::read(config.attrs, config.numAttrs)?)
    };
    let shape = Shape {
        grid: Dim3 { x: config.gridDimX, y: config.gridDimY, z: config.gridDimZ },
        block: Dim3 { x: config.blockDimX, y: config.blockDimY, z: config.blockDimZ },
        shared_bytes: config.sharedMemBytes,
    };
    let stream = if config.hStream.is_null() { default_stream() } else { config.hStream };
    // SAFETY: the caller's parameters.
    unsafe { launch(function, shape, stream, Params { kernel_params, extra }, &attributes) }
}

pub(crate) unsafe fn cuLaunchCooperativeKernel(
    function: CUfunction,
    grid_x: u32,
    grid_y: u32,
    grid_z: u32,
    block_x: u32,
    block_y: u32,
    block_z: u32,
    shared_bytes: u32,
    stream: CUstream,
    kernel_params: *mut *mut c_void,
) -> Result<(), CuError> {
    let shape = Shape {
        grid: Dim3 { x: grid_x, y: grid_y, z: grid_z },
        block: Dim3 { x: block_x, y: block_y, z: block_z },
        shared_bytes,
    };
    let params = Params { kernel_params, extra: std::ptr::null_mut() };
    let attributes = Attributes { cooperative: true, ..Attributes::default() };
    // SAFETY: the caller's parameters.
    unsafe { launch(function, shape, stream, params, &attributes) }
}

/// What the old interface (cuFuncSetBlockShape, cuParamSet*, cuLaunchGrid) puts together.
///
/// # Safety
/// Nothing is asked of the caller: the buffer is this library's own.
pub(super) fn launch_buffer(
    function: CUfunction,
    grid: (c_int, c_int),
    block: Dim3,
    shared_bytes: u32,
    stream: CUstream,
    buffer: &mut [u8],
) -> Result<(), CuError> {
    let side = |n: c_int| u32::try_from(n).map_err(|_| CuError::INVALID_VALUE);
    let grid = Dim3 { x: side(grid.0)?, y: side(grid.1)?, z: 1 };
    let shape = Shape { grid, block, shared_bytes };
    let mut size = buffer.len();
    // CU_LAUNCH_PARAM_BUFFER_POINTER, BUFFER_SIZE, END.
    let mut extra = [1, buffer.as_mut_ptr() as usize, 2, &raw mut size as usize, 0];
    let params = Params { kernel_params: std::ptr::null_mut(), extra: extra.as_mut_ptr().cast() };
    // SAFETY: the list ends with END and names a live buffer and its length.
    unsafe { launch(function, shape, stream, params, &Attributes::default()) }
}
