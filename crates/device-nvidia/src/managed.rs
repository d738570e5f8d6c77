//! Managed variables, at addresses that a restart can give again.
//!
//! The program knows where its managed variables are. The driver takes a range for those of a
//! module when it loads it, of a multiple of 32 MiB, aligned, by a mapping that is up to 32 MiB
//! longer (seen with driver 580 on H100 and H200).

use crate::window::{CHUNK, Window};
use kedge_protocol::ModuleId;
use std::collections::HashMap;

/// Far below where the kernel begins to map, far above the client's addresses.
const BASE: u64 = 0x7e00_0000_0000;
const CHUNKS: usize = 512;

pub(crate) struct Managed {
    window: Window,
    /// During a restart: where the modules' variables ended.
    expected: Option<HashMap<ModuleId, u64>>,
}

impl Default for Managed {
    fn default() -> Managed {
        Managed { window: Window::new(BASE, CHUNKS), expected: None }
    }
}

impl Managed {
    /// A restart begins: module, address and size of each variable that the program knows.
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

    /// It is over.
    pub(crate) fn expect_none(&mut self) {
        self.expected = None;
    }

    /// Loads a module: its managed variables come into the window, and during a restart to where
    /// they were.
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

    /// As the driver does, which ends up in the higher half of a hole of two chunks: the range's
    /// first byte.
    fn take(chunks: u64) -> u64 {
        let bytes = (chunks + 1) * CHUNK - (2 << 20);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping; what is not aligned of it goes back at once.
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
        // Not into the window, however the process looks.
        let elsewhere = all.load(b, || take(1));
        assert!(!all.window.range().contains(&elsewhere));
        assert_eq!(all.load(c, || take(1)), third);
        assert_eq!(all.load(d, || take(2)), fourth);
        all.expect_none();
        assert_eq!(all.load(a, || take(1)), fourth - CHUNK);
    }
}
