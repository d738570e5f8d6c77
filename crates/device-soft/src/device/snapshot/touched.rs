//! Which pages of this process were ever touched: all others read as zero and need not be kept.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

const PAGE: u64 = 4096;
/// Entries read at once.
const BATCH: usize = 8192;
/// A page is in memory, or in swap (Linux Documentation/admin-guide/mm/pagemap.rst).
const PRESENT_OR_SWAPPED: u64 = 3 << 62;
/// Holes up to this size are kept like what surrounds them: their zeros cost less than one piece
/// more.
pub(super) const SMALL_HOLE: u64 = 256 << 10;

/// The kernel's account of this process's pages.
pub(super) struct Pagemap(File);

impl Pagemap {
    pub(super) fn open() -> io::Result<Self> {
        File::open("/proc/self/pagemap").map(Self)
    }

    /// The runs (address, length) of [addr, addr+size) that hold all of its touched pages, in
    /// order.
    pub(super) fn touched(&self, addr: u64, size: u64) -> io::Result<Vec<(u64, u64)>> {
        let end = addr + size;
        let mut runs = Runs { of: (addr, end), all: Vec::new() };
        let mut page = addr / PAGE;
        let mut buffer = [0u8; 8 * BATCH];
        while page * PAGE < end {
            let wanted = (end.div_ceil(PAGE) - page).min(BATCH as u64);
            let bytes = &mut buffer[..8 * wanted as usize];
            self.0.read_exact_at(bytes, page * 8)?;
            for (entry, page) in bytes.chunks_exact(8).zip(page..) {
                let mut word = [0; 8];
                word.copy_from_slice(entry);
                if u64::from_le_bytes(word) & PRESENT_OR_SWAPPED != 0 {
                    runs.add(page);
                }
            }
            page += wanted;
        }
        Ok(runs.all)
    }
}

/// Runs of pages, cut to a range.
struct Runs {
    of: (u64, u64),
    all: Vec<(u64, u64)>,
}

impl Runs {
    /// Pages come in order.
    fn add(&mut self, page: u64) {
        let start = (page * PAGE).max(self.of.0);
        let end = ((page + 1) * PAGE).min(self.of.1);
        match self.all.last_mut() {
            Some((addr, len)) if start - (*addr + *len) <= SMALL_HOLE => *len = end - *addr,
            _ => self.all.push((start, end - start)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_touched_pages_are_told() {
        let len = 64 << 20;
        // SAFETY: a new anonymous mapping, which goes at the end of the test.
        let base = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            let access = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(std::ptr::null_mut(), len as usize, access, flags, -1, 0)
        };
        assert_ne!(base, libc::MAP_FAILED);
        // SAFETY: advice about that mapping.
        unsafe { libc::madvise(base, len as usize, libc::MADV_NOHUGEPAGE) };
        let base = base as u64;
        let far = base + (40 << 20);
        for addr in [base + 5000, base + 9 * PAGE, far, base + len - 1] {
            // SAFETY: inside of that mapping.
            unsafe { (addr as *mut u8).write_volatile(1) };
        }
        let touched = Pagemap::open().unwrap().touched(base + 100, len - 200).unwrap();
        let last = base + len - PAGE;
        let near = (base + PAGE, 9 * PAGE);
        assert_eq!(touched, [near, (far, PAGE), (last, PAGE - 100)]);
        // SAFETY: mapped above, and no longer used.
        unsafe { libc::munmap(base as usize as *mut libc::c_void, len as usize) };
    }
}
