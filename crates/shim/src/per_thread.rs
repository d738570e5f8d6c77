//! What is kept for each thread as long as the thread may call.
//!
//! A `thread_local!` that has something to drop is gone while exit() runs the program's last
//! functions: the C library ends those of the thread that calls it before them. CUDA may be called
//! there, on the context that is current (libgomp's plugin ends its devices so). Values here are
//! dropped when their thread ends, by a key of the C library (pthread_key_create), and by exit()
//! never.

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::sync::OnceLock;
use std::thread::LocalKey;

/// One thread's value, in a `thread_local!`.
pub(crate) struct PerThread<T: 'static> {
    value: ManuallyDrop<RefCell<T>>,
    /// Whether the thread's end is known to [`AtEnd`].
    armed: Cell<bool>,
}

impl<T> PerThread<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self { value: ManuallyDrop::new(RefCell::new(value)), armed: Cell::new(false) }
    }
}

/// What is done when a thread ends that has changed its value.
pub(crate) struct AtEnd {
    clear: fn(),
    /// None: the process has no key left, and values of threads that end stay.
    key: OnceLock<Option<libc::pthread_key_t>>,
}

impl AtEnd {
    pub(crate) const fn new(clear: fn()) -> Self {
        Self { clear, key: OnceLock::new() }
    }

    fn arm(&'static self) {
        let made = || {
            let mut key = 0;
            // SAFETY: `key` is written, and `end` stays where it is: this library is not unloaded.
            let result = unsafe { libc::pthread_key_create(&mut key, Some(end)) };
            (result == 0).then_some(key)
        };
        let Some(key) = *self.key.get_or_init(made) else { return };
        // SAFETY: the key is ours, and its values are never written through.
        unsafe { libc::pthread_setspecific(key, std::ptr::from_ref(self).cast()) };
    }
}

unsafe extern "C" fn end(value: *mut c_void) {
    // SAFETY: `arm` alone sets values, each an `AtEnd` that is static.
    let this = unsafe { &*value.cast::<AtEnd>() };
    // What a value's own end does may fail, and must not unwind into the C library.
    let _ = std::panic::catch_unwind(this.clear);
}

/// Reads the calling thread's value.
#[inline]
pub(crate) fn read<T, R>(key: &'static LocalKey<PerThread<T>>, f: impl FnOnce(&T) -> R) -> R {
    key.with(|kept| f(&kept.value.borrow()))
}

/// Changes the calling thread's value, which `end` clears when the thread ends.
#[inline]
pub(crate) fn change<T, R>(
    key: &'static LocalKey<PerThread<T>>,
    end: &'static AtEnd,
    f: impl FnOnce(&mut T) -> R,
) -> R {
    key.with(|kept| {
        if !kept.armed.replace(true) {
            end.arm();
        }
        f(&mut kept.value.borrow_mut())
    })
}

/// Drops the calling thread's value. For [`AtEnd`].
pub(crate) fn clear<T: Default>(key: &'static LocalKey<PerThread<T>>) {
    key.with(|kept| {
        // What other ends do may set a value again.
        kept.armed.set(false);
        let value = kept.value.replace(T::default());
        drop(value);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    static DROPPED: AtomicU32 = AtomicU32::new(0);

    #[derive(Default)]
    struct Dropped(u32);

    impl Drop for Dropped {
        fn drop(&mut self) {
            DROPPED.fetch_add(self.0, Ordering::Relaxed);
        }
    }

    thread_local! {
        static VALUE: PerThread<Vec<Dropped>> = const { PerThread::new(Vec::new()) };
        /// Ends before keys do, as exit() has the thread-locals of its thread end.
        static BEFORE: Last = const { Last };
    }
    static END: AtEnd = AtEnd::new(|| clear(&VALUE));

    struct Last;

    impl Drop for Last {
        fn drop(&mut self) {
            SEEN.store(read(&VALUE, Vec::len) as u32, Ordering::Relaxed);
            change(&VALUE, &END, |all| all.push(Dropped(100)));
        }
    }

    static SEEN: AtomicU32 = AtomicU32::new(0);

    #[test]
    fn a_value_outlives_thread_locals_and_not_its_thread() {
        let thread = std::thread::spawn(|| {
            change(&VALUE, &END, |all| all.extend([1, 20].map(Dropped)));
            BEFORE.with(|_| ());
            assert_eq!(DROPPED.load(Ordering::Relaxed), 0);
            Arc::new(())
        });
        thread.join().unwrap();
        assert_eq!(SEEN.load(Ordering::Relaxed), 2);
        assert_eq!(DROPPED.load(Ordering::Relaxed), 121);
        assert_eq!(read(&VALUE, Vec::len), 0);
    }
}
