//! Has the driver place managed variables at addresses that a restart can give them again.
//!
//! A program knows the addresses of its managed variables. When the driver loads a module, it takes
//! an aligned range of a multiple of 32 MiB for the module's, by a mapping that is up to 32 MiB
//! longer (seen with driver 580 on H100 and H200).

use crate::window::{CHUNK, Window};
use kedge_protocol::ModuleId;
use std::collections::HashMap;

/// The window's first address: far below the kernel's own mappings, far above the client's arenas.
const BASE: u64 = 0x7e00_0000_0000;
/// The window's length, in chunks of [`CHUNK`] bytes: 16 GiB.
const CHUNKS: usize = 512;

/// The window in which managed variables lie.
pub(crate) struct Managed {
    window: Window,
    /// During a restart: the end of each module's variables in the checkpoint.
    expected: Option<HashMap<ModuleId, u64>>,
}

impl Default for Managed {
    fn default() -> Managed {
        Managed { window: Window::new(BASE, CHUNKS), expected: None }
    }
}

impl Managed {
    /// Begins a restart: `variables` has the module, address and bytes of each variable whose
    /// address the program knows.
    pub(crate) fn expect(&mut self, variables: impl Iterator<Item = (ModuleId, u64, u64)>) {
        let mut expected: HashMap<ModuleId, u64> = HashMap::new();
        let all = self.window.range();
        for (module, addr, bytes) in variables {
            let end = addr.saturating_add(bytes);
            if all.contains(&addr) && end <= all.end {
                let known = expected.entry(module).or_default();
                *known = end.max(*known);
            }
        }
        self.expected = Some(expected);
    }

    /// Ends a restart.
    pub(crate) fn expect_none(&mut self) {
        self.expected = None;
    }

    /// Runs `load`, which loads a module, so that the driver places its managed variables in the
    /// window, and during a restart at their old addresses.
    pub(crate) fn load<T>(&mut self, module: ModuleId, load: impl FnOnce() -> T) -> T {
        let limit = match &self.expected {
            None => Some(self.window.range().end),
            Some(known) => known.get(&module).map(|end| end.next_multiple_of(CHUNK)),
        };
        match limit {
            Some(limit) => self.window.holds(limit, load),
            None => load(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;
    use std::ptr;

    /// Takes a range as the driver does, and returns its first address. In a hole of two chunks,
    /// that is the higher one.
    fn take(chunks: u64) -> u64 {
        let bytes = (chunks + 1) * CHUNK - (2 << 20);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: the kernel chooses a free range for the new mapping, and only parts of that are
        // unmapped, to which nothing refers.
        unsafe {
            let at = libc::mmap(ptr::null_mut(), bytes as usize, libc::PROT_NONE, flags, -1, 0);
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
        // SAFETY: `take` mapped the range, and nothing refers to it.
        unsafe { libc::munmap(at as *mut _, (chunks * CHUNK) as usize) };
    }

    /// Runs `alone` in a process of its own, as other tests map and unmap memory at the same time.
    #[test]
    fn variables_lie_where_they_lay() {
        let this = std::env::current_exe().unwrap();
        let alone = ["--ignored", "--exact", "managed::tests::alone", "--test-threads=1"];
        let told = Command::new(this).args(alone).output().unwrap();
        let said = String::from_utf8_lossy(&told.stdout);
        assert!(told.status.success() && said.contains("1 passed"), "{said}");
    }

    #[test]
    #[ignore = "variables_lie_where_they_lay runs it in its own process"]
    fn alone() {
        let [a, b, c, d] = [1, 2, 3, 4].map(ModuleId);
        let (first, second, third, fourth);
        let asked;
        {
            let mut all = Managed::default();
            let top = all.window.range().end;
            assert_eq!(all.load(a, || 5), 5);
            first = all.load(a, || take(1));
            assert_eq!(first, top - CHUNK);
            second = all.load(b, || take(5));
            assert_eq!(second, first - 5 * CHUNK);
            third = all.load(c, || take(1));
            assert_eq!(third, second - CHUNK);
            give_back(first, 1);
            give_back(second, 5);
            // Into the hole, and only now: a hole of one chunk would not do.
            fourth = all.load(d, || take(2));
            assert_eq!(fourth, top - 2 * CHUNK);
            asked = [(c, third, 8), (d, fourth, CHUNK + 8), (d, fourth + 64, 8)];
            give_back(third, 1);
            give_back(fourth, 2);
        }
        let mut all = Managed::default();
        all.expect(asked.into_iter().chain([(b, 4096, 4096)]));
        // This module's variables were outside of the window, and stay so.
        let elsewhere = all.load(b, || take(1));
        assert!(!all.window.range().contains(&elsewhere));
        assert_eq!(all.load(c, || take(1)), third);
        assert_eq!(all.load(d, || take(2)), fourth);
        all.expect_none();
        assert_eq!(all.load(a, || take(1)), fourth - CHUNK);
    }
}
