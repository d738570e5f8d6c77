//! The program's pointers.

use kedge_cuda_types::CuError;
use std::ffi::{CStr, c_char};

/// Stores a result. INVALID_VALUE for NULL.
///
/// # Safety
/// `to` is NULL or valid for a write of `T`, as the API's caller promises; it need not be aligned.
#[inline]
pub(crate) unsafe fn write<T>(to: *mut T, value: T) -> Result<(), CuError> {
    if to.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: `to` is not NULL, and so valid for a write, by this function's contract; it need not
    // be aligned.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// Stores a result that the program may decline with NULL.
///
/// # Safety
/// As [`write`].
#[inline]
pub(crate) unsafe fn write_optional<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: `to` is not NULL, and so valid for a write, by this function's contract; it need
        // not be aligned.
        unsafe { to.write_unaligned(value) };
    }
}

/// Reads an argument. INVALID_VALUE for NULL.
///
/// # Safety
/// `from` is NULL or valid for a read of `T`; it need not be aligned.
#[inline]
pub(crate) unsafe fn read<T: Copy>(from: *const T) -> Result<T, CuError> {
    if from.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: `from` is not NULL, and so valid for a read, by this function's contract; it need not
    // be aligned.
    Ok(unsafe { from.read_unaligned() })
}

/// Copies an array argument. INVALID_VALUE for NULL with a count.
///
/// # Safety
/// `from` is NULL or valid for reads of `count` values.
pub(crate) unsafe fn read_array<T: Copy>(from: *const T, count: usize) -> Result<Vec<T>, CuError> {
    if count == 0 {
        return Ok(Vec::new());
    }
    if from.is_null() || count > MAX_ARRAY {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: `from` is valid for `count` reads, by this function's contract.
    Ok((0..count).map(|i| unsafe { from.add(i).read_unaligned() }).collect())
}

/// More elements than any array argument has.
const MAX_ARRAY: usize = 1 << 26;

/// A name. INVALID_VALUE for NULL or what is not UTF-8.
///
/// # Safety
/// `from` is NULL or a C string that outlives `'a`.
pub(crate) unsafe fn string<'a>(from: *const c_char) -> Result<&'a str, CuError> {
    if from.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: `from` is a C string, by this function's contract.
    let text = unsafe { CStr::from_ptr(from) };
    text.to_str().map_err(|_| CuError::INVALID_VALUE)
}
