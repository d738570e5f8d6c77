//! How much host memory may be taken.

use crate::error::CaptureError;
use kedge_control::gpu::read_number;
use kedge_device_nvidia::CacheLimits;

const MIB: u64 = 1 << 20;

/// Refuses so many bytes of host memory where that is too much.
pub(crate) fn has_room(bytes: u64, limits: CacheLimits) -> Result<(), CaptureError> {
    let limit = match limits.host {
        u64::MAX => read_number("/proc/meminfo", "MemAvailable:").map_or(u64::MAX, |kib| kib << 9),
        limit => limit,
    };
    if bytes <= limit {
        return Ok(());
    }
    Err(CaptureError::NoRoom { needs: bytes.div_ceil(MIB), limit: limit / MIB })
}
