//! Memory that goes off the devices while nothing runs, and comes back where it was: that of slabs,
//! which is what `cudaMalloc` and its like give, and of the program's handles (`cuMemCreate`).

use crate::NvidiaBackend;
use crate::restore::settle;
use kedge_device::{Object, SnapshotError};

impl NvidiaBackend {
    /// See [`kedge_device::Swap::vacate`].
    pub(crate) fn vacate_slabs(&self) -> Result<u64, SnapshotError> {
        self.shared.cache.surrender();
        let vacated = self.tables().arena.vacate();
        vacated.map_err(|error| SnapshotError::new(error, "a slab's memory cannot be given back"))
    }

    /// See [`kedge_device::Swap::occupy`].
    pub(crate) fn occupy_slabs(&self) -> Result<(), SnapshotError> {
        let occupied = self.allocate_releasing_cache(|| self.tables().arena.occupy());
        occupied
            .map_err(|error| SnapshotError::new(error, "the devices' memory cannot be had again"))
    }

    /// See [`kedge_device::Swap::refill`].
    pub(crate) fn refill_memory(
        &self,
        object: &Object,
        start: u64,
        bytes: &[u8],
    ) -> Result<(), SnapshotError> {
        let target = {
            let mut restoring = self.restoring();
            let target = self.target(&mut restoring, object, start, bytes.len() as u64)?;
            restoring.uses(&target.ctx);
            target
        };
        Ok(self.upload(&target, bytes)?)
    }

    /// See [`kedge_device::Swap::refilled`].
    pub(crate) fn all_refilled(&self) -> Result<(), SnapshotError> {
        let used = std::mem::take(&mut self.restoring().used);
        let settled = settle(&self.shared.driver, &used).and(self.shared.slots.settle());
        // Through which handles were filled.
        self.restoring().handles.clear();
        settled.map_err(|error| SnapshotError::new(error, "bytes did not come back to the devices"))
    }
}
