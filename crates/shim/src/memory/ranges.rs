//! Which addresses of one arena are free: best fit with coalescing, by address only. What backs a
//! range, and who owns it, is its caller's business.

use std::collections::{BTreeMap, BTreeSet};

/// Every range starts and ends at a multiple of this, in bytes, as `cuMemAlloc` aligns.
pub(crate) const GRANULE: u64 = 512;
/// Ranges of at least this size start at a multiple of it.
pub(crate) const LARGE: u64 = 2 << 20;

/// Rounds `size` up to whole granules; `None` where that overflows.
pub(crate) fn round_up(size: u64, granule: u64) -> Option<u64> {
    debug_assert!(granule.is_power_of_two());
    Some(size.checked_add(granule - 1)? & !(granule - 1))
}

/// The free parts of an address range. Two free parts never touch.
#[derive(Debug)]
pub(crate) struct Ranges {
    /// Start → size.
    by_start: BTreeMap<u64, u64>,
    /// (size, start): the smallest part that fits comes first, and of those the lowest.
    by_size: BTreeSet<(u64, u64)>,
}

impl Ranges {
    /// All of [start, start+size) free.
    pub(crate) fn new(start: u64, size: u64) -> Self {
        let mut ranges = Self { by_start: BTreeMap::new(), by_size: BTreeSet::new() };
        ranges.insert(start, size);
        ranges
    }

    /// Takes `size` bytes (not 0, a multiple of [`GRANULE`]) that start at a multiple of `align` (a
    /// power of two) out of the smallest free part that can hold them.
    pub(crate) fn take(&mut self, size: u64, align: u64) -> Option<u64> {
        debug_assert!(size > 0 && size.is_multiple_of(GRANULE) && align.is_power_of_two());
        let fits = |&(part, start): &(u64, u64)| {
            let at = round_up(start, align)?;
            (at.checked_add(size)? <= start + part).then_some((start, at))
        };
        let (start, at) = self.by_size.range((size, 0)..).find_map(fits)?;
        self.carve(start, at, size);
        Some(at)
    }

    /// Takes exactly [at, at+size) if all of it is free.
    pub(crate) fn take_at(&mut self, at: u64, size: u64) -> bool {
        let Some((&start, &part)) = self.by_start.range(..=at).next_back() else { return false };
        let fits = size > 0 && at.checked_add(size).is_some_and(|end| end <= start + part);
        if fits {
            self.carve(start, at, size);
        }
        fits
    }

    /// Gives [start, start+size) back. The caller took it, and gives it back once.
    pub(crate) fn put(&mut self, mut start: u64, mut size: u64) {
        if let Some((&before, &part)) = self.by_start.range(..start).next_back() {
            debug_assert!(before + part <= start, "a range is given back twice");
            if before + part == start {
                self.remove(before, part);
                start = before;
                size += part;
            }
        }
        if let Some((&after, &part)) = self.by_start.range(start..).next() {
            debug_assert!(start + size <= after, "a range is given back twice");
            if start + size == after {
                self.remove(after, part);
                size += part;
            }
        }
        self.insert(start, size);
    }

    /// Takes [at, at+size) out of the free part that begins at `start`.
    fn carve(&mut self, start: u64, at: u64, size: u64) {
        let part = self.by_start[&start];
        self.remove(start, part);
        self.insert(start, at - start);
        self.insert(at + size, start + part - (at + size));
    }

    fn insert(&mut self, start: u64, size: u64) {
        if size > 0 {
            self.by_start.insert(start, size);
            self.by_size.insert((size, start));
        }
    }

    fn remove(&mut self, start: u64, size: u64) {
        self.by_start.remove(&start);
        self.by_size.remove(&(size, start));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Small xorshift generator: the same sequence in every run.
    struct Random(u64);
    impl Random {
        fn below(&mut self, bound: u64) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0 % bound
        }
    }

    #[test]
    fn takes_the_smallest_part_that_fits() {
        let mut ranges = Ranges::new(0, 64 * GRANULE);
        let big = ranges.take(8 * GRANULE, GRANULE).unwrap();
        ranges.take(GRANULE, GRANULE).unwrap();
        let small = ranges.take(2 * GRANULE, GRANULE).unwrap();
        ranges.take(GRANULE, GRANULE).unwrap();
        ranges.put(big, 8 * GRANULE);
        ranges.put(small, 2 * GRANULE);
        assert_eq!(ranges.take(2 * GRANULE, GRANULE), Some(small));
        assert_eq!(ranges.take(7 * GRANULE, GRANULE), Some(big));
    }

    #[test]
    fn aligns_and_keeps_what_lies_before() {
        let mut ranges = Ranges::new(GRANULE, 2 * LARGE);
        assert_eq!(ranges.take(LARGE, LARGE), Some(LARGE));
        assert_eq!(ranges.take(GRANULE, GRANULE), Some(2 * LARGE));
        assert_eq!(ranges.take(LARGE - GRANULE, GRANULE), Some(GRANULE));
    }

    #[test]
    fn takes_a_given_address_only_if_it_is_free() {
        let mut ranges = Ranges::new(0, 16 * GRANULE);
        assert!(ranges.take_at(4 * GRANULE, 4 * GRANULE));
        assert!(!ranges.take_at(7 * GRANULE, GRANULE));
        assert!(!ranges.take_at(2 * GRANULE, 3 * GRANULE));
        assert!(!ranges.take_at(u64::MAX - 10, 100));
        assert!(ranges.take_at(8 * GRANULE, 8 * GRANULE));
        assert!(!ranges.take_at(16 * GRANULE, GRANULE));
    }

    /// Against a model with one flag per granule.
    #[test]
    fn agrees_with_a_model_under_random_use() {
        const GRANULES: u64 = 4096;
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        let mut ranges = Ranges::new(0, GRANULES * GRANULE);
        let mut taken = vec![false; GRANULES as usize];
        let mut live: Vec<(u64, u64)> = Vec::new();
        for _ in 0..20_000 {
            if !live.is_empty() && random.below(100) < 48 {
                let (start, count) = live.swap_remove(random.below(live.len() as u64) as usize);
                ranges.put(start * GRANULE, count * GRANULE);
                taken[start as usize..(start + count) as usize].fill(false);
                continue;
            }
            let (count, align) = (1 + random.below(64), 1 << random.below(6));
            let longest = taken
                .chunk_by(|a, b| a == b)
                .filter(|run| !run[0])
                .map(<[bool]>::len)
                .max()
                .unwrap_or(0);
            match ranges.take(count * GRANULE, align * GRANULE) {
                Some(at) => {
                    let start = at / GRANULE;
                    assert!(start.is_multiple_of(align));
                    let range = &mut taken[start as usize..(start + count) as usize];
                    assert!(range.iter().all(|&flag| !flag), "handed out twice");
                    range.fill(true);
                    live.push((start, count));
                }
                None => assert!(longest < (count + align) as usize, "refused though it fits"),
            }
        }
        for (start, count) in live {
            ranges.put(start * GRANULE, count * GRANULE);
        }
        assert_eq!(ranges.by_start.iter().collect::<Vec<_>>(), [(&0, &(GRANULES * GRANULE))]);
        assert_eq!(ranges.by_size.len(), 1);
    }
}
