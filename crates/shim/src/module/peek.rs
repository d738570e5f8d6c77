//! Reading images whose headers may lie about how long they are.
//!
//! The kernel copies (process_vm_readv on this very process), so that a length that leads out of
//! mapped memory is an error and not a SIGSEGV.

use kedge_cuda_types::CuError;

/// Copies `out.len()` bytes at `addr`. INVALID_IMAGE where they are not all mapped.
///
/// # Safety
/// Where the kernel refuses to copy (a seccomp filter), the bytes are read directly: then `addr`
/// must be valid for the read.
pub(super) unsafe fn bytes(addr: u64, out: &mut [u8]) -> Result<(), CuError> {
    let mut done = 0;
    while done < out.len() {
        let rest = &mut out[done..];
        let from = addr.checked_add(done as u64).ok_or(CuError::INVALID_IMAGE)?;
        let local = libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() };
        let remote = libc::iovec { iov_base: from as *mut _, iov_len: rest.len() };
        // SAFETY: the kernel writes at most `rest.len()` bytes to `rest`, and checks the source.
        let copied = unsafe { libc::process_vm_readv(libc::getpid(), &local, 1, &remote, 1, 0) };
        match usize::try_from(copied) {
            Ok(0) => return Err(CuError::INVALID_IMAGE),
            Ok(copied) => done += copied,
            Err(_) if faulted() => return Err(CuError::INVALID_IMAGE),
            Err(_) => {
                let len = rest.len();
                // SAFETY: `from` is readable for `len` bytes, by this function's contract, and
                // `rest` has as many.
                unsafe { std::ptr::copy_nonoverlapping(from as *const u8, rest.as_mut_ptr(), len) };
                return Ok(());
            }
        }
    }
    Ok(())
}

fn faulted() -> bool {
    std::io::Error::last_os_error().raw_os_error() == Some(libc::EFAULT)
}

/// A `T` at `addr`.
///
/// # Safety
/// As [`bytes`]; every bit pattern is a `T`, and `T` has no padding that matters.
pub(super) unsafe fn value<T: Copy>(addr: u64) -> Result<T, CuError> {
    let mut value = std::mem::MaybeUninit::<T>::zeroed();
    // SAFETY: the value's own bytes, which are initialised to zero.
    let out =
        unsafe { std::slice::from_raw_parts_mut(value.as_mut_ptr().cast::<u8>(), size_of::<T>()) };
    // SAFETY: a `T` is readable at `addr`, by this function's contract; every bit pattern is a `T`.
    unsafe {
        bytes(addr, out)?;
        Ok(value.assume_init())
    }
}

/// The length of a text: where its NUL is. INVALID_IMAGE where memory, or `max`, ends before it.
///
/// # Safety
/// As [`bytes`], for a text.
pub(super) unsafe fn text_len(addr: u64, max: u64) -> Result<u64, CuError> {
    /// Chunks end where pages end, so that the last one is mapped whole.
    const PAGE: u64 = 4096;
    let mut chunk = [0u8; PAGE as usize];
    let mut len = 0;
    while len < max {
        let at = addr + len;
        let chunk = &mut chunk[..(PAGE - at % PAGE) as usize];
        // SAFETY: the text goes on at least to the end of this page, or ends in it.
        unsafe { bytes(at, chunk)? };
        if let Some(nul) = chunk.iter().position(|byte| *byte == 0) {
            return Ok(len + nul as u64);
        }
        len += chunk.len() as u64;
    }
    Err(CuError::INVALID_IMAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unmapped_memory_is_an_error() {
        let mut out = [0; 8];
        // SAFETY: the kernel checks the source.
        unsafe {
            assert_eq!(bytes(0x10, &mut out), Err(CuError::INVALID_IMAGE));
            assert_eq!(value::<u64>(u64::MAX - 3), Err(CuError::INVALID_IMAGE));
        }
    }

    #[test]
    fn a_text_ends_at_its_nul() {
        let mut text = vec![b'x'; 10_000];
        text.push(0);
        let addr = text.as_ptr() as u64;
        // SAFETY: a live text with a NUL.
        unsafe {
            assert_eq!(text_len(addr, 1 << 20), Ok(10_000));
            assert_eq!(text_len(addr, 1000), Err(CuError::INVALID_IMAGE));
        }
    }
}
