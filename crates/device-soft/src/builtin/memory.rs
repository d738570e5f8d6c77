//! `malloc` and `free` in kernels, and the device runtime's cudaMalloc and cudaFree.

use super::Call;
use super::runtime_error::{INVALID_VALUE, MEMORY_ALLOCATION, SUCCESS};
use crate::exec::Flow;
use crate::fault::FaultKind;

/// `void *malloc(size_t)`.
pub(super) fn malloc(call: &mut Call<'_>) -> Result<(), Flow> {
    for lane in call.lanes() {
        let addr = call.services().malloc(call.u64(lane, 0));
        call.set_result(lane, addr.to_le_bytes());
    }
    Ok(())
}

/// `void free(void *)`. An address that `malloc` did not give stops the kernel, as on a real
/// device.
pub(super) fn free(call: &mut Call<'_>) -> Result<(), Flow> {
    for lane in call.lanes() {
        let addr = call.u64(lane, 0);
        if addr != 0 && !call.services().free(addr) {
            let detail = format!("free of {addr:#x}, which malloc did not give");
            return Err(call.fault(lane, FaultKind::Trap, detail));
        }
    }
    Ok(())
}

/// `cudaError_t cudaMalloc(void **at, size_t bytes)`.
pub(super) fn cuda_malloc(call: &mut Call<'_>) -> Result<(), Flow> {
    for lane in call.lanes() {
        let addr = call.services().malloc(call.u64(lane, 1));
        call.write(lane, call.u64(lane, 0), &addr.to_le_bytes())?;
        call.set_status(lane, if addr == 0 { MEMORY_ALLOCATION } else { SUCCESS });
    }
    Ok(())
}

/// `cudaError_t cudaFree(void *at)`.
pub(super) fn cuda_free(call: &mut Call<'_>) -> Result<(), Flow> {
    for lane in call.lanes() {
        let addr = call.u64(lane, 0);
        let freed = addr == 0 || call.services().free(addr);
        call.set_status(lane, if freed { SUCCESS } else { INVALID_VALUE });
    }
    Ok(())
}
