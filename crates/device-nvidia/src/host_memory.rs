//! Host memory that kernels use directly: pages of the shared arena, and of aliases of it,
//! registered with the driver.

use crate::driver::{Driver, check};
use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::is_shared;
use std::collections::BTreeMap;
use std::ptr;
use std::sync::Arc;

const PAGE: u64 = 4096;

/// CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP.
const FLAGS: u32 = 1 | 2;

/// What is registered. Small allocations share pages, and the driver registers a page once, so a
/// page that several allocations lie in has a count.
pub(crate) struct HostMemory {
    driver: Arc<Driver>,
    /// First page → (end, allocations in it).
    registered: BTreeMap<u64, (u64, u32)>,
    /// Aliases of the shared arena: start → end.
    aliases: BTreeMap<u64, u64>,
}

fn pages(addr: u64, size: u64) -> Result<(u64, u64), CuError> {
    let end = addr.checked_add(size.max(1)).ok_or(CuError::INVALID_VALUE)?;
    let end = end.checked_next_multiple_of(PAGE).ok_or(CuError::INVALID_VALUE)?;
    Ok((addr / PAGE * PAGE, end))
}

impl HostMemory {
    pub(crate) fn new(driver: &Arc<Driver>) -> HostMemory {
        HostMemory {
            driver: Arc::clone(driver),
            registered: BTreeMap::new(),
            aliases: BTreeMap::new(),
        }
    }

    /// Whether this process has the shared arena's pages there.
    fn ours(&self, from: u64, to: u64) -> bool {
        let aliased = self.aliases.range(..=from).next_back().is_some_and(|(_, end)| to <= *end);
        aliased || (is_shared(from) && is_shared(to - 1))
    }

    /// Makes [addr, addr+size) usable by kernels, in every context.
    pub(crate) fn share(&mut self, addr: u64, size: u64) -> Result<(), CuError> {
        let (from, to) = pages(addr, size)?;
        if !self.ours(from, to) {
            return Err(CuError::INVALID_VALUE);
        }
        if let Some((end, count)) = self.registered.get_mut(&from)
            && *end == to
        {
            *count += 1;
            return Ok(());
        }
        let start = ptr::with_exposed_provenance_mut(from as usize);
        // SAFETY: pages of the shared arena or of an alias, which stay mapped in this process.
        check(unsafe { (self.driver.cuMemHostRegister_v2)(start, (to - from) as usize, FLAGS) })?;
        let mut device = 0;
        // SAFETY: a live out pointer, and the range that was just registered.
        let asked =
            check(unsafe { (self.driver.cuMemHostGetDevicePointer_v2)(&mut device, start, 0) });
        if asked.is_err() || device != from {
            // SAFETY: as registered above.
            unsafe { (self.driver.cuMemHostUnregister)(start) };
            return Err(asked.err().unwrap_or(CuError::NOT_SUPPORTED));
        }
        self.registered.insert(from, (to, 1));
        Ok(())
    }

    pub(crate) fn unshare(&mut self, addr: u64, size: u64) -> Result<(), CuError> {
        let (from, to) = pages(addr, size)?;
        let found = self.registered.get_mut(&from).filter(|(end, _)| *end == to);
        let (_, count) = found.ok_or(CuError::INVALID_VALUE)?;
        *count -= 1;
        if *count > 0 {
            return Ok(());
        }
        self.registered.remove(&from);
        let start = ptr::with_exposed_provenance_mut(from as usize);
        // SAFETY: registered by `share`, and used by no work any longer.
        check(unsafe { (self.driver.cuMemHostUnregister)(start) })
    }

    /// Shows shared-arena pages at `alias` as well: the arena's pages, mapped a second time.
    pub(crate) fn alias(&mut self, alias: u64, addr: u64, size: u64) -> Result<(), CuError> {
        let whole = size > 0 && (alias | addr | size).is_multiple_of(PAGE);
        let end = alias.checked_add(size).ok_or(CuError::INVALID_VALUE)?;
        let source_end = addr.checked_add(size).ok_or(CuError::INVALID_VALUE)?;
        if !whole || !is_shared(addr) || !is_shared(source_end - 1) || is_shared(alias) {
            return Err(CuError::INVALID_VALUE);
        }
        let reserved = libc::MAP_PRIVATE
            | libc::MAP_ANONYMOUS
            | libc::MAP_NORESERVE
            | libc::MAP_FIXED_NOREPLACE;
        let want = ptr::with_exposed_provenance_mut::<libc::c_void>(alias as usize);
        // SAFETY: a new mapping, which NOREPLACE keeps from touching what is there.
        let got = unsafe { libc::mmap(want, size as usize, libc::PROT_NONE, reserved, -1, 0) };
        if got != want {
            if got != libc::MAP_FAILED {
                // SAFETY: an old kernel took the address as a hint; nobody knows of this mapping.
                unsafe { libc::munmap(got, size as usize) };
            }
            return Err(CuError::MAP_FAILED);
        }
        let from = ptr::with_exposed_provenance_mut::<libc::c_void>(addr as usize);
        // SAFETY: an old size of 0 duplicates a shared mapping (mremap(2)); the target is the range
        // that was reserved just now.
        let moved = unsafe {
            libc::mremap(from, 0, size as usize, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED, want)
        };
        if moved == libc::MAP_FAILED {
            // SAFETY: the reservation above.
            unsafe { libc::munmap(want, size as usize) };
            return Err(CuError::MAP_FAILED);
        }
        self.aliases.insert(alias, end);
        Ok(())
    }

    /// Ends an alias, or a part of one.
    pub(crate) fn unalias(&mut self, alias: u64, size: u64) -> Result<(), CuError> {
        let end = alias.checked_add(size).ok_or(CuError::INVALID_VALUE)?;
        let whole = size > 0 && (alias | size).is_multiple_of(PAGE);
        let found = self.aliases.range(..=alias).next_back().map(|(start, end)| (*start, *end));
        let Some((start, last)) = found.filter(|(_, last)| whole && end <= *last) else {
            return Err(CuError::INVALID_VALUE);
        };
        self.aliases.remove(&start);
        if start < alias {
            self.aliases.insert(start, alias);
        }
        if end < last {
            self.aliases.insert(end, last);
        }
        let at = ptr::with_exposed_provenance_mut::<libc::c_void>(alias as usize);
        // SAFETY: pages of an alias that `alias` mapped and nothing uses any longer.
        unsafe { libc::munmap(at, size as usize) };
        Ok(())
    }
}
