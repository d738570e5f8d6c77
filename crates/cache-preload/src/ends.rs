//! Interposes the C functions that close descriptors, or put others in their place.

use crate::real::{self, real};
use kedge_cache_client::{FILES, fail};
use libc::{FILE, c_int, c_uint, c_void};

/// Sets errno to EBADF, and returns what a function returns whose descriptor is not open.
fn not_open() -> c_int {
    fail(libc::EBADF) as c_int
}

/// Interposes `close`: forgets what is known of the descriptor.
///
/// # Safety
/// As for the C function.
#[unsafe(no_mangle)]
unsafe extern "C" fn close(fd: c_int) -> c_int {
    if FILES.is_own(fd) {
        return not_open();
    }
    FILES.forget(fd);
    real!(CLOSE as fn(c_int) -> c_int, libc::SYS_close, (fd))
}

/// Interposes `fclose`: forgets what is known of the stream's descriptor.
///
/// # Safety
/// As for the C function.
#[unsafe(no_mangle)]
unsafe extern "C" fn fclose(stream: *mut FILE) -> c_int {
    let known = real::FCLOSE.get();
    let found = if known.is_null() { real::FCLOSE.find() } else { known };
    if found.is_null() {
        return fail(libc::ENOSYS) as c_int;
    }
    if !stream.is_null() {
        // SAFETY: the pointer is this thread's errno, which lives as long as the thread.
        let errno = unsafe { &mut *libc::__errno_location() };
        let before = *errno;
        // SAFETY: the caller promises a stream. One without a descriptor gives -1.
        FILES.forget(unsafe { libc::fileno(stream) });
        *errno = before;
    }
    // SAFETY: `found` is the next library's `fclose`, which has this type.
    let function = unsafe {
        std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut FILE) -> c_int>(found)
    };
    // SAFETY: the caller promises a stream that it does not use again.
    unsafe { function(stream) }
}

/// Makes way for another file at descriptor `new`; returns false if this library needs it now.
fn make_way(new: c_int) -> bool {
    let gave_way = FILES.give_way(new);
    if gave_way {
        FILES.forget(new);
    }
    gave_way
}

/// Interposes `dup2`: forgets what is known of `new`.
///
/// It fails with EBUSY, as Linux does in a race, if `new` is a descriptor of this library's own
/// that stays in use.
///
/// # Safety
/// As for the C function.
#[unsafe(no_mangle)]
unsafe extern "C" fn dup2(old: c_int, new: c_int) -> c_int {
    if FILES.is_own(old) {
        return not_open();
    }
    if old != new && !make_way(new) {
        return fail(libc::EBUSY) as c_int;
    }
    real!(DUP2 as fn(c_int, c_int) -> c_int, libc::SYS_dup2, (old, new))
}

/// Interposes `dup3`, as [`dup2`].
///
/// # Safety
/// As for the C function.
#[unsafe(no_mangle)]
unsafe extern "C" fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int {
    if FILES.is_own(old) {
        return not_open();
    }
    if old != new && !make_way(new) {
        return fail(libc::EBUSY) as c_int;
    }
    real!(DUP3 as fn(c_int, c_int, c_int) -> c_int, libc::SYS_dup3, (old, new, flags))
}

/// Interposes `close_range`: forgets what is known of the range, unless it is only marked for exec.
///
/// # Safety
/// As for the C function.
#[unsafe(no_mangle)]
unsafe extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    if flags.cast_unsigned() & libc::CLOSE_RANGE_CLOEXEC == 0 {
        FILES.forget_range(first, last);
    }
    real!(
        CLOSE_RANGE as fn(c_uint, c_uint, c_int) -> c_int,
        libc::SYS_close_range,
        (first, last, flags)
    )
}

/// Interposes `closefrom` (glibc 2.34), which older C libraries lack: this one makes the system
/// call there.
///
/// # Safety
/// As for the C function.
#[unsafe(no_mangle)]
unsafe extern "C" fn closefrom(first: c_int) {
    let least = first.max(0).cast_unsigned();
    FILES.forget_range(least, c_uint::MAX);
    if real::CLOSEFROM.get().is_null() {
        // SAFETY: the caller wants all descriptors from `first` on closed; the call touches no
        // memory.
        unsafe { libc::syscall(libc::SYS_close_range, least, c_uint::MAX, 0) };
        return;
    }
    // SAFETY: the address is the next library's `closefrom`, which has this type.
    let function = unsafe {
        std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_int)>(real::CLOSEFROM.get())
    };
    // SAFETY: the caller wants all descriptors from `first` on closed.
    unsafe { function(first) }
}
