//! Tensor maps in the driver's own form.

use crate::driver::{Driver, check};
use kedge_cuda_types::CuError;
use kedge_cuda_types::tensor_map::{Mode, TENSOR_MAP_BYTES, TensorMap};
use std::ffi::{c_int, c_void};
use std::ptr;

type Bytes = [u8; TENSOR_MAP_BYTES];

/// A map where the driver wants it.
#[repr(align(64))]
struct Aligned(Bytes);

const TOO_OLD: CuError = CuError::CALL_REQUIRES_NEWER_DRIVER;

fn device_address(address: u64) -> *mut c_void {
    ptr::without_provenance_mut(address as usize)
}

pub(crate) fn encode(driver: &Driver, map: &TensorMap) -> Result<Bytes, CuError> {
    let mut out = Aligned([0; TENSOR_MAP_BYTES]);
    let to = out.0.as_mut_ptr().cast();
    let (format, rank) = (map.format as u32, u32::from(map.rank));
    let (interleave, swizzle) = (map.interleave as u32, map.swizzle as u32);
    let (promotion, fill) = (u32::from(map.promotion), u32::from(map.nan_fill));
    let (address, steps) = (device_address(map.address), map.steps.map(u32::from));
    let (dims, strides) = (map.dims.as_ptr(), map.strides.as_ptr());
    // SAFETY: the map is aligned, and each array has an element for each of at most five
    // dimensions.
    check(unsafe {
        match map.mode {
            Mode::Tiled { extent } => {
                let encode = driver.cuTensorMapEncodeTiled.ok_or(TOO_OLD)?;
                let (extent, steps) = (extent.map(u32::from), steps);
                encode(
                    to,
                    format,
                    rank,
                    address,
                    dims,
                    strides,
                    extent.as_ptr(),
                    steps.as_ptr(),
                    interleave,
                    swizzle,
                    promotion,
                    fill,
                )
            }
            Mode::Im2col { lower, upper, channels, pixels } => {
                let encode = driver.cuTensorMapEncodeIm2col.ok_or(TOO_OLD)?;
                let (lower, upper) = (lower.map(c_int::from), upper.map(c_int::from));
                encode(
                    to,
                    format,
                    rank,
                    address,
                    dims,
                    strides,
                    lower.as_ptr(),
                    upper.as_ptr(),
                    channels.into(),
                    pixels.into(),
                    steps.as_ptr(),
                    interleave,
                    swizzle,
                    promotion,
                    fill,
                )
            }
        }
    })?;
    Ok(out.0)
}

pub(crate) fn relocate(driver: &Driver, map: &Bytes, address: u64) -> Result<Bytes, CuError> {
    let replace = driver.cuTensorMapReplaceAddress.ok_or(TOO_OLD)?;
    let mut moved = Aligned(*map);
    // SAFETY: an aligned map, which the driver checks.
    check(unsafe { replace(moved.0.as_mut_ptr().cast(), device_address(address)) })?;
    Ok(moved.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_without_tensor_maps_is_told_to_be_too_old() {
        let old = Driver::refusing();
        assert_eq!(relocate(&old, &[0; TENSOR_MAP_BYTES], 0), Err(TOO_OLD));
    }
}
