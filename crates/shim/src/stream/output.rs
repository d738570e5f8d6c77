//! What kernels print, written where the program writes.

use crate::{callback, memory, session};
use kedge_protocol::{Call, Output, OutputTarget};
use std::ffi::c_void;

unsafe extern "C" {
    static stdout: *mut libc::FILE;
    static stderr: *mut libc::FILE;
}

/// Writes what device printf and assert have produced, and runs what waited for the device to
/// finish. Every synchronising function calls it after its wait.
///
/// The bytes go through the C library's own streams, so that they keep their place among what the
/// program itself has printed and not yet flushed.
pub(crate) fn flush_output() {
    let Ok(session) = session::get() else { return };
    while session.client.output_pending() {
        let Ok(output) = session.call::<Output>(&Call::TakeOutput {}) else { return };
        for (target, bytes) in output.parts.iter() {
            write(*target, bytes);
        }
        if !output.more {
            break;
        }
    }
    memory::shadow::pull();
    callback::sweep();
}

fn write(target: OutputTarget, bytes: &[u8]) {
    // SAFETY: the C library initialised its streams before any of the program ran; fwrite locks
    // the stream and reads exactly `bytes`.
    unsafe {
        let file = match target {
            OutputTarget::Stdout {} => stdout,
            OutputTarget::Stderr {} => stderr,
        };
        libc::fwrite(bytes.as_ptr().cast::<c_void>(), 1, bytes.len(), file);
    }
}
