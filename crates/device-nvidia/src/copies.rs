//! Copies and fills that the driver makes without help: of device memory, shared host memory and
//! arrays.

use crate::driver::{Driver, check};
use kedge_cuda_types::CuError;
use kedge_cuda_types::graph::CUDA_MEMSET_NODE_PARAMS_v1;
use kedge_cuda_types::handle::{CUarray, CUstream};
use kedge_cuda_types::memory::{CU_MEMORYTYPE_ARRAY, CU_MEMORYTYPE_UNIFIED, CUDA_MEMCPY3D};
use kedge_protocol::{ArrayId, Copy3d, Place};

/// Looks up the driver's arrays.
pub(crate) trait Arrays {
    /// Returns the driver's handle of an array.
    ///
    /// # Errors
    /// INVALID_HANDLE if there is no such array.
    fn array(&self, id: ArrayId) -> Result<CUarray, CuError>;
}

/// A copy in the driver's form.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum RawCopy {
    /// Bytes without gaps on both sides.
    Line { dst: u64, src: u64, bytes: usize },
    /// Anything else.
    Shaped(CUDA_MEMCPY3D),
}

/// One side of a shaped copy.
#[derive(Debug, Default)]
struct Side {
    kind: u32,
    addr: u64,
    array: CUarray,
    x: usize,
    y: usize,
    z: usize,
    pitch: usize,
    height: usize,
}

/// Converts a copy to the driver's form.
///
/// # Errors
/// INVALID_VALUE for the client's private memory, and for planes whose distance is not a whole
/// number of rows: the driver has no form for either.
pub(crate) fn raw(copy: &Copy3d, arrays: &impl Arrays) -> Result<RawCopy, CuError> {
    if let (Place::Mapped { addr: src, .. }, Place::Mapped { addr: dst, .. }) = (copy.src, copy.dst)
        && copy.src.is_packed(copy.shape())
        && copy.dst.is_packed(copy.shape())
    {
        let bytes = copy.shape().bytes().ok_or(CuError::INVALID_VALUE)? as usize;
        return Ok(RawCopy::Line { dst, src, bytes });
    }
    let (src, dst) = (side(copy, copy.src, arrays)?, side(copy, copy.dst, arrays)?);
    Ok(RawCopy::Shaped(CUDA_MEMCPY3D {
        srcXInBytes: src.x,
        srcY: src.y,
        srcZ: src.z,
        srcMemoryType: src.kind,
        srcDevice: src.addr,
        srcArray: src.array,
        srcPitch: src.pitch,
        srcHeight: src.height,
        dstXInBytes: dst.x,
        dstY: dst.y,
        dstZ: dst.z,
        dstMemoryType: dst.kind,
        dstDevice: dst.addr,
        dstArray: dst.array,
        dstPitch: dst.pitch,
        dstHeight: dst.height,
        WidthInBytes: copy.width as usize,
        Height: copy.height as usize,
        Depth: copy.depth as usize,
        ..Default::default()
    }))
}

/// Converts one side of a copy.
fn side(copy: &Copy3d, place: Place, arrays: &impl Arrays) -> Result<Side, CuError> {
    match place {
        Place::Mapped { addr, pitch, slice } => {
            let pitch = if copy.height == 1 && copy.depth == 1 { copy.width } else { pitch };
            let pitch = if pitch == 0 { copy.width } else { pitch };
            let rows = if copy.depth == 1 { copy.height } else { slice / pitch };
            if copy.depth > 1 && !slice.is_multiple_of(pitch) {
                return Err(CuError::INVALID_VALUE);
            }
            let (pitch, height) = (pitch as usize, rows as usize);
            Ok(Side { kind: CU_MEMORYTYPE_UNIFIED, addr, pitch, height, ..Default::default() })
        }
        Place::Array { array, x_bytes, y, z } => Ok(Side {
            kind: CU_MEMORYTYPE_ARRAY,
            array: arrays.array(array)?,
            x: x_bytes as usize,
            y: y as usize,
            z: z as usize,
            ..Default::default()
        }),
        Place::Client { .. } => Err(CuError::INVALID_VALUE),
    }
}

/// Converts a copy to the form that graph nodes take.
pub(crate) fn shaped(copy: RawCopy) -> CUDA_MEMCPY3D {
    match copy {
        RawCopy::Shaped(shaped) => shaped,
        RawCopy::Line { dst, src, bytes } => CUDA_MEMCPY3D {
            srcMemoryType: CU_MEMORYTYPE_UNIFIED,
            srcDevice: src,
            srcPitch: bytes,
            srcHeight: 1,
            dstMemoryType: CU_MEMORYTYPE_UNIFIED,
            dstDevice: dst,
            dstPitch: bytes,
            dstHeight: 1,
            WidthInBytes: bytes,
            Height: 1,
            Depth: 1,
            ..Default::default()
        },
    }
}

/// Submits a copy to `stream`, whose context must be current.
///
/// # Errors
/// What the driver returns.
pub(crate) fn run(driver: &Driver, copy: &RawCopy, stream: CUstream) -> Result<(), CuError> {
    // SAFETY: the driver checks device addresses; shared host memory stays mapped in this process
    // as long as it lives, and the driver made the arrays.
    check(unsafe {
        match copy {
            RawCopy::Line { dst, src, bytes } => (driver.cuMemcpyAsync)(*dst, *src, *bytes, stream),
            RawCopy::Shaped(shaped) => (driver.cuMemcpy3DAsync_v2)(shaped, stream),
        }
    })
}

/// Submits a fill of `width` elements × `height` rows to `stream`, whose context must be current.
///
/// # Errors
/// INVALID_VALUE for elements of other than 1, 2 or 4 bytes, or what the driver returns.
pub(crate) fn memset(
    driver: &Driver,
    fill: &CUDA_MEMSET_NODE_PARAMS_v1,
    stream: CUstream,
) -> Result<(), CuError> {
    let CUDA_MEMSET_NODE_PARAMS_v1 { dst, pitch, value, elementSize, width, height } = *fill;
    // SAFETY: the driver made the stream, and checks the addresses.
    check(unsafe {
        match (elementSize, height) {
            (1, 1) => (driver.cuMemsetD8Async)(dst, value as u8, width, stream),
            (2, 1) => (driver.cuMemsetD16Async)(dst, value as u16, width, stream),
            (4, 1) => (driver.cuMemsetD32Async)(dst, value, width, stream),
            (1, _) => (driver.cuMemsetD2D8Async)(dst, pitch, value as u8, width, height, stream),
            (2, _) => (driver.cuMemsetD2D16Async)(dst, pitch, value as u16, width, height, stream),
            (4, _) => (driver.cuMemsetD2D32Async)(dst, pitch, value, width, height, stream),
            _ => return Err(CuError::INVALID_VALUE),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    struct None;
    impl Arrays for None {
        fn array(&self, id: ArrayId) -> Result<CUarray, CuError> {
            Ok(CUarray(id.0 as usize))
        }
    }

    fn mapped(addr: u64, pitch: u64, slice: u64) -> Place {
        Place::Mapped { addr, pitch, slice }
    }

    #[test]
    fn copies_without_gaps_are_lines() {
        let copy =
            Copy3d { src: mapped(1, 8, 32), dst: mapped(2, 8, 32), width: 8, height: 4, depth: 2 };
        assert_eq!(raw(&copy, &None), Ok(RawCopy::Line { dst: 2, src: 1, bytes: 64 }));
        let line =
            Copy3d { src: mapped(1, 0, 0), dst: mapped(2, 0, 0), width: 8, height: 1, depth: 1 };
        assert_eq!(raw(&line, &None), Ok(RawCopy::Line { dst: 2, src: 1, bytes: 8 }));
    }

    #[test]
    fn planes_are_whole_rows_apart() {
        let copy = |slice| Copy3d {
            src: mapped(1, 16, slice),
            dst: Place::Array { array: ArrayId(7), x_bytes: 4, y: 2, z: 1 },
            width: 8,
            height: 4,
            depth: 2,
        };
        let Ok(RawCopy::Shaped(shaped)) = raw(&copy(96), &None) else { panic!("a line") };
        assert_eq!((shaped.srcPitch, shaped.srcHeight), (16, 6));
        assert_eq!((shaped.dstArray, shaped.dstXInBytes, shaped.dstZ), (CUarray(7), 4, 1));
        assert_eq!(raw(&copy(90), &None), Err(CuError::INVALID_VALUE));
        let private = Place::Client { addr: 1, pitch: 8, slice: 32 };
        assert!(raw(&Copy3d { src: private, ..copy(96) }, &None).is_err());
    }
}
