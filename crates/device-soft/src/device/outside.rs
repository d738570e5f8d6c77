//! Device memory outside of the arenas. A client that was told that its devices are not exact,
//! because it began on a GPU, knows variables at the addresses where the driver had placed them,
//! and shadows managed ones there.

use super::arena::PAGE;
use super::placer::Placer;
use kedge_cuda_types::CuError;
use kedge_device::Ranges;

/// Where variables of modules go that such a client loads later: below the generic windows.
const BASE: u64 = 0x2D00_0000_0000;
const LEN: u64 = 64 << 30;
/// A client maps its shadow of a managed variable by pages: none is shared with another's.
const GRAIN: u64 = PAGE;
/// End of a process's addresses.
const ADDRESS_END: u64 = 1 << 47;

/// The ranges of this process that are such memory. What is mapped stays until the end.
pub(super) struct Outside {
    mapped: Ranges,
    placer: Placer,
}

impl Default for Outside {
    fn default() -> Outside {
        Outside { mapped: Ranges::default(), placer: Placer::new(BASE, LEN) }
    }
}

impl Outside {
    /// Whether all of a range is mapped.
    pub(super) fn holds(&self, addr: u64, size: u64) -> bool {
        self.mapped.cover(addr, size)
    }

    /// `size` zeroed bytes at an address of our choice.
    pub(super) fn take(&mut self, size: u64, align: u64) -> Result<u64, CuError> {
        let whole = size.checked_next_multiple_of(GRAIN).ok_or(CuError::OUT_OF_MEMORY)?;
        let addr = self.placer.take(whole, align.max(GRAIN)).ok_or(CuError::OUT_OF_MEMORY)?;
        self.map(addr, whole).inspect_err(|_| self.placer.give_back(addr, whole))?;
        Ok(addr)
    }

    /// `size` bytes at this address, which is no arena's.
    ///
    /// # Errors
    /// INVALID_VALUE where this process has something else there.
    pub(super) fn take_at(&mut self, addr: u64, size: u64) -> Result<(), CuError> {
        let whole = size.checked_next_multiple_of(GRAIN).ok_or(CuError::INVALID_VALUE)?;
        // Ours, as it was before a checkpoint.
        if (BASE..BASE + LEN).contains(&addr) {
            self.placer.take_at(addr, whole).ok_or(CuError::INVALID_VALUE)?;
        }
        self.map(addr, size)
    }

    /// Ends what `take` or `take_at` gave; the bytes are zero by then.
    pub(super) fn give_back(&mut self, addr: u64, size: u64) {
        if (BASE..BASE + LEN).contains(&addr) {
            self.placer.give_back(addr, size.next_multiple_of(GRAIN));
        }
    }

    /// Maps the pages of a range that are not mapped yet.
    fn map(&mut self, addr: u64, size: u64) -> Result<(), CuError> {
        let end = addr.checked_add(size).filter(|end| *end <= ADDRESS_END);
        let end = end.ok_or(CuError::INVALID_VALUE)?;
        let (first, last) = (addr / PAGE * PAGE, end.next_multiple_of(PAGE));
        if !self.mapped.overlap(first, last - first) {
            return self.map_pages(first, last);
        }
        let pages = (first..last).step_by(PAGE as usize);
        let missing: Vec<u64> = pages.filter(|page| !self.mapped.cover(*page, PAGE)).collect();
        missing.into_iter().try_for_each(|page| self.map_pages(page, page + PAGE))
    }

    fn map_pages(&mut self, first: u64, last: u64) -> Result<(), CuError> {
        map(first, last - first)?;
        self.mapped.add(first, last - first);
        Ok(())
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        for (addr, size) in self.mapped.iter() {
            // SAFETY: mapped by `map` for this object alone, and whoever used it held this object.
            unsafe { libc::munmap(addr as usize as *mut libc::c_void, size as usize) };
        }
    }
}

fn map(at: u64, bytes: u64) -> Result<(), CuError> {
    let flags =
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let want = at as usize as *mut libc::c_void;
    // SAFETY: a new anonymous mapping, which NOREPLACE keeps from touching what is already there.
    let got = unsafe { libc::mmap(want, bytes as usize, access, flags, -1, 0) };
    if got == want {
        return Ok(());
    }
    if got != libc::MAP_FAILED {
        // A kernel older than 4.17 ignores the flag.
        // SAFETY: the mapping was made just now and nobody knows of it.
        unsafe { libc::munmap(got, bytes as usize) };
    }
    Err(CuError::INVALID_VALUE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_mapped_once_and_never_over_others() {
        let mut outside = Outside::default();
        let a = outside.take(100, 16).unwrap();
        let b = outside.take(5000, 256).unwrap();
        assert_eq!((a, b), (BASE, BASE + GRAIN));
        assert!(outside.holds(b, 2 * PAGE) && !outside.holds(b, 2 * PAGE + 1));
        assert_eq!(outside.take_at(a, 100), Err(CuError::INVALID_VALUE), "taken");
        outside.give_back(a, 100);
        assert_eq!(outside.take_at(a, 100), Ok(()));
        // Two variables of the driver's on one page.
        let at = BASE + LEN + (1 << 30);
        assert_eq!((outside.take_at(at + 16, 4), outside.take_at(at + 32, 8)), (Ok(()), Ok(())));
        let mine = Box::new([0_u8; 4]);
        assert_eq!(outside.take_at(mine.as_ptr() as u64, 4), Err(CuError::INVALID_VALUE));
        assert_eq!(outside.take_at(u64::MAX - 2, 8), Err(CuError::INVALID_VALUE));
    }
}
