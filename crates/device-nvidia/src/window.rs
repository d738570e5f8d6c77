//! Addresses that the driver takes from the kernel without naming them, made to be the same in
//! every process.
//!
//! The kernel gives the highest hole that fits, and which one that is depends on all else in the
//! process, down to its allocator's arenas. So ranges are kept for what a program may know the
//! addresses of, far below all else; while the driver takes some, one of them is open, and the
//! highest hole of that size: those above are filled for good.

use std::ops::Range;
use std::ptr;

/// Of a window; and what the driver's ranges for managed variables are a multiple of.
pub(crate) const CHUNK: u64 = 32 << 20;
/// Smallest hole that is filled, in bytes: what needs to lie somewhere takes more, and small
/// mappings find room elsewhere.
const MIN_HOLE: u64 = CHUNK + (1 << 20);
/// Largest hole that is filled, in bytes: more than a process has.
const MAX_HOLE: u64 = 1 << 46;
/// Holes of one size that are filled at once.
const MAX_FILLED: usize = 64;

/// Only addresses.
const EMPTY: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

pub(crate) struct Window {
    base: u64,
    /// Which chunks are ours: the others have something in them, or are where nobody's are.
    kept: Vec<bool>,
}

impl Window {
    /// Where something lies already, it has no chunks.
    pub(crate) fn new(base: u64, chunks: usize) -> Window {
        let mut window = Window { base, kept: vec![false; chunks] };
        window.keep(0..chunks);
        window
    }

    pub(crate) fn range(&self) -> Range<u64> {
        self.base..self.base + self.kept.len() as u64 * CHUNK
    }

    /// What `act` maps lies below `limit` and as high as it fits there.
    pub(crate) fn holds<T>(&mut self, limit: u64, act: impl FnOnce() -> T) -> T {
        let chunks = 0..self.kept.len();
        // What was left meanwhile.
        self.keep(chunks.clone());
        fill_above(self.range().end);
        self.open((limit.saturating_sub(self.base) / CHUNK) as usize);
        let done = act();
        self.keep(chunks);
        done
    }

    /// Gives the first `limit` chunks back, as far as they are ours.
    fn open(&mut self, limit: usize) {
        let limit = limit.min(self.kept.len());
        let mut from = 0;
        while let Some(first) = (from..limit).find(|chunk| self.kept[*chunk]) {
            let run = (first..limit).take_while(|chunk| self.kept[*chunk]).count();
            from = first + run;
            unmap(self.base + first as u64 * CHUNK, run as u64 * CHUNK);
            self.kept[first..from].fill(false);
        }
    }

    /// Takes all of these chunks in which nothing is.
    fn keep(&mut self, chunks: Range<usize>) {
        let mut from = chunks.start;
        while let Some(first) = (from..chunks.end).find(|chunk| !self.kept[*chunk]) {
            from = first + (first..chunks.end).take_while(|chunk| !self.kept[*chunk]).count();
            self.keep_free(first..from);
        }
    }

    /// As a whole, or by halves.
    fn keep_free(&mut self, chunks: Range<usize>) {
        let bytes = chunks.len() as u64 * CHUNK;
        if map_at(self.base + chunks.start as u64 * CHUNK, bytes) {
            self.kept[chunks].fill(true);
        } else if chunks.len() > 1 {
            let middle = chunks.start + chunks.len() / 2;
            self.keep_free(chunks.start..middle);
            self.keep_free(middle..chunks.end);
        }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        self.open(self.kept.len());
    }
}

/// Leaves no hole above `floor` that is of use.
fn fill_above(floor: u64) {
    if !fill_one(MIN_HOLE, floor) {
        return;
    }
    let mut bytes = MAX_HOLE;
    while bytes >= CHUNK {
        let hole = bytes.max(MIN_HOLE);
        let _ = (0..MAX_FILLED).take_while(|_| fill_one(hole, floor)).count();
        bytes /= 2;
    }
}

/// Fills the highest hole of that size, if it lies above `floor`.
fn fill_one(bytes: u64, floor: u64) -> bool {
    // SAFETY: a new mapping wherever there is room.
    let at = unsafe { libc::mmap(ptr::null_mut(), bytes as usize, libc::PROT_NONE, EMPTY, -1, 0) };
    if at == libc::MAP_FAILED {
        return false;
    }
    let above = at.addr() as u64 >= floor;
    if !above {
        unmap(at.addr() as u64, bytes);
    }
    above
}

/// Maps these addresses, if nothing is there.
fn map_at(at: u64, bytes: u64) -> bool {
    let wanted = ptr::with_exposed_provenance_mut(at as usize);
    let flags = EMPTY | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: a new mapping, which replaces none.
    let got = unsafe { libc::mmap(wanted, bytes as usize, libc::PROT_NONE, flags, -1, 0) };
    if got != libc::MAP_FAILED && got != wanted {
        // A kernel that takes the address for a hint.
        unmap(got.addr() as u64, bytes);
    }
    got == wanted
}

/// Gives back what this module has mapped, and nobody has used.
fn unmap(at: u64, bytes: u64) {
    // SAFETY: the callers pass a range that this module has mapped, and that nobody has used.
    unsafe { libc::munmap(ptr::with_exposed_provenance_mut(at as usize), bytes as usize) };
}
