//! C's own functions, behind those of this library.
//!
//! They are looked up once, when this library is loaded: a later look-up might be in a signal
//! handler. Before that, a call is the kernel's: without C's function it is no point where a
//! thread can be cancelled, but there are no other threads yet.

use libc::c_void;
use std::ffi::CStr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// A function of C's library.
#[derive(Debug)]
pub(crate) struct Real {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Real {
    const fn new(name: &'static CStr) -> Real {
        Real { name, found: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// Returns its address, or null before this library was loaded.
    pub(crate) fn get(&self) -> *mut c_void {
        self.found.load(Ordering::Relaxed)
    }

    /// Looks it up.
    pub(crate) fn find(&self) -> *mut c_void {
        // SAFETY: the name ends with a zero.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.found.store(found, Ordering::Relaxed);
        found
    }
}

macro_rules! functions {
    ($($place:ident = $name:literal),* $(,)?) => {
        $(pub(crate) static $place: Real = Real::new($name);)*

        /// Looks all of them up.
        pub(crate) fn find_all() {
            $($place.find();)*
        }
    };
}

functions! {
    WRITE = c"write", PWRITE = c"pwrite64", WRITEV = c"writev", PWRITEV = c"pwritev64",
    CLOSE = c"close", FCLOSE = c"fclose", DUP2 = c"dup2", DUP3 = c"dup3",
    CLOSE_RANGE = c"close_range", CLOSEFROM = c"closefrom",
    MMAP = c"mmap64", SENDFILE = c"sendfile64", SPLICE = c"splice",
    COPY = c"copy_file_range", TESTCANCEL = c"pthread_testcancel",
}

/// Is a point where the thread can be cancelled, as C's function is that has been called.
pub(crate) fn may_be_cancelled() {
    let found = TESTCANCEL.get();
    if !found.is_null() {
        // SAFETY: C's function of that name has this type.
        let function = unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn()>(found) };
        // SAFETY: nothing here is left undone where the thread ends.
        unsafe { function() };
    }
}

/// Calls C's function, of the type that is told, or makes a system call where it was not found.
macro_rules! real {
    ($place:ident as fn($($type:ty),*) -> $result:ty, $number:expr, ($($argument:expr),*)) => {{
        let found = $crate::real::$place.get();
        if found.is_null() {
            // SAFETY: the call is the one that the caller has made, with what it has promised.
            unsafe { libc::syscall($number, $($argument),*) as $result }
        } else {
            // SAFETY: C's function of that name has this type.
            let function = unsafe {
                std::mem::transmute::<
                    *mut libc::c_void,
                    unsafe extern "C" fn($($type),*) -> $result,
                >(found)
            };
            // SAFETY: as above.
            unsafe { function($($argument),*) }
        }
    }};
}
pub(crate) use real;
