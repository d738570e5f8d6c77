//! Memory that goes off the devices while nothing runs, and comes back where it was.

use super::take::memory;
use crate::device::SoftBackend;
use kedge_cuda_types::CuError;
use kedge_device::SnapshotError;

/// Gives the pages of all private memory and of handles back to the system: how many bytes they
/// held.
pub(in crate::device) fn vacate(backend: &SoftBackend) -> Result<u64, SnapshotError> {
    if !backend.runtime.is_at_rest() {
        let what = "the device is at work: wait until it is at rest";
        return Err(SnapshotError::new(CuError::NOT_READY, what));
    }
    let runs = memory(backend, &backend.tables()).private;
    let handles = backend.vmm.vacate()?;
    backend.runtime.memory.vacate();
    Ok(handles + runs.iter().map(|(_, bytes)| bytes).sum::<u64>())
}
