//! Functions that write.

use crate::real::{may_be_cancelled, real};
use kedge_cache_client::FILES;
use kedge_cache_client::c::{list, one, told};
use libc::{c_int, c_void, iovec, off64_t, size_t, ssize_t};

/// Takes the place of C's.
///
/// # Safety
/// As of C's.
#[unsafe(no_mangle)]
unsafe extern "C" fn write(fd: c_int, bytes: *const c_void, length: size_t) -> ssize_t {
    may_be_cancelled();
    match FILES.write(fd, &one(bytes, length), None) {
        Some(result) => told(result),
        None => real!(
            WRITE as fn(c_int, *const c_void, size_t) -> ssize_t,
            libc::SYS_write,
            (fd, bytes, length)
        ),
    }
}

/// Takes the place of C's.
///
/// # Safety
/// As of C's.
#[unsafe(no_mangle)]
unsafe extern "C" fn pwrite64(
    fd: c_int,
    bytes: *const c_void,
    length: size_t,
    offset: off64_t,
) -> ssize_t {
    may_be_cancelled();
    match FILES.write(fd, &one(bytes, length), Some(offset)) {
        Some(result) => told(result),
        None => real!(
            PWRITE as fn(c_int, *const c_void, size_t, off64_t) -> ssize_t,
            libc::SYS_pwrite64,
            (fd, bytes, length, offset)
        ),
    }
}

/// Takes the place of C's, which is the same as [`pwrite64`] where offsets have 64 bits.
///
/// # Safety
/// As of C's.
#[unsafe(no_mangle)]
unsafe extern "C" fn pwrite(
    fd: c_int,
    bytes: *const c_void,
    length: size_t,
    offset: off64_t,
) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe { pwrite64(fd, bytes, length, offset) }
}

/// Takes the place of C's.
///
/// # Safety
/// As of C's.
#[unsafe(no_mangle)]
unsafe extern "C" fn writev(fd: c_int, parts: *const iovec, count: c_int) -> ssize_t {
    may_be_cancelled();
    // SAFETY: the caller's promise.
    match unsafe { list(parts, count) }.and_then(|parts| FILES.write(fd, parts, None)) {
        Some(result) => told(result),
        None => real!(
            WRITEV as fn(c_int, *const iovec, c_int) -> ssize_t,
            libc::SYS_writev,
            (fd, parts, count)
        ),
    }
}

/// Takes the place of C's.
///
/// # Safety
/// As of C's.
#[unsafe(no_mangle)]
unsafe extern "C" fn pwritev64(
    fd: c_int,
    parts: *const iovec,
    count: c_int,
    offset: off64_t,
) -> ssize_t {
    may_be_cancelled();
    // SAFETY: the caller's promise.
    match unsafe { list(parts, count) }.and_then(|parts| FILES.write(fd, parts, Some(offset))) {
        Some(result) => told(result),
        // The kernel takes an offset's upper half where longs have 32 bits, and ignores it here.
        None => real!(
            PWRITEV as fn(c_int, *const iovec, c_int, off64_t) -> ssize_t,
            libc::SYS_pwritev,
            (fd, parts, count, offset)
        ),
    }
}

/// Takes the place of C's, which is the same as [`pwritev64`] where offsets have 64 bits.
///
/// # Safety
/// As of C's.
#[unsafe(no_mangle)]
unsafe extern "C" fn pwritev(
    fd: c_int,
    parts: *const iovec,
    count: c_int,
    offset: off64_t,
) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe { pwritev64(fd, parts, count, offset) }
}
