//! Small values that cross the C boundary by value, and callback types.

use std::ffi::c_int;

/// Dynamic shared memory, in bytes, for a block of `block_size` threads.
pub type CUoccupancyB2DSize = unsafe extern "C" fn(block_size: c_int) -> usize;

/// `CUipcMemHandle`: 64 opaque bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CUipcMemHandle(pub [u8; 64]);

/// `CUipcEventHandle`: 64 opaque bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CUipcEventHandle(pub [u8; 64]);
