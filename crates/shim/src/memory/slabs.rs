//! The slabs that a device has granted, and which parts of them are free: bookkeeping only, without
//! a word to the proxy.
//!
//! Small allocations share slabs. An allocation of [`OWN`] bytes or more has a slab of its own,
//! which goes back whole. A slab that nothing uses is idle: kept for the next allocation, while all
//! idle ones together are not too large.

use super::ranges::{GRANULE, LARGE, Ranges};
use std::collections::BTreeMap;

/// An allocation of this many bytes has a slab of its own.
pub(super) const OWN: u64 = 16 << 20;
/// Bytes of a slab that allocations share, where the device has so many.
pub(super) const SHARED: u64 = 32 << 20;
/// Idle slabs have at most this many bytes in all.
const MAX_IDLE: u64 = 1 << 30;

#[derive(Debug)]
pub(super) struct Slabs {
    /// By address.
    all: BTreeMap<u64, Slab>,
    /// Free parts of shared slabs. Slabs do not touch, so no part spans two.
    free: Ranges,
    /// Slabs that nothing uses, from the longest idle to the latest.
    idle: Vec<u64>,
    idle_bytes: u64,
    granted: u64,
    used: u64,
}

#[derive(Debug)]
struct Slab {
    bytes: u64,
    used: u64,
    /// For one allocation.
    own: bool,
}

impl Default for Slabs {
    fn default() -> Self {
        let free = Ranges::new(0, 0);
        Self { all: BTreeMap::new(), free, idle: Vec::new(), idle_bytes: 0, granted: 0, used: 0 }
    }
}

impl Slabs {
    /// Room for `size` bytes (a multiple of [`GRANULE`]): its address and the bytes really taken.
    /// `None` where no slab has it.
    pub(super) fn take(&mut self, size: u64) -> Option<(u64, u64)> {
        if size >= OWN {
            let (bytes, base) = self.idle_own(size)?;
            self.occupy(base, bytes);
            return Some((base, bytes));
        }
        let align = if size >= LARGE { LARGE } else { GRANULE };
        let addr = self.free.take(size, align)?;
        self.occupy(addr, size);
        Some((addr, size))
    }

    /// Takes back what `take` gave.
    pub(super) fn put(&mut self, addr: u64, taken: u64) {
        let Some((base, slab)) = self.all.range_mut(..=addr).next_back() else { return };
        slab.used -= taken;
        self.used -= taken;
        if !slab.own {
            self.free.put(addr, taken);
        }
        if slab.used == 0 {
            self.idle_bytes += slab.bytes;
            self.idle.push(*base);
        }
    }

    /// Adds a slab for an allocation of `size` bytes, which the next `take` finds.
    pub(super) fn add(&mut self, base: u64, bytes: u64, size: u64) {
        let own = size >= OWN;
        if !own {
            self.free.put(base, bytes);
        }
        self.all.insert(base, Slab { bytes, used: 0, own });
        self.granted += bytes;
        self.idle_bytes += bytes;
        self.idle.push(base);
    }

    /// Removes an idle slab if there are too many: one that is too large to be kept at all, else
    /// the one that has been idle longest.
    pub(super) fn remove_excess(&mut self) -> Option<(u64, u64)> {
        if self.idle_bytes <= MAX_IDLE {
            return None;
        }
        let too_large = self.idle.iter().position(|base| self.all[base].bytes > MAX_IDLE);
        self.remove(too_large.unwrap_or(0))
    }

    /// Removes an idle slab, if there is one: its address and its bytes.
    pub(super) fn remove_idle(&mut self) -> Option<(u64, u64)> {
        self.remove(0)
    }

    /// Bytes of slabs that no allocation uses.
    pub(super) fn spare(&self) -> u64 {
        self.granted - self.used
    }

    /// The smallest idle slab for one allocation of `size` bytes that does not waste half of it:
    /// its bytes and its address.
    fn idle_own(&self, size: u64) -> Option<(u64, u64)> {
        let slabs = self.idle.iter().map(|base| (self.all[base].bytes, *base));
        let fits = |&(bytes, base): &(u64, u64)| {
            self.all[&base].own && bytes >= size && bytes - size < bytes / 2
        };
        slabs.filter(fits).min()
    }

    /// Counts `taken` bytes at `addr` as used.
    fn occupy(&mut self, addr: u64, taken: u64) {
        let Some((base, slab)) = self.all.range_mut(..=addr).next_back() else { return };
        if slab.used == 0 {
            self.idle_bytes -= slab.bytes;
            self.idle.retain(|other| other != base);
        }
        slab.used += taken;
        self.used += taken;
    }

    fn remove(&mut self, index: usize) -> Option<(u64, u64)> {
        if index >= self.idle.len() {
            return None;
        }
        let base = self.idle.remove(index);
        let slab = self.all.remove(&base)?;
        if !slab.own {
            let whole = self.free.take_at(base, slab.bytes);
            debug_assert!(whole, "an idle slab is free in all its parts");
        }
        self.granted -= slab.bytes;
        self.idle_bytes -= slab.bytes;
        Some((base, slab.bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const BASE: u64 = 1 << 40;

    /// A slab of its own at `index`, taken.
    fn own(slabs: &mut Slabs, index: u64, bytes: u64) -> u64 {
        slabs.add(BASE + (index << 36), bytes, bytes);
        slabs.take(bytes).unwrap().0
    }

    #[test]
    fn small_allocations_share_a_slab() {
        let mut slabs = Slabs::default();
        assert_eq!(slabs.take(512), None);
        slabs.add(BASE, SHARED, 512);
        assert_eq!(slabs.take(512), Some((BASE, 512)));
        assert_eq!(slabs.take(LARGE + 512), Some((BASE + LARGE, LARGE + 512)));
        assert_eq!(slabs.take(1024), Some((BASE + 512, 1024)), "the smallest part");
        assert_eq!(slabs.spare(), SHARED - LARGE - 2048);
        assert_eq!(slabs.remove_idle(), None);
        for (addr, size) in [(BASE, 512), (BASE + LARGE, LARGE + 512)] {
            slabs.put(addr, size);
        }
        assert_eq!(slabs.remove_idle(), None);
        slabs.put(BASE + 512, 1024);
        assert_eq!(slabs.remove_idle(), Some((BASE, SHARED)));
        assert_eq!((slabs.take(512), slabs.spare()), (None, 0));
    }

    #[test]
    fn an_allocation_lies_in_one_slab() {
        let mut slabs = Slabs::default();
        slabs.add(BASE, LARGE, 512);
        slabs.add(BASE + 2 * LARGE, LARGE, 512);
        assert_eq!(slabs.take(LARGE + 512), None);
        assert_eq!(slabs.take(LARGE), Some((BASE, LARGE)));
        assert_eq!(slabs.take(LARGE), Some((BASE + 2 * LARGE, LARGE)));
        slabs.put(BASE, LARGE);
        slabs.put(BASE + 2 * LARGE, LARGE);
        assert_eq!(slabs.remove_idle(), Some((BASE, LARGE)));
        assert_eq!(slabs.take(512), Some((BASE + 2 * LARGE, 512)));
    }

    #[test]
    fn a_large_slab_is_kept_for_what_nearly_fills_it() {
        let mut slabs = Slabs::default();
        let slab = own(&mut slabs, 0, 64 * MIB);
        assert_eq!(slabs.take(40 * MIB), None, "it is in use");
        slabs.put(slab, 64 * MIB);
        assert_eq!(slabs.take(32 * MIB), None, "half of it would be wasted");
        assert_eq!(slabs.take(65 * MIB), None);
        assert_eq!(slabs.take(512), None, "small allocations do not break it up");
        assert_eq!(slabs.take(33 * MIB), Some((slab, 64 * MIB)));
        assert_eq!(slabs.spare(), 0);
        let other = own(&mut slabs, 1, 48 * MIB);
        slabs.put(slab, 64 * MIB);
        slabs.put(other, 48 * MIB);
        assert_eq!(slabs.take(40 * MIB), Some((other, 48 * MIB)), "the smallest that fits");
    }

    #[test]
    fn idle_slabs_have_a_limit() {
        let mut slabs = Slabs::default();
        let taken: Vec<u64> = (0..3).map(|i| own(&mut slabs, i, 400 * MIB)).collect();
        slabs.put(taken[1], 400 * MIB);
        slabs.put(taken[0], 400 * MIB);
        assert_eq!(slabs.remove_excess(), None);
        slabs.put(taken[2], 400 * MIB);
        assert_eq!(slabs.remove_excess(), Some((taken[1], 400 * MIB)), "the longest idle goes");
        assert_eq!(slabs.remove_excess(), None);
        let huge = own(&mut slabs, 3, 1025 * MIB);
        slabs.put(huge, 1025 * MIB);
        assert_eq!(slabs.remove_excess(), Some((huge, 1025 * MIB)), "and no other for its sake");
        assert_eq!(slabs.remove_excess(), None);
        assert_eq!(slabs.spare(), 800 * MIB);
    }
}
