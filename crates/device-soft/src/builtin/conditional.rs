//! Conditions of graphs' conditional nodes.

use super::Call;
use crate::exec::Flow;

/// `void cudaGraphSetConditional(cudaGraphConditionalHandle, unsigned)`. A handle is the address of
/// its condition.
pub(super) fn set(call: &mut Call<'_>) -> Result<(), Flow> {
    for lane in call.lanes() {
        let (condition, value) = (call.u64(lane, 0), call.u32(lane, 1));
        call.write(lane, condition, &value.to_le_bytes())?;
    }
    Ok(())
}
