//! cudaError_t values that the device runtime returns (CUDA Runtime API reference), and their
//! names.

use super::Call;
use crate::exec::Flow;

macro_rules! errors {
    ($($(#[$meta:meta])* $constant:ident = $code:literal, $name:literal, $text:literal;)*) => {
        $($(#[$meta])* pub(crate) const $constant: u32 = $code;)*

        /// The constant's name in driver_types.h, and what it means.
        fn described(error: u32) -> (&'static str, &'static str) {
            match error {
                $($code => ($name, $text),)*
                _ => ("unrecognized error code", "unrecognized error code"),
            }
        }
    };
}

errors! {
    SUCCESS = 0, "cudaSuccess", "no error";
    INVALID_VALUE = 1, "cudaErrorInvalidValue", "invalid argument";
    MEMORY_ALLOCATION = 2, "cudaErrorMemoryAllocation", "out of memory";
    INVALID_CONFIGURATION = 9, "cudaErrorInvalidConfiguration", "invalid configuration argument";
    LAUNCH_MAX_DEPTH_EXCEEDED = 65, "cudaErrorLaunchMaxDepthExceeded",
        "launch would exceed maximum depth of nested launches";
    LAUNCH_PENDING_COUNT_EXCEEDED = 69, "cudaErrorLaunchPendingCountExceeded",
        "launch failed because launch would exceed cudaLimitDevRuntimePendingLaunchCount";
    INVALID_DEVICE_FUNCTION = 98, "cudaErrorInvalidDeviceFunction", "invalid device function";
    INVALID_DEVICE = 101, "cudaErrorInvalidDevice", "invalid device ordinal";
    UNSUPPORTED_LIMIT = 215, "cudaErrorUnsupportedLimit", "limit is not supported on this architecture";
    NOT_SUPPORTED = 801, "cudaErrorNotSupported", "operation not supported";
    #[allow(dead_code, reason = "named for programs that ask for its name")]
    UNKNOWN = 999, "cudaErrorUnknown", "unknown error";
}

/// `const char *cudaGetErrorName(cudaError_t)`.
pub(super) fn name(call: &mut Call<'_>) -> Result<(), Flow> {
    tell(call, |error| described(error).0)
}

/// `const char *cudaGetErrorString(cudaError_t)`.
pub(super) fn string(call: &mut Call<'_>) -> Result<(), Flow> {
    tell(call, |error| described(error).1)
}

/// A text in the device heap, or NULL where that is full. It is never freed: programs ask once,
/// before they give up.
fn tell(call: &mut Call<'_>, text: impl Fn(u32) -> &'static str) -> Result<(), Flow> {
    for lane in call.lanes() {
        let text = text(call.u32(lane, 0));
        let at = call.services().malloc(text.len() as u64 + 1);
        if at != 0 {
            call.write(lane, at, text.as_bytes())?;
            call.write(lane, at + text.len() as u64, &[0])?;
        }
        call.set_result(lane, at.to_le_bytes());
    }
    Ok(())
}

/// `cudaError_t cudaGetLastError()`: the thread's last error, which is then forgotten.
pub(super) fn get_last(call: &mut Call<'_>) -> Result<(), Flow> {
    last(call, true)
}

/// `cudaError_t cudaPeekAtLastError()`.
pub(super) fn peek_at_last(call: &mut Call<'_>) -> Result<(), Flow> {
    last(call, false)
}

fn last(call: &mut Call<'_>, forget: bool) -> Result<(), Flow> {
    for lane in call.lanes() {
        let error = call.services().last_error(call.thread_number(lane), forget);
        call.set_result(lane, error.to_le_bytes());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_named() {
        assert_eq!(described(INVALID_CONFIGURATION).0, "cudaErrorInvalidConfiguration");
        assert_eq!(described(UNKNOWN).1, "unknown error");
        assert_eq!(described(12_345).0, "unrecognized error code");
    }
}
