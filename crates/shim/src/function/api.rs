//! cuFunc*.

use super::{Function, attribute, resolve, set_attribute};
use crate::ffi;
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUfunction, CUmodule};
use std::ffi::{CString, c_char, c_int};
use std::sync::{Arc, Mutex, PoisonError};

pub(crate) unsafe fn cuFuncGetAttribute(
    value: *mut c_int,
    attr: u32,
    function: CUfunction,
) -> Result<(), CuError> {
    let answer = attribute(&*resolve(function)?, attr)?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(value, answer) }
}

pub(crate) unsafe fn cuFuncSetAttribute(
    function: CUfunction,
    attr: u32,
    value: c_int,
) -> Result<(), CuError> {
    set_attribute(&*resolve(function)?, attr, value)
}

/// A preference between L1 and shared memory, which the software device does not divide.
pub(crate) unsafe fn cuFuncSetCacheConfig(
    function: CUfunction,
    config: u32,
) -> Result<(), CuError> {
    const PREFER_EQUAL: u32 = 3;
    resolve(function)?;
    if config > PREFER_EQUAL { Err(CuError::INVALID_VALUE) } else { Ok(()) }
}

/// A hint that no device since Maxwell follows.
pub(crate) unsafe fn cuFuncSetSharedMemConfig(
    function: CUfunction,
    _config: u32,
) -> Result<(), CuError> {
    resolve(function).map(drop)
}

pub(crate) unsafe fn cuFuncGetModule(
    module: *mut CUmodule,
    function: CUfunction,
) -> Result<(), CuError> {
    let owner = resolve(function)?.module.upgrade().ok_or(CuError::INVALID_HANDLE)?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(module, owner.handle()) }
}

/// A name that lives as long as the process, as callers of cuFuncGetName and cuKernelGetName may
/// assume it lives as long as the module. One copy of each name.
pub(crate) fn lasting_name(name: &str) -> *const c_char {
    static NAMES: Mutex<Vec<CString>> = Mutex::new(Vec::new());
    let name = CString::new(name.as_bytes()).unwrap_or_default();
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    let at = names.binary_search(&name).unwrap_or_else(|at| {
        names.insert(at, name);
        at
    });
    // A CString's bytes stay where they are when the vector that holds it grows.
    names[at].as_ptr()
}

pub(crate) unsafe fn cuFuncGetName(
    name: *mut *const c_char,
    function: CUfunction,
) -> Result<(), CuError> {
    if name.is_null() || function.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let function = resolve(function)?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(name, lasting_name(&function.info().name)) }
}

/// Offset and size of the parameter at `index`; INVALID_VALUE behind the last.
///
/// # Safety
/// The pointers are NULL or valid for a write.
pub(crate) unsafe fn param_info(
    function: &Function,
    index: usize,
    offset: *mut usize,
    size: *mut usize,
) -> Result<(), CuError> {
    let param = function.info().params.get(index).ok_or(CuError::INVALID_VALUE)?;
    // SAFETY: `offset` and `size` are NULL or valid for a write each, by this function's contract.
    unsafe {
        ffi::write(offset, param.offset as usize)?;
        ffi::write_optional(size, param.size as usize);
    }
    Ok(())
}

pub(crate) unsafe fn cuFuncGetParamInfo(
    function: CUfunction,
    index: usize,
    offset: *mut usize,
    size: *mut usize,
) -> Result<(), CuError> {
    let function: Arc<Function> = resolve(function)?;
    // SAFETY: the caller's out pointers.
    unsafe { param_info(&function, index, offset, size) }
}

/// A function that has a handle is loaded.
pub(crate) unsafe fn cuFuncIsLoaded(state: *mut u32, function: CUfunction) -> Result<(), CuError> {
    const LOADED: u32 = 1;
    resolve(function)?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(state, LOADED) }
}

pub(crate) unsafe fn cuFuncLoad(function: CUfunction) -> Result<(), CuError> {
    resolve(function).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;

    #[test]
    fn a_name_stays_where_it_is() {
        let first = lasting_name("kernel_b");
        for i in 0..100 {
            lasting_name(&format!("kernel_{i}"));
        }
        assert_eq!(lasting_name("kernel_b"), first);
        // SAFETY: the name lives as long as the process.
        assert_eq!(unsafe { CStr::from_ptr(first) }, c"kernel_b");
    }
}
