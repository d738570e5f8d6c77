//! cuDevice*: what the devices are. Everything is answered from what the proxy said at cuInit.

mod peer;

pub(crate) use peer::*;

use crate::{ffi, session};
use kedge_cuda_types::CuError;
use kedge_cuda_types::attribute as attr;
use kedge_cuda_types::handle::CUdevice;
use kedge_protocol::DeviceInfo;
use std::ffi::{c_char, c_int};

pub(crate) unsafe fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int) -> Result<(), CuError> {
    session::get()?.device(ordinal)?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(device, ordinal) }
}

pub(crate) unsafe fn cuDeviceGetCount(count: *mut c_int) -> Result<(), CuError> {
    let devices = session::get()?.devices.len();
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(count, devices as c_int) }
}

/// Copies `text` and its NUL, cut to `len` bytes in all.
///
/// # Safety
/// `to` is NULL or valid for `len` bytes.
unsafe fn write_text(to: *mut c_char, len: c_int, text: &str) -> Result<(), CuError> {
    let room = usize::try_from(len).map_err(|_| CuError::INVALID_VALUE)?;
    if to.is_null() || room == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let kept = text.len().min(room - 1);
    // SAFETY: `kept` + 1 bytes lie within the caller's `len`; a str is no part of that buffer.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), to.cast(), kept);
        to.add(kept).write(0);
    }
    Ok(())
}

pub(crate) unsafe fn cuDeviceGetName(
    name: *mut c_char,
    len: c_int,
    dev: CUdevice,
) -> Result<(), CuError> {
    let device = session::get()?.device(dev)?;
    // SAFETY: the caller's buffer.
    unsafe { write_text(name, len, &device.name) }
}

pub(crate) unsafe fn cuDeviceGetUuid(uuid: *mut [u8; 16], dev: CUdevice) -> Result<(), CuError> {
    let device = session::get()?.device(dev)?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(uuid, device.uuid) }
}

/// Differs from the first only where a GPU is divided (MIG).
pub(crate) unsafe fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], dev: CUdevice) -> Result<(), CuError> {
    // SAFETY: `cuDeviceGetUuid` asks the same of these arguments as this call does.
    unsafe { cuDeviceGetUuid(uuid, dev) }
}

pub(crate) unsafe fn cuDeviceTotalMem_v2(bytes: *mut usize, dev: CUdevice) -> Result<(), CuError> {
    let total = session::get()?.device(dev)?.total_memory;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(bytes, total as usize) }
}

pub(crate) unsafe fn cuDeviceGetAttribute(
    value: *mut c_int,
    attribute: u32,
    dev: CUdevice,
) -> Result<(), CuError> {
    let device = session::get()?.device(dev)?;
    let answer = match device.attribute(attribute) {
        Some(answer) => answer,
        // A feature that the device did not speak of, it does not have.
        None if attr::name(attribute).is_some() => 0,
        None => return Err(CuError::INVALID_VALUE),
    };
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(value, answer) }
}

pub(crate) unsafe fn cuDeviceComputeCapability(
    major: *mut c_int,
    minor: *mut c_int,
    dev: CUdevice,
) -> Result<(), CuError> {
    // SAFETY: the caller's out pointers.
    unsafe {
        cuDeviceGetAttribute(major, attr::COMPUTE_CAPABILITY_MAJOR, dev)?;
        cuDeviceGetAttribute(minor, attr::COMPUTE_CAPABILITY_MINOR, dev)
    }
}

/// `CUdevprop`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct DeviceProperties {
    max_threads_per_block: c_int,
    max_threads_dim: [c_int; 3],
    max_grid_size: [c_int; 3],
    shared_mem_per_block: c_int,
    total_constant_memory: c_int,
    simd_width: c_int,
    mem_pitch: c_int,
    regs_per_block: c_int,
    clock_rate: c_int,
    texture_align: c_int,
}

pub(crate) unsafe fn cuDeviceGetProperties(
    properties: *mut DeviceProperties,
    dev: CUdevice,
) -> Result<(), CuError> {
    let device = session::get()?.device(dev)?;
    let value = |attribute| device.attribute(attribute).unwrap_or(0);
    let answer = DeviceProperties {
        max_threads_per_block: value(attr::MAX_THREADS_PER_BLOCK),
        max_threads_dim: [attr::MAX_BLOCK_DIM_X, attr::MAX_BLOCK_DIM_Y, attr::MAX_BLOCK_DIM_Z]
            .map(value),
        max_grid_size: [attr::MAX_GRID_DIM_X, attr::MAX_GRID_DIM_Y, attr::MAX_GRID_DIM_Z]
            .map(value),
        shared_mem_per_block: value(attr::MAX_SHARED_MEMORY_PER_BLOCK),
        total_constant_memory: value(attr::TOTAL_CONSTANT_MEMORY),
        simd_width: value(attr::WARP_SIZE),
        mem_pitch: value(attr::MAX_PITCH),
        regs_per_block: value(attr::MAX_REGISTERS_PER_BLOCK),
        clock_rate: value(attr::CLOCK_RATE),
        texture_align: value(attr::TEXTURE_ALIGNMENT),
    };
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(properties, answer) }
}

pub(crate) unsafe fn cuDeviceGetPCIBusId(
    id: *mut c_char,
    len: c_int,
    dev: CUdevice,
) -> Result<(), CuError> {
    let [domain, bus, slot] = session::get()?.device(dev)?.pci;
    let text = format!("{domain:04x}:{bus:02x}:{slot:02x}.0");
    if usize::try_from(len).is_ok_and(|len| len <= text.len()) {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: the caller's buffer.
    unsafe { write_text(id, len, &text) }
}

pub(crate) unsafe fn cuDeviceGetByPCIBusId(
    dev: *mut CUdevice,
    id: *const c_char,
) -> Result<(), CuError> {
    // SAFETY: the caller's C string.
    let wanted =
        DeviceInfo::parse_pci(unsafe { ffi::string(id)? }).ok_or(CuError::INVALID_VALUE)?;
    let devices = &session::get()?.devices;
    let found = devices.iter().position(|device| device.pci == wanted);
    let ordinal = found.ok_or(CuError::INVALID_DEVICE)?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(dev, ordinal as CUdevice) }
}

pub(crate) unsafe fn cuDeviceGetExecAffinitySupport(
    supported: *mut c_int,
    _kind: u32,
    dev: CUdevice,
) -> Result<(), CuError> {
    session::get()?.device(dev)?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(supported, 0) }
}

pub(crate) unsafe fn cuDeviceGetTexture1DLinearMaxWidth(
    elements: *mut usize,
    _format: u32,
    channels: u32,
    dev: CUdevice,
) -> Result<(), CuError> {
    if !matches!(channels, 1 | 2 | 4) {
        return Err(CuError::INVALID_VALUE);
    }
    let device = session::get()?.device(dev)?;
    let width = device.limit(attr::MAXIMUM_TEXTURE1D_LINEAR_WIDTH, 1 << 27);
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(elements, width as usize) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_pci_addresses() {
        assert_eq!(DeviceInfo::parse_pci("0000:3b:00.0"), Some([0, 0x3b, 0]));
        assert_eq!(DeviceInfo::parse_pci("3b:01"), Some([0, 0x3b, 1]));
        assert_eq!(DeviceInfo::parse_pci("1:2:3"), Some([1, 2, 3]));
        for bad in ["", "x", "1", "1:2:3:4", "1:2.3"] {
            assert_eq!(DeviceInfo::parse_pci(bad), None, "{bad}");
        }
    }

    #[test]
    fn cuts_names() {
        let mut buffer = [1 as c_char; 4];
        // SAFETY: a live buffer of that length.
        unsafe { write_text(buffer.as_mut_ptr(), 4, "kedge").unwrap() };
        assert_eq!(buffer.map(|c| c as u8), *b"ked\0");
        // SAFETY: a buffer of no bytes: nothing is written.
        assert!(unsafe { write_text(buffer.as_mut_ptr(), 0, "kedge") }.is_err());
    }
}
