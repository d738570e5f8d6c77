//! Limits of the process (`ulimit`) that stand in the way.

use std::io;

/// Returns bytes of the limit that this process has now; `None` where there is none.
fn limit(resource: libc::__rlimit_resource_t) -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel fills the structure.
    let told = unsafe { libc::getrlimit(resource, &raw mut limit) } == 0;
    (told && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// Refuses a file of `len` bytes that is longer than the process may make one. The kernel would end
/// the process for it (SIGXFSZ).
pub(crate) fn check_file(len: u64) -> io::Result<()> {
    match limit(libc::RLIMIT_FSIZE) {
        Some(most) if most < len => Err(io::Error::from_raw_os_error(libc::EFBIG)),
        _ => Ok(()),
    }
}

/// Returns what to do about an error if a limit is its cause; else nothing.
pub(crate) fn hint(error: &io::Error) -> String {
    let (resource, option, what) = match error.raw_os_error() {
        Some(libc::EFBIG) => (libc::RLIMIT_FSIZE, 'f', "the size of files"),
        Some(libc::ENOMEM) => (libc::RLIMIT_AS, 'v', "the address space"),
        _ => return String::new(),
    };
    limit(resource).map_or_else(String::new, |most| {
        format!(
            "; {what} is limited to {most} bytes, and CUDA programs reserve terabytes of addresses, most of which \
             take no memory: start kedge under `ulimit -{option} unlimited`"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_within_the_limit_is_allowed() {
        check_file(0).unwrap();
        assert_eq!(hint(&io::ErrorKind::NotFound.into()), "");
    }
}
