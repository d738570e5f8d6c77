//! Physical memory (`cuMemCreate`) that travels to other processes as a descriptor of the program's
//! own.

use super::give;
use super::link::{ask, client};
use super::vmm::{self, Physical};
use crate::{entry, session};
use kedge_cuda_types::CuError;
use kedge_cuda_types::memory::*;
use kedge_protocol::{Call, Imported};
use kedge_transport::TICKET;
use std::ffi::{c_int, c_void};
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Refuses kinds of handles other than descriptors. NONE is no kind.
fn check_kind(kind: u32, what: &'static str) -> Result<(), CuError> {
    match kind {
        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR => Ok(()),
        CU_MEM_HANDLE_TYPE_NONE => Err(CuError::INVALID_VALUE),
        _ => Err(entry::not_supported(what)),
    }
}

/// Refuses what memory cannot be exported as.
pub(super) fn check_requested(kinds: u32) -> Result<(), CuError> {
    match kinds & !CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR {
        0 => Ok(()),
        _ => Err(entry::not_supported("cuMemCreate of memory for Windows or fabric handles")),
    }
}

/// The descriptor belongs to the program, which closes it.
pub(crate) unsafe fn cuMemExportToShareableHandle(
    out: *mut c_void,
    handle: u64,
    kind: u32,
    flags: u64,
) -> Result<(), CuError> {
    let physical = vmm::by_handle(handle)?;
    let asked_for = physical.props.requestedHandleTypes & kind != 0;
    if out.is_null() || flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    check_kind(kind, "cuMemExportToShareableHandle to Windows or fabric handles")?;
    if !asked_for {
        return Err(CuError::INVALID_VALUE);
    }
    let call = Call::HandleExport { handle: physical.id };
    let fd = client()?.call_for_descriptor(&call).map_err(session::gone)??;
    // SAFETY: for this kind the caller's pointer is to an int.
    unsafe { give(out.cast::<c_int>(), fd.into_raw_fd()) }
}

/// `os_handle` is a descriptor, which stays the program's.
pub(crate) unsafe fn cuMemImportFromShareableHandle(
    handle: *mut u64,
    os_handle: *mut c_void,
    kind: u32,
) -> Result<(), CuError> {
    if handle.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    check_kind(kind, "cuMemImportFromShareableHandle of Windows or fabric handles")?;
    let number = c_int::try_from(os_handle as usize).map_err(|_| CuError::INVALID_VALUE)?;
    // SAFETY: F_GETFD only tells whether the number is a descriptor.
    if unsafe { libc::fcntl(number, libc::F_GETFD) } < 0 {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: open (above), and the program's to keep open during the call.
    let fd = unsafe { BorrowedFd::borrow_raw(number) };
    let id = vmm::new_id();
    let imported = with_descriptor(fd, |ticket| {
        let imported: Result<Imported, u32> = ask(&Call::HandleImport { handle: id, ticket })?;
        imported.map_err(CuError)
    })?;
    let made = Physical::imported(id, &imported)?;
    // SAFETY: `handle` is NULL or valid for a write: the API asks that of the program.
    unsafe { give(handle, made) }
}

/// How long a descriptor is sent again and again: once more for each restart or move between it and
/// its call, of which there may be many in a row.
const SEND_AGAIN_LIMIT: Duration = Duration::from_secs(60);

/// Makes a call that uses a descriptor, by the ticket under which the proxy gets it.
pub(super) fn with_descriptor<T>(
    fd: BorrowedFd<'_>,
    call: impl Fn(u64) -> Result<T, CuError>,
) -> Result<T, CuError> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    until_there(SEND_AGAIN_LIMIT, || {
        let ticket = TICKET | NEXT.fetch_add(1, Ordering::Relaxed);
        client()?.send_descriptor(ticket, fd).map_err(session::gone)?;
        call(ticket)
    })
}

/// Makes a call until the proxy has got what it needs, for `limit`.
fn until_there<T>(
    limit: Duration,
    mut call: impl FnMut() -> Result<T, CuError>,
) -> Result<T, CuError> {
    let begin = Instant::now();
    loop {
        match call() {
            Err(CuError::NOT_READY) if begin.elapsed() < limit => {}
            Err(CuError::NOT_READY) => return Err(CuError::OPERATING_SYSTEM),
            outcome => return outcome,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_may_move_any_number_of_times_between_a_descriptor_and_its_call() {
        let mut left = 20;
        let there = until_there(SEND_AGAIN_LIMIT, || {
            left -= 1;
            if left > 0 { Err(CuError::NOT_READY) } else { Ok(7) }
        });
        assert_eq!(there, Ok(7));
        let never = until_there(Duration::ZERO, || Err::<(), _>(CuError::NOT_READY));
        assert_eq!(never, Err(CuError::OPERATING_SYSTEM));
        let mut calls = 0;
        let other = until_there(SEND_AGAIN_LIMIT, || {
            calls += 1;
            Err::<(), _>(CuError::INVALID_VALUE)
        });
        assert_eq!((other, calls), (Err(CuError::INVALID_VALUE), 1));
    }
}
