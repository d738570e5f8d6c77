//! Disjoint address ranges, cut wherever one is taken out.

use std::collections::BTreeMap;

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Ranges {
    /// Address → length.
    by_addr: BTreeMap<u64, u64>,
    bytes: u64,
}

impl Ranges {
    /// `addr + size` must not overflow: callers have checked that the range lies in an arena.
    pub(super) fn add(&mut self, addr: u64, size: u64) {
        if size > 0 {
            self.cut(addr, size);
            self.by_addr.insert(addr, size);
            self.bytes += size;
        }
    }

    /// Takes [addr, addr+size) out; what sticks out of a range stays.
    pub(super) fn cut(&mut self, addr: u64, size: u64) {
        let end = addr + size;
        let start = match self.by_addr.range(..addr).next_back() {
            Some((base, len)) if base + len > addr => *base,
            _ => addr,
        };
        let hit: Vec<(u64, u64)> = self.by_addr.range(start..end).map(|(a, l)| (*a, *l)).collect();
        for (base, len) in hit {
            self.by_addr.remove(&base);
            self.bytes -= len;
            for (from, to) in [(base, addr.min(base + len)), (end.max(base), base + len)] {
                if from < to {
                    self.by_addr.insert(from, to - from);
                    self.bytes += to - from;
                }
            }
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn into_iter(self) -> impl Iterator<Item = (u64, u64)> {
        self.by_addr.into_iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_leave_what_sticks_out() {
        let mut ranges = Ranges::default();
        ranges.add(0x1000, 0x3000);
        ranges.cut(0x2000, 0x1000);
        assert_eq!(ranges.bytes(), 0x2000);
        ranges.add(0x3800, 0x1000);
        assert_eq!(ranges.bytes(), 0x2800);
        let all: Vec<_> = ranges.into_iter().collect();
        assert_eq!(all, [(0x1000, 0x1000), (0x3000, 0x800), (0x3800, 0x1000)]);
    }

    #[test]
    fn a_cut_over_everything_leaves_nothing() {
        let mut ranges = Ranges::default();
        ranges.add(0x1000, 0x1000);
        ranges.add(0x5000, 1);
        ranges.cut(0, 0x10000);
        assert_eq!(ranges, Ranges::default());
    }
}
