//! The structures and codes of nvml.h that are answered.

use std::ffi::{c_char, c_int, c_uint};

/// nvmlReturn_t.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Status(pub(crate) c_uint);

impl Status {
    pub(crate) const UNINITIALIZED: Status = Status(1);
    pub(crate) const INVALID_ARGUMENT: Status = Status(2);
    pub(crate) const NOT_SUPPORTED: Status = Status(3);
    pub(crate) const NOT_FOUND: Status = Status(6);
    pub(crate) const INSUFFICIENT_SIZE: Status = Status(7);
    pub(crate) const DRIVER_NOT_LOADED: Status = Status(9);
    pub(crate) const VERSION_MISMATCH: Status = Status(25);
}

/// (code, words), as nvmlErrorString gives them.
pub(crate) const WORDS: &[(c_uint, &std::ffi::CStr)] = &[
    (0, c"Success"),
    (1, c"Uninitialized"),
    (2, c"Invalid Argument"),
    (3, c"Not Supported"),
    (4, c"Insufficient Permissions"),
    (6, c"Not Found"),
    (7, c"Insufficient Size"),
    (9, c"Driver Not Loaded"),
    (12, c"NVML Shared Library Not Found"),
    (13, c"Function Not Found"),
    (25, c"Argument Version Mismatch"),
];

/// nvmlDevice_t: the device's number, from 1 on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Device(pub(crate) usize);

/// nvmlMemory_t, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Memory {
    pub(crate) total: u64,
    pub(crate) free: u64,
    pub(crate) used: u64,
}

/// nvmlMemory_v2_t.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct MemoryV2 {
    pub(crate) version: c_uint,
    pub(crate) total: u64,
    pub(crate) reserved: u64,
    pub(crate) free: u64,
    pub(crate) used: u64,
}

/// NVML_STRUCT_VERSION(Memory, 2).
pub(crate) const MEMORY_V2: c_uint = size_of::<MemoryV2>() as c_uint | 2 << 24;

/// nvmlPciInfo_t.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct PciInfo {
    pub(crate) bus_id_legacy: [c_char; 16],
    pub(crate) domain: c_uint,
    pub(crate) bus: c_uint,
    pub(crate) device: c_uint,
    pub(crate) pci_device_id: c_uint,
    pub(crate) pci_subsystem_id: c_uint,
    pub(crate) bus_id: [c_char; 32],
}

const _: () = assert!(size_of::<PciInfo>() == 68 && size_of::<MemoryV2>() == 40);

/// CUDA's number for "no version".
pub(crate) type Number = c_int;
