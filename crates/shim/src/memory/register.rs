//! Registered host memory: private memory of the program moves into the shared arena in place;
//! shared mappings of its files are shown in the arena as they are, here and in the proxy.
//!
//! Private pages are copied into the arena and the arena's pages are then mapped over them, so the
//! program's address stays and the device sees the same memory at the arena's address. Where the
//! proxy has nothing else at the program's address, devices see the memory there too, and kernels
//! can be given that address; `cuMemHostGetDevicePointer` tells which it is. **A write by another
//! thread between the copy and the mapping is lost**; a program that registers memory while it
//! writes to it, or to what shares a page with it, is not safe here. (The driver pins the pages
//! where they are.)

use super::backing::{self, Backing};
use super::link::{call, client, current, post, quiesce};
use super::share::with_descriptor;
use super::shared::PAGE;
use super::table::{Allocation, Kind};
use super::{MEMORY, host};
use crate::{capture, entry};
use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::{self, SHARED_BASE};
use kedge_cuda_types::memory::*;
use kedge_protocol::{Call, Post};
use std::ffi::c_void;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
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
    let backing = backing_of(&pages, &fresh)?;
    let theirs = matches!(backing, Backing::File { .. });
    let alias = MEMORY
        .shared
        .enter_windows(&pages)?
        .ok_or_else(|| entry::not_supported("cuMemHostRegister across distant registrations"))?;
    let place = alias + (fresh.start - pages.start);
    let entered = match &backing {
        _ if fresh.is_empty() => Ok(()),
        Backing::Private => move_in(&fresh, place),
        Backing::File { fd, offset } => adopt(fd.as_fd(), *offset, place, fresh.end - fresh.start),
    };
    if let Err(error) = entered {
        MEMORY.shared.leave_windows(&pages);
        return Err(error);
    }
    let base = alias + (host - pages.start);
    let undone = |aliased: bool, error: CuError| {
        // Where that fails as well, the first error says more.
        let _ = move_back(base, host, size, (aliased, theirs));
        error
    };
    let aliased = make_alias(&pages, &fresh, alias).map_err(|error| undone(false, error))?;
    share(base, aliased.then_some(host), size).map_err(|error| undone(aliased, error))?;
    MEMORY.record(&current, Kind::Registered { flags, host, aliased, theirs }, base, size, size);
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
    // SAFETY: `cuMemHostRegister_v2` asks the same of these arguments as this call does.
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

/// What lies in the `fresh` ones of `pages`, which must be as their neighbours that are registered.
/// Refuses this thread's stack in use.
fn backing_of(pages: &Range<u64>, fresh: &Range<u64>) -> Result<Backing, CuError> {
    let here = 0u8;
    let stack = ptr::from_ref(&here) as u64;
    // What this call's own frames write while they are copied would be lost.
    if fresh.start <= stack && stack < fresh.end {
        return Err(entry::not_supported("cuMemHostRegister of the calling thread's stack"));
    }
    let backing = backing::of(fresh)?;
    let table = MEMORY.table();
    let mut neighbours = [pages.start, pages.end - PAGE]
        .into_iter()
        .filter_map(|page| Some(table.overlapping_registered(page, PAGE)?.kind));
    let theirs = matches!(backing, Backing::File { .. });
    let other = |kind| matches!(kind, Kind::Registered { theirs: is, .. } if is != theirs);
    match neighbours.any(other) {
        // With the fresh pages none, which says nothing of the others.
        true => {
            Err(entry::not_supported("cuMemHostRegister beside a registration of another kind"))
        }
        false => Ok(backing),
    }
}

/// Shows `size` bytes of a file, from `offset` on, in the arena at `place`: in the proxy and here.
fn adopt(fd: BorrowedFd<'_>, offset: u64, place: u64, size: u64) -> Result<(), CuError> {
    with_descriptor(fd, |ticket| call(&Call::Adopt { addr: place, size, offset, ticket }))?;
    show(fd, offset, place, size).inspect_err(|_| {
        let _ = disown(place, size);
    })
}

/// Ends what `adopt` did.
fn disown(place: u64, size: u64) -> Result<(), CuError> {
    post(&Post::Disown { addr: place, size })?;
    show(client()?.shared_fd(), place - SHARED_BASE, place, size)
}

/// Maps a file's bytes at `place` in the arena.
fn show(fd: BorrowedFd<'_>, offset: u64, place: u64, size: u64) -> Result<(), CuError> {
    let offset = libc::off_t::try_from(offset).map_err(|_| CuError::INVALID_VALUE)?;
    let (at, access) = (place as usize as *mut c_void, libc::PROT_READ | libc::PROT_WRITE);
    let flags = libc::MAP_SHARED | libc::MAP_FIXED;
    // SAFETY: the range lies in a window of the arena that is this registration's own.
    let got = unsafe { libc::mmap(at, size as usize, access, flags, fd.as_raw_fd(), offset) };
    if got == libc::MAP_FAILED { Err(CuError::OUT_OF_MEMORY) } else { Ok(()) }
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
    // SAFETY: both ranges are mapped, readable and writable (`backing_of`, the arena's own
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
    let Kind::Registered { host, aliased, theirs, .. } = found.kind else { return Ok(()) };
    unshare(found.base, aliased.then_some(host), found.size)?;
    move_back(found.base, host, found.size, (aliased, theirs))
}

/// Undoes what brought [host, host+size) into the arena at `base`: for the pages that no
/// registration in the table uses.
fn move_back(
    base: u64,
    host: u64,
    size: u64,
    (aliased, theirs): (bool, bool),
) -> Result<(), CuError> {
    let pages = host / PAGE * PAGE..(host + size).next_multiple_of(PAGE);
    let alone = unmoved(&pages);
    if aliased && !alone.is_empty() {
        post(&Post::Unalias { alias: alone.start, size: alone.end - alone.start })?;
    }
    let alias = base - (host - pages.start) + (alone.start - pages.start);
    if theirs && !alone.is_empty() {
        disown(alias, alone.end - alone.start)?;
    }
    if !theirs {
        // A program may have unmapped them.
        if backing::all_shared(&alone) {
            move_out(&alone)?;
        }
        host::drop_pages(alias, alone.end - alone.start)?;
    }
    MEMORY.shared.leave_windows(&pages);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stack_in_use_cannot_move() {
        let local = 0u8;
        let local = ptr::from_ref(&local) as u64 / PAGE * PAGE;
        let stack = local - 8 * PAGE..local + PAGE;
        assert_eq!(backing_of(&stack, &stack).err(), Some(CuError::NOT_SUPPORTED));
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
            assert!(backing::all_shared(&pages));
            move_out(&pages).unwrap();
            assert!(!backing::all_shared(&pages));
            assert_eq!(word.read(), 42);
            libc::munmap(at, len);
        }
    }
}
