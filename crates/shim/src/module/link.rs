//! cuLink*: collects what is to be linked. The proxy links, when the result is loaded; so that an
//! error comes where CUDA reports it, cuLinkComplete loads the result once and unloads it again.

use super::Module;
use super::image::{Images, MAX_IMAGES};
use super::jit::Options;
use crate::handle::{Kind, Table};
use crate::module::api::read_file;
use crate::{context, entry, ffi};
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::CUlinkState;
use std::ffi::{c_char, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// CUjitInputType.
const INPUT_CUBIN: u32 = 0;
const INPUT_PTX: u32 = 1;
const INPUT_FATBINARY: u32 = 2;
const INPUT_OBJECT: u32 = 3;
const INPUT_LIBRARY: u32 = 4;
const INPUT_NVVM: u32 = 5;

#[derive(Debug, Default)]
struct State {
    parts: Vec<Images>,
    /// The result, which the program reads until it destroys the linker.
    result: Vec<u8>,
}

#[derive(Debug, Default)]
struct Linker {
    options: Options,
    state: Mutex<State>,
}

impl Linker {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

static LINKERS: Table<Linker> = Table::new(Kind::LinkState);

fn find(linker: CUlinkState) -> Result<std::sync::Arc<Linker>, CuError> {
    LINKERS.get(linker.0).ok_or(CuError::INVALID_HANDLE)
}

pub(crate) unsafe fn cuLinkCreate_v2(
    count: u32,
    options: *mut u32,
    values: *mut *mut c_void,
    out: *mut CUlinkState,
) -> Result<(), CuError> {
    if out.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: `options` and `values` have `count` values, which the API asks the program to keep
    // until the linker is destroyed.
    let options = unsafe { Options::read(count, options, values)? };
    let linker = Linker { options, state: Mutex::default() };
    let handle = LINKERS.insert(linker).ok_or(CuError::OUT_OF_MEMORY)?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(out, CUlinkState(handle)) }
}

fn check_kind(kind: u32) -> Result<(), CuError> {
    match kind {
        INPUT_CUBIN | INPUT_PTX | INPUT_FATBINARY => Ok(()),
        INPUT_OBJECT | INPUT_LIBRARY => {
            Err(entry::not_supported("linking a host object or library (cuLinkAddFile)"))
        }
        INPUT_NVVM => Err(entry::not_supported("linking LTO-IR by cuLinkAddData (nvJitLink does)")),
        _ => Err(CuError::INVALID_VALUE),
    }
}

fn add(linker: CUlinkState, images: Images) -> Result<(), CuError> {
    let linker = find(linker)?;
    let mut state = linker.state();
    if state.parts.len() >= MAX_IMAGES {
        return Err(CuError::INVALID_VALUE);
    }
    state.parts.push(images);
    Ok(())
}

pub(crate) unsafe fn cuLinkAddData_v2(
    linker: CUlinkState,
    kind: u32,
    data: *mut c_void,
    size: usize,
    _name: *const c_char,
    _count: u32,
    _options: *mut u32,
    _values: *mut *mut c_void,
) -> Result<(), CuError> {
    check_kind(kind)?;
    // SAFETY: the caller's data of that size.
    let bytes = unsafe { ffi::read_array(data.cast::<u8>(), size)? };
    add(linker, Images::of_bytes(bytes))
}

pub(crate) unsafe fn cuLinkAddFile_v2(
    linker: CUlinkState,
    kind: u32,
    path: *const c_char,
    _count: u32,
    _options: *mut u32,
    _values: *mut *mut c_void,
) -> Result<(), CuError> {
    check_kind(kind)?;
    // SAFETY: the caller's C string.
    let bytes = read_file(unsafe { ffi::string(path)? })?;
    add(linker, Images::of_bytes(bytes))
}

pub(crate) unsafe fn cuLinkComplete(
    linker: CUlinkState,
    image: *mut *mut c_void,
    size: *mut usize,
) -> Result<(), CuError> {
    let linker = find(linker)?;
    let mut state = linker.state();
    let images = Images::linked(std::mem::take(&mut state.parts));
    let ctx = context::current()?;
    match Module::load(&ctx, &images) {
        Ok(module) => module.unload()?,
        Err(refused) => {
            // SAFETY: CUDA asks the caller to keep the option buffers until cuLinkDestroy.
            unsafe { linker.options.report(&refused.message) };
            return Err(refused.error);
        }
    }
    state.result = images.pack();
    // SAFETY: the caller's out pointers and option buffers.
    unsafe {
        linker.options.report("");
        ffi::write_optional(size, state.result.len());
        ffi::write(image, state.result.as_mut_ptr().cast())
    }
}

pub(crate) unsafe fn cuLinkDestroy(linker: CUlinkState) -> Result<(), CuError> {
    LINKERS.remove(linker.0).map(drop).ok_or(CuError::INVALID_HANDLE)
}

// The names before CUDA 6.5, whose size-typed options differ in nothing that matters here.

pub(crate) unsafe fn cuLinkCreate(
    count: u32,
    options: *mut u32,
    values: *mut *mut c_void,
    out: *mut CUlinkState,
) -> Result<(), CuError> {
    // SAFETY: `cuLinkCreate_v2` asks the same of these arguments as this call does.
    unsafe { cuLinkCreate_v2(count, options, values, out) }
}

pub(crate) unsafe fn cuLinkAddData(
    linker: CUlinkState,
    kind: u32,
    data: *mut c_void,
    size: usize,
    name: *const c_char,
    count: u32,
    options: *mut u32,
    values: *mut *mut c_void,
) -> Result<(), CuError> {
    // SAFETY: `cuLinkAddData_v2` asks the same of these arguments as this call does.
    unsafe { cuLinkAddData_v2(linker, kind, data, size, name, count, options, values) }
}

pub(crate) unsafe fn cuLinkAddFile(
    linker: CUlinkState,
    kind: u32,
    path: *const c_char,
    count: u32,
    options: *mut u32,
    values: *mut *mut c_void,
) -> Result<(), CuError> {
    // SAFETY: `cuLinkAddFile_v2` asks the same of these arguments as this call does.
    unsafe { cuLinkAddFile_v2(linker, kind, path, count, options, values) }
}
