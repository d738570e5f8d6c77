//! `malloc` and `free` in kernels.

use super::Call;
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

/// `void free(void *)`. An address that `malloc` did not give stops the kernel, as on a real device.
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
