//! The functions of `include/kedge_cache.h`.

use crate::files::{FILES, start};
use crate::sys::fail;
use libc::{c_int, c_void, iovec, off64_t, size_t, ssize_t};

/// Has this library begin when it is loaded.
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = loaded;

extern "C" fn loaded() {
    start();
}

/// Returns what a C function returns.
pub fn told(result: Result<usize, c_int>) -> ssize_t {
    // No write is longer than `ssize_t` tells.
    result.map_or_else(fail, usize::cast_signed)
}

/// Returns bytes as one part.
pub fn one(bytes: *const c_void, length: size_t) -> [iovec; 1] {
    [iovec { iov_base: bytes.cast_mut(), iov_len: length }]
}

/// Does what `write` does.
///
/// # Safety
/// As of `write`: none but of what the bytes are.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kedge_cache_write(
    fd: c_int,
    bytes: *const c_void,
    length: size_t,
) -> ssize_t {
    match FILES.write(fd, &one(bytes, length), None) {
        Some(result) => told(result),
        // SAFETY: the caller's promise.
        None => unsafe { libc::write(fd, bytes, length) },
    }
}

/// Does what `pwrite` does.
///
/// # Safety
/// As of `pwrite`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kedge_cache_pwrite(
    fd: c_int,
    bytes: *const c_void,
    length: size_t,
    offset: off64_t,
) -> ssize_t {
    match FILES.write(fd, &one(bytes, length), Some(offset)) {
        Some(result) => told(result),
        // SAFETY: the caller's promise.
        None => unsafe { libc::pwrite64(fd, bytes, length, offset) },
    }
}

/// Does what `writev` does.
///
/// # Safety
/// `parts` are `count` parts.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kedge_cache_writev(
    fd: c_int,
    parts: *const iovec,
    count: c_int,
) -> ssize_t {
    // SAFETY: the caller's promise.
    match unsafe { list(parts, count) }.and_then(|parts| FILES.write(fd, parts, None)) {
        Some(result) => told(result),
        // SAFETY: as above.
        None => unsafe { libc::writev(fd, parts, count) },
    }
}

/// Does what `pwritev` does.
///
/// # Safety
/// `parts` are `count` parts.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kedge_cache_pwritev(
    fd: c_int,
    parts: *const iovec,
    count: c_int,
    offset: off64_t,
) -> ssize_t {
    // SAFETY: the caller's promise.
    match unsafe { list(parts, count) }.and_then(|parts| FILES.write(fd, parts, Some(offset))) {
        Some(result) => told(result),
        // SAFETY: as above.
        None => unsafe { libc::pwritev64(fd, parts, count, offset) },
    }
}

/// Forgets a descriptor that is closed or replaced by a way that nobody sees: not needed, and
/// sooner.
#[unsafe(no_mangle)]
pub extern "C" fn kedge_cache_forget(fd: c_int) {
    FILES.forget(fd);
}

/// Returns the parts of a `writev`. `None` of what the kernel refuses, or has nothing of.
///
/// # Safety
/// They are there.
pub unsafe fn list<'a>(parts: *const iovec, count: c_int) -> Option<&'a [iovec]> {
    let count = usize::try_from(count).ok().filter(|count| (1..=1024).contains(count))?;
    let is_list = !parts.is_null() && parts.is_aligned();
    // SAFETY: it is no null pointer, aligned, and `count` parts by the caller's promise.
    is_list.then(|| unsafe { std::slice::from_raw_parts(parts, count) })
}
