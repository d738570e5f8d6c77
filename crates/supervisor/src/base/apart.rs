//! Processes that are none of the job's.

use std::io;

/// In the child: goes on as a process of its own session that no supervisor is the parent of.
pub(crate) fn leave() -> io::Result<()> {
    // SAFETY: plain calls; the process that forks ends at once, without a word to whoever shares
    // its memory's buffers.
    unsafe {
        match libc::fork() {
            -1 => Err(io::Error::last_os_error()),
            0 => {
                libc::setsid();
                Ok(())
            }
            _ => libc::_exit(0),
        }
    }
}
