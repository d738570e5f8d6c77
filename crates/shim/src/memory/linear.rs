//! Copies of a run of bytes: `cuMemcpy` and its kin, 1D arrays included.

use super::array;
use super::place::{Shape, Side, locate, locate_on_device};
use super::transfer::{Finish, run};
use crate::context::wait_for_both;
use crate::entry::default_stream;
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUarray, CUcontext, CUdeviceptr, CUstream};
use std::ffi::c_void;

/// Where an address must lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// Anywhere: the reference lets unified addresses decide.
    Any(u64),
    /// In memory that a device can access.
    Device(u64),
}

impl End {
    fn host(p: *const c_void) -> Self {
        Self::Any(p as u64)
    }

    fn side(self, shape: Shape) -> Result<Side, CuError> {
        match self {
            Self::Any(addr) => locate(addr, 0, 0, shape),
            Self::Device(addr) => locate_on_device(addr, 0, 0, shape),
        }
    }
}

/// # Safety
/// Both ends are valid for `count` bytes.
unsafe fn copy(
    dst: End,
    src: End,
    count: usize,
    stream: CUstream,
    finish: Finish,
) -> Result<(), CuError> {
    if count == 0 {
        return Ok(());
    }
    let shape = Shape::line(count as u64);
    // SAFETY: both ends are valid for `count` bytes, by this function's contract, and so for the
    // shape.
    unsafe { run(dst.side(shape)?, src.side(shape)?, shape, stream, finish) }
}

pub(crate) unsafe fn cuMemcpy(
    dst: CUdeviceptr,
    src: CUdeviceptr,
    count: usize,
) -> Result<(), CuError> {
    // SAFETY: both ends are valid for `count` bytes: the API asks that of the program.
    unsafe { copy(End::Any(dst), End::Any(src), count, default_stream(), Finish::Sync) }
}

pub(crate) unsafe fn cuMemcpyAsync(
    dst: CUdeviceptr,
    src: CUdeviceptr,
    count: usize,
    stream: CUstream,
) -> Result<(), CuError> {
    // SAFETY: both ends are valid for `count` bytes: the API asks that of the program.
    unsafe { copy(End::Any(dst), End::Any(src), count, stream, Finish::Async) }
}

pub(crate) unsafe fn cuMemcpyHtoD_v2(
    dst: CUdeviceptr,
    src: *const c_void,
    count: usize,
) -> Result<(), CuError> {
    // SAFETY: both ends are valid for `count` bytes: the API asks that of the program.
    unsafe { copy(End::Device(dst), End::host(src), count, default_stream(), Finish::Sync) }
}

pub(crate) unsafe fn cuMemcpyHtoDAsync_v2(
    dst: CUdeviceptr,
    src: *const c_void,
    count: usize,
    stream: CUstream,
) -> Result<(), CuError> {
    // SAFETY: both ends are valid for `count` bytes: the API asks that of the program.
    unsafe { copy(End::Device(dst), End::host(src), count, stream, Finish::Async) }
}

pub(crate) unsafe fn cuMemcpyDtoH_v2(
    dst: *mut c_void,
    src: CUdeviceptr,
    count: usize,
) -> Result<(), CuError> {
    // SAFETY: both ends are valid for `count` bytes: the API asks that of the program.
    unsafe { copy(End::host(dst), End::Device(src), count, default_stream(), Finish::Sync) }
}

pub(crate) unsafe fn cuMemcpyDtoHAsync_v2(
    dst: *mut c_void,
    src: CUdeviceptr,
    count: usize,
    stream: CUstream,
) -> Result<(), CuError> {
    // SAFETY: both ends are valid for `count` bytes: the API asks that of the program.
    unsafe { copy(End::host(dst), End::Device(src), count, stream, Finish::Async) }
}

pub(crate) unsafe fn cuMemcpyDtoD_v2(
    dst: CUdeviceptr,
    src: CUdeviceptr,
    count: usize,
) -> Result<(), CuError> {
    // SAFETY: both ends are valid for `count` bytes: the API asks that of the program.
    unsafe { copy(End::Device(dst), End::Device(src), count, default_stream(), Finish::Sync) }
}

pub(crate) unsafe fn cuMemcpyDtoDAsync_v2(
    dst: CUdeviceptr,
    src: CUdeviceptr,
    count: usize,
    stream: CUstream,
) -> Result<(), CuError> {
    // SAFETY: both ends are valid for `count` bytes: the API asks that of the program.
    unsafe { copy(End::Device(dst), End::Device(src), count, stream, Finish::Async) }
}

/// Comes after what the default streams of both contexts wait for. On which devices the addresses
/// lie they say themselves.
pub(crate) unsafe fn cuMemcpyPeer(
    dst: CUdeviceptr,
    dst_context: CUcontext,
    src: CUdeviceptr,
    src_context: CUcontext,
    count: usize,
) -> Result<(), CuError> {
    wait_for_both([dst_context, src_context])?;
    // SAFETY: `cuMemcpyDtoD_v2` asks the same of these arguments as this call does.
    unsafe { cuMemcpyDtoD_v2(dst, src, count) }
}

pub(crate) unsafe fn cuMemcpyPeerAsync(
    dst: CUdeviceptr,
    _dst_context: CUcontext,
    src: CUdeviceptr,
    _src_context: CUcontext,
    count: usize,
    stream: CUstream,
) -> Result<(), CuError> {
    // SAFETY: `cuMemcpyDtoDAsync_v2` asks the same of these arguments as this call does.
    unsafe { cuMemcpyDtoDAsync_v2(dst, src, count, stream) }
}

/// # Safety
/// `end` is valid for `count` bytes.
unsafe fn into_array(
    dst: CUarray,
    offset: usize,
    end: End,
    count: usize,
    stream: CUstream,
    finish: Finish,
) -> Result<(), CuError> {
    if count == 0 {
        return Ok(());
    }
    let (to, shape) = array::run_of(dst, offset as u64, count as u64)?;
    let from = end.side(Shape::line(count as u64))?.packed(shape);
    // SAFETY: `end` is valid for `count` bytes, by this function's contract; the other end is an
    // array, whose bounds are checked.
    unsafe { run(to, from, shape, stream, finish) }
}

/// # Safety
/// `end` is valid for `count` bytes.
unsafe fn out_of_array(
    end: End,
    src: CUarray,
    offset: usize,
    count: usize,
    stream: CUstream,
    finish: Finish,
) -> Result<(), CuError> {
    if count == 0 {
        return Ok(());
    }
    let (from, shape) = array::run_of(src, offset as u64, count as u64)?;
    let to = end.side(Shape::line(count as u64))?.packed(shape);
    // SAFETY: `end` is valid for `count` bytes, by this function's contract; the other end is an
    // array, whose bounds are checked.
    unsafe { run(to, from, shape, stream, finish) }
}

pub(crate) unsafe fn cuMemcpyDtoA_v2(
    dst: CUarray,
    offset: usize,
    src: CUdeviceptr,
    count: usize,
) -> Result<(), CuError> {
    // SAFETY: `src` is valid for `count` bytes: the API asks that of the program.
    unsafe { into_array(dst, offset, End::Device(src), count, default_stream(), Finish::Sync) }
}

pub(crate) unsafe fn cuMemcpyAtoD_v2(
    dst: CUdeviceptr,
    src: CUarray,
    offset: usize,
    count: usize,
) -> Result<(), CuError> {
    // SAFETY: `dst` is valid for `count` bytes: the API asks that of the program.
    unsafe { out_of_array(End::Device(dst), src, offset, count, default_stream(), Finish::Sync) }
}

pub(crate) unsafe fn cuMemcpyHtoA_v2(
    dst: CUarray,
    offset: usize,
    src: *const c_void,
    count: usize,
) -> Result<(), CuError> {
    // SAFETY: `src` is valid for `count` bytes: the API asks that of the program.
    unsafe { into_array(dst, offset, End::host(src), count, default_stream(), Finish::Sync) }
}

pub(crate) unsafe fn cuMemcpyHtoAAsync_v2(
    dst: CUarray,
    offset: usize,
    src: *const c_void,
    count: usize,
    stream: CUstream,
) -> Result<(), CuError> {
    // SAFETY: `src` is valid for `count` bytes: the API asks that of the program.
    unsafe { into_array(dst, offset, End::host(src), count, stream, Finish::Async) }
}

pub(crate) unsafe fn cuMemcpyAtoH_v2(
    dst: *mut c_void,
    src: CUarray,
    offset: usize,
    count: usize,
) -> Result<(), CuError> {
    // SAFETY: `dst` is valid for `count` bytes: the API asks that of the program.
    unsafe { out_of_array(End::host(dst), src, offset, count, default_stream(), Finish::Sync) }
}

pub(crate) unsafe fn cuMemcpyAtoHAsync_v2(
    dst: *mut c_void,
    src: CUarray,
    offset: usize,
    count: usize,
    stream: CUstream,
) -> Result<(), CuError> {
    // SAFETY: `dst` is valid for `count` bytes: the API asks that of the program.
    unsafe { out_of_array(End::host(dst), src, offset, count, stream, Finish::Async) }
}

pub(crate) unsafe fn cuMemcpyAtoA_v2(
    dst: CUarray,
    dst_offset: usize,
    src: CUarray,
    src_offset: usize,
    count: usize,
) -> Result<(), CuError> {
    if count == 0 {
        return Ok(());
    }
    let (to, shape) = array::run_of(dst, dst_offset as u64, count as u64)?;
    let (from, from_shape) = array::run_of(src, src_offset as u64, count as u64)?;
    if shape != from_shape {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: arrays are not dereferenced here.
    unsafe { run(to, from, shape, default_stream(), Finish::Sync) }
}
