//! Disjoint address ranges, cut wherever one is taken out.

use std::collections::BTreeMap;

/// Ranges that touch stay apart: each ends as it was added, or as cuts left it.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Ranges {
    /// Address → length.
    by_addr: BTreeMap<u64, u64>,
    bytes: u64,
}

impl Ranges {
    /// Adds a range in place of what overlaps it. `addr + size` must not overflow, here and in
    /// [`Ranges::cut`]: callers have checked that the range lies in an arena.
    pub fn add(&mut self, addr: u64, size: u64) {
        if size > 0 {
            self.cut(addr, size);
            self.by_addr.insert(addr, size);
            self.bytes += size;
        }
    }

    /// Takes [addr, addr+size) out; what sticks out of a range stays.
    pub fn cut(&mut self, addr: u64, size: u64) {
        let end = addr + size;
        let start = self.holding(addr).map_or(addr, |(base, _)| base);
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

    /// Takes a range out that must be one of these; whether it was.
    pub fn remove(&mut self, addr: u64, size: u64) -> bool {
        let found = self.by_addr.get(&addr) == Some(&size);
        if found {
            self.by_addr.remove(&addr);
            self.bytes -= size;
        }
        found
    }

    /// Returns the range, as (address, length), that holds an address.
    pub fn holding(&self, addr: u64) -> Option<(u64, u64)> {
        let (&start, &len) = self.by_addr.range(..=addr).next_back()?;
        (addr - start < len).then_some((start, len))
    }

    /// Returns the ranges next to an address that is in none, below it and above it.
    pub fn beside(&self, addr: u64) -> [Option<(u64, u64)>; 2] {
        let pair = |(&start, &len): (&u64, &u64)| (start, len);
        let below = self.by_addr.range(..=addr).next_back().map(pair);
        [below, self.by_addr.range(addr..).next().map(pair)]
    }

    /// Returns whether a range lies in one of these.
    pub fn contain(&self, addr: u64, size: u64) -> bool {
        self.holding(addr).is_some_and(|(start, len)| size <= len - (addr - start))
    }

    /// Returns the parts of [start, end) that are in these: first byte, and what is behind the
    /// last.
    pub fn within(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, u64)> {
        let first = self.holding(start).map_or(start, |(base, _)| base);
        let hit = self.by_addr.range(first..end.max(first));
        hit.map(move |(at, len)| ((*at).max(start), (at + len).min(end)))
    }

    /// Returns the parts of [start, end) that are in none of these: first byte, and what is behind
    /// the last.
    pub fn between(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, u64)> {
        let mut at = start;
        let last = (end.max(start), end.max(start));
        self.within(start, end).chain(std::iter::once(last)).filter_map(move |(from, to)| {
            let gap = (at, from);
            at = to;
            (gap.0 < gap.1).then_some(gap)
        })
    }

    /// Returns whether every byte of a range is in some of these; what touches counts as one.
    pub fn cover(&self, addr: u64, size: u64) -> bool {
        let Some(end) = addr.checked_add(size) else { return false };
        let mut at = addr;
        while at < end {
            match self.holding(at) {
                Some((start, len)) => at = start + len,
                None => return false,
            }
        }
        true
    }

    /// Returns whether a range shares a byte with one of these.
    pub fn overlap(&self, addr: u64, size: u64) -> bool {
        let before = self.by_addr.range(..addr.saturating_add(size)).next_back();
        before.is_some_and(|(start, len)| start + len > addr)
    }

    /// Returns how many bytes there are in all.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns how many ranges there are.
    pub fn count(&self) -> usize {
        self.by_addr.len()
    }

    /// Returns (address, length) of each, in order.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        self.by_addr.iter().map(|(addr, len)| (*addr, *len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(all: &[(u64, u64)]) -> Ranges {
        let mut ranges = Ranges::default();
        all.iter().for_each(|(addr, size)| ranges.add(*addr, *size));
        ranges
    }

    #[test]
    fn cuts_leave_what_sticks_out() {
        let mut ranges = ranges(&[(0x1000, 0x3000)]);
        ranges.cut(0x2000, 0x1000);
        assert_eq!(ranges.bytes(), 0x2000);
        ranges.add(0x3800, 0x1000);
        assert_eq!(ranges.bytes(), 0x2800);
        let all: Vec<_> = ranges.iter().collect();
        assert_eq!(all, [(0x1000, 0x1000), (0x3000, 0x800), (0x3800, 0x1000)]);
    }

    #[test]
    fn a_cut_over_everything_leaves_nothing() {
        let mut ranges = ranges(&[(0x1000, 0x1000), (0x5000, 1)]);
        ranges.cut(0, 0x10000);
        assert_eq!(ranges, Ranges::default());
    }

    #[test]
    fn ranges_that_touch_cover_together_but_contain_apart() {
        let ranges = ranges(&[(0x1000, 0x3000), (0x4000, 0x1000)]);
        assert!(ranges.cover(0x1800, 0x3000) && !ranges.contain(0x1800, 0x3000));
        assert!(ranges.contain(0x1000, 0x3000) && !ranges.cover(0x4800, 0x1000));
        assert!(!ranges.cover(0xfff, 2) && !ranges.cover(u64::MAX, 2));
        assert!(!ranges.contain(0x1000, u64::MAX));
    }

    #[test]
    fn what_is_in_none_lies_between() {
        let ranges = ranges(&[(0x1000, 0x1000), (0x2000, 0x800), (0x5000, 1)]);
        let between = |start, end| ranges.between(start, end).collect::<Vec<_>>();
        assert_eq!(between(0, 0x6000), [(0, 0x1000), (0x2800, 0x5000), (0x5001, 0x6000)]);
        assert_eq!(between(0x1800, 0x2800), []);
        assert_eq!(between(0x1800, 0x3000), [(0x2800, 0x3000)]);
        assert_eq!(between(0x3000, 0x4000), [(0x3000, 0x4000)]);
        assert_eq!((between(0x3000, 0x3000), between(0x3000, 0x2000)), (vec![], vec![]));
        assert_eq!(Ranges::default().between(1, 2).collect::<Vec<_>>(), [(1, 2)]);
    }

    #[test]
    fn one_shared_byte_is_an_overlap() {
        let ranges = ranges(&[(0x1000, 0x1000)]);
        assert!(
            ranges.overlap(0xfff, 2) && ranges.overlap(0x1fff, 1) && ranges.overlap(0, u64::MAX)
        );
        assert!(!ranges.overlap(0xfff, 1) && !ranges.overlap(0x2000, 1));
    }

    #[test]
    fn only_a_whole_range_is_removed() {
        let mut ranges = ranges(&[(0x1000, 0x1000)]);
        assert!(!ranges.remove(0x1000, 0x800) && !ranges.remove(0x1800, 0x800));
        assert!(ranges.remove(0x1000, 0x1000) && !ranges.remove(0x1000, 0x1000));
        assert_eq!(ranges, Ranges::default());
    }
}
