//! What NVML's functions return.

use kedge_protocol::management::status;
use std::ffi::{CStr, c_uint};

/// nvmlReturn_t.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Status(pub(crate) c_uint);

impl Status {
    pub(crate) const UNINITIALIZED: Status = Status(status::UNINITIALIZED);
    pub(crate) const INVALID_ARGUMENT: Status = Status(status::INVALID_ARGUMENT);
    pub(crate) const INSUFFICIENT_SIZE: Status = Status(status::INSUFFICIENT_SIZE);
    pub(crate) const DRIVER_NOT_LOADED: Status = Status(status::DRIVER_NOT_LOADED);
    pub(crate) const VERSION_MISMATCH: Status = Status(status::VERSION_MISMATCH);
    pub(crate) const UNKNOWN: Status = Status(status::UNKNOWN);
}

/// (code, words), as nvmlErrorString gives them.
pub(crate) const WORDS: &[(c_uint, &CStr)] = &[
    (0, c"Success"),
    (1, c"Uninitialized"),
    (2, c"Invalid Argument"),
    (3, c"Not Supported"),
    (4, c"Insufficient Permissions"),
    (5, c"Already Initialized"),
    (6, c"Not Found"),
    (7, c"Insufficient Size"),
    (8, c"Insufficient External Power"),
    (9, c"Driver Not Loaded"),
    (10, c"Timeout"),
    (11, c"Interrupt Request Issue"),
    (12, c"NVML Shared Library Not Found"),
    (13, c"Function Not Found"),
    (14, c"Corrupted infoROM"),
    (15, c"GPU is lost"),
    (16, c"GPU requires reset"),
    (17, c"GPU access blocked by the operating system"),
    (18, c"Driver/library version mismatch"),
    (19, c"In use by another client"),
    (20, c"Insufficient Memory"),
    (21, c"No data"),
    (22, c"vGPU ECC not supported"),
    (23, c"Insufficient Resources"),
    (24, c"Invalid Frequency"),
    (25, c"Argument version mismatch"),
    (26, c"Requested functionality has been deprecated"),
    (27, c"System is not in ready state"),
    (28, c"No supported GPUs were found"),
    (29, c"Resource not in correct state to perform requested operation"),
    (30, c"Reset type is not supported for given device"),
];
