//! That all ranks have been saved.

use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether all ranks have been saved and end: one flag for this process and for those that it
/// forks, as which the init of a restarted job takes its checkpoints.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Saved(&'static AtomicBool);

impl Saved {
    /// It stays for as long as the process.
    pub(crate) fn new() -> Saved {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping, wherever the kernel puts it.
        let at = unsafe { libc::mmap(null_mut(), size_of::<AtomicBool>(), access, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            return Saved(Box::leak(Box::default()));
        }
        // SAFETY: it begins with a page, is never unmapped, and all that use it do so by this type,
        // whose `false` is the zero that it holds.
        Saved(unsafe { &*at.cast::<AtomicBool>() })
    }

    pub(crate) fn set(self) {
        self.0.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_set(self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}
