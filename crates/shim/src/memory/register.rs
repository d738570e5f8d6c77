//! Registered host memory: private memory of the program that moves into the shared arena in place.
//!
//! The pages are copied into the arena and the arena's pages are then mapped over them, so the
//! program's address stays and the device sees the same memory at the arena's address. Where the
//! proxy has nothing else at the program's address, devices see the memory there too, and kernels
//! can be given that address; `cuMemHostGetDevicePointer` tells which it is. **A write by another thread between the copy and the mapping
//! is lost**; a program that registers memory while it writes to it, or to what shares a page with
//! it, is not safe here. (The driver pins the pages where they are.)

use super::link::{call, client, current, post, quiesce};
use super::shared::PAGE;
use super::table::{Allocation, Kind};
use super::{MEMORY, host};
use crate::{capture, entry};
use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::{self, SHARED_BASE};
use kedge_cuda_types::memory::*;
use kedge_protocol::{Call, Post};
use std::ffi::c_void;
use std::fs;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One registration or its end at a time: they read and change who uses which pages.
static MOVING: Mutex<()> = Mutex::new(());

fn one_at_a_time() -> MutexGuard<'static, ()> {
    MOVING.lock().unwrap_or_else(PoisonError::into_inner)
}

const FLAGS: u32 = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
const REFUSED: u32 = CU_MEMHOSTREGISTER_IOMEMORY | CU_MEMHOSTREGISTER_READ_ONLY;

pub(crate) unsafe fn cuMemHostRegister_v2(
    p: *mut c_void,
    bytesize: usize,
    flags: u32,
) -> Result<(), CuError> {
    let current = current()?;
    let (host, size) = (p as u64, bytesize as u64);
    let end = host.checked_add(size).and_then(|end| end.checked_next_multiple_of(PAGE));
    let (Some(end), true) = (end, host != 0 && size != 0) else {
        return Err(CuError::INVALID_VALUE);
    };
    if flags & REFUSED != 0 {
        return Err(entry::not_supported("cuMemHostRegister of I/O or read-only memory"));
    }
    if flags & !FLAGS != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    capture::check_unsafe()?;
    let _guard = one_at_a_time();
    check_new(host, size)?;
    let pages = host / PAGE * PAGE..end;
    let fresh = unmoved(&pages);
    check_private(&fresh)?;
    let alias = MEMORY
        .shared
        .enter_windows(&pages)?
        .ok_or_else(|| entry::not_supported("cuMemHostRegister across distant registrations"))?;
    if let Err(error) = move_in(&fresh, alias + (fresh.start - pages.start)) {
        MEMORY.shared.leave_windows(&pages);
        return Err(error);
    }
    let base = alias + (host - pages.start);
    let undone = |aliased: bool, error: CuError| {
        // Where that fails as well, the first error says more.
        let _ = move_back(base, host, size, aliased);
        error
    };
    let aliased = make_alias(&pages, &fresh, alias).map_err(|error| undone(false, error))?;
    share(base, aliased.then_some(host), size).map_err(|error| undone(aliased, error))?;
    MEMORY.record(&current, Kind::Registered { flags, host, aliased }, base, size, size);
    Ok(())
}

/// Lets devices use the program's addresses of the pages that have just moved. Whether they now can
/// for all of `pages`.
fn make_alias(pages: &Range<u64>, fresh: &Range<u64>, arena: u64) -> Result<bool, CuError> {
    let neighbours_aliased = {
        let table = MEMORY.table();
        let neighbours = [pages.start, pages.end - PAGE];
        let mut neighbours = neighbours.iter().filter(|page| !fresh.contains(page));
        neighbours.all(|&page| {
            let found = table.overlapping_registered(page, PAGE).map(|found| found.kind);
            matches!(found, Some(Kind::Registered { aliased: true, .. }))
        })
    };
    if fresh.is_empty() || !neighbours_aliased {
        return Ok(neighbours_aliased);
    }
    let (addr, size) = (arena + (fresh.start - pages.start), fresh.end - fresh.start);
    match call(&Call::Alias { alias: fresh.start, addr, size }) {
        Ok(()) => Ok(true),
        Err(CuError::MAP_FAILED | CuError::NOT_SUPPORTED) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Lets devices use registered memory under both addresses, or under none.
fn share(base: u64, host: Option<u64>, size: u64) -> Result<(), CuError> {
    call(&Call::Share { addr: base, size })?;
    let Some(addr) = host else { return Ok(()) };
    call(&Call::Share { addr, size }).or_else(|error| {
        post(&Post::Unshare { addr: base, size })?;
        Err(error)
    })
}

fn unshare(base: u64, host: Option<u64>, size: u64) -> Result<(), CuError> {
    post(&Post::Unshare { addr: base, size })?;
    host.map_or(Ok(()), |addr| post(&Post::Unshare { addr, size }))
}

/// The first version, with the same arguments.
pub(crate) unsafe fn cuMemHostRegister(
    p: *mut c_void,
    bytesize: usize,
    flags: u32,
) -> Result<(), CuError> {
    // SAFETY: as the caller promised.
    unsafe { cuMemHostRegister_v2(p, bytesize, flags) }
}

pub(crate) unsafe fn cuMemHostUnregister(p: *mut c_void) -> Result<(), CuError> {
    let host = p as u64;
    capture::check_unsafe()?;
    let _guard = one_at_a_time();
    let base = match MEMORY.table().find_registered(host) {
        Some((found, 0)) => found.base,
        Some(_) => return Err(CuError::INVALID_VALUE),
        None => return Err(CuError::HOST_MEMORY_NOT_REGISTERED),
    };
    quiesce()?;
    let found = MEMORY.table_mut().remove(base, |_| true).ok_or(CuError::INVALID_VALUE)?;
    release(&found)
}

/// Refuses memory that is registered already, or that CUDA itself allocated.
fn check_new(host: u64, size: u64) -> Result<(), CuError> {
    let table = MEMORY.table();
    if table.overlapping_registered(host, size).is_some()
        || table.within(host, size).next().is_some()
    {
        return Err(CuError::HOST_MEMORY_ALREADY_REGISTERED);
    }
    if arena::is_shared(host) || arena::device_of(host).is_some() {
        return Err(CuError::INVALID_VALUE);
    }
    Ok(())
}

/// The pages that no other registration has moved. Only the first and the last can be shared.
fn unmoved(pages: &Range<u64>) -> Range<u64> {
    let table = MEMORY.table();
    let moved = |page: u64| table.overlapping_registered(page, PAGE).is_some();
    let start = if moved(pages.start) { pages.start + PAGE } else { pages.start };
    let last = pages.end - PAGE;
    let end = if last >= start && moved(last) { last } else { pages.end };
    start..end.max(start)
}

/// Refuses pages that are not the process's own writable memory, and this thread's stack in use.
fn check_private(pages: &Range<u64>) -> Result<(), CuError> {
    let here = 0u8;
    let stack = ptr::from_ref(&here) as u64;
    // What this call's own frames write while they are copied would be lost.
    if pages.start <= stack && stack < pages.end {
        return Err(entry::not_supported("cuMemHostRegister of the calling thread's stack"));
    }
    every_mapping(pages, |access| match access.as_bytes() {
        [b'r', b'w', b'-', b'p'] => Ok(()),
        [b'r', b'w', ..] => {
            Err(entry::not_supported("cuMemHostRegister of shared or executable memory"))
        }
        _ => Err(entry::not_supported("cuMemHostRegister of memory without write access")),
    })
}

/// Whether pages that were moved into the arena are still there: a program may have unmapped them.
fn still_moved(pages: &Range<u64>) -> bool {
    let shared =
        |access: &str| if access.ends_with('s') { Ok(()) } else { Err(CuError::NOT_FOUND) };
    every_mapping(pages, shared).is_ok()
}

/// Shows `check` the access (`rw-p`) of each mapping in `pages`; INVALID_VALUE where some have none.
fn every_mapping(
    pages: &Range<u64>,
    check: impl Fn(&str) -> Result<(), CuError>,
) -> Result<(), CuError> {
    let maps = fs::read_to_string("/proc/self/maps").map_err(|_| CuError::OPERATING_SYSTEM)?;
    let mut at = pages.start;
    for (range, access) in maps.lines().filter_map(parse_mapping) {
        if at >= pages.end {
            break;
        }
        if range.contains(&at) {
            check(access)?;
            at = range.end;
        }
    }
    if at < pages.end { Err(CuError::INVALID_VALUE) } else { Ok(()) }
}

/// A line of /proc/self/maps: the addresses, and what may be done with them (`rw-p`).
fn parse_mapping(line: &str) -> Option<(Range<u64>, &str)> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let address = |text| u64::from_str_radix(text, 16).ok();
    Some((address(start)?..address(end)?, words.next()?))
}

/// Copies `pages` to the arena at `alias`, and maps the arena's pages over them.
fn move_in(pages: &Range<u64>, alias: u64) -> Result<(), CuError> {
    let len = (pages.end - pages.start) as usize;
    if len == 0 {
        return Ok(());
    }
    let fd = client()?.shared_fd().as_raw_fd();
    let (at, offset) = (pages.start as usize as *mut c_void, (alias - SHARED_BASE) as libc::off_t);
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: both ranges are mapped, readable and writable (`check_private`, the arena's own
    // reservation), and do not overlap. The mapping replaces pages by pages with the same content.
    let got = unsafe {
        ptr::copy_nonoverlapping(at.cast::<u8>(), alias as usize as *mut u8, len);
        libc::mmap(at, len, access, libc::MAP_SHARED | libc::MAP_FIXED, fd, offset)
    };
    if got == libc::MAP_FAILED { Err(CuError::OUT_OF_MEMORY) } else { Ok(()) }
}

/// Puts pages back into private memory with the content that they have now.
fn move_out(pages: &Range<u64>) -> Result<(), CuError> {
    let len = (pages.end - pages.start) as usize;
    if len == 0 {
        return Ok(());
    }
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let at = pages.start as usize as *mut c_void;
    // SAFETY: the new mapping is ours alone until mremap puts it over the pages that it copies,
    // which were moved into the arena by `move_in` and are readable.
    unsafe {
        let copy = libc::mmap(ptr::null_mut(), len, access, private, -1, 0);
        if copy == libc::MAP_FAILED {
            return Err(CuError::OUT_OF_MEMORY);
        }
        ptr::copy_nonoverlapping(at.cast::<u8>(), copy.cast::<u8>(), len);
        let fixed = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        if libc::mremap(copy, len, len, fixed, at) == libc::MAP_FAILED {
            libc::munmap(copy, len);
            return Err(CuError::OUT_OF_MEMORY);
        }
    }
    Ok(())
}

/// Ends a registration that is no longer in the table.
fn release(found: &Allocation) -> Result<(), CuError> {
    let Kind::Registered { host, aliased, .. } = found.kind else { return Ok(()) };
    unshare(found.base, aliased.then_some(host), found.size)?;
    move_back(found.base, host, found.size, aliased)
}

/// Undoes what moved [host, host+size) into the arena at `base`: for the pages that no registration
/// in the table uses.
fn move_back(base: u64, host: u64, size: u64, aliased: bool) -> Result<(), CuError> {
    let pages = host / PAGE * PAGE..(host + size).next_multiple_of(PAGE);
    let alone = unmoved(&pages);
    if aliased && !alone.is_empty() {
        post(&Post::Unalias { alias: alone.start, size: alone.end - alone.start })?;
    }
    if still_moved(&alone) {
        move_out(&alone)?;
    }
    let alias = base - (host - pages.start) + (alone.start - pages.start);
    host::drop_pages(alias, alone.end - alone.start)?;
    MEMORY.shared.leave_windows(&pages);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_mappings() {
        let line = "7f0c1000-7f0c3000 rw-p 00000000 00:00 0                  [heap]";
        assert_eq!(parse_mapping(line), Some((0x7f0c_1000..0x7f0c_3000, "rw-p")));
        assert_eq!(parse_mapping("nonsense"), None);
        assert_eq!(parse_mapping(""), None);
    }

    #[test]
    fn only_writable_private_memory_can_move() {
        let heap = vec![0u8; 4 * PAGE as usize];
        let start = (heap.as_ptr() as u64).next_multiple_of(PAGE);
        assert_eq!(check_private(&(start..start + 2 * PAGE)), Ok(()));
        let code = check_private as *const () as u64 / PAGE * PAGE;
        assert_eq!(check_private(&(code..code + PAGE)), Err(CuError::NOT_SUPPORTED));
        assert_eq!(check_private(&(PAGE..2 * PAGE)), Err(CuError::INVALID_VALUE));
        let local = ptr::from_ref(&start) as u64 / PAGE * PAGE;
        let stack = local - 8 * PAGE..local + PAGE;
        assert_eq!(check_private(&stack), Err(CuError::NOT_SUPPORTED));
    }

    #[test]
    fn memory_moves_out_with_its_content() {
        let len = 2 * PAGE as usize;
        // SAFETY: a new anonymous shared mapping, used by this test only.
        let at = unsafe {
            let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
            libc::mmap(ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        assert_ne!(at, libc::MAP_FAILED);
        let word = at.cast::<u64>();
        // SAFETY: inside the mapping made above, which `move_out` keeps readable.
        unsafe {
            word.write(42);
            let pages = at as u64..at as u64 + len as u64;
            assert!(still_moved(&pages));
            move_out(&pages).unwrap();
            assert!(!still_moved(&pages));
            assert_eq!(word.read(), 42);
            libc::munmap(at, len);
        }
    }
}
