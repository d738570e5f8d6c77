//! Without the feature `private-tables`: no undocumented table is known.

use crate::ffi;
use kedge_cuda_types::CuError;
use std::ffi::c_void;

pub(crate) unsafe fn cuGetExportTable(
    table: *mut *const c_void,
    _uuid: *const c_void,
) -> Result<(), CuError> {
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(table, std::ptr::null())? };
    Err(CuError::NOT_FOUND)
}

/// No compiler tells what a cubin was made from.
pub(crate) fn with_source(_cubin: &[u8]) -> Option<Vec<u8>> {
    None
}

pub(crate) fn knows_sources() -> bool {
    false
}
