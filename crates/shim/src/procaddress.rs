//! cuGetProcAddress: a function by name, CUDA version and kind of default stream.

use crate::{ffi, generated::procs::PROCS, init};
use kedge_cuda_types::CuError;
use std::ffi::{c_char, c_int, c_void};

/// One symbol under the name and from the version at which it is asked for.
#[derive(Debug)]
pub(crate) struct Proc {
    pub(crate) name: &'static str,
    pub(crate) version: u32,
    /// A `_ptds` or `_ptsz` symbol.
    pub(crate) per_thread: bool,
    pub(crate) address: Address,
}

/// A function's address, which many threads may read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Address(pub(crate) *const ());

// SAFETY: the address of a function: nothing is reached through it but by calling.
unsafe impl Sync for Address {}

macro_rules! proc {
    ($name:literal, $version:literal, $per_thread:literal, $($symbol:ident)::+) => {
        Proc {
            name: $name,
            version: $version,
            per_thread: $per_thread,
            address: $crate::procaddress::Address($($symbol)::+ as *const ()),
        }
    };
}
pub(crate) use proc;

/// CUdriverProcAddress_flags: prefer the per-thread variants.
const PER_THREAD_DEFAULT_STREAM: u64 = 2;
const FLAGS: u64 = 3;

/// CUdriverProcAddressQueryResult.
const FOUND: u32 = 0;
const SYMBOL_NOT_FOUND: u32 = 1;
const VERSION_NOT_SUFFICIENT: u32 = 2;

/// The newest symbol for `name` that is not newer than `version`; with `per_thread` a variant that
/// uses the thread's default stream, where there is one.
fn find(name: &str, version: u32, per_thread: bool) -> Result<*const (), u32> {
    let start = PROCS.partition_point(|proc| proc.name < name);
    let named = || PROCS[start..].iter().take_while(|proc| proc.name == name);
    if named().next().is_none() {
        return Err(SYMBOL_NOT_FOUND);
    }
    let newest = |per_thread| {
        named().filter(|proc| proc.per_thread == per_thread && proc.version <= version).last()
    };
    let variant = if per_thread { newest(true) } else { None };
    let proc = variant.or_else(|| newest(false)).ok_or(VERSION_NOT_SUFFICIENT)?;
    Ok(proc.address.0)
}

/// # Safety
/// The C API's: `symbol` is a C string, `pfn` valid for a write, `status` too or NULL.
unsafe fn get(
    symbol: *const c_char,
    pfn: *mut *mut c_void,
    version: c_int,
    flags: u64,
    status: *mut u32,
) -> Result<(), CuError> {
    // SAFETY: the caller's C string.
    let name = unsafe { ffi::string(symbol)? };
    let version = u32::try_from(version).map_err(|_| CuError::INVALID_VALUE)?;
    if flags & !FLAGS != 0 || version > newest_version() {
        return Err(CuError::INVALID_VALUE);
    }
    let found = find(name, version, flags & PER_THREAD_DEFAULT_STREAM != 0);
    let (address, outcome) = match found {
        Ok(address) => (address.cast_mut().cast(), FOUND),
        Err(outcome) => (std::ptr::null_mut(), outcome),
    };
    // SAFETY: the caller's out pointers.
    unsafe {
        ffi::write(pfn, address)?;
        ffi::write_optional(status, outcome);
    }
    // With a status the caller learns it there; without, only from the return value.
    if outcome != FOUND && status.is_null() { Err(CuError::NOT_FOUND) } else { Ok(()) }
}

/// Requests beyond the CUDA version that this library knows of are refused as CUDA refuses them;
/// a runtime of the same major version may ask for its own.
fn newest_version() -> u32 {
    init::driver_version() / 1000 * 1000 + 999
}

pub(crate) unsafe fn cuGetProcAddress(
    symbol: *const c_char,
    pfn: *mut *mut c_void,
    version: c_int,
    flags: u64,
) -> Result<(), CuError> {
    // SAFETY: `symbol` is NULL or a C string, and `pfn` NULL or valid for a write: the API asks
    // that of the program.
    unsafe { get(symbol, pfn, version, flags, std::ptr::null_mut()) }
}

pub(crate) unsafe fn cuGetProcAddress_v2(
    symbol: *const c_char,
    pfn: *mut *mut c_void,
    version: c_int,
    flags: u64,
    status: *mut u32,
) -> Result<(), CuError> {
    // SAFETY: `symbol` is NULL or a C string, and the others are NULL or valid for writes: the API
    // asks that of the program.
    unsafe { get(symbol, pfn, version, flags, status) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generated::exports;

    fn is(found: Result<*const (), u32>, symbol: *const ()) -> bool {
        found == Ok(symbol)
    }

    #[test]
    fn the_table_is_sorted() {
        assert!(PROCS.is_sorted_by_key(|proc| (proc.name, proc.version)));
    }

    #[test]
    fn picks_by_version() {
        assert!(is(find("cuCtxGetDevice", 2000, false), exports::cuCtxGetDevice as *const ()));
        assert!(is(find("cuCtxGetDevice", 12080, false), exports::cuCtxGetDevice as *const ()));
        assert!(is(find("cuCtxGetDevice", 13000, false), exports::cuCtxGetDevice_v2 as *const ()));
        assert!(is(find("cuMemAlloc", 3020, false), exports::cuMemAlloc_v2 as *const ()));
        assert_eq!(find("cuMemAllocAsync", 11010, false), Err(VERSION_NOT_SUFFICIENT));
        assert_eq!(find("cuNoSuch", 13000, false), Err(SYMBOL_NOT_FOUND));
        assert_eq!(find("", 0, false), Err(SYMBOL_NOT_FOUND));
    }

    #[test]
    fn picks_by_default_stream() {
        let copy = "cuMemcpyHtoD";
        assert!(is(find(copy, 7000, true), exports::cuMemcpyHtoD_v2_ptds as *const ()));
        assert!(is(find(copy, 7000, false), exports::cuMemcpyHtoD_v2 as *const ()));
        assert!(is(find("cuMemAlloc", 12000, true), exports::cuMemAlloc_v2 as *const ()));
    }

    #[test]
    fn says_what_was_missing() {
        let mut pfn = std::ptr::null_mut();
        let mut status = 7;
        // SAFETY: live C strings and out pointers.
        unsafe {
            let name = c"cuNoSuch".as_ptr();
            assert_eq!(cuGetProcAddress(name, &mut pfn, 12000, 0), Err(CuError::NOT_FOUND));
            assert_eq!(cuGetProcAddress_v2(name, &mut pfn, 12000, 0, &mut status), Ok(()));
            assert_eq!((pfn.is_null(), status), (true, SYMBOL_NOT_FOUND));
            let empty = c"".as_ptr();
            assert_eq!(cuGetProcAddress_v2(empty, &mut pfn, 0, 0, &mut status), Ok(()));
            let init = c"cuInit".as_ptr();
            assert_eq!(cuGetProcAddress_v2(init, &mut pfn, 2000, 0, &mut status), Ok(()));
            assert_eq!((pfn.is_null(), status), (false, FOUND));
        }
    }
}
