//! cuGetErrorName and cuGetErrorString.

use crate::ffi;
use kedge_cuda_types::CuError;
use kedge_cuda_types::error::CUresult;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char};
use std::sync::OnceLock;

/// What each code means, in a few words. In the order of the codes.
const TEXTS: &[(CUresult, &CStr)] = &[
    (0, c"no error"),
    (1, c"invalid argument"),
    (2, c"out of memory"),
    (3, c"CUDA is not initialized"),
    (4, c"the driver is shutting down"),
    (5, c"the profiler is disabled"),
    (6, c"the profiler is not initialized"),
    (7, c"the profiler has already started"),
    (8, c"the profiler has already stopped"),
    (34, c"the CUDA driver is a stub library"),
    (36, c"the call needs a newer driver"),
    (46, c"the device is busy or unavailable"),
    (47, c"multicast resources are used up"),
    (100, c"no CUDA device is detected"),
    (101, c"invalid device ordinal"),
    (102, c"the device is not licensed for this"),
    (200, c"the kernel image is invalid"),
    (201, c"invalid device context"),
    (202, c"the context is already current"),
    (205, c"mapping the resource failed"),
    (206, c"unmapping the resource failed"),
    (207, c"the array is mapped"),
    (208, c"the resource is already mapped"),
    (209, c"no kernel image is available for this device"),
    (210, c"the resource is already acquired"),
    (211, c"the resource is not mapped"),
    (212, c"the resource is not mapped as an array"),
    (213, c"the resource is not mapped as a pointer"),
    (214, c"uncorrectable ECC error"),
    (215, c"the device does not support this limit"),
    (216, c"the context is already in use by a thread"),
    (217, c"peer access is not supported between these devices"),
    (218, c"a PTX JIT compilation failed"),
    (219, c"invalid graphics context"),
    (220, c"uncorrectable NVLink error"),
    (221, c"the PTX JIT compiler is not available"),
    (222, c"the PTX version is not supported"),
    (223, c"PTX JIT compilation is disabled"),
    (224, c"the execution affinity is not supported"),
    (225, c"the device-side synchronization is not supported"),
    (226, c"a contained error has occurred"),
    (227, c"the loader's version is insufficient"),
    (300, c"the kernel source is invalid"),
    (301, c"file not found"),
    (302, c"a shared object's symbol was not found"),
    (303, c"a shared object failed to initialize"),
    (304, c"an operating system call failed"),
    (400, c"invalid resource handle"),
    (401, c"the resource is not in a state for this"),
    (402, c"the query would lose information"),
    (500, c"named symbol not found"),
    (600, c"the device is not ready"),
    (700, c"an illegal memory access was encountered"),
    (701, c"too many resources requested for launch"),
    (702, c"the launch timed out and was terminated"),
    (703, c"the launch uses an incompatible texturing mode"),
    (704, c"peer access is already enabled"),
    (705, c"peer access has not been enabled"),
    (708, c"the primary context is already active"),
    (709, c"the context is destroyed"),
    (710, c"a device-side assert was triggered"),
    (711, c"too many peer mappings"),
    (712, c"the memory is already registered"),
    (713, c"the memory is not registered"),
    (714, c"hardware stack error"),
    (715, c"an illegal instruction was encountered"),
    (716, c"misaligned address"),
    (717, c"an operation does not allow this address space"),
    (718, c"invalid program counter"),
    (719, c"unspecified launch failure"),
    (720, c"too many blocks in cooperative launch"),
    (721, c"tensor memory was not freed"),
    (800, c"operation not permitted"),
    (801, c"operation not supported"),
    (802, c"the system is not yet initialized"),
    (803, c"the driver does not match this library"),
    (804, c"forward compatibility was attempted on a device that does not support it"),
    (805, c"the MPS client failed to connect"),
    (806, c"the MPS server failed a remote call"),
    (807, c"the MPS server is not ready"),
    (808, c"the MPS clients are used up"),
    (809, c"the MPS connections are used up"),
    (810, c"the MPS client was terminated"),
    (811, c"dynamic parallelism is not supported here"),
    (812, c"dynamic parallelism of a wrong version"),
    (900, c"operation not permitted when the stream is capturing"),
    (901, c"operation failed due to a previous error during capture"),
    (902, c"operation would merge two captures"),
    (903, c"the capture was not begun in this stream"),
    (904, c"the capture has branches that were not joined"),
    (905, c"dependency on uncaptured work in another stream"),
    (906, c"operation would make the legacy stream depend on a capturing stream"),
    (907, c"operation not permitted on an event last recorded in a capturing stream"),
    (908, c"the capture was begun by another thread"),
    (909, c"the wait operation timed out"),
    (910, c"the graph update violates the instantiated graph's constraints"),
    (911, c"an error in an external device"),
    (912, c"invalid cluster size"),
    (913, c"the function is not loaded"),
    (914, c"invalid resource type"),
    (915, c"invalid resource configuration"),
    (916, c"a key rotation failed"),
    (917, c"the stream is detached"),
    (918, c"recapturing the graph failed"),
    (919, c"the fabric is not ready"),
    (999, c"unknown error"),
];

fn text(code: CUresult) -> Option<&'static CStr> {
    let index = TEXTS.binary_search_by_key(&code, |(code, _)| *code).ok()?;
    Some(TEXTS[index].1)
}

fn name(code: CUresult) -> Option<&'static CStr> {
    static NAMES: OnceLock<BTreeMap<CUresult, CString>> = OnceLock::new();
    let names = NAMES.get_or_init(|| {
        let name = |code| Some((code, CString::new(CuError(code).name()?).ok()?));
        TEXTS.iter().filter_map(|(code, _)| name(*code)).collect()
    });
    names.get(&code).map(CString::as_c_str)
}

/// # Safety
/// `to` is NULL or valid for a write.
unsafe fn answer(to: *mut *const c_char, text: Option<&'static CStr>) -> Result<(), CuError> {
    // SAFETY: `to` is NULL or valid for a write, by this function's contract. CUDA stores NULL for
    // a code that it does not know.
    unsafe { ffi::write(to, text.map_or(std::ptr::null(), CStr::as_ptr))? };
    text.map(drop).ok_or(CuError::INVALID_VALUE)
}

pub(crate) unsafe fn cuGetErrorName(
    error: CUresult,
    name_out: *mut *const c_char,
) -> Result<(), CuError> {
    // SAFETY: the caller's out pointer.
    unsafe { answer(name_out, name(error)) }
}

pub(crate) unsafe fn cuGetErrorString(
    error: CUresult,
    text_out: *mut *const c_char,
) -> Result<(), CuError> {
    // SAFETY: the caller's out pointer.
    unsafe { answer(text_out, text(error)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_name_and_text() {
        assert!(TEXTS.is_sorted_by_key(|(code, _)| *code));
        for code in 0..1000 {
            assert_eq!(text(code).is_some(), CuError(code).name().is_some(), "{code}");
        }
        assert_eq!(name(700), Some(c"CUDA_ERROR_ILLEGAL_ADDRESS"));
        assert_eq!(name(0), Some(c"CUDA_SUCCESS"));
    }

    #[test]
    fn an_unknown_code_is_refused() {
        let mut out = c"x".as_ptr();
        // SAFETY: a live out pointer.
        assert_eq!(unsafe { cuGetErrorName(12345, &mut out) }, Err(CuError::INVALID_VALUE));
        assert!(out.is_null());
    }
}
