//! The start-up handshake of NVIDIA's runtime (table INTEGRITY_CHECK, slot 1).
//!
//! The runtime asks a few times, at its own version plus 0, 1 and 2, and refuses to work with a
//! driver that answers otherwise. It is answered for interoperability, as public implementations
//! answer it (docs/interoperability.md). It guards nothing: the key is the same everywhere.

use super::md2::hmac_md2;
use super::tables::{CUDART_INTERFACE, INTEGRITY_CHECK};
use crate::{ffi, init, session};
use kedge_cuda_types::CuError;
use kedge_cuda_types::error::{CUresult, status};

const KEY: [u8; 16] = [
    0x14, 0x6A, 0xDD, 0xAE, 0x53, 0xA9, 0xA7, 0x52, 0xAA, 0x08, 0x41, 0x36, 0x0B, 0xF5, 0x5A, 0x9F,
];
/// What is expected at a version plus 0 and plus 1, as two little-endian words.
const PLUS_0: [u64; 2] = [0x3341_181C_03CB_675C, 0x8ED3_83AA_1F4C_D1E8];
const PLUS_1: [u64; 2] = [0x1841_181C_03CB_675C, 0x8ED3_83AA_1F4C_D1E8];

/// Slot 1.
///
/// # Safety
/// `out` is NULL or valid for a write of two words.
pub(super) unsafe extern "C" fn check(version: u32, seconds: u64, out: *mut [u64; 2]) -> CUresult {
    let answer = match version % 10 {
        0 => PLUS_0,
        1 => PLUS_1,
        2 => identity(version, seconds),
        _ => {
            crate::entry::log_once("INTEGRITY_CHECK", || {
                format!("private table INTEGRITY_CHECK: unknown question {version}")
            });
            return CuError::INVALID_VALUE.0;
        }
    };
    // SAFETY: `out` is NULL or valid for a write: the runtime, which calls this slot, passes a
    // variable of its own.
    status(unsafe { ffi::write(out, answer) })
}

/// A code over what process, thread, library and devices this is.
fn identity(version: u32, seconds: u64) -> [u64; 2] {
    // SAFETY: no preconditions.
    let thread = unsafe { libc::pthread_self() } as u32;
    let mut message = Vec::with_capacity(256);
    for word in [init::driver_version(), version, std::process::id(), thread] {
        message.extend(word.to_le_bytes());
    }
    let tables = [CUDART_INTERFACE.as_ptr() as u64, INTEGRITY_CHECK.as_ptr() as u64];
    for word in [tables[0], tables[1], check as *const () as u64, seconds] {
        message.extend(word.to_le_bytes());
    }
    for device in session::get().map_or(&[][..], |session| &session.devices) {
        message.extend(device.uuid);
        for number in device.pci {
            message.extend(number.to_le_bytes());
        }
    }
    let code = u128::from_le_bytes(hmac_md2(&KEY, &message));
    [code as u64, (code >> 64) as u64]
}
