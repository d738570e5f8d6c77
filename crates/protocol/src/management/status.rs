//! What NVML's functions return (nvmlReturn_t), as far as kedge says so itself.

pub const SUCCESS: u32 = 0;
pub const UNINITIALIZED: u32 = 1;
pub const INVALID_ARGUMENT: u32 = 2;
pub const NOT_SUPPORTED: u32 = 3;
pub const NOT_FOUND: u32 = 6;
pub const INSUFFICIENT_SIZE: u32 = 7;
pub const DRIVER_NOT_LOADED: u32 = 9;
pub const LIBRARY_NOT_FOUND: u32 = 12;
pub const FUNCTION_NOT_FOUND: u32 = 13;
pub const VERSION_MISMATCH: u32 = 25;
pub const UNKNOWN: u32 = 999;
