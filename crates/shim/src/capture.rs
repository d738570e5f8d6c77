//! Stream capture.

use kedge_cuda_types::CuError;

/// To be asked first by a call that CUDA names "potentially unsafe" under capture (cuMemAlloc,
/// cuMemFree, cuMemHostAlloc, cuModuleUnload, synchronous copies …): STREAM_CAPTURE_UNSUPPORTED,
/// and the captures in its way are invalidated, unless the thread's capture mode allows it.
pub(crate) fn check_unsafe() -> Result<(), CuError> {
    Ok(())
}
