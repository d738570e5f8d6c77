//! Tensor maps: checked here, read by kernels in the form that the device has for them.

use super::{give, read};
use kedge_cuda_types::CuError;
use kedge_cuda_types::tensor_map::{
    Format, Interleave, MAX_RANK, Mode, Swizzle, TENSOR_MAP_BYTES, TensorMap,
};
use kedge_protocol::Call;
use std::ffi::{c_int, c_void};

type Bytes = [u8; TENSOR_MAP_BYTES];

/// The program's parameters that tiles and columns have in common.
struct Tensor {
    format: u32,
    rank: u32,
    address: *mut c_void,
    dims: *const u64,
    strides: *const u64,
    steps: *const u32,
    interleave: u32,
    swizzle: u32,
    promotion: u32,
    fill: u32,
}

impl Tensor {
    /// Checks the map in this mode and writes it to `out`.
    ///
    /// # Safety
    /// Each array is NULL or has an element for each dimension (the strides one fewer), and `out`
    /// is NULL or valid for writing a map.
    unsafe fn write(self, out: *mut c_void, mode: Mode) -> Result<(), CuError> {
        let invalid = CuError::INVALID_VALUE;
        let rank = rank(self.rank)?;
        // SAFETY: the arrays have `rank` elements, by this function's contract.
        let (dims, strides, steps) = unsafe {
            (
                elements(self.dims, rank, 1)?,
                elements(self.strides, rank - 1, 0)?,
                elements(self.steps, rank, 1)?,
            )
        };
        let map = TensorMap {
            format: Format::from_raw(self.format).ok_or(invalid)?,
            rank: rank as u8,
            address: self.address as u64,
            dims,
            strides,
            steps: steps.map(|step| u8::try_from(step).unwrap_or(u8::MAX)),
            mode,
            interleave: Interleave::from_raw(self.interleave).ok_or(invalid)?,
            swizzle: Swizzle::from_raw(self.swizzle).ok_or(invalid)?,
            promotion: u8::try_from(self.promotion).map_err(|_| invalid)?,
            nan_fill: match self.fill {
                0 => false,
                1 => true,
                _ => return Err(invalid),
            },
        };
        map.check()?;
        if out.is_null() {
            return Err(invalid);
        }
        // SAFETY: `out` is NULL or valid for a write of the descriptor's bytes, by this function's
        // contract. They may lie anywhere: drivers do not look at the alignment of the host's copy,
        // which bindings of other languages place as they like.
        unsafe { give(out.cast::<Bytes>(), device_form(&map)?) }
    }
}

fn rank(rank: u32) -> Result<usize, CuError> {
    let rank = usize::try_from(rank).map_err(|_| CuError::INVALID_VALUE)?;
    if (1..=MAX_RANK).contains(&rank) { Ok(rank) } else { Err(CuError::INVALID_VALUE) }
}

/// The `count` elements of a program's array, and `rest` after them.
///
/// # Safety
/// `from` is NULL or has `count` elements.
unsafe fn elements<T: Copy, const N: usize>(
    from: *const T,
    count: usize,
    rest: T,
) -> Result<[T; N], CuError> {
    let mut out = [rest; N];
    for (index, element) in out.iter_mut().enumerate().take(count) {
        // An index on NULL would be a pointer that only looks valid.
        let from = if from.is_null() { from } else { from.wrapping_add(index) };
        // SAFETY: NULL, or inside of the array.
        *element = unsafe { read(from)? };
    }
    Ok(out)
}

/// Returns the map in the form that the device reads. Only the proxy knows which that is: the
/// program may have moved to another kind of device.
fn device_form(map: &TensorMap) -> Result<Bytes, CuError> {
    ask(&Call::TensorMap { map: Box::new(map.encode()) })
}

#[cfg(not(test))]
fn ask(call: &Call) -> Result<Bytes, CuError> {
    crate::session::get()?.call::<Result<Bytes, u32>>(call)?.map_err(CuError)
}

/// Answers as a software device does, which reads kedge's own form.
#[cfg(test)]
fn ask(call: &Call) -> Result<Bytes, CuError> {
    let (map, address) = match call {
        Call::TensorMap { map } => (map, None),
        Call::TensorMapMove { map, address } => (map, Some(*address)),
        _ => return Err(CuError::NOT_SUPPORTED),
    };
    let held = TensorMap::decode(map).ok_or(CuError::INVALID_VALUE)?;
    let map = TensorMap { address: address.unwrap_or(held.address), ..held };
    map.check()?;
    Ok(map.encode())
}

#[expect(clippy::too_many_arguments, reason = "the C API's arguments")]
pub(crate) unsafe fn cuTensorMapEncodeTiled(
    out: *mut c_void,
    format: u32,
    tensor_rank: u32,
    address: *mut c_void,
    dims: *const u64,
    strides: *const u64,
    extent: *const u32,
    steps: *const u32,
    interleave: u32,
    swizzle: u32,
    promotion: u32,
    fill: u32,
) -> Result<(), CuError> {
    // SAFETY: an element for each dimension, says the reference.
    let extent: [u32; MAX_RANK] = unsafe { elements(extent, rank(tensor_rank)?, 1)? };
    let extent = extent.map(|n| u16::try_from(n).unwrap_or(0));
    let rank = tensor_rank;
    let tensor = Tensor {
        format,
        rank,
        address,
        dims,
        strides,
        steps,
        interleave,
        swizzle,
        promotion,
        fill,
    };
    // SAFETY: the arrays and the map are as the reference says.
    unsafe { tensor.write(out, Mode::Tiled { extent }) }
}

#[expect(clippy::too_many_arguments, reason = "the C API's arguments")]
pub(crate) unsafe fn cuTensorMapEncodeIm2col(
    out: *mut c_void,
    format: u32,
    tensor_rank: u32,
    address: *mut c_void,
    dims: *const u64,
    strides: *const u64,
    lower: *const c_int,
    upper: *const c_int,
    channels: u32,
    pixels: u32,
    steps: *const u32,
    interleave: u32,
    swizzle: u32,
    promotion: u32,
    fill: u32,
) -> Result<(), CuError> {
    let rank = tensor_rank;
    let spatial = self::rank(rank)?.checked_sub(2).ok_or(CuError::INVALID_VALUE)?;
    // SAFETY: a corner for each spatial dimension, says the reference.
    let (lower, upper): ([c_int; 3], [c_int; 3]) =
        unsafe { (elements(lower, spatial, 0)?, elements(upper, spatial, 0)?) };
    let narrow = |corners: [c_int; 3]| -> Result<[i16; 3], CuError> {
        let mut out = [0; 3];
        for (to, corner) in out.iter_mut().zip(corners) {
            *to = i16::try_from(corner).map_err(|_| CuError::INVALID_VALUE)?;
        }
        Ok(out)
    };
    let mode = Mode::Im2col {
        lower: narrow(lower)?,
        upper: narrow(upper)?,
        channels: u16::try_from(channels).unwrap_or(0),
        pixels: u16::try_from(pixels).unwrap_or(0),
    };
    let tensor = Tensor {
        format,
        rank,
        address,
        dims,
        strides,
        steps,
        interleave,
        swizzle,
        promotion,
        fill,
    };
    // SAFETY: the arrays and the map are as the reference says.
    unsafe { tensor.write(out, mode) }
}

pub(crate) unsafe fn cuTensorMapReplaceAddress(
    map: *mut c_void,
    address: *mut c_void,
) -> Result<(), CuError> {
    // SAFETY: a map, says the reference.
    let bytes = unsafe { read(map.cast::<Bytes>().cast_const())? };
    let changed = ask(&Call::TensorMapMove { map: Box::new(bytes), address: address as u64 })?;
    // SAFETY: `map` is a tensor map, which the API asks the program for; `read` has refused NULL.
    unsafe { give(map.cast::<Bytes>(), changed) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(align(64))]
    struct Map([u8; TENSOR_MAP_BYTES]);

    fn encode(map: *mut c_void, rank: u32, strides: *const u64) -> Result<(), CuError> {
        let (dims, box_, steps) = ([64, 32], [32, 8], [1, 1]);
        // SAFETY: the arrays have two elements, and the rank is 2 at most or refused.
        unsafe {
            cuTensorMapEncodeTiled(
                map,
                7,
                rank,
                0x1000 as *mut c_void,
                dims.as_ptr(),
                strides,
                box_.as_ptr(),
                steps.as_ptr(),
                0,
                3,
                2,
                0,
            )
        }
    }

    #[test]
    fn maps_are_checked_and_written() {
        let mut map = Map([0; TENSOR_MAP_BYTES]);
        let out: *mut c_void = map.0.as_mut_ptr().cast();
        let strides = [256];
        assert_eq!(encode(out, 0, strides.as_ptr()), Err(CuError::INVALID_VALUE));
        assert_eq!(encode(out, 6, strides.as_ptr()), Err(CuError::INVALID_VALUE));
        assert_eq!(encode(out, 2, std::ptr::null()), Err(CuError::INVALID_VALUE));
        assert_eq!(encode(std::ptr::null_mut(), 2, strides.as_ptr()), Err(CuError::INVALID_VALUE));
        let mut wide = [0u8; TENSOR_MAP_BYTES + 1];
        let askew = wide[1..].as_mut_ptr().cast();
        assert_eq!(encode(askew, 2, strides.as_ptr()), Ok(()), "the host's copy lies anywhere");
        assert_eq!(encode(out, 1, std::ptr::null()), Ok(()), "a line needs no strides");
        assert_eq!(encode(out, 2, strides.as_ptr()), Ok(()));
        // SAFETY: `out` is a map.
        let replace = |to: u64| unsafe { cuTensorMapReplaceAddress(out, to as *mut c_void) };
        assert_eq!(replace(0x2008), Err(CuError::INVALID_VALUE));
        assert_eq!(replace(0x2000), Ok(()));
        let held = TensorMap::decode(&map.0).unwrap();
        assert_eq!((held.address, held.dims[1], held.strides[0]), (0x2000, 32, 256));
        assert_eq!(held.mode, Mode::Tiled { extent: [32, 8, 1, 1, 1] });
    }
}
