//! Functions by which the kernel reads a file without a look at how long it is now.

use crate::real::real;
use kedge_cache_client::FILES;
use libc::{c_int, c_uint, c_void, off64_t, size_t, ssize_t};

/// Takes the place of C's.
///
/// # Safety
/// As of C's.
#[unsafe(no_mangle)]
unsafe extern "C" fn mmap64(
    address: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off64_t,
) -> *mut c_void {
    if fd >= 0 && flags & libc::MAP_ANONYMOUS == 0 {
        FILES.maps(fd);
    }
    real!(
        MMAP as fn(*mut c_void, size_t, c_int, c_int, c_int, off64_t) -> *mut c_void,
        libc::SYS_mmap,
        (address, length, protection, flags, fd, offset)
    )
}

/// Takes the place of C's, which is the same as [`mmap64`] where offsets have 64 bits.
///
/// # Safety
/// As of C's.
#[unsafe(no_mangle)]
unsafe extern "C" fn mmap(
    address: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off64_t,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe { mmap64(address, length, protection, flags, fd, offset) }
}

/// Takes the place of C's.
///
/// # Safety
/// As of C's.
#[unsafe(no_mangle)]
unsafe extern "C" fn sendfile64(
    to: c_int,
    from: c_int,
    offset: *mut off64_t,
    length: size_t,
) -> ssize_t {
    FILES.refresh(from);
    real!(
        SENDFILE as fn(c_int, c_int, *mut off64_t, size_t) -> ssize_t,
        libc::SYS_sendfile,
        (to, from, offset, length)
    )
}

/// Takes the place of C's, which is the same as [`sendfile64`] where offsets have 64 bits.
///
/// # Safety
/// As of C's.
#[unsafe(no_mangle)]
unsafe extern "C" fn sendfile(
    to: c_int,
    from: c_int,
    offset: *mut off64_t,
    length: size_t,
) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe { sendfile64(to, from, offset, length) }
}

/// Takes the place of C's.
///
/// # Safety
/// As of C's.
#[unsafe(no_mangle)]
unsafe extern "C" fn splice(
    from: c_int,
    from_at: *mut off64_t,
    to: c_int,
    to_at: *mut off64_t,
    length: size_t,
    flags: c_uint,
) -> ssize_t {
    FILES.refresh(from);
    real!(
        SPLICE as fn(c_int, *mut off64_t, c_int, *mut off64_t, size_t, c_uint) -> ssize_t,
        libc::SYS_splice,
        (from, from_at, to, to_at, length, flags)
    )
}

/// Takes the place of C's.
///
/// # Safety
/// As of C's.
#[unsafe(no_mangle)]
unsafe extern "C" fn copy_file_range(
    from: c_int,
    from_at: *mut off64_t,
    to: c_int,
    to_at: *mut off64_t,
    length: size_t,
    flags: c_uint,
) -> ssize_t {
    FILES.refresh(from);
    real!(
        COPY as fn(c_int, *mut off64_t, c_int, *mut off64_t, size_t, c_uint) -> ssize_t,
        libc::SYS_copy_file_range,
        (from, from_at, to, to_at, length, flags)
    )
}
