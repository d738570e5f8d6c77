//! Limits of this process (`ulimit`) that stand in the way.

use std::io;

/// Returns which limit to raise if `error` says that one was reached; else nothing.
pub(crate) fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EMFILE) => "; raise the limit on open files (`ulimit -n`)",
        Some(libc::EFBIG) => "; raise the limit on the size of files (`ulimit -f`)",
        Some(libc::EAGAIN | libc::ENOMEM) if has_limits() => {
            "; raise the limits on processes (`ulimit -u`) and addresses (`ulimit -v`)"
        }
        _ => "",
    }
}

/// Whether this process has a limit on what threads need.
fn has_limits() -> bool {
    let limited = |resource| {
        let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: 0 };
        // SAFETY: the kernel fills the structure.
        unsafe { libc::getrlimit(resource, &raw mut limit) };
        limit.rlim_cur != libc::RLIM_INFINITY
    };
    limited(libc::RLIMIT_NPROC) || limited(libc::RLIMIT_AS)
}
