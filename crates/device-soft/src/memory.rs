//! Valid device addresses, and the generic-address windows of the spaces that are not global.
//!
//! A global address is an address of this process: the arenas are mapped where
//! [`kedge_cuda_types::arena`] says. [`Spans`] knows which parts of them programs may touch.

use kedge_device::Ranges;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{RwLock, RwLockReadGuard};

/// Generic addresses of shared memory: the block's own from here; of the cluster's block with rank
/// `r` at `(r + 1) * SHARED_STRIDE` further.
pub const SHARED_WINDOW: u64 = 0x2F00_0000_0000;
pub const SHARED_STRIDE: u64 = 1 << 24;
pub const SHARED_WINDOWS: u64 = 1 + crate::spec::MAX_CLUSTER as u64;
/// The same place as `addr`, a generic address in shared memory, in the cluster's block `rank`.
pub(crate) fn shared_in_block(addr: u64, rank: u32) -> u64 {
    let offset = addr.wrapping_sub(SHARED_WINDOW) % SHARED_STRIDE;
    SHARED_WINDOW + (u64::from(rank) + 1) * SHARED_STRIDE + offset
}

/// Generic addresses of the executing thread's local memory.
pub const LOCAL_WINDOW: u64 = 0x2F10_0000_0000;
pub const LOCAL_WINDOW_LEN: u64 = 1 << 32;
/// Generic addresses of the kernel's parameters.
pub const PARAM_WINDOW: u64 = 0x2F20_0000_0000;
pub const PARAM_WINDOW_LEN: u64 = 1 << 20;

/// A state space, as an access names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Space {
    Generic,
    Global,
    Shared,
    Local,
    Const,
    Param,
}

/// A range of valid addresses, [lo, hi).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Span {
    pub lo: u64,
    pub hi: u64,
}

/// The valid address ranges of one client: its allocations, module globals, shared-arena ranges.
#[derive(Debug, Default)]
pub struct Spans {
    /// Ranges that touch stay apart, so that an overrun is found.
    table: RwLock<Ranges>,
    version: AtomicU64,
}

impl Spans {
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes [addr, addr+size) valid, replacing what overlaps it.
    pub fn insert(&self, addr: u64, size: u64) {
        self.change(|table| table.add(addr, bounded(addr, size)));
    }

    /// Makes [addr, addr+size) invalid; what sticks out of a removed range stays valid.
    pub fn remove(&self, addr: u64, size: u64) {
        self.change(|table| table.cut(addr, bounded(addr, size)));
    }

    fn change(&self, change: impl FnOnce(&mut Ranges)) {
        change(&mut self.table.write().unwrap_or_else(|e| e.into_inner()));
        self.version.fetch_add(1, Ordering::Release);
    }

    fn table(&self) -> RwLockReadGuard<'_, Ranges> {
        self.table.read().unwrap_or_else(|e| e.into_inner())
    }

    /// The span that holds `addr`.
    pub fn find(&self, addr: u64) -> Option<Span> {
        let (lo, size) = self.table().holding(addr)?;
        Some(Span { lo, hi: lo + size })
    }

    /// The span that is nearest to `addr`, which lies in none.
    pub fn nearest(&self, addr: u64) -> Option<Span> {
        let spans = self.table().beside(addr).into_iter().flatten();
        let spans = spans.map(|(lo, size)| Span { lo, hi: lo + size });
        spans.min_by_key(|span| if addr < span.lo { span.lo - addr } else { addr - span.hi })
    }

    /// Whether all of [addr, addr+size) lies in one span or in touching ones.
    pub fn covers(&self, addr: u64, size: u64) -> bool {
        self.table().cover(addr, size)
    }

    /// Changes with every insert and remove.
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }
}

/// Cuts a range that would reach past the last address.
fn bounded(addr: u64, size: u64) -> u64 {
    size.min(u64::MAX - addr)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_split_and_cover() {
        let spans = Spans::new();
        spans.insert(100, 100);
        spans.insert(200, 50);
        assert_eq!(spans.find(199), Some(Span { lo: 100, hi: 200 }));
        assert!(spans.covers(150, 100) && !spans.covers(150, 101));
        spans.remove(120, 10);
        assert_eq!(spans.find(119), Some(Span { lo: 100, hi: 120 }));
        assert_eq!(spans.find(120), None);
        assert_eq!(spans.find(130), Some(Span { lo: 130, hi: 200 }));
        assert!(!spans.covers(110, 20) && !spans.covers(99, 2) && !spans.covers(u64::MAX, 2));
    }

    #[test]
    fn the_nearest_span_is_below_or_above() {
        let spans = Spans::new();
        assert_eq!(spans.nearest(5), None);
        spans.insert(100, 100);
        spans.insert(300, 50);
        for (addr, lo) in [(0, 100), (99, 100), (200, 100), (249, 100), (251, 300), (u64::MAX, 300)]
        {
            assert_eq!(spans.nearest(addr).map(|span| span.lo), Some(lo), "{addr}");
        }
    }

    /// The table is asked in the order of addresses, which is the worst one for a list.
    #[test]
    fn a_million_spans_come_and_go() {
        let spans = Spans::new();
        let all = (0..1_000_000).map(|index| 0x1000 + 512 * index);
        all.clone().for_each(|addr| spans.insert(addr, 1));
        assert_eq!(spans.find(0x1000 + 512), Some(Span { lo: 0x1200, hi: 0x1201 }));
        all.for_each(|addr| spans.remove(addr, 1));
        assert_eq!(spans.find(0x1000), None);
    }
}
