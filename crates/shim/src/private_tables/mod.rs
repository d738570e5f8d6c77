//! The undocumented tables that NVIDIA's runtime and libraries ask for, and what they expect of
//! them (docs/interoperability.md). Everything undocumented that kedge relies on is in this folder;
//! without the feature `private-tables` it is left out.

mod compile_cache;
mod handshake;
mod md2;
mod slots;
mod storage;
mod tables;

pub(crate) use storage::Storage;

use crate::{ffi, log};
use kedge_cuda_types::CuError;
use std::ffi::c_void;

pub(crate) unsafe fn cuGetExportTable(
    table: *mut *const c_void,
    uuid: *const [u8; 16],
) -> Result<(), CuError> {
    // SAFETY: the caller's UUID.
    let uuid = u128::from_be_bytes(unsafe { ffi::read(uuid)? });
    let found = tables::by_uuid(uuid);
    if found.is_none() && !tables::known_absent(uuid) {
        log::line(&format!("private table {uuid:032x} is not known; the caller got NOT_FOUND"));
    }
    let address = found.map_or(std::ptr::null(), |slots| slots.as_ptr().cast());
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(table, address)? };
    found.map(drop).ok_or(CuError::NOT_FOUND)
}
