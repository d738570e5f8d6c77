//! cuModule*.

use super::image::Images;
use super::jit::Options;
use super::{Module, by_handle};
use crate::{context, ffi};
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUdeviceptr, CUfunction, CUmodule};
use std::ffi::{c_char, c_void};

/// Loads into the current context, with the error log where the program wants it.
///
/// # Safety
/// `out` is NULL or valid for a write; `options` are valid.
unsafe fn load(
    out: *mut CUmodule,
    images: Result<Images, CuError>,
    options: &Options,
) -> Result<(), CuError> {
    if out.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let ctx = context::current()?;
    let loaded = images.map_err(Into::into).and_then(|images| Module::load(&ctx, &images));
    match loaded {
        Ok(module) => {
            // SAFETY: the buffers that the options name are valid for writes, and `out` is NULL or
            // valid for a write, by this function's contract.
            unsafe {
                options.report("");
                ffi::write(out, module.handle())
            }
        }
        Err(refused) => {
            // SAFETY: the buffers that the options name are valid for writes, by this function's
            // contract.
            unsafe { options.report(&refused.message) };
            Err(refused.error)
        }
    }
}

/// A file's content, with a NUL behind it in case it is text. A cubin is known by its bytes.
pub(crate) fn read_file(path: &str) -> Result<Vec<u8>, CuError> {
    let mut bytes = std::fs::read(path).map_err(|_| CuError::FILE_NOT_FOUND)?;
    if !bytes.starts_with(b"\x7fELF") {
        bytes.push(0);
    }
    Ok(bytes)
}

pub(crate) unsafe fn cuModuleLoad(
    module: *mut CUmodule,
    path: *const c_char,
) -> Result<(), CuError> {
    // SAFETY: the caller's C string.
    let bytes = read_file(unsafe { ffi::string(path)? })?;
    let images = Images::of_bytes(bytes);
    // SAFETY: the caller's out pointer.
    unsafe { load(module, Ok(images), &Options::default()) }
}

pub(crate) unsafe fn cuModuleLoadData(
    module: *mut CUmodule,
    image: *const c_void,
) -> Result<(), CuError> {
    // SAFETY: the caller's image and out pointer.
    unsafe { load(module, Images::recognise(image), &Options::default()) }
}

pub(crate) unsafe fn cuModuleLoadDataEx(
    module: *mut CUmodule,
    image: *const c_void,
    count: u32,
    options: *mut u32,
    values: *mut *mut c_void,
) -> Result<(), CuError> {
    // SAFETY: the caller's image, arrays and out pointer.
    unsafe {
        let options = Options::read(count, options, values)?;
        load(module, Images::recognise(image), &options)
    }
}

pub(crate) unsafe fn cuModuleLoadFatBinary(
    module: *mut CUmodule,
    image: *const c_void,
) -> Result<(), CuError> {
    // SAFETY: `cuModuleLoadData` asks the same of these arguments as this call does.
    unsafe { cuModuleLoadData(module, image) }
}

pub(crate) unsafe fn cuModuleUnload(module: CUmodule) -> Result<(), CuError> {
    by_handle(module)?.unload()
}

/// CU_MODULE_EAGER_LOADING 1, CU_MODULE_LAZY_LOADING 2: a library is loaded when it is first used.
pub(crate) unsafe fn cuModuleGetLoadingMode(mode: *mut u32) -> Result<(), CuError> {
    const LAZY: u32 = 2;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(mode, LAZY) }
}

pub(crate) unsafe fn cuModuleGetFunction(
    function: *mut CUfunction,
    module: CUmodule,
    name: *const c_char,
) -> Result<(), CuError> {
    // SAFETY: the caller's C string.
    let name = unsafe { ffi::string(name)? };
    let module = by_handle(module)?;
    let found = module.function(name)?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(function, found.handle()) }
}

pub(crate) unsafe fn cuModuleGetFunctionCount(
    count: *mut u32,
    module: CUmodule,
) -> Result<(), CuError> {
    let functions = by_handle(module)?.kernel_names()?.len();
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(count, functions as u32) }
}

pub(crate) unsafe fn cuModuleEnumerateFunctions(
    functions: *mut CUfunction,
    count: u32,
    module: CUmodule,
) -> Result<(), CuError> {
    let all = by_handle(module)?.functions(count as usize)?;
    for (i, function) in all.into_iter().enumerate() {
        // SAFETY: the caller's array has room for `count`.
        unsafe { ffi::write(functions.wrapping_add(i), function)? };
    }
    Ok(())
}

pub(crate) unsafe fn cuModuleGetGlobal_v2(
    address: *mut CUdeviceptr,
    bytes: *mut usize,
    module: CUmodule,
    name: *const c_char,
) -> Result<(), CuError> {
    // SAFETY: the caller's C string.
    let name = unsafe { ffi::string(name)? };
    let module = by_handle(module)?;
    let global = module.global(name)?;
    // SAFETY: the caller's out pointers.
    unsafe {
        ffi::write_optional(address, global.addr);
        ffi::write_optional(bytes, global.size as usize);
    }
    Ok(())
}
