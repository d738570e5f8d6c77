//! Valid device addresses, and the generic-address windows of the spaces that are not global.
//!
//! A global address is an address of this process: the arenas are mapped where
//! [`kedge_cuda_types::arena`] says. [`Spans`] knows which parts of them programs may touch.

use std::sync::RwLock;
use std::sync::atomic::{AtomicU64, Ordering};

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
    /// Sorted, disjoint; adjacent ranges stay apart, so that an overrun is found.
    table: RwLock<Vec<Span>>,
    version: AtomicU64,
}

impl Spans {
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes [addr, addr+size) valid, replacing what overlaps it.
    pub fn insert(&self, addr: u64, size: u64) {
        self.remove(addr, size);
        if size == 0 {
            return;
        }
        let mut table = self.table.write().unwrap_or_else(|e| e.into_inner());
        let at = table.partition_point(|span| span.lo < addr);
        table.insert(at, Span { lo: addr, hi: addr.saturating_add(size) });
        self.version.fetch_add(1, Ordering::Release);
    }

    /// Makes [addr, addr+size) invalid; what sticks out of a removed range stays valid.
    pub fn remove(&self, addr: u64, size: u64) {
        let end = addr.saturating_add(size);
        let mut table = self.table.write().unwrap_or_else(|e| e.into_inner());
        let first = table.partition_point(|span| span.hi <= addr);
        let last = table.partition_point(|span| span.lo < end);
        if first >= last {
            return;
        }
        let (head, tail) = (table[first], table[last - 1]);
        let mut keep = Vec::with_capacity(2);
        if head.lo < addr {
            keep.push(Span { lo: head.lo, hi: addr });
        }
        if tail.hi > end {
            keep.push(Span { lo: end, hi: tail.hi });
        }
        table.splice(first..last, keep);
        self.version.fetch_add(1, Ordering::Release);
    }

    /// The span that holds `addr`.
    pub fn find(&self, addr: u64) -> Option<Span> {
        let table = self.table.read().unwrap_or_else(|e| e.into_inner());
        let at = table.partition_point(|span| span.hi <= addr);
        table.get(at).copied().filter(|span| span.lo <= addr)
    }

    /// Whether all of [addr, addr+size) lies in one span or in touching ones.
    pub fn covers(&self, addr: u64, size: u64) -> bool {
        let Some(end) = addr.checked_add(size) else { return false };
        let table = self.table.read().unwrap_or_else(|e| e.into_inner());
        let mut at = table.partition_point(|span| span.hi <= addr);
        let mut covered = addr;
        while covered < end {
            match table.get(at) {
                Some(span) if span.lo <= covered => covered = span.hi,
                _ => return false,
            }
            at += 1;
        }
        true
    }

    /// Changes with every insert and remove.
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }
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
}
