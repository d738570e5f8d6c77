//! Filters of system calls (seccomp), which threads have each for themselves: a call that is
//! injected into a thread is filtered like its own, and the answer may be the end of the whole
//! process.

use crate::{EngineError, proc};
use libc::pid_t;
use std::fs::File;
use std::io::Read;

/// Longer than any status file up to its line on seccomp, but for a process with very many groups.
const USUAL: usize = 4096;

/// Refuses the processes `pids` if a thread of theirs filters its system calls.
///
/// # Errors
///
/// [`EngineError::Unsupported`], which names the first such thread.
pub(crate) fn refuse(pids: impl IntoIterator<Item = pid_t>) -> Result<(), EngineError> {
    let mut buffer = Vec::with_capacity(USUAL);
    for pid in pids {
        for tid in proc::threads(pid) {
            if is_filtered(pid, tid, &mut buffer) {
                let what = format!(
                    "its thread {tid} filters its system calls (seccomp), which kedge cannot save yet"
                );
                return Err(EngineError::unsupported(pid, what));
            }
        }
    }
    Ok(())
}

/// Tells whether a thread has a filter. One that has ended has none.
fn is_filtered(pid: pid_t, tid: pid_t, buffer: &mut Vec<u8>) -> bool {
    buffer.clear();
    let file = File::open(format!("/proc/{pid}/task/{tid}/status"));
    file.is_ok_and(|mut file| file.read_to_end(buffer).is_ok())
        && mode(buffer).is_some_and(|m| m != b"0")
}

/// Returns what the text of a status file says of seccomp: `0` is no filter. A kernel without
/// seccomp says nothing.
fn mode(status: &[u8]) -> Option<&[u8]> {
    // The name, which comes first, may hold anything but a line's end.
    let line =
        status.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"Seccomp:"))?;
    Some(line.trim_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mode_is_found() {
        assert_eq!(mode(b"Name:\tSeccomp: 9\nSeccomp:\t2\nSeccomp_filters:\t1\n"), Some(&b"2"[..]));
        assert_eq!(mode(b"Name:\ta\nSeccomp_filters:\t1\n"), None);
    }

    #[test]
    fn a_thread_without_a_filter_has_none() {
        let pid = std::process::id() as pid_t;
        assert!(!is_filtered(pid, pid, &mut Vec::new()));
        refuse([pid]).unwrap();
    }
}
