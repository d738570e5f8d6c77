//! Addresses of the client's part of the shared arena: pinned and managed allocations, and windows
//! through which registered host memory is seen.

use super::ranges::{GRANULE, LARGE, Ranges, round_up};
use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::{CALLS_BASE, SHARED_BASE};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard};

/// Bytes of a page. Allocations of at least a page own their pages; smaller ones share them.
pub(crate) const PAGE: u64 = 4096;
/// Registered host memory is seen at a fixed distance from its own address within each window of
/// this size, so that two registrations that share a page share its copy in the arena as well.
pub(crate) const WINDOW: u64 = 1 << 30;

/// The client's part of the shared arena.
#[derive(Debug)]
pub(crate) struct Shared {
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    ranges: Ranges,
    /// Bytes in use, and how many may be: what the machine has got.
    used: u64,
    limit: u64,
    /// Host window (address / WINDOW) → its place.
    windows: BTreeMap<u64, Window>,
}

#[derive(Debug, Clone, Copy)]
struct Window {
    arena: u64,
    /// Registrations that use it.
    users: u32,
}

impl Shared {
    /// `limit`: bytes that may be allocated at once.
    pub(crate) fn new(limit: u64) -> Self {
        let ranges = Ranges::new(SHARED_BASE, CALLS_BASE - SHARED_BASE);
        Self { inner: Mutex::new(Inner { ranges, used: 0, limit, windows: BTreeMap::new() }) }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Takes room for `size` bytes: its address and the bytes really taken.
    pub(crate) fn take(&self, size: u64) -> Result<(u64, u64), CuError> {
        // What is smaller than a page lies in one page, because devices register whole pages.
        let (size, align) = match size {
            0..PAGE => {
                let size = size.next_power_of_two().max(GRANULE);
                (size, size)
            }
            _ => {
                let size = round_up(size, PAGE).ok_or(CuError::OUT_OF_MEMORY)?;
                (size, if size >= LARGE { LARGE } else { PAGE })
            }
        };
        let mut inner = self.lock();
        inner.charge(size)?;
        match inner.ranges.take(size, align) {
            Some(addr) => Ok((addr, size)),
            None => {
                inner.used -= size;
                Err(CuError::OUT_OF_MEMORY)
            }
        }
    }

    /// Takes back what `take` gave.
    pub(crate) fn put(&self, addr: u64, size: u64) {
        let mut inner = self.lock();
        inner.used -= size;
        inner.ranges.put(addr, size);
    }

    /// The arena's address for host pages `pages` (a range of addresses, whole pages) and counts a
    /// user of their windows. `None`: the windows' places do not fit together, or the arena is
    /// full.
    pub(crate) fn enter_windows(&self, pages: &Range<u64>) -> Result<Option<u64>, CuError> {
        let windows = windows_of(pages);
        let mut inner = self.lock();
        inner.charge(pages.end - pages.start)?;
        let placed = inner.place_windows(&windows);
        let Some(arena) = placed else {
            inner.used -= pages.end - pages.start;
            return Ok(None);
        };
        for (index, window) in windows.clone().enumerate() {
            let place = arena + index as u64 * WINDOW;
            let entry = inner.windows.entry(window).or_insert(Window { arena: place, users: 0 });
            entry.users += 1;
        }
        Ok(Some(arena + pages.start % WINDOW))
    }

    /// Undoes `enter_windows`.
    pub(crate) fn leave_windows(&self, pages: &Range<u64>) {
        let mut inner = self.lock();
        inner.used -= pages.end - pages.start;
        for window in windows_of(pages) {
            let Some(entry) = inner.windows.get_mut(&window) else { continue };
            entry.users -= 1;
            if entry.users == 0 {
                let arena = entry.arena;
                inner.windows.remove(&window);
                inner.ranges.put(arena, WINDOW);
            }
        }
    }
}

/// Numbers of the windows that a range of addresses touches.
fn windows_of(pages: &Range<u64>) -> Range<u64> {
    pages.start / WINDOW..pages.end.div_ceil(WINDOW)
}

impl Inner {
    fn charge(&mut self, size: u64) -> Result<(), CuError> {
        match self.used.checked_add(size).filter(|&used| used <= self.limit) {
            Some(used) => {
                self.used = used;
                Ok(())
            }
            None => Err(CuError::OUT_OF_MEMORY),
        }
    }

    /// Finds or makes consecutive places for consecutive windows; the first one's place.
    fn place_windows(&mut self, windows: &Range<u64>) -> Option<u64> {
        let known = windows.clone().find_map(|w| self.windows.get(&w).map(|at| (w, at.arena)));
        let Some((window, arena)) = known else {
            return self.ranges.take((windows.end - windows.start) * WINDOW, PAGE);
        };
        let first = arena.checked_sub((window - windows.start) * WINDOW)?;
        let place = |window: u64| first + (window - windows.start) * WINDOW;
        let mut taken = Vec::new();
        for window in windows.clone() {
            let fits = match self.windows.get(&window) {
                Some(entry) => entry.arena == place(window),
                None => {
                    let free = self.ranges.take_at(place(window), WINDOW);
                    taken.extend(free.then_some(place(window)));
                    free
                }
            };
            if !fits {
                taken.into_iter().for_each(|place| self.ranges.put(place, WINDOW));
                return None;
            }
        }
        Some(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: u64 = 0x7f00_0000_0000;

    #[test]
    fn small_allocations_share_pages_and_large_ones_own_them() {
        let shared = Shared::new(1 << 30);
        assert_eq!(shared.take(1).unwrap(), (SHARED_BASE, 512));
        assert_eq!(shared.take(600).unwrap(), (SHARED_BASE + 1024, 1024));
        assert_eq!(shared.take(PAGE + 1).unwrap(), (SHARED_BASE + PAGE, 2 * PAGE));
        assert_eq!(shared.take(LARGE).unwrap().0 % LARGE, 0);
    }

    #[test]
    fn the_machine_s_memory_is_the_limit() {
        let shared = Shared::new(4 * PAGE);
        let (addr, size) = shared.take(3 * PAGE).unwrap();
        assert_eq!(shared.take(2 * PAGE), Err(CuError::OUT_OF_MEMORY));
        assert_eq!(shared.enter_windows(&(HOST..HOST + 2 * PAGE)), Err(CuError::OUT_OF_MEMORY));
        shared.put(addr, size);
        assert!(shared.take(4 * PAGE).is_ok());
        assert_eq!(shared.take(u64::MAX), Err(CuError::OUT_OF_MEMORY));
    }

    #[test]
    fn neighbours_keep_their_distance() {
        let shared = Shared::new(u64::MAX);
        let first = HOST..HOST + 2 * PAGE;
        let second = HOST + PAGE..HOST + 3 * PAGE;
        let a = shared.enter_windows(&first).unwrap().unwrap();
        let b = shared.enter_windows(&second).unwrap().unwrap();
        assert_eq!(b, a + PAGE, "the shared page is one page");
        shared.leave_windows(&first);
        assert_eq!(shared.enter_windows(&first).unwrap(), Some(a), "the window is still in use");
    }

    #[test]
    fn windows_that_do_not_fit_together_are_refused() {
        let shared = Shared::new(u64::MAX);
        let (low, high) = (HOST..HOST + PAGE, HOST + WINDOW..HOST + WINDOW + PAGE);
        let both = HOST + WINDOW - PAGE..HOST + WINDOW + PAGE;
        let a = shared.enter_windows(&low).unwrap().unwrap();
        assert_eq!(shared.enter_windows(&both).unwrap(), Some(a + WINDOW - PAGE));
        shared.leave_windows(&both);
        let pinned = shared.take(PAGE).unwrap();
        assert_eq!(pinned.0, a + WINDOW, "the place after the window is taken");
        shared.enter_windows(&high).unwrap().unwrap();
        assert_eq!(shared.enter_windows(&both).unwrap(), None);
        shared.leave_windows(&low);
        shared.leave_windows(&high);
        assert!(shared.enter_windows(&both).unwrap().is_some(), "free windows go anywhere");
    }
}
