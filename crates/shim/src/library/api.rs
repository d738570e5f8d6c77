//! cuLibrary* and cuKernel*.

use super::{Library, kernel, library};
use crate::function::{self, lasting_name};
use crate::module::{Images, read_file};
use crate::{context, ffi};
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUdevice, CUdeviceptr, CUfunction, CUkernel, CUlibrary, CUmodule};
use std::ffi::{c_char, c_int, c_void};

/// CUlibraryOption: the program keeps the image in place.
const BINARY_IS_PRESERVED: u32 = 1;

pub(crate) unsafe fn cuLibraryLoadData(
    out: *mut CUlibrary,
    image: *const c_void,
    _jit_options: *mut u32,
    _jit_values: *mut *mut c_void,
    _jit_count: u32,
    options: *mut u32,
    _values: *mut *mut c_void,
    count: u32,
) -> Result<(), CuError> {
    if out.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: the caller's image and array.
    let (mut images, options) = unsafe {
        (Images::recognise(image)?, ffi::read_array(options.cast_const(), count as usize)?)
    };
    let preserved = options.contains(&BINARY_IS_PRESERVED);
    if !preserved {
        // SAFETY: the images were just recognised where they are.
        unsafe { images.keep()? };
    }
    // SAFETY: the caller's out pointer.
    unsafe { publish(out, Library::create(images)?, !preserved) }
}

/// Loads a library at once where a context is there to load it into, so that an invalid image is
/// found by this call; the runtime's own (whose images are preserved) wait for their first use.
///
/// # Safety
/// `out` is valid for a write.
unsafe fn publish(
    out: *mut CUlibrary,
    library: std::sync::Arc<Library>,
    eager: bool,
) -> Result<(), CuError> {
    if eager
        && let Ok(ctx) = context::current()
        && let Err(error) = library.module_in(&ctx)
    {
        library.unload()?;
        return Err(error);
    }
    // SAFETY: `out` is NULL or valid for a write, by this function's contract.
    unsafe { ffi::write(out, library.handle()) }
}

pub(crate) unsafe fn cuLibraryLoadFromFile(
    out: *mut CUlibrary,
    path: *const c_char,
    _jit_options: *mut u32,
    _jit_values: *mut *mut c_void,
    _jit_count: u32,
    _options: *mut u32,
    _values: *mut *mut c_void,
    _count: u32,
) -> Result<(), CuError> {
    if out.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: the caller's C string.
    let bytes = read_file(unsafe { ffi::string(path)? })?;
    // SAFETY: the caller's out pointer.
    unsafe { publish(out, Library::create(Images::of_bytes(bytes))?, true) }
}

pub(crate) unsafe fn cuLibraryUnload(handle: CUlibrary) -> Result<(), CuError> {
    library(handle)?.unload()
}

pub(crate) unsafe fn cuLibraryGetKernel(
    out: *mut CUkernel,
    handle: CUlibrary,
    name: *const c_char,
) -> Result<(), CuError> {
    let library = library(handle)?;
    // SAFETY: the caller's C string.
    let name = unsafe { ffi::string(name)? };
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(out, library.kernel(name)?.handle()) }
}

pub(crate) unsafe fn cuLibraryGetKernelCount(
    count: *mut u32,
    handle: CUlibrary,
) -> Result<(), CuError> {
    let kernels = library(handle)?.any_module()?.kernel_names()?.len();
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(count, kernels as u32) }
}

pub(crate) unsafe fn cuLibraryEnumerateKernels(
    kernels: *mut CUkernel,
    count: u32,
    handle: CUlibrary,
) -> Result<(), CuError> {
    let library = library(handle)?;
    let module = library.any_module()?;
    for (index, name) in module.kernel_names()?.iter().take(count as usize).enumerate() {
        let kernel = library.kernel(name)?.handle();
        // SAFETY: the caller's array has room for `count`.
        unsafe { ffi::write(kernels.wrapping_add(index), kernel)? };
    }
    Ok(())
}

pub(crate) unsafe fn cuLibraryGetModule(
    out: *mut CUmodule,
    handle: CUlibrary,
) -> Result<(), CuError> {
    let library = library(handle)?;
    let module = library.module_in(&*context::current()?)?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(out, module.handle()) }
}

pub(crate) unsafe fn cuLibraryGetGlobal(
    address: *mut CUdeviceptr,
    bytes: *mut usize,
    handle: CUlibrary,
    name: *const c_char,
) -> Result<(), CuError> {
    // SAFETY: the caller's C string.
    let name = unsafe { ffi::string(name)? };
    let module = library(handle)?.module_in(&*context::current()?)?;
    let global = module.global(name)?;
    // SAFETY: the caller's out pointers.
    unsafe {
        ffi::write_optional(address, global.addr);
        ffi::write_optional(bytes, global.size as usize);
    }
    Ok(())
}

/// As a global, and only a managed one.
pub(crate) unsafe fn cuLibraryGetManaged(
    address: *mut CUdeviceptr,
    bytes: *mut usize,
    handle: CUlibrary,
    name: *const c_char,
) -> Result<(), CuError> {
    // SAFETY: the caller's C string.
    let name = unsafe { ffi::string(name)? };
    let module = library(handle)?.any_module()?;
    let global = module.global(name)?;
    if !global.managed {
        return Err(CuError::NOT_FOUND);
    }
    // SAFETY: the caller's out pointers.
    unsafe {
        ffi::write_optional(address, global.addr);
        ffi::write_optional(bytes, global.size as usize);
    }
    Ok(())
}

pub(crate) unsafe fn cuKernelGetFunction(
    out: *mut CUfunction,
    handle: CUkernel,
) -> Result<(), CuError> {
    let function = super::function_in_current(handle)?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(out, function.handle()) }
}

pub(crate) unsafe fn cuKernelGetLibrary(
    out: *mut CUlibrary,
    handle: CUkernel,
) -> Result<(), CuError> {
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(out, kernel(handle)?.library.handle()) }
}

pub(crate) unsafe fn cuKernelGetAttribute(
    value: *mut c_int,
    attribute: u32,
    handle: CUkernel,
    dev: CUdevice,
) -> Result<(), CuError> {
    let answer = function::attribute(&*kernel(handle)?.function_on(dev)?, attribute)?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(value, answer) }
}

pub(crate) unsafe fn cuKernelSetAttribute(
    attribute: u32,
    value: c_int,
    handle: CUkernel,
    dev: CUdevice,
) -> Result<(), CuError> {
    function::set_attribute(&*kernel(handle)?.function_on(dev)?, attribute, value)
}

/// A preference between L1 and shared memory, which the software device does not divide.
pub(crate) unsafe fn cuKernelSetCacheConfig(
    handle: CUkernel,
    config: u32,
    _dev: CUdevice,
) -> Result<(), CuError> {
    const PREFER_EQUAL: u32 = 3;
    kernel(handle)?;
    if config > PREFER_EQUAL { Err(CuError::INVALID_VALUE) } else { Ok(()) }
}

pub(crate) unsafe fn cuKernelGetName(
    name: *mut *const c_char,
    handle: CUkernel,
) -> Result<(), CuError> {
    if name.is_null() || handle.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let kernel = kernel(handle)?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(name, lasting_name(&kernel.name)) }
}

pub(crate) unsafe fn cuKernelGetParamInfo(
    handle: CUkernel,
    index: usize,
    offset: *mut usize,
    size: *mut usize,
) -> Result<(), CuError> {
    let function = super::function_in_current(handle)?;
    // SAFETY: the caller's out pointers.
    unsafe { function::param_info(&function, index, offset, size) }
}
