//! Texture references, which CUDA 12 removed from the runtime: their settings are kept, for
//! programs that make one with `cuTexRefCreate`. No module offers any, so none is ever read by a
//! kernel.

use super::place::{Shape, locate_on_device};
use super::{array, give, read};
use crate::handle::{Kind, Table};
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUarray, CUdeviceptr, CUtexref};
use kedge_cuda_types::memory::*;
use std::sync::{Arc, Mutex, PoisonError};

/// A reference's settings, with the defaults that the reference gives.
#[derive(Debug, Clone, Copy)]
struct Settings {
    array: Option<CUarray>,
    address: Option<CUdeviceptr>,
    format: u32,
    channels: i32,
    modes: [u32; 3],
    filter: u32,
    flags: u32,
    border: [f32; 4],
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            array: None,
            address: None,
            format: CU_AD_FORMAT_FLOAT,
            channels: 1,
            modes: [1; 3],
            filter: 0,
            flags: 0,
            border: [0.0; 4],
        }
    }
}

static REFERENCES: Table<Mutex<Settings>> = Table::new(Kind::TexRef);

fn by_handle(handle: CUtexref) -> Result<Arc<Mutex<Settings>>, CuError> {
    REFERENCES.get(handle.0).ok_or(CuError::INVALID_HANDLE)
}

fn get<T>(handle: CUtexref, of: impl FnOnce(&Settings) -> T) -> Result<T, CuError> {
    Ok(of(&by_handle(handle)?.lock().unwrap_or_else(PoisonError::into_inner)))
}

fn set(handle: CUtexref, change: impl FnOnce(&mut Settings)) -> Result<(), CuError> {
    change(&mut by_handle(handle)?.lock().unwrap_or_else(PoisonError::into_inner));
    Ok(())
}

fn dimension(dim: i32) -> Result<usize, CuError> {
    usize::try_from(dim).ok().filter(|&dim| dim < 3).ok_or(CuError::INVALID_VALUE)
}

pub(crate) unsafe fn cuTexRefCreate(handle: *mut CUtexref) -> Result<(), CuError> {
    let made = REFERENCES.insert(Mutex::default()).ok_or(CuError::OUT_OF_MEMORY)?;
    // SAFETY: `handle` is NULL or valid for a write: the API asks that of the program.
    unsafe { give(handle, CUtexref(made)) }
}

pub(crate) unsafe fn cuTexRefDestroy(handle: CUtexref) -> Result<(), CuError> {
    REFERENCES.remove(handle.0).map(|_| ()).ok_or(CuError::INVALID_HANDLE)
}

pub(crate) unsafe fn cuTexRefSetArray(
    handle: CUtexref,
    array: CUarray,
    flags: u32,
) -> Result<(), CuError> {
    /// `CU_TRSA_OVERRIDE_FORMAT`, which the reference demands.
    const OVERRIDE_FORMAT: u32 = 1;
    let shape = array::by_handle(array)?.shape;
    if flags != OVERRIDE_FORMAT {
        return Err(CuError::INVALID_VALUE);
    }
    set(handle, |s| {
        (s.array, s.address) = (Some(array), None);
        (s.format, s.channels) = (shape.Format, shape.NumChannels as i32);
    })
}

pub(crate) unsafe fn cuTexRefSetAddress_v2(
    offset: *mut usize,
    handle: CUtexref,
    dptr: CUdeviceptr,
    bytes: usize,
) -> Result<(), CuError> {
    locate_on_device(dptr, 0, 0, Shape::line(bytes as u64))?;
    set(handle, |s| (s.array, s.address) = (None, Some(dptr)))?;
    // SAFETY: `offset` is NULL or valid for a write: the API asks that of the program.
    if offset.is_null() { Ok(()) } else { unsafe { give(offset, 0) } }
}

pub(crate) unsafe fn cuTexRefSetFormat(
    handle: CUtexref,
    format: u32,
    channels: i32,
) -> Result<(), CuError> {
    if channel_bytes(format).is_none() || !matches!(channels, 1 | 2 | 4) {
        return Err(CuError::INVALID_VALUE);
    }
    set(handle, |s| (s.format, s.channels) = (format, channels))
}

pub(crate) unsafe fn cuTexRefSetAddressMode(
    handle: CUtexref,
    dim: i32,
    mode: u32,
) -> Result<(), CuError> {
    let dim = dimension(dim)?;
    if mode > 3 {
        return Err(CuError::INVALID_VALUE);
    }
    set(handle, |s| s.modes[dim] = mode)
}

pub(crate) unsafe fn cuTexRefSetFilterMode(handle: CUtexref, filter: u32) -> Result<(), CuError> {
    if filter > 1 {
        return Err(CuError::INVALID_VALUE);
    }
    set(handle, |s| s.filter = filter)
}

pub(crate) unsafe fn cuTexRefSetFlags(handle: CUtexref, flags: u32) -> Result<(), CuError> {
    set(handle, |s| s.flags = flags)
}

pub(crate) unsafe fn cuTexRefSetBorderColor(
    handle: CUtexref,
    color: *mut f32,
) -> Result<(), CuError> {
    // SAFETY: four floats, the caller promises.
    let color = unsafe { read(color.cast::<[f32; 4]>())? };
    set(handle, |s| s.border = color)
}

pub(crate) unsafe fn cuTexRefGetAddress_v2(
    dptr: *mut CUdeviceptr,
    handle: CUtexref,
) -> Result<(), CuError> {
    let address = get(handle, |s| s.address)?.ok_or(CuError::INVALID_VALUE)?;
    // SAFETY: `dptr` is NULL or valid for a write: the API asks that of the program.
    unsafe { give(dptr, address) }
}

pub(crate) unsafe fn cuTexRefGetArray(
    array: *mut CUarray,
    handle: CUtexref,
) -> Result<(), CuError> {
    let found = get(handle, |s| s.array)?.ok_or(CuError::INVALID_VALUE)?;
    // SAFETY: `array` is NULL or valid for a write: the API asks that of the program.
    unsafe { give(array, found) }
}

pub(crate) unsafe fn cuTexRefGetAddressMode(
    mode: *mut u32,
    handle: CUtexref,
    dim: i32,
) -> Result<(), CuError> {
    let dim = dimension(dim)?;
    // SAFETY: `mode` is NULL or valid for a write: the API asks that of the program.
    unsafe { give(mode, get(handle, |s| s.modes[dim])?) }
}

pub(crate) unsafe fn cuTexRefGetFilterMode(
    filter: *mut u32,
    handle: CUtexref,
) -> Result<(), CuError> {
    // SAFETY: `filter` is NULL or valid for a write: the API asks that of the program.
    unsafe { give(filter, get(handle, |s| s.filter)?) }
}

pub(crate) unsafe fn cuTexRefGetFormat(
    format: *mut u32,
    channels: *mut i32,
    handle: CUtexref,
) -> Result<(), CuError> {
    let (f, c) = get(handle, |s| (s.format, s.channels))?;
    // SAFETY: `format` and `channels` are NULL or valid for a write each: the API asks that of the
    // program.
    unsafe {
        give(format, f)?;
        give(channels, c)
    }
}

pub(crate) unsafe fn cuTexRefGetFlags(flags: *mut u32, handle: CUtexref) -> Result<(), CuError> {
    // SAFETY: `flags` is NULL or valid for a write: the API asks that of the program.
    unsafe { give(flags, get(handle, |s| s.flags)?) }
}

pub(crate) unsafe fn cuTexRefGetBorderColor(
    color: *mut f32,
    handle: CUtexref,
) -> Result<(), CuError> {
    // SAFETY: four floats, the caller promises.
    unsafe { give(color.cast::<[f32; 4]>(), get(handle, |s| s.border)?) }
}
