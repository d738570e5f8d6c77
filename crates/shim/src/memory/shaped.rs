//! Copies of rows and planes: `cuMemcpy2D`, `cuMemcpy3D` and their kin.

use super::place::{Shape, Side, locate, locate_on_device};
use super::transfer::{Finish, run};
use super::{array, read};
use crate::context::wait_for_both;
use crate::entry::default_stream;
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUarray, CUstream};
use kedge_cuda_types::memory::*;
use kedge_protocol::{Copy3d, StreamOp};

/// One side of a 2D or 3D copy, as its structure describes it.
#[derive(Debug, Clone, Copy)]
struct Operand {
    /// `CU_MEMORYTYPE_*`.
    kind: u32,
    host: u64,
    device: u64,
    array: CUarray,
    /// Offset: bytes, rows, planes.
    at: [u64; 3],
    /// Bytes between rows, rows between planes; 0 where there is but one.
    pitch: u64,
    rows: u64,
}

fn source_2d(c: &CUDA_MEMCPY2D) -> Operand {
    Operand {
        kind: c.srcMemoryType,
        host: c.srcHost,
        device: c.srcDevice,
        array: c.srcArray,
        at: [c.srcXInBytes as u64, c.srcY as u64, 0],
        pitch: c.srcPitch as u64,
        rows: 0,
    }
}

fn destination_2d(c: &CUDA_MEMCPY2D) -> Operand {
    Operand {
        kind: c.dstMemoryType,
        host: c.dstHost,
        device: c.dstDevice,
        array: c.dstArray,
        at: [c.dstXInBytes as u64, c.dstY as u64, 0],
        pitch: c.dstPitch as u64,
        rows: 0,
    }
}

fn source_3d(c: &CUDA_MEMCPY3D) -> Operand {
    Operand {
        kind: c.srcMemoryType,
        host: c.srcHost,
        device: c.srcDevice,
        array: c.srcArray,
        at: [c.srcXInBytes as u64, c.srcY as u64, c.srcZ as u64],
        pitch: c.srcPitch as u64,
        rows: c.srcHeight as u64,
    }
}

fn destination_3d(c: &CUDA_MEMCPY3D) -> Operand {
    Operand {
        kind: c.dstMemoryType,
        host: c.dstHost,
        device: c.dstDevice,
        array: c.dstArray,
        at: [c.dstXInBytes as u64, c.dstY as u64, c.dstZ as u64],
        pitch: c.dstPitch as u64,
        rows: c.dstHeight as u64,
    }
}

/// A pitch or a plane's height; where it is given it must hold what is copied.
fn span(given: u64, offset: u64, count: u64, several: bool) -> Result<u64, CuError> {
    let needed = offset.checked_add(count).ok_or(CuError::INVALID_VALUE)?;
    match given {
        0 => Ok(needed),
        given if several && given < needed => Err(CuError::INVALID_VALUE),
        given => Ok(given),
    }
}

impl Operand {
    fn side(&self, shape: Shape) -> Result<Side, CuError> {
        let [x, y, z] = self.at;
        if self.kind == CU_MEMORYTYPE_ARRAY {
            return array::place(self.array, self.at, shape);
        }
        let several = shape.height > 1 || shape.depth > 1 || y > 0 || z > 0;
        let pitch = span(self.pitch, x, shape.width, several)?;
        let rows = span(self.rows, y, shape.height, shape.depth > 1 || z > 0)?;
        let checked = || {
            let slice = pitch.checked_mul(rows)?;
            let offset =
                z.checked_mul(slice)?.checked_add(y.checked_mul(pitch)?)?.checked_add(x)?;
            Some((slice, offset))
        };
        let (slice, offset) = checked().ok_or(CuError::INVALID_VALUE)?;
        let address = |base: u64| base.checked_add(offset).ok_or(CuError::INVALID_VALUE);
        match self.kind {
            CU_MEMORYTYPE_HOST => locate(address(self.host)?, pitch, slice, shape),
            CU_MEMORYTYPE_DEVICE => locate_on_device(address(self.device)?, pitch, slice, shape),
            CU_MEMORYTYPE_UNIFIED => locate(address(self.device)?, pitch, slice, shape),
            _ => Err(CuError::INVALID_VALUE),
        }
    }
}

/// The two sides of a 3D copy, destination first, and what it moves.
fn sides_3d(c: &CUDA_MEMCPY3D) -> Result<(Side, Side, Shape), CuError> {
    let shape =
        Shape { width: c.WidthInBytes as u64, height: c.Height as u64, depth: c.Depth as u64 };
    if shape.is_empty() {
        return Err(CuError::INVALID_VALUE);
    }
    if c.srcLOD != 0 || c.dstLOD != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    Ok((destination_3d(c).side(shape)?, source_3d(c).side(shape)?, shape))
}

/// The operation of a graph's copy node, checked. Private memory is accessed when the graph runs.
pub(crate) fn copy_op(c: &CUDA_MEMCPY3D) -> Result<StreamOp, CuError> {
    let (dst, src, Shape { width, height, depth }) = sides_3d(c)?;
    let copy = Copy3d { src: src.place, dst: dst.place, width, height, depth };
    Ok(StreamOp::Copy { copy })
}

/// # Safety
/// `copy` is NULL or valid, and so is what it describes.
unsafe fn copy_2d(
    copy: *const CUDA_MEMCPY2D,
    stream: CUstream,
    finish: Finish,
) -> Result<(), CuError> {
    // SAFETY: `copy` is NULL or valid for a read, by this function's contract.
    let c = unsafe { read(copy)? };
    let shape = Shape { width: c.WidthInBytes as u64, height: c.Height as u64, depth: 1 };
    if shape.is_empty() {
        return Ok(());
    }
    let (dst, src) = (destination_2d(&c).side(shape)?, source_2d(&c).side(shape)?);
    // SAFETY: the program answers for the bytes that the descriptor names at both ends, by this
    // function's contract.
    unsafe { run(dst, src, shape, stream, finish) }
}

/// # Safety
/// `copy` is NULL or valid, and so is what it describes.
unsafe fn copy_3d(
    copy: *const CUDA_MEMCPY3D,
    stream: CUstream,
    finish: Finish,
) -> Result<(), CuError> {
    // SAFETY: `copy` is NULL or valid for a read, by this function's contract.
    let c = unsafe { read(copy)? };
    if c.WidthInBytes == 0 || c.Height == 0 || c.Depth == 0 {
        return Ok(());
    }
    let (dst, src, shape) = sides_3d(&c)?;
    // SAFETY: the program answers for the bytes that the descriptor names at both ends, by this
    // function's contract.
    unsafe { run(dst, src, shape, stream, finish) }
}

pub(crate) unsafe fn cuMemcpy2D_v2(copy: *const CUDA_MEMCPY2D) -> Result<(), CuError> {
    // SAFETY: `copy` is NULL or describes a copy for whose bytes the program answers: the API asks
    // that of it.
    unsafe { copy_2d(copy, default_stream(), Finish::Sync) }
}

pub(crate) unsafe fn cuMemcpy2DUnaligned_v2(copy: *const CUDA_MEMCPY2D) -> Result<(), CuError> {
    // SAFETY: `copy` is NULL or describes a copy for whose bytes the program answers: the API asks
    // that of it.
    unsafe { copy_2d(copy, default_stream(), Finish::Sync) }
}

pub(crate) unsafe fn cuMemcpy2DAsync_v2(
    copy: *const CUDA_MEMCPY2D,
    stream: CUstream,
) -> Result<(), CuError> {
    // SAFETY: `copy` is NULL or describes a copy for whose bytes the program answers: the API asks
    // that of it.
    unsafe { copy_2d(copy, stream, Finish::Async) }
}

pub(crate) unsafe fn cuMemcpy3D_v2(copy: *const CUDA_MEMCPY3D) -> Result<(), CuError> {
    // SAFETY: `copy` is NULL or describes a copy for whose bytes the program answers: the API asks
    // that of it.
    unsafe { copy_3d(copy, default_stream(), Finish::Sync) }
}

pub(crate) unsafe fn cuMemcpy3DAsync_v2(
    copy: *const CUDA_MEMCPY3D,
    stream: CUstream,
) -> Result<(), CuError> {
    // SAFETY: `copy` is NULL or describes a copy for whose bytes the program answers: the API asks
    // that of it.
    unsafe { copy_3d(copy, stream, Finish::Async) }
}

/// Comes after what the default streams of both contexts wait for. On which devices the addresses
/// lie they say themselves.
pub(crate) unsafe fn cuMemcpy3DPeer(copy: *const CUDA_MEMCPY3D_PEER) -> Result<(), CuError> {
    // SAFETY: `copy` is NULL or valid for a read: the API asks that of the program.
    let told = unsafe { read(copy)? };
    wait_for_both([told.dstContext, told.srcContext])?;
    // SAFETY: `copy` is NULL or describes a copy for whose bytes the program answers: the API asks
    // that of it.
    unsafe { copy_3d(copy, default_stream(), Finish::Sync) }
}

pub(crate) unsafe fn cuMemcpy3DPeerAsync(
    copy: *const CUDA_MEMCPY3D_PEER,
    stream: CUstream,
) -> Result<(), CuError> {
    // SAFETY: `copy` is NULL or describes a copy for whose bytes the program answers: the API asks
    // that of it.
    unsafe { copy_3d(copy, stream, Finish::Async) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_protocol::Place;

    const HOST: u64 = 0x7fff_0000_0000;

    fn host(at: [u64; 3], pitch: u64, rows: u64) -> Operand {
        let kind = CU_MEMORYTYPE_HOST;
        Operand { kind, host: HOST, device: 0, array: CUarray::NULL, at, pitch, rows }
    }

    #[test]
    fn offsets_and_pitches_make_an_address() {
        let shape = Shape { width: 4, height: 3, depth: 2 };
        let side = host([8, 2, 1], 100, 10).side(shape).unwrap();
        let expected = Place::Client { addr: HOST + 1000 + 200 + 8, pitch: 100, slice: 1000 };
        assert_eq!(side.place, expected);
    }

    #[test]
    fn missing_pitches_mean_tight_rows() {
        let side = host([0; 3], 0, 0).side(Shape { width: 4, height: 3, depth: 2 }).unwrap();
        assert_eq!(side.place, Place::Client { addr: HOST, pitch: 4, slice: 12 });
    }

    #[test]
    fn rows_must_fit_their_pitch() {
        let shape = Shape { width: 4, height: 3, depth: 1 };
        assert_eq!(host([0; 3], 3, 0).side(shape), Err(CuError::INVALID_VALUE));
        assert!(host([0; 3], 3, 0).side(Shape::line(4)).is_ok(), "a single row has no next one");
        assert_eq!(host([u64::MAX, 0, 0], 0, 0).side(shape), Err(CuError::INVALID_VALUE));
        let unknown = Operand { kind: 9, ..host([0; 3], 0, 0) };
        assert_eq!(unknown.side(shape), Err(CuError::INVALID_VALUE));
    }
}
