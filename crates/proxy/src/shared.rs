//! Host memory that devices use in place: which of the shared arena's bytes they may, and the
//! arena's pages at a second address. Memory that the program registered keeps its own address, and
//! kernels may use that address too where this process has nothing else there.

use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::{self, SHARED_BASE, SHARED_CLIENT_LEN, SHARED_LEN};
use kedge_device::{Backend, Ranges};
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};

const PAGE: u64 = 4096;
/// The system bounds a process's mappings; a client gets a part of them.
pub(crate) const MAX_ALIASES: usize = 16_384;

/// What one client shares with its devices.
#[derive(Default)]
pub(crate) struct SharedMemory {
    /// Where this process shows the arena's pages a second time.
    aliases: Ranges,
    /// What is valid for device access, as it was shared.
    shared: Ranges,
    /// Where the arena shows files of the client's.
    adopted: Ranges,
}

/// The arena's own pages, while a file is shown in their place, are mapped this far behind it.
const STASH: u64 = SHARED_LEN;

impl SharedMemory {
    /// Makes a range of the client's part of the shared arena, or of aliases, valid for `backend`.
    pub(crate) fn share(
        &mut self,
        backend: &dyn Backend,
        addr: u64,
        size: u64,
    ) -> Result<(), CuError> {
        let known = in_clients_part(addr, size) || self.aliases.cover(addr, size);
        if size == 0 || !known || self.shared.overlap(addr, size) {
            return Err(CuError::INVALID_VALUE);
        }
        backend.share(addr, size)?;
        self.shared.add(addr, size);
        Ok(())
    }

    /// Ends what `share` made valid, by the same range.
    pub(crate) fn unshare(
        &mut self,
        backend: &dyn Backend,
        addr: u64,
        size: u64,
    ) -> Result<(), CuError> {
        if !self.shared.remove(addr, size) {
            return Err(CuError::INVALID_VALUE);
        }
        backend.unshare(addr, size)
    }

    /// Maps the arena's pages [addr, addr+size) at `alias` too. MAP_FAILED where that is taken: in
    /// a device's arena, where the device cannot use them.
    pub(crate) fn alias(
        &mut self,
        backend: &dyn Backend,
        alias: u64,
        addr: u64,
        size: u64,
    ) -> Result<(), CuError> {
        let whole = (alias | addr | size).is_multiple_of(PAGE) && size > 0;
        if !whole || alias.checked_add(size).is_none() || !in_clients_part(addr, size) {
            return Err(CuError::INVALID_VALUE);
        }
        if self.aliases.count() >= MAX_ALIASES {
            return Err(CuError::MAP_FAILED);
        }
        if on_device(alias, size)? {
            backend.lend_addresses(alias, size)?;
            let shown = map_over(alias, addr, size);
            shown.or_else(|error| backend.take_addresses(alias, size).and(Err(error)))?;
        } else {
            map(alias, addr, size)?;
        }
        self.aliases.add(alias, size);
        Ok(())
    }

    /// Unmaps [alias, alias+size), which is aliased whole and shared with no device any longer.
    pub(crate) fn unalias(
        &mut self,
        backend: &dyn Backend,
        alias: u64,
        size: u64,
    ) -> Result<(), CuError> {
        let whole = size > 0 && (alias | size).is_multiple_of(PAGE);
        if !whole || !self.aliases.cover(alias, size) || self.shared.overlap(alias, size) {
            return Err(CuError::INVALID_VALUE);
        }
        let on_device = on_device(alias, size)?;
        self.aliases.cut(alias, size);
        if on_device {
            return backend.take_addresses(alias, size);
        }
        // SAFETY: pages that `map` put there, in a table that no other code changes; no device may
        // use them.
        let rc = unsafe { libc::munmap(alias as usize as *mut libc::c_void, size as usize) };
        if rc == 0 { Ok(()) } else { Err(CuError::UNMAP_FAILED) }
    }
}

impl SharedMemory {
    /// Shows a file's bytes from `offset` on in the place of the arena's pages [addr, addr+size). A
    /// client that shortens the file meanwhile ends this process, which is its own.
    pub(crate) fn adopt(
        &mut self,
        file: OwnedFd,
        offset: u64,
        addr: u64,
        size: u64,
    ) -> Result<(), CuError> {
        let whole = (addr | size | offset).is_multiple_of(PAGE) && size > 0;
        let free = |addr| !self.shared.overlap(addr, size) && !self.adopted.overlap(addr, size);
        if !whole || !in_clients_part(addr, size) || !free(addr) {
            return Err(CuError::INVALID_VALUE);
        }
        if self.adopted.count() >= MAX_ALIASES {
            return Err(CuError::MAP_FAILED);
        }
        let file = File::from(file);
        let found = file.metadata().map_err(|_| CuError::OPERATING_SYSTEM)?;
        let end = offset.checked_add(size).ok_or(CuError::INVALID_VALUE)?;
        if !found.file_type().is_file() || found.len().next_multiple_of(PAGE) < end {
            return Err(CuError::INVALID_VALUE);
        }
        let offset = libc::off_t::try_from(offset).map_err(|_| CuError::INVALID_VALUE)?;
        map(addr + STASH, addr, size)?;
        let (at, access) = (addr as usize as *mut libc::c_void, libc::PROT_READ | libc::PROT_WRITE);
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        // SAFETY: replaces pages of the arena, which stay mapped in the stash and which no device
        // may use.
        let got = unsafe { libc::mmap(at, size as usize, access, flags, file.as_raw_fd(), offset) };
        if got == libc::MAP_FAILED {
            unstash(addr, size)?;
            return Err(CuError::MAP_FAILED);
        }
        self.adopted.add(addr, size);
        Ok(())
    }

    /// Puts the arena's own pages back in [addr, addr+size), all of which show files.
    pub(crate) fn disown(&mut self, addr: u64, size: u64) -> Result<(), CuError> {
        let whole = (addr | size).is_multiple_of(PAGE) && size > 0;
        if !whole || !self.adopted.cover(addr, size) || self.shared.overlap(addr, size) {
            return Err(CuError::INVALID_VALUE);
        }
        // One mapping moves at a time.
        let mut at = addr;
        while let Some((start, len)) = self.adopted.holding(at).filter(|_| at < addr + size) {
            let end = (start + len).min(addr + size);
            unstash(at, end - at)?;
            at = end;
        }
        self.adopted.cut(addr, size);
        Ok(())
    }

    /// Whether the arena shows any file.
    pub(crate) fn adopts(&self) -> bool {
        self.adopted.count() > 0
    }
}

/// Moves the arena's pages from the stash to their place.
fn unstash(addr: u64, size: u64) -> Result<(), CuError> {
    let (from, to) = ((addr + STASH) as usize, addr as usize);
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: `adopt` mapped the stash, and what it replaces is the file that it showed or pages of
    // the arena; no device may use them.
    let got = unsafe {
        libc::mremap(from as *mut _, size as usize, size as usize, flags, to as *mut libc::c_void)
    };
    if got == libc::MAP_FAILED { Err(CuError::UNMAP_FAILED) } else { Ok(()) }
}

/// Whether a range lies in a device's arena; INVALID_VALUE where only some of it does.
fn on_device(addr: u64, size: u64) -> Result<bool, CuError> {
    let (first, last) = (arena::device_of(addr), arena::device_of(addr + (size - 1)));
    if first == last { Ok(first.is_some()) } else { Err(CuError::INVALID_VALUE) }
}

/// Whether a range lies in the client's part of the shared arena.
fn in_clients_part(addr: u64, size: u64) -> bool {
    addr >= SHARED_BASE
        && addr.checked_add(size).is_some_and(|end| end <= SHARED_BASE + SHARED_CLIENT_LEN)
}

/// Maps the shared pages [addr, addr+size) over what is at `alias`, which is this process's to
/// replace.
fn map_over(alias: u64, addr: u64, size: u64) -> Result<(), CuError> {
    let (want, len) = (alias as usize as *mut libc::c_void, size as usize);
    let (from, fixed) = (addr as usize as *mut _, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED);
    // SAFETY: the backend has left these addresses to the caller. mremap with an old length of 0
    // makes a second mapping of the shared pages, and leaves the first as it is.
    let got = unsafe { libc::mremap(from, 0, len, fixed, want) };
    if got == libc::MAP_FAILED { Err(CuError::MAP_FAILED) } else { Ok(()) }
}

fn map(alias: u64, addr: u64, size: u64) -> Result<(), CuError> {
    let (want, len) = (alias as usize as *mut libc::c_void, size as usize);
    let reserve =
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: the reservation replaces nothing, and is this call's own.
    unsafe {
        let got = libc::mmap(want, len, libc::PROT_NONE, reserve, -1, 0);
        if got == libc::MAP_FAILED {
            return Err(CuError::MAP_FAILED);
        }
        if got != want {
            // A kernel older than 4.17 ignores the flag.
            libc::munmap(got, len);
            return Err(CuError::MAP_FAILED);
        }
    }
    map_over(alias, addr, size).inspect_err(|_| {
        // SAFETY: the reservation that was just made, which nobody else knows.
        unsafe { libc::munmap(want, len) };
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::Fake;

    const BAD: Result<(), CuError> = Err(CuError::INVALID_VALUE);
    /// Far from where the kernel puts other threads' mappings.
    const SECOND: u64 = 0x6000_0000_0000;

    #[test]
    fn nonsense_is_refused() {
        let (backend, mut memory) = (Fake::idle(), SharedMemory::default());
        let b = &*backend;
        assert_eq!(memory.alias(b, 0x7000_0000_0001, SHARED_BASE, PAGE), BAD);
        assert_eq!(memory.alias(b, 0x7000_0000_0000, 0x1000, PAGE), BAD);
        assert_eq!(memory.alias(b, u64::MAX - PAGE + 1, SHARED_BASE, PAGE), BAD);
        assert_eq!(memory.alias(b, 0x7000_0000_0000, SHARED_BASE, 0), BAD);
        assert_eq!(memory.unalias(b, 0x7000_0000_0000, PAGE), BAD);
        let taken = (&raw const memory as u64) / PAGE * PAGE;
        assert_eq!(memory.alias(b, taken, SHARED_BASE, PAGE), Err(CuError::MAP_FAILED));
        // This device cannot use host memory at its own addresses.
        let device = arena::device_base(0);
        assert_eq!(memory.alias(b, device, SHARED_BASE, PAGE), Err(CuError::MAP_FAILED));
        assert_eq!(memory.alias(b, device - PAGE, SHARED_BASE, 2 * PAGE), BAD);
    }

    #[test]
    fn only_what_was_shared_can_be_unshared() {
        let (backend, mut memory) = (Fake::idle(), SharedMemory::default());
        let (b, addr) = (&*backend, SHARED_BASE);
        memory.share(b, addr, 8192).unwrap();
        assert_eq!(memory.share(b, addr + 4096, 8192), BAD);
        assert_eq!(memory.share(b, addr + 8192, 0), BAD);
        assert_eq!(memory.share(b, 0x1000, 4096), BAD);
        assert_eq!(memory.share(b, addr + SHARED_CLIENT_LEN - 1, 2), BAD);
        assert_eq!(memory.unshare(b, addr, 4096), BAD);
        assert_eq!(memory.unshare(b, addr + 4096, 4096), BAD);
        memory.unshare(b, addr, 8192).unwrap();
        assert_eq!(memory.unshare(b, addr, 8192), BAD);
        memory.share(b, addr + 4096, 512).unwrap();
    }

    #[test]
    fn an_alias_stays_while_devices_may_use_it() {
        let (backend, mut memory) = (Fake::idle(), SharedMemory::default());
        let b = &*backend;
        // As two neighbours were aliased; nothing is mapped, so nothing may be unmapped.
        memory.aliases.add(SECOND, PAGE);
        memory.aliases.add(SECOND + PAGE, PAGE);
        memory.share(&*backend, SECOND + 100, 2 * PAGE - 200).unwrap();
        assert_eq!(memory.unalias(b, SECOND, PAGE), BAD);
        assert_eq!(memory.unalias(b, SECOND + PAGE, PAGE), BAD);
        assert_eq!(memory.unalias(b, SECOND, 3 * PAGE), BAD);
        assert_eq!(memory.share(&*backend, SECOND + 2 * PAGE, 1), BAD);
    }

    #[test]
    fn an_alias_shows_the_same_bytes_until_it_ends() {
        let len = 2 * PAGE;
        let (rw, shared) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        let second = (SECOND + (1 << 30)) as usize as *mut libc::c_void;
        // SAFETY: a new mapping, which only this test uses, and `map` replaces nothing.
        let first = unsafe { libc::mmap(std::ptr::null_mut(), len as usize, rw, shared, -1, 0) };
        map(second as u64, first as u64, len).unwrap();
        // SAFETY: both are mapped writable.
        unsafe {
            first.cast::<u64>().write(42);
            assert_eq!(second.cast::<u64>().read(), 42);
        }
        let (backend, mut memory) = (Fake::idle(), SharedMemory::default());
        let b = &*backend;
        memory.aliases.add(second as u64, len);
        memory.unalias(b, second as u64 + PAGE, PAGE).unwrap();
        assert_eq!(memory.unalias(b, second as u64 + PAGE, PAGE), BAD);
        // SAFETY: the first page is still mapped; the first mapping is this test's own.
        unsafe {
            assert_eq!(second.cast::<u64>().read(), 42);
            libc::munmap(first, len as usize);
        }
        memory.unalias(b, second as u64, PAGE).unwrap();
    }

    /// A file of two pages, "ab…".
    fn two_pages() -> File {
        use std::os::fd::FromRawFd;
        // SAFETY: a C string; a new descriptor.
        let file = unsafe { File::from_raw_fd(libc::memfd_create(c"two".as_ptr(), 0)) };
        std::os::unix::fs::FileExt::write_all_at(&file, b"a", 0).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, b"b", PAGE).unwrap();
        file.set_len(2 * PAGE).unwrap();
        file
    }

    #[test]
    fn a_file_is_shown_in_the_arena_until_it_is_disowned() {
        crate::client_memory::arena_of_tests();
        let addr = SHARED_BASE + (1 << 30);
        let byte = |page: u64| (addr + page * PAGE) as usize as *mut u8;
        let mut memory = SharedMemory::default();
        // SAFETY: the arena is mapped, and this test alone uses this part of it.
        unsafe {
            byte(0).write(1);
            byte(1).write(2);
            memory.adopt(two_pages().into(), 0, addr, 2 * PAGE).unwrap();
            assert_eq!((byte(0).read(), byte(1).read()), (b'a', b'b'));
            assert_eq!(memory.adopt(two_pages().into(), 0, addr + PAGE, PAGE), BAD);
            memory.disown(addr + PAGE, PAGE).unwrap();
            assert_eq!((byte(0).read(), byte(1).read()), (b'a', 2));
            assert_eq!(memory.disown(addr, 2 * PAGE), BAD);
            let backend = Fake::idle();
            memory.share(&*backend, addr, PAGE).unwrap();
            assert_eq!(memory.disown(addr, PAGE), BAD, "a device may use it");
            memory.unshare(&*backend, addr, PAGE).unwrap();
            memory.disown(addr, PAGE).unwrap();
            assert_eq!((byte(0).read(), byte(1).read()), (1, 2));
        }
        assert!(!memory.adopts());
        for (file, offset) in
            [(two_pages(), PAGE), (two_pages(), u64::MAX - PAGE + 1), (two_pages(), 1)]
        {
            assert_eq!(memory.adopt(file.into(), offset, addr, 2 * PAGE), BAD);
        }
        let device = File::options().read(true).write(true).open("/dev/zero").unwrap();
        assert_eq!(memory.adopt(device.into(), 0, addr, PAGE), BAD);
        let read_only = File::open("/proc/self/exe").unwrap();
        assert_eq!(memory.adopt(read_only.into(), 0, addr, PAGE), Err(CuError::MAP_FAILED));
        // SAFETY: as above.
        let left = unsafe { byte(0).read() };
        assert_eq!(left, 1, "what could not be shown has left the arena's own");
    }
}
