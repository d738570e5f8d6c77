//! Memory that goes off the devices while nothing runs, and comes back where it was: that of slabs, which is
//! what `cudaMalloc` and its like give.

use crate::NvidiaBackend;
use crate::restore::{Target, settle};
use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::device_of;
use kedge_device::SnapshotError;

impl NvidiaBackend {
    /// See [`kedge_device::Backend::vacate`].
    pub(crate) fn vacate_slabs(&self) -> Result<u64, SnapshotError> {
        self.shared.cache.surrender();
        let vacated = self.tables().arena.vacate();
        vacated.map_err(|error| SnapshotError::new(error, "a slab's memory cannot be given back"))
    }

    /// See [`kedge_device::Backend::occupy`].
    pub(crate) fn occupy_slabs(&self) -> Result<(), SnapshotError> {
        let occupied = self.or_with_less_cached(|| self.tables().arena.occupy());
        occupied
            .map_err(|error| SnapshotError::new(error, "the devices' memory cannot be had again"))
    }

    /// See [`kedge_device::Backend::refill`].
    pub(crate) fn refill_slab(&self, addr: u64, bytes: &[u8]) -> Result<(), SnapshotError> {
        let device = device_of(addr).ok_or(CuError::INVALID_VALUE)?;
        if !self.tables().arena.granted(addr, bytes.len() as u64) {
            return Err(CuError::INVALID_VALUE.into());
        }
        let ctx = self.context_on(device)?;
        self.restoring().uses(&ctx);
        Ok(self.upload(&Target { ctx, addr }, bytes)?)
    }

    /// See [`kedge_device::Backend::refilled`].
    pub(crate) fn all_refilled(&self) -> Result<(), SnapshotError> {
        let used = std::mem::take(&mut self.restoring().used);
        let settled = settle(&self.shared.driver, &used).and(self.shared.slots.settle());
        settled.map_err(|error| SnapshotError::new(error, "bytes did not come back to the devices"))
    }
}
