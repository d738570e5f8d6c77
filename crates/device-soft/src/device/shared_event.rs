//! Events that several processes record and wait for: two counters in memory that all of them map.

use super::runtime::Runtime;
use super::shareable::{sealed, sealed_size};
use kedge_cuda_types::CuError;
use kedge_device::Done;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const BYTES: usize = 4096;

/// Records of all processes, counted as they are submitted and as they are reached.
#[repr(C)]
struct Counters {
    submitted: AtomicU64,
    reached: AtomicU64,
}

pub(super) struct SharedEvent {
    counters: NonNull<Counters>,
    file: File,
}

// SAFETY: the mapping lives as long as the value, is tied to no thread, and holds atomics alone.
unsafe impl Send for SharedEvent {}
// SAFETY: as above.
unsafe impl Sync for SharedEvent {}

impl SharedEvent {
    pub(super) fn create() -> Result<Arc<Self>, CuError> {
        let file = sealed("kedge-event\0", BYTES as u64).map_err(|_| CuError::OUT_OF_MEMORY)?;
        Self::map(file)
    }

    /// The event of another process; INVALID_VALUE where the descriptor is no event's.
    pub(super) fn open(fd: OwnedFd) -> Result<Arc<Self>, CuError> {
        match sealed_size(fd.as_fd())? {
            size if size == BYTES as u64 => Self::map(fd.into()),
            _ => Err(CuError::INVALID_VALUE),
        }
    }

    fn map(file: File) -> Result<Arc<Self>, CuError> {
        let (access, shared) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let at =
            unsafe { libc::mmap(std::ptr::null_mut(), BYTES, access, shared, file.as_raw_fd(), 0) };
        match NonNull::new(at.cast::<Counters>()) {
            Some(counters) if at != libc::MAP_FAILED => Ok(Arc::new(Self { counters, file })),
            _ => Err(CuError::OUT_OF_MEMORY),
        }
    }

    pub(super) fn export(&self) -> Result<OwnedFd, CuError> {
        Ok(self.file.try_clone().map_err(|_| CuError::OPERATING_SYSTEM)?.into())
    }

    fn counters(&self) -> &Counters {
        // SAFETY: page-aligned, BYTES are mapped while `self` lives and the file cannot shrink; any
        // content, changing at any time, is valid for atomics.
        unsafe { self.counters.as_ref() }
    }

    /// One more record is submitted; its number.
    pub(super) fn submit(&self) -> u64 {
        self.counters().submitted.fetch_add(1, Ordering::AcqRel).wrapping_add(1)
    }

    pub(super) fn reach(&self, number: u64) {
        self.counters().reached.fetch_max(number, Ordering::AcqRel);
    }

    /// The latest record, if it is not reached.
    pub(super) fn pending(&self) -> Option<u64> {
        let number = self.counters().submitted.load(Ordering::Acquire);
        (!self.is_reached(number)).then_some(number)
    }

    pub(super) fn is_reached(&self, number: u64) -> bool {
        self.counters().reached.load(Ordering::Acquire) >= number
    }

    /// Calls `done` once record `number` is reached.
    pub(super) fn when_reached(self: Arc<Self>, runtime: &Runtime, number: u64, done: Done) {
        let mut done = Some(done);
        runtime.engines.poll(move || {
            let over = self.is_reached(number);
            if over && let Some(done) = done.take() {
                done(Ok(()));
            }
            over
        });
    }
}

impl Drop for SharedEvent {
    fn drop(&mut self) {
        // SAFETY: this mapping is ours, and no reference into it outlives `self`.
        unsafe { libc::munmap(self.counters.as_ptr().cast(), BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_processes_see_one_event() {
        let here = SharedEvent::create().unwrap();
        let there = SharedEvent::open(here.export().unwrap()).unwrap();
        assert_eq!(there.pending(), None);
        let number = here.submit();
        assert_eq!(there.pending(), Some(number));
        here.reach(number);
        assert_eq!(there.pending(), None);
        assert_eq!(there.submit(), number + 1);
        assert!(!here.is_reached(number + 1));
    }

    #[test]
    fn what_is_no_event_is_refused() {
        let memory = super::super::shareable::create(0, 2 << 20).unwrap();
        assert_eq!(SharedEvent::open(memory.into()).err(), Some(CuError::INVALID_VALUE));
        let (pipe, _) = std::io::pipe().unwrap();
        assert_eq!(SharedEvent::open(pipe.into()).err(), Some(CuError::INVALID_VALUE));
    }
}
