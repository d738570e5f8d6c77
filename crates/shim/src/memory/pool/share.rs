//! Pools that several processes use: one allocates, others open what it shows them.
//!
//! An exported pool is a sealed file that says on which device it is, and a tag; what opens an
//! allocation is its own export data, an IPC handle ([`crate::memory::ipc`]) with its pool's tag.

use super::{POOLS, Pool, by_handle};
use crate::memory::table::Kind;
use crate::memory::{MEMORY, give, ipc, read};
use crate::{entry, session};
use kedge_cuda_types::CuError;
use kedge_cuda_types::abi::CUipcMemHandle;
use kedge_cuda_types::handle::{CUdeviceptr, CUmemoryPool};
use kedge_cuda_types::memory::*;
use std::ffi::{c_int, c_void};
use std::fs::File;
use std::os::fd::{BorrowedFd, FromRawFd, IntoRawFd};
use std::os::unix::fs::FileExt;

/// Begins the file.
const MAGIC: [u8; 16] = *b"kedge pool, 2\0\0\0";
/// It, the device's UUID, and the pool's tag.
const BYTES: usize = 40;

/// What names a pool among those of all processes.
pub(super) fn new_tag() -> Result<u64, CuError> {
    let mut tag = [0; 8];
    // SAFETY: `tag` is valid for a write of its own length.
    let got = unsafe { libc::getrandom(tag.as_mut_ptr().cast(), tag.len(), 0) };
    if got == 8 { Ok(u64::from_le_bytes(tag)) } else { Err(CuError::OPERATING_SYSTEM) }
}

/// Refuses kinds of handles that pools cannot be shared by.
pub(super) fn check_kinds(kinds: u32) -> Result<(), CuError> {
    match kinds & !CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR {
        0 => Ok(()),
        _ => Err(entry::not_supported("a memory pool for Windows or fabric handles")),
    }
}

/// The descriptor belongs to the program, which closes it.
pub(crate) unsafe fn cuMemPoolExportToShareableHandle(
    handle: *mut c_void,
    pool: CUmemoryPool,
    kind: u32,
    flags: u64,
) -> Result<(), CuError> {
    let pool = by_handle(pool)?;
    let tag = pool.shared.filter(|_| kind == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    let tag = tag.ok_or(CuError::INVALID_VALUE)?;
    if handle.is_null() || flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let uuid = session::get()?.device(pool.device as i32)?.uuid;
    let file = describe(&uuid, tag)?;
    // SAFETY: for this kind the caller's pointer is to an int.
    unsafe { give(handle.cast::<c_int>(), file.into_raw_fd()) }
}

/// A sealed file that names a device and a pool.
fn describe(uuid: &[u8; 16], tag: u64) -> Result<File, CuError> {
    // SAFETY: a C string.
    let fd = unsafe {
        libc::memfd_create(c"kedge-pool".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)
    };
    if fd < 0 {
        return Err(CuError::OPERATING_SYSTEM);
    }
    // SAFETY: made above, and owned by nobody else.
    let file = unsafe { File::from_raw_fd(fd) };
    let bytes = [&MAGIC[..], uuid, &tag.to_le_bytes()].concat();
    let written = file.write_all_at(&bytes, 0);
    written.map_err(|_| CuError::OPERATING_SYSTEM)?;
    let seals = libc::F_SEAL_SEAL | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_WRITE;
    // SAFETY: `fd` is open as long as `file` is, and F_ADD_SEALS takes a number.
    match unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, seals) } {
        0 => Ok(file),
        _ => Err(CuError::OPERATING_SYSTEM),
    }
}

/// The device and the pool that such a file names; INVALID_VALUE for any other file.
fn described(file: &File) -> Result<([u8; 16], u64), CuError> {
    let mut bytes = [0; BYTES];
    let whole = file.metadata().is_ok_and(|found| found.is_file() && found.len() == BYTES as u64);
    if !whole || file.read_exact_at(&mut bytes, 0).is_err() || bytes[..16] != MAGIC {
        return Err(CuError::INVALID_VALUE);
    }
    let (mut uuid, mut tag) = ([0; 16], [0; 8]);
    uuid.copy_from_slice(&bytes[16..32]);
    tag.copy_from_slice(&bytes[32..]);
    Ok((uuid, u64::from_le_bytes(tag)))
}

/// A pool from which nothing can be allocated; `handle` is a descriptor, which stays the program's.
pub(crate) unsafe fn cuMemPoolImportFromShareableHandle(
    pool: *mut CUmemoryPool,
    handle: *mut c_void,
    kind: u32,
    flags: u64,
) -> Result<(), CuError> {
    let number = c_int::try_from(handle as usize).map_err(|_| CuError::INVALID_VALUE)?;
    // SAFETY: F_GETFD only tells whether the number is a descriptor.
    let open = unsafe { libc::fcntl(number, libc::F_GETFD) } >= 0;
    if pool.is_null() || flags != 0 || kind != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || !open {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: open (above), and the program's to keep open during the call.
    let fd = unsafe { BorrowedFd::borrow_raw(number) };
    let file = fd.try_clone_to_owned().map_err(|_| CuError::OPERATING_SYSTEM)?;
    let (uuid, tag) = described(&File::from(file))?;
    let devices = &session::get()?.devices;
    let device = devices.iter().position(|device| device.uuid == uuid);
    let device = device.ok_or(CuError::INVALID_DEVICE)? as u32;
    let (shared, imported) = (Some(tag), true);
    let made = POOLS.insert_with(|handle| Pool {
        shared,
        imported,
        ..Pool::new(handle, device, false, 0)
    });
    // SAFETY: `pool` is NULL or valid for a write: the API asks that of the program.
    unsafe { give(pool, made.ok_or(CuError::OUT_OF_MEMORY)?.handle) }
}

/// `data`: 64 bytes (CUmemPoolPtrExportData), as an IPC handle has.
pub(crate) unsafe fn cuMemPoolExportPointer(
    data: *mut c_void,
    ptr: CUdeviceptr,
) -> Result<(), CuError> {
    let found = MEMORY.table().find(ptr).cloned().filter(|found| found.base == ptr);
    let found = found.ok_or(CuError::INVALID_VALUE)?;
    let Kind::Pool(pool) = found.kind else { return Err(CuError::INVALID_VALUE) };
    let tag = by_handle(pool)?.shared.ok_or(CuError::INVALID_VALUE)?;
    if data.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let handle = ipc::for_pool(ipc::handle_of(&found)?, tag);
    // SAFETY: the caller's 64 bytes, which need no alignment of their own.
    unsafe { data.cast::<CUipcMemHandle>().write_unaligned(handle) };
    Ok(())
}

/// The program frees it by `cuMemFree` or `cuMemFreeAsync`.
pub(crate) unsafe fn cuMemPoolImportPointer(
    ptr: *mut CUdeviceptr,
    pool: CUmemoryPool,
    data: *mut c_void,
) -> Result<(), CuError> {
    let pool = by_handle(pool)?;
    let tag = pool.shared.filter(|_| pool.imported).ok_or(CuError::INVALID_VALUE)?;
    if ptr.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: the caller's 64 bytes.
    let handle = ipc::of_pool(&unsafe { read(data.cast::<CUipcMemHandle>())? }, tag)?;
    let addr = ipc::open_handle(&handle, pool.device, true)?;
    // SAFETY: `ptr` is NULL or valid for a write: the API asks that of the program.
    unsafe { give(ptr, addr) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pointer_opens_by_its_own_pool_alone() {
        let handle = CUipcMemHandle(std::array::from_fn(|at| at as u8));
        let data = ipc::for_pool(handle, 9);
        assert_eq!(ipc::of_pool(&data, 8).err(), Some(CuError::INVALID_VALUE));
        assert_eq!(ipc::of_pool(&handle, 9).err(), Some(CuError::INVALID_VALUE));
        assert_eq!(ipc::of_pool(&data, 9).unwrap().0[..56], handle.0[..56]);
        assert_eq!(ipc::of_pool(&data, 9).unwrap().0[56..], *b"kedgemem");
    }

    #[test]
    fn a_pool_s_file_names_its_device_and_cannot_be_changed() {
        let file = describe(&[7; 16], 9).unwrap();
        assert_eq!(described(&file), Ok(([7; 16], 9)));
        assert!(file.write_all_at(&[0], 0).is_err() && file.set_len(0).is_err());
        let other = File::open("/proc/self/exe").unwrap();
        assert_eq!(described(&other), Err(CuError::INVALID_VALUE));
        let device = File::open("/dev/zero").unwrap();
        assert_eq!(described(&device), Err(CuError::INVALID_VALUE));
    }
}
