//! Without the feature `private-tables`: no undocumented table is known.

use crate::{ffi, log};
use kedge_cuda_types::CuError;
use std::ffi::c_void;

pub(crate) unsafe fn cuGetExportTable(
    table: *mut *const c_void,
    uuid: *const [u8; 16],
) -> Result<(), CuError> {
    // SAFETY: the caller's UUID.
    let uuid = u128::from_be_bytes(unsafe { ffi::read(uuid)? });
    log::line(&format!(
        "private table {uuid:032x} is wanted, and this kedge was built without the feature \
         private-tables: programs of the CUDA runtime need it"
    ));
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(table, std::ptr::null())? };
    Err(CuError::NOT_FOUND)
}
