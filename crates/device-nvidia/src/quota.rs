//! How much of each device's memory a client may have, in slabs and handles: `--gpu-memory`.

use crate::NvidiaBackend;
use crate::tables::Tables;
use kedge_cuda_types::CuError;
use std::sync::atomic::{AtomicBool, Ordering};

#[derive(Debug)]
pub(crate) struct Quota {
    /// The largest number: there is none.
    bytes: u64,
    /// A restart makes what was allowed once, imported memory that is the client's own now as well.
    lifted: AtomicBool,
}

impl Quota {
    pub(crate) fn new(bytes: u64) -> Quota {
        Quota { bytes, lifted: AtomicBool::new(false) }
    }

    /// A restart begins, or is over.
    pub(crate) fn set_lifted(&self, lifted: bool) {
        self.lifted.store(lifted, Ordering::Relaxed);
    }

    /// Bytes of a device that may still be had, as far as this goes.
    pub(crate) fn left(&self, tables: &Tables, device: u32) -> u64 {
        if self.bytes == u64::MAX || self.lifted.load(Ordering::Relaxed) {
            return u64::MAX;
        }
        self.bytes.saturating_sub(tables.arena.used(device))
    }
}

impl NvidiaBackend {
    /// # Errors
    /// OUT_OF_MEMORY: the client may not have so many bytes more. Nothing that is kept elsewhere is
    /// in the way then.
    pub(crate) fn within_quota(&self, device: u32, bytes: u64) -> Result<(), CuError> {
        let left = self.quota.left(&self.tables(), device);
        if bytes <= left { Ok(()) } else { Err(CuError::OUT_OF_MEMORY) }
    }
}

#[cfg(test)]
mod tests {
    use crate::arena::GRANULE;
    use crate::fake::Turn;
    use crate::quota::Quota;
    use crate::snapshot_tests::{Quiet, bare};
    use crate::{CacheLimits, NvidiaBackend};
    use kedge_cuda_types::CuError;
    use kedge_cuda_types::arena::device_base;
    use kedge_device::Backend;
    use kedge_protocol::MemHandleId;
    use std::sync::Arc;

    #[test]
    fn slabs_and_handles_are_bounded_but_at_a_restart() {
        let (_turn, driver) = Turn::begin(64 << 20);
        let backend = bare(&driver, CacheLimits::default(), Arc::new(Quiet));
        let mut backend: NvidiaBackend = Arc::into_inner(backend).expect("no other has it");
        backend.quota = Quota::new(2 * GRANULE);
        let at = |index: u64| device_base(0) + index * GRANULE;
        let (handle, short) = (MemHandleId(1), Err(CuError::OUT_OF_MEMORY));
        backend.grant(0, at(0), GRANULE).unwrap();
        assert_eq!(backend.grant(0, at(1), 2 * GRANULE), short);
        backend.create_handle(handle, 0, GRANULE, false).unwrap();
        assert_eq!(backend.quota.left(&backend.tables(), 0), 0);
        assert_eq!(backend.grant(0, at(1), GRANULE), short);
        assert_eq!(backend.create_handle(MemHandleId(2), 0, GRANULE, false), short);
        backend.quota.set_lifted(true);
        backend.grant(0, at(1), GRANULE).unwrap();
        backend.quota.set_lifted(false);
        backend.destroy_handle(handle).unwrap();
        assert_eq!(backend.quota.left(&backend.tables(), 0), 0);
        backend.give_back(0, at(0), GRANULE).unwrap();
        backend.grant(0, at(2), GRANULE).unwrap();
    }
}
