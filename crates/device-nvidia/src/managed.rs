//! Managed variables, at addresses that a restart can give again.
//!
//! The program knows where its managed variables are. The driver takes a range for those of a module when it loads
//! it, of a multiple of 32 MiB, aligned, by a mapping that is up to 32 MiB longer and names no address (seen with driver
//! 580 on H100 and H200): the kernel gives the highest hole that fits, and which one that is depends on all else in the process,
//! down to its allocator's arenas. So modules are loaded while a window that is kept for this has the highest such
//! hole: those above it are filled for good.

use kedge_protocol::ModuleId;
use std::collections::HashMap;
use std::ptr;

/// Far below where the kernel begins to map, far above the client's addresses.
const BASE: u64 = 0x7e00_0000_0000;
/// What the driver takes, or a multiple.
const CHUNK: u64 = 32 << 20;
const CHUNKS: usize = 512;
/// No range fits into a smaller hole.
const LEAST: u64 = CHUNK + (1 << 20);
/// More than a process has.
const MOST: u64 = 1 << 46;
/// Holes of one size that are filled at once.
const MAX_FILLED: usize = 64;

pub(crate) struct Window {
    base: u64,
    /// Which chunks are ours: the others have something in them, or are where nobody's are.
    kept: Vec<bool>,
    /// During a restart: where the modules' variables ended.
    expected: Option<HashMap<ModuleId, u64>>,
}

impl Default for Window {
    fn default() -> Window {
        Window::at(BASE, CHUNKS)
    }
}

impl Window {
    fn at(base: u64, chunks: usize) -> Window {
        let mut window = Window { base, kept: vec![false; chunks], expected: None };
        window.keep_all();
        window
    }

    /// A restart begins: where each asked variable lay, from its first byte to behind its last.
    pub(crate) fn expect(&mut self, variables: impl Iterator<Item = (ModuleId, u64, u64)>) {
        let mut expected: HashMap<ModuleId, u64> = HashMap::new();
        let all = self.base..self.end(self.kept.len());
        for (module, _, end) in variables
            .filter(|(_, start, end)| all.contains(start) && start < end && *end <= all.end)
        {
            let known = expected.entry(module).or_default();
            *known = end.max(*known);
        }
        self.expected = Some(expected);
    }

    /// It is over.
    pub(crate) fn expect_none(&mut self) {
        self.expected = None;
    }

    /// Loads a module: its managed variables come into the window, and during a restart to where they were.
    pub(crate) fn load<T>(&mut self, module: ModuleId, load: impl FnOnce() -> T) -> T {
        let limit = match &self.expected {
            None => Some(self.kept.len()),
            Some(known) => known.get(&module).map(|end| (end - self.base).div_ceil(CHUNK) as usize),
        };
        let Some(limit) = limit else { return load() };
        // What modules left that have gone.
        self.keep_all();
        fill_above(self.end(self.kept.len()));
        self.open(limit);
        let loaded = load();
        self.keep_all();
        loaded
    }

    fn start(&self, chunk: usize) -> u64 {
        self.base + chunk as u64 * CHUNK
    }

    fn end(&self, chunks: usize) -> u64 {
        self.start(chunks)
    }

    /// Gives the first `limit` chunks back, as far as they are ours.
    fn open(&mut self, limit: usize) {
        for chunk in 0..limit {
            if std::mem::take(&mut self.kept[chunk]) {
                let at = self.start(chunk);
                // SAFETY: a mapping of ours, which nobody uses.
                unsafe {
                    libc::munmap(ptr::with_exposed_provenance_mut(at as usize), CHUNK as usize)
                };
            }
        }
    }

    /// Takes all chunks in which nothing is: by runs, since mostly nothing is in any.
    fn keep_all(&mut self) {
        let mut from = 0;
        while let Some(first) = (from..self.kept.len()).find(|chunk| !self.kept[*chunk]) {
            let run = (first..self.kept.len()).take_while(|chunk| !self.kept[*chunk]).count();
            from = first + run;
            if map_at(self.start(first), run as u64 * CHUNK) {
                self.kept[first..from].fill(true);
                continue;
            }
            for chunk in first..from {
                self.kept[chunk] = map_at(self.start(chunk), CHUNK);
            }
        }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        self.open(self.kept.len());
    }
}

/// Leaves no hole above `floor` that a range fits into.
fn fill_above(floor: u64) {
    if !fill_one(LEAST, floor) {
        return;
    }
    let mut bytes = MOST;
    while bytes >= CHUNK {
        let hole = bytes.max(LEAST);
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
    if at.addr() as u64 >= floor {
        return true;
    }
    // SAFETY: the mapping that was just made.
    unsafe { libc::munmap(at, bytes as usize) };
    false
}

/// Only addresses.
const EMPTY: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

/// Maps these addresses, if nothing is there.
fn map_at(at: u64, bytes: u64) -> bool {
    let wanted = ptr::with_exposed_provenance_mut(at as usize);
    let flags = EMPTY | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: a new mapping, which replaces none.
    let got = unsafe { libc::mmap(wanted, bytes as usize, libc::PROT_NONE, flags, -1, 0) };
    if got != libc::MAP_FAILED && got != wanted {
        // SAFETY: the mapping that was just made, by a kernel that takes the address for a hint.
        unsafe { libc::munmap(got, bytes as usize) };
    }
    got == wanted
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// As the driver does, which ends up in the higher half of a hole of two chunks: the range's first byte.
    fn take(chunks: u64) -> u64 {
        let bytes = (chunks + 1) * CHUNK - (2 << 20);
        // SAFETY: a new mapping; what is not aligned of it goes back at once.
        unsafe {
            let at = libc::mmap(ptr::null_mut(), bytes as usize, libc::PROT_NONE, EMPTY, -1, 0);
            assert_ne!(at, libc::MAP_FAILED);
            let at = at.addr() as u64;
            let first = at.next_multiple_of(CHUNK);
            if first > at {
                libc::munmap(at as *mut _, (first - at) as usize);
            }
            let behind = first + chunks * CHUNK;
            if at + bytes > behind {
                libc::munmap(behind as *mut _, (at + bytes - behind) as usize);
            }
            first
        }
    }

    fn give_back(at: u64, chunks: u64) {
        // SAFETY: what `take` took.
        unsafe { libc::munmap(at as *mut _, (chunks * CHUNK) as usize) };
    }

    /// In a process of its own: other tests map and unmap at the same time.
    #[test]
    fn variables_lie_where_they_lay() {
        let this = std::env::current_exe().unwrap();
        let alone = ["--ignored", "--exact", "managed::tests::alone", "--test-threads=1"];
        let told = Command::new(this).args(alone).output().unwrap();
        let said = String::from_utf8_lossy(&told.stdout);
        assert!(told.status.success() && said.contains("1 passed"), "{said}");
    }

    #[test]
    #[ignore = "another runs it by itself"]
    fn alone() {
        let [a, b, c, d] = [1, 2, 3, 4].map(ModuleId);
        let (first, second, third, fourth);
        let asked;
        {
            let mut window = Window::default();
            let top = window.end(CHUNKS);
            assert_eq!(window.load(a, || 5), 5);
            first = window.load(a, || take(1));
            assert_eq!(first, top - CHUNK);
            second = window.load(b, || take(5));
            assert_eq!(second, first - 5 * CHUNK);
            third = window.load(c, || take(1));
            assert_eq!(third, second - CHUNK);
            give_back(first, 1);
            give_back(second, 5);
            // Into the hole, and only now: a hole of one chunk would not do.
            fourth = window.load(d, || take(2));
            assert_eq!(fourth, top - 2 * CHUNK);
            asked = [
                (c, third, third + 8),
                (d, fourth, fourth + CHUNK + 8),
                (d, fourth + 64, fourth + 72),
            ];
            give_back(third, 1);
            give_back(fourth, 2);
        }
        let mut window = Window::default();
        window.expect(asked.into_iter().chain([(b, 4096, 8192)]));
        // Not into the window, however the process looks.
        let elsewhere = window.load(b, || take(1));
        assert!(!(window.base..window.end(CHUNKS)).contains(&elsewhere));
        assert_eq!(window.load(c, || take(1)), third);
        assert_eq!(window.load(d, || take(2)), fourth);
        window.expect_none();
        assert_eq!(window.load(a, || take(1)), fourth - CHUNK);
    }
}
