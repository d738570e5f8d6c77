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

/// Times that a descriptor is sent: once more for each restart between it and its call.
const TRIES: u32 = 3;

/// Makes a call that uses a descriptor, by the ticket under which the proxy gets it.
pub(super) fn with_descriptor<T>(
    fd: BorrowedFd<'_>,
    call: impl Fn(u64) -> Result<T, CuError>,
) -> Result<T, CuError> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    for _ in 0..TRIES {
        let ticket = TICKET | NEXT.fetch_add(1, Ordering::Relaxed);
        client()?.send_descriptor(ticket, fd).map_err(session::gone)?;
        match call(ticket) {
            // The proxy has not got it.
            Err(CuError::NOT_READY) => {}
            outcome => return outcome,
        }
    }
    Err(CuError::OPERATING_SYSTEM)
}
