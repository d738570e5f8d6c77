//! Shared-arena pages at a second address: host memory that the program registered keeps its own
//! address, and kernels may use that address too where this process has nothing else there.

use super::arena::in_clients_share;
use super::tasks::lock;
use kedge_cuda_types::CuError;
use std::collections::BTreeMap;
use std::sync::Mutex;

const PAGE: u64 = 4096;
/// The system bounds a process's mappings; a client gets a part of them.
const MAX_ALIASES: usize = 16_384;

/// Aliased ranges: start → size.
#[derive(Default)]
pub(super) struct Aliases(Mutex<BTreeMap<u64, u64>>);

impl Aliases {
    /// Maps the shared-arena pages [addr, addr+size) at `alias` too. MAP_FAILED where that is taken.
    pub(super) fn make(&self, alias: u64, addr: u64, size: u64) -> Result<(), CuError> {
        let aligned = (alias | addr | size).is_multiple_of(PAGE) && size > 0;
        if !aligned || alias.checked_add(size).is_none() || !in_clients_share(addr, size) {
            return Err(CuError::INVALID_VALUE);
        }
        let mut all = lock(&self.0);
        if all.len() >= MAX_ALIASES {
            return Err(CuError::MAP_FAILED);
        }
        map(alias, addr, size)?;
        all.insert(alias, size);
        Ok(())
    }

    /// Unmaps [alias, alias+size), which is aliased whole.
    pub(super) fn end(&self, alias: u64, size: u64) -> Result<(), CuError> {
        let mut all = lock(&self.0);
        if size == 0 || !(alias | size).is_multiple_of(PAGE) || !covers(&all, alias, size) {
            return Err(CuError::INVALID_VALUE);
        }
        cut(&mut all, alias, size);
        // SAFETY: pages that `map` put there, in a table that no other code changes.
        let rc = unsafe { libc::munmap(alias as usize as *mut libc::c_void, size as usize) };
        if rc == 0 { Ok(()) } else { Err(CuError::UNMAP_FAILED) }
    }

    /// Whether every byte of the range is aliased; ranges that touch count as one.
    pub(super) fn holds(&self, addr: u64, size: u64) -> bool {
        covers(&lock(&self.0), addr, size)
    }
}

/// The range that holds an address.
fn holding(all: &BTreeMap<u64, u64>, addr: u64) -> Option<(u64, u64)> {
    let (&start, &len) = all.range(..=addr).next_back()?;
    (addr < start + len).then_some((start, len))
}

fn covers(all: &BTreeMap<u64, u64>, addr: u64, size: u64) -> bool {
    let Some(end) = addr.checked_add(size) else { return false };
    let mut at = addr;
    while at < end {
        match holding(all, at) {
            Some((start, len)) => at = start + len,
            None => return false,
        }
    }
    true
}

/// Takes a range that is covered out of the table.
fn cut(all: &mut BTreeMap<u64, u64>, addr: u64, size: u64) {
    let end = addr + size;
    let first = holding(all, addr).map_or(addr, |(start, _)| start);
    let touched: Vec<(u64, u64)> =
        all.range(first..end).map(|(&start, &len)| (start, len)).collect();
    for (start, len) in touched {
        all.remove(&start);
        if start < addr {
            all.insert(start, addr - start);
        }
        if end < start + len {
            all.insert(end, start + len - end);
        }
    }
}

fn map(alias: u64, addr: u64, size: u64) -> Result<(), CuError> {
    let (want, len) = (alias as usize as *mut libc::c_void, size as usize);
    let from = addr as usize as *mut libc::c_void;
    let reserve =
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: the reservation replaces nothing. mremap with an old length of 0 makes a second mapping
    // of the shared pages, here over that reservation, and leaves the first as it is.
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
        let fixed = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        if libc::mremap(from, 0, len, fixed, want) == libc::MAP_FAILED {
            libc::munmap(want, len);
            return Err(CuError::MAP_FAILED);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_cuda_types::arena::SHARED_BASE;

    #[test]
    fn aliases_split_and_join() {
        let aliases = Aliases(Mutex::new(BTreeMap::from([(0x1000, 0x3000), (0x4000, 0x1000)])));
        assert!(aliases.holds(0x1800, 0x3000) && !aliases.holds(0x4800, 0x1000));
        assert!(!aliases.holds(0xfff, 2) && !aliases.holds(u64::MAX, 2));
        let mut all = lock(&aliases.0);
        cut(&mut all, 0x3000, 0x1800);
        assert_eq!(*all, BTreeMap::from([(0x1000, 0x2000), (0x4800, 0x800)]));
        cut(&mut all, 0x1800, 0x800);
        assert_eq!(*all, BTreeMap::from([(0x1000, 0x800), (0x2000, 0x1000), (0x4800, 0x800)]));
    }

    #[test]
    fn nonsense_is_refused() {
        let (aliases, bad) = (Aliases::default(), Err(CuError::INVALID_VALUE));
        assert_eq!(aliases.make(0x7000_0000_0001, SHARED_BASE, PAGE), bad);
        assert_eq!(aliases.make(0x7000_0000_0000, 0x1000, PAGE), bad);
        assert_eq!(aliases.make(u64::MAX - PAGE + 1, SHARED_BASE, PAGE), bad);
        assert_eq!(aliases.make(0x7000_0000_0000, SHARED_BASE, 0), bad);
        assert_eq!(aliases.end(0x7000_0000_0000, PAGE), bad);
        let taken = (&raw const aliases as u64) / PAGE * PAGE;
        assert_eq!(aliases.make(taken, SHARED_BASE, PAGE), Err(CuError::MAP_FAILED));
    }

    #[test]
    fn an_alias_shows_the_same_bytes() {
        let len = 2 * PAGE as usize;
        let (rw, shared) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        // Far from where the kernel puts other threads' mappings.
        let second = 0x6000_0000_0000 as *mut libc::c_void;
        // SAFETY: a new mapping, which only this test uses, and `map` replaces nothing.
        unsafe {
            let first = libc::mmap(std::ptr::null_mut(), len, rw, shared, -1, 0);
            map(second as u64, first as u64, len as u64).unwrap();
            first.cast::<u64>().write(42);
            assert_eq!(second.cast::<u64>().read(), 42);
            libc::munmap(first, len);
            libc::munmap(second, len);
        }
    }
}
