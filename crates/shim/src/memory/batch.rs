//! Batches of copies. A batch's copies may run in any order; here they run one after the other.

use super::place::{Home, Shape, Side, locate};
use super::transfer::{Finish, run};
use super::{array, give, read};
use crate::stream;
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUarray, CUdeviceptr, CUstream};
use kedge_cuda_types::memory::*;

/// Batches have no default stream.
fn check_stream(stream: CUstream) -> Result<(), CuError> {
    let default = stream.is_null() || stream == CUstream::LEGACY;
    if default { Err(CuError::INVALID_VALUE) } else { Ok(()) }
}

/// One copy of a batch; the source has been read when this returns if the program asked for that.
///
/// # Safety
/// Both sides are valid for the shape.
unsafe fn one(
    dst: Side,
    src: Side,
    shape: Shape,
    order: u32,
    stream: CUstream,
) -> Result<(), CuError> {
    let known = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM..=CU_MEMCPY_SRC_ACCESS_ORDER_ANY;
    if !known.contains(&order) {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: the program answers for both ends of the shape, by this function's contract.
    unsafe { run(dst, src, shape, stream, Finish::Async)? };
    let now = order == CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL;
    if now && matches!(src.home, Home::Pinned | Home::Managed) && !stream::is_capturing(stream)? {
        stream::wait(stream)?;
    }
    Ok(())
}

/// Arguments of `cuMemcpyBatchAsync`.
#[derive(Clone, Copy)]
struct Batch {
    dsts: *mut CUdeviceptr,
    srcs: *mut CUdeviceptr,
    sizes: *mut usize,
    count: usize,
    attributes: *mut CUmemcpyAttributes,
    indices: *mut usize,
    attribute_count: usize,
}

/// # Safety
/// The arrays have the lengths that the batch says. `failed` learns the index of a copy that fails.
unsafe fn linear(batch: Batch, failed: &mut usize, stream: CUstream) -> Result<(), CuError> {
    check_stream(stream)?;
    if batch.count == 0 || batch.attribute_count == 0 || batch.attribute_count > batch.count {
        return Err(CuError::INVALID_VALUE);
    }
    let mut run_index = 0;
    for index in 0..batch.count {
        *failed = index;
        // SAFETY: `index` and `run_index` stay inside the arrays.
        unsafe {
            let next = run_index + 1;
            if next < batch.attribute_count && read(batch.indices.wrapping_add(next))? == index {
                run_index = next;
            }
            let attributes = read(batch.attributes.wrapping_add(run_index))?;
            let (dst, src) =
                (read(batch.dsts.wrapping_add(index))?, read(batch.srcs.wrapping_add(index))?);
            let shape = Shape::line(read(batch.sizes.wrapping_add(index))? as u64);
            if shape.is_empty() {
                return Err(CuError::INVALID_VALUE);
            }
            let (dst, src) = (locate(dst, 0, 0, shape)?, locate(src, 0, 0, shape)?);
            one(dst, src, shape, attributes.srcAccessOrder, stream)?;
        }
    }
    Ok(())
}

pub(crate) unsafe fn cuMemcpyBatchAsync_v2(
    dsts: *mut CUdeviceptr,
    srcs: *mut CUdeviceptr,
    sizes: *mut usize,
    count: usize,
    attributes: *mut CUmemcpyAttributes,
    indices: *mut usize,
    attribute_count: usize,
    stream: CUstream,
) -> Result<(), CuError> {
    let batch = Batch { dsts, srcs, sizes, count, attributes, indices, attribute_count };
    // SAFETY: the arrays of `batch` have their counts' values, and both ends of each copy their
    // bytes: the API asks that of the program.
    unsafe { linear(batch, &mut 0, stream) }
}

pub(crate) unsafe fn cuMemcpyBatchAsync(
    dsts: *mut CUdeviceptr,
    srcs: *mut CUdeviceptr,
    sizes: *mut usize,
    count: usize,
    attributes: *mut CUmemcpyAttributes,
    indices: *mut usize,
    attribute_count: usize,
    failed_index: *mut usize,
    stream: CUstream,
) -> Result<(), CuError> {
    let batch = Batch { dsts, srcs, sizes, count, attributes, indices, attribute_count };
    let mut failed = usize::MAX;
    // SAFETY: the arrays of `batch` have their counts' values, both ends of each copy their bytes,
    // and `failed_index` is NULL or valid for a write: the API asks that of the program.
    unsafe {
        let outcome = linear(batch, &mut failed, stream);
        report(failed_index, failed, outcome)
    }
}

/// Tells which copy failed: SIZE_MAX where the batch itself is at fault.
///
/// # Safety
/// `out` is NULL or valid for a write.
unsafe fn report(
    out: *mut usize,
    failed: usize,
    outcome: Result<(), CuError>,
) -> Result<(), CuError> {
    if outcome.is_err() && !out.is_null() {
        // SAFETY: `out` is NULL or valid for a write, by this function's contract.
        unsafe { give(out, failed)? };
    }
    outcome
}

/// One side of a 3D copy.
fn side(operand: &CUmemcpy3DOperand, extent: &CUextent3D) -> Result<(Side, Shape), CuError> {
    let [first, second, third, fourth] = operand.op;
    let [width, height, depth] =
        [extent.width, extent.height, extent.depth].map(|extent| extent as u64);
    match operand.type_ {
        CU_MEMCPY_OPERAND_TYPE_POINTER => {
            // Row length and layer height in elements of a byte; 0 means the extent's own.
            let pitch = if second == 0 { width } else { second };
            let rows = if third == 0 { height } else { third };
            let slice = pitch.checked_mul(rows).ok_or(CuError::INVALID_VALUE)?;
            if pitch < width || rows < height {
                return Err(CuError::INVALID_VALUE);
            }
            let shape = Shape { width, height, depth };
            Ok((locate(first, pitch, slice, shape)?, shape))
        }
        CU_MEMCPY_OPERAND_TYPE_ARRAY => {
            let handle = CUarray(first as usize);
            let element = array::by_handle(handle)?.element();
            let bytes = |count: u64| count.checked_mul(element).ok_or(CuError::INVALID_VALUE);
            let shape = Shape { width: bytes(width)?, height, depth };
            Ok((array::place(handle, [bytes(second)?, third, fourth], shape)?, shape))
        }
        _ => Err(CuError::INVALID_VALUE),
    }
}

/// # Safety
/// `ops` has `count` elements. `failed` learns the index of a copy that fails.
unsafe fn shaped(
    count: usize,
    ops: *mut CUDA_MEMCPY3D_BATCH_OP,
    failed: &mut usize,
    flags: u64,
    stream: CUstream,
) -> Result<(), CuError> {
    check_stream(stream)?;
    if count == 0 || flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    for index in 0..count {
        *failed = index;
        // SAFETY: the array has `count` elements, the caller promises, and each its sides.
        unsafe {
            let op = read(ops.wrapping_add(index))?;
            // An array's elements give the extent its unit; between pointers that is a byte.
            let (dst, to) = side(&op.dst, &op.extent)?;
            let (src, from) = side(&op.src, &op.extent)?;
            let (dst, src, shape) = match (to == from, to.width > from.width) {
                (true, _) => (dst, src, to),
                (_, true) => (dst, widened(&op.src, &op.extent, to)?, to),
                (_, false) => (widened(&op.dst, &op.extent, from)?, src, from),
            };
            if shape.is_empty() {
                return Err(CuError::INVALID_VALUE);
            }
            one(dst, src, shape, op.srcAccessOrder, stream)?;
        }
    }
    Ok(())
}

/// A pointer operand whose other side is an array: its rows count the array's elements.
fn widened(
    operand: &CUmemcpy3DOperand,
    extent: &CUextent3D,
    shape: Shape,
) -> Result<Side, CuError> {
    if operand.type_ != CU_MEMCPY_OPERAND_TYPE_POINTER || extent.width == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let element = shape.width / extent.width as u64;
    let mut scaled = *operand;
    scaled.op[1] = operand.op[1].checked_mul(element).ok_or(CuError::INVALID_VALUE)?;
    let extent = CUextent3D { width: shape.width as usize, ..*extent };
    Ok(side(&scaled, &extent)?.0)
}

pub(crate) unsafe fn cuMemcpy3DBatchAsync_v2(
    count: usize,
    ops: *mut CUDA_MEMCPY3D_BATCH_OP,
    flags: u64,
    stream: CUstream,
) -> Result<(), CuError> {
    // SAFETY: `ops` has `count` values, and both ends of each copy have its bytes: the API asks
    // that of the program.
    unsafe { shaped(count, ops, &mut 0, flags, stream) }
}

pub(crate) unsafe fn cuMemcpy3DBatchAsync(
    count: usize,
    ops: *mut CUDA_MEMCPY3D_BATCH_OP,
    failed_index: *mut usize,
    flags: u64,
    stream: CUstream,
) -> Result<(), CuError> {
    let mut failed = usize::MAX;
    // SAFETY: `ops` has `count` values, both ends of each copy have its bytes, and `failed_index`
    // is NULL or valid for a write: the API asks that of the program.
    unsafe {
        let outcome = shaped(count, ops, &mut failed, flags, stream);
        report(failed_index, failed, outcome)
    }
}
