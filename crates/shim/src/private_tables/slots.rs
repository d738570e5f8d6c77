//! The slots that runtimes and libraries were seen to call. What each does, and how that was
//! learnt, is told in docs/interoperability.md.

use super::storage::Destructor;
use crate::context::{self, Context};
use crate::{entry, ffi, log, module, stream};
use kedge_cuda_types::CuError;
use kedge_cuda_types::error::{CUresult, status};
use kedge_cuda_types::handle::{CUcontext, CUdevice, CUfunction, CUmodule, CUstream};
use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::sync::Arc;

/// CUDART_INTERFACE 2: the primary context's handle, neither retained nor activated.
pub(super) unsafe extern "C" fn primary_context(out: *mut CUcontext, dev: CUdevice) -> CUresult {
    // SAFETY: the caller's out pointer.
    status(context::primary_of(dev).and_then(|ctx| unsafe { ffi::write(out, ctx.handle()) }))
}

/// CUDART_INTERFACE 12: asks for the JIT compilers to be loaded; ours are the proxy's.
pub(super) unsafe extern "C" fn load_compilers() -> CUresult {
    0
}

/// Zeroed memory of the process that callers write into.
#[repr(align(16))]
struct Shared<const N: usize>(UnsafeCell<[u8; N]>);

// SAFETY: only the caller touches the bytes; for this process they are opaque.
unsafe impl<const N: usize> Sync for Shared<N> {}

impl<const N: usize> Shared<N> {
    const fn new() -> Self {
        Self(UnsafeCell::new([0; N]))
    }

    /// # Safety
    /// Both pointers are NULL or valid for a write.
    unsafe fn hand_out(&self, buffer: *mut *mut c_void, len: *mut usize) {
        // SAFETY: `buffer` and `len` are NULL or valid for writes, by this function's contract; the
        // bytes are static.
        unsafe {
            ffi::write_optional(buffer, self.0.get().cast());
            ffi::write_optional(len, N);
        }
    }
}

/// TOOLS_RUNTIME_CALLBACK_HOOKS 2: a flag for each runtime function. 567 were used by 13.5.
pub(super) unsafe extern "C" fn hooks_buffer(
    buffer: *mut *mut c_void,
    len: *mut usize,
) -> CUresult {
    static FLAGS: Shared<8192> = Shared::new();
    // SAFETY: the caller's out pointers.
    unsafe { FLAGS.hand_out(buffer, len) };
    0
}

/// TOOLS_RUNTIME_CALLBACK_HOOKS 6.
pub(super) unsafe extern "C" fn hooks_flags(buffer: *mut *mut c_void, len: *mut usize) -> CUresult {
    static FLAGS: Shared<64> = Shared::new();
    // SAFETY: the caller's out pointers.
    unsafe { FLAGS.hand_out(buffer, len) };
    0
}

/// TOOLS_TLS 2: what a tool keeps for the thread; there is none.
pub(super) unsafe extern "C" fn tools_tls(out: *mut *mut c_void) -> CUresult {
    // SAFETY: the caller's out pointer.
    status(unsafe { ffi::write(out, std::ptr::null_mut()) })
}

/// NULL is the current context, which may be a primary one that is not active yet.
fn storage_of(handle: CUcontext) -> Result<Arc<Context>, CuError> {
    if handle.is_null() { context::current_or_dead() } else { context::by_handle(handle) }
}

/// CONTEXT_LOCAL_STORAGE 0.
pub(super) unsafe extern "C" fn storage_put(
    ctx: CUcontext,
    key: usize,
    value: usize,
    destructor: Option<Destructor>,
) -> CUresult {
    status(storage_of(ctx).map(|ctx| ctx.storage.put(key, value, destructor)))
}

/// CONTEXT_LOCAL_STORAGE 1.
pub(super) unsafe extern "C" fn storage_delete(ctx: CUcontext, key: usize) -> CUresult {
    let deleted = storage_of(ctx).map(|ctx| ctx.storage.delete(key));
    status(deleted.and_then(|was_there| was_there.then_some(()).ok_or(CuError::INVALID_HANDLE)))
}

/// CONTEXT_LOCAL_STORAGE 2. On almost every call of the runtime.
pub(super) unsafe extern "C" fn storage_get(
    value: *mut usize,
    ctx: CUcontext,
    key: usize,
) -> CUresult {
    let found = if ctx.is_null() {
        context::with_current(|top| top.and_then(|ctx| ctx.storage.get(key)))
    } else {
        context::by_handle(ctx).ok().and_then(|ctx| ctx.storage.get(key))
    };
    match found {
        // SAFETY: the caller's out pointer.
        Some(found) => status(unsafe { ffi::write(value, found) }),
        None => CuError::INVALID_HANDLE.0,
    }
}

/// CONTEXT_CHECKS 2: 0, and 0 written, on the real driver.
pub(super) unsafe extern "C" fn context_check(
    _ctx: CUcontext,
    a: *mut u32,
    b: *mut *mut c_void,
) -> CUresult {
    // SAFETY: the caller's out pointers.
    unsafe {
        ffi::write_optional(a, 0);
        ffi::write_optional(b, std::ptr::null_mut());
    }
    0
}

/// CONTEXT_CHECKS 3.
pub(super) unsafe extern "C" fn context_check_all() -> CUresult {
    0
}

/// Tools context 3: the device of a context.
pub(super) unsafe extern "C" fn context_device(ctx: CUcontext, out: *mut CUdevice) -> CUresult {
    // SAFETY: the caller's out pointer.
    status(storage_of(ctx).and_then(|ctx| unsafe { ffi::write(out, ctx.ordinal() as CUdevice) }))
}

/// Tools context 4: a context's number, from 1.
pub(super) unsafe extern "C" fn context_id(ctx: CUcontext, out: *mut u64) -> CUresult {
    // SAFETY: the caller's out pointer.
    status(storage_of(ctx).and_then(|ctx| unsafe { ffi::write(out, u64::from(ctx.id().0.max(1))) }))
}

/// Tools context 51: what a stream's handle stands for; the default streams have several. Callers
/// were seen to hand it to 39 and to nothing else: it is the stream's number, not an address.
/// Default streams are the current context's, which callers passed; `per_thread` says which of them
/// NULL is.
pub(super) unsafe extern "C" fn stream_of_handle(
    _ctx: CUcontext,
    handle: CUstream,
    out: *mut usize,
    per_thread: u32,
) -> CUresult {
    let named =
        if handle == CUstream::NULL && per_thread != 0 { CUstream::PER_THREAD } else { handle };
    // SAFETY: the caller's out pointer.
    status(stream::resolve(named).and_then(|id| unsafe { ffi::write(out, id.0 as usize) }))
}

/// Tools context 39: the number of what 51 told, which no other stream has or gets.
pub(super) unsafe extern "C" fn stream_number(
    _ctx: CUcontext,
    stream: usize,
    out: *mut u64,
) -> CUresult {
    // SAFETY: the caller's out pointer.
    status(unsafe { ffi::write(out, stream as u64) })
}

/// Bytes of each block that slot 4 of table 1734dc26 hands out; callers used less than 192.
const BLOCK: usize = 192;

/// Table 1734dc26, 4: two small blocks of host memory, one after the other.
pub(super) unsafe extern "C" fn two_blocks(a: *mut *mut c_void, b: *mut *mut c_void) -> CUresult {
    // SAFETY: calloc has no preconditions.
    let memory = unsafe { libc::calloc(2, BLOCK) };
    if memory.is_null() {
        return CuError::OUT_OF_MEMORY.0;
    }
    // SAFETY: the caller's out pointers; the second block lies within the allocation.
    unsafe {
        ffi::write_optional(a, memory);
        ffi::write_optional(b, memory.byte_add(BLOCK));
    }
    0
}

/// Table 1734dc26, 13: frees both.
pub(super) unsafe extern "C" fn free_blocks(a: *mut c_void, b: *mut c_void) -> CUresult {
    // A pair is one allocation that starts at the lower address; anything else is left alone.
    let (first, second) = if a < b { (a, b) } else { (b, a) };
    if !first.is_null() && second as usize - first as usize == BLOCK {
        // SAFETY: `two_blocks` made the pair, and the caller is done with it.
        unsafe { libc::free(first) };
    }
    0
}

/// What the real slot was seen to return, and cuFFT takes 0 for a failure.
const SEEN_RESULT: CUresult = 1;

type EachFunction = unsafe extern "C" fn(user: *mut c_void, function: CUfunction) -> u32;

/// Tools module 7: calls back for every function of a module.
pub(super) unsafe extern "C" fn each_function(
    _ctx: CUcontext,
    module: CUmodule,
    callback: Option<EachFunction>,
    user: *mut c_void,
) -> CUresult {
    let Some(callback) = callback else { return CuError::INVALID_VALUE.0 };
    let functions = match module::functions_of(module) {
        Ok(functions) => functions,
        Err(error) => {
            log::line(&format!("private table tools module (6e163fbe), slot 7: {error}"));
            return error.0;
        }
    };
    if entry::logging() {
        log::trace(&format!("each_function({module:x?}): {functions:x?}"));
    }
    for function in functions {
        // SAFETY: the caller's function, with the caller's word.
        unsafe { callback(user, function) };
    }
    SEEN_RESULT
}
