//! Addresses for the few ranges that a device places itself.

use std::collections::BTreeMap;

/// First-fit allocation of addresses, for the few ranges that a device places itself.
pub(super) struct Placer {
    /// Free ranges: address → length.
    free: BTreeMap<u64, u64>,
}

impl Placer {
    pub(super) fn new(base: u64, len: u64) -> Self {
        Self { free: BTreeMap::from([(base, len)]) }
    }

    pub(super) fn take(&mut self, size: u64, align: u64) -> Option<u64> {
        // 256, as cuMemAlloc aligns: vector accesses into variables then never split.
        let align = align.max(256);
        if !align.is_power_of_two() {
            return None;
        }
        let size = size.checked_next_multiple_of(256)?;
        let (base, len, addr) = self.free.iter().find_map(|(base, len)| {
            let addr = base.checked_next_multiple_of(align)?;
            (addr.checked_add(size)? <= base + len).then_some((*base, *len, addr))
        })?;
        self.carve(base, len, addr, size);
        Some(addr)
    }

    /// Takes a range that `take` may have given; `None` where it is not free.
    pub(super) fn take_at(&mut self, addr: u64, size: u64) -> Option<()> {
        let size = size.checked_next_multiple_of(256).filter(|size| *size > 0)?;
        let end = addr.checked_add(size)?;
        let (&base, &len) = self.free.range(..=addr).next_back()?;
        if !addr.is_multiple_of(256) || end > base + len {
            return None;
        }
        self.carve(base, len, addr, size);
        Some(())
    }

    /// Takes [addr, addr+size) out of the free range [base, base+len), which holds it.
    fn carve(&mut self, base: u64, len: u64, addr: u64, size: u64) {
        self.free.remove(&base);
        if addr > base {
            self.free.insert(base, addr - base);
        }
        if addr + size < base + len {
            self.free.insert(addr + size, base + len - addr - size);
        }
    }

    pub(super) fn give_back(&mut self, addr: u64, size: u64) {
        let (mut addr, mut size) = (addr, size.next_multiple_of(256));
        if let Some(next) = self.free.remove(&(addr + size)) {
            size += next;
        }
        if let Some((&before, &len)) = self.free.range(..addr).next_back()
            && before + len == addr
        {
            addr = before;
            size += len;
        }
        self.free.insert(addr, size);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placer_takes_first_fit_and_merges() {
        let mut placer = Placer::new(0x1000, 0x1000);
        let a = placer.take(100, 1).unwrap();
        let b = placer.take(300, 4096);
        assert_eq!((a, b), (0x1000, None));
        let b = placer.take(300, 1).unwrap();
        assert_eq!(b, 0x1100);
        placer.give_back(a, 100);
        placer.give_back(b, 300);
        assert_eq!(placer.free, BTreeMap::from([(0x1000, 0x1000)]));
        assert_eq!(placer.take(0x1000, 1), Some(0x1000));
        assert_eq!(placer.take(1, 1), None);
    }

    #[test]
    fn placer_takes_a_given_range_only_where_it_is_free() {
        let mut placer = Placer::new(0x1000, 0x1000);
        assert_eq!(placer.take_at(0x1400, 300), Some(()));
        assert_eq!(placer.free, BTreeMap::from([(0x1000, 0x400), (0x1600, 0xa00)]));
        for (addr, size) in [
            (0x1500, 1),
            (0x1300, 257),
            (0x1810, 16),
            (0x1f00, 257),
            (0xf00, 256),
            (0x1000, 0),
            (0x1000, u64::MAX),
            (u64::MAX - 255, 256),
        ] {
            assert_eq!(placer.take_at(addr, size), None, "{addr:#x} {size:#x}");
        }
        assert_eq!(
            (placer.take_at(0x1000, 0x400), placer.take(0x100, 1)),
            (Some(()), Some(0x1600))
        );
    }
}
