//! Disjoint ranges of a file, each with a value.

use std::collections::BTreeMap;
use std::ops::Range;

/// A map from disjoint ranges to values.
///
/// Ranges that touch and have one value are one range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RangeMap<T> {
    /// Start → end and value.
    map: BTreeMap<u64, (u64, T)>,
    total: u64,
}

impl<T> Default for RangeMap<T> {
    fn default() -> RangeMap<T> {
        RangeMap { map: BTreeMap::new(), total: 0 }
    }
}

impl<T: Copy + Eq> RangeMap<T> {
    /// Returns whether no range is there.
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// Returns how many ranges there are.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Returns how much all ranges hold together.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Returns where the last range ends.
    pub fn end(&self) -> Option<u64> {
        self.map.last_key_value().map(|(_, (end, _))| *end)
    }

    /// Iterates over all ranges, in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (Range<u64>, T)> + '_ {
        self.map.iter().map(|(start, (end, value))| (*start..*end, *value))
    }

    /// Iterates over what lies in `range`, clipped to it, in order.
    pub fn within(&self, range: Range<u64>) -> impl Iterator<Item = (Range<u64>, T)> + '_ {
        // A range that begins before may reach into it.
        let first = self.map.range(..range.start).next_back().map_or(range.start, |(s, _)| *s);
        self.map.range(first..range.end.max(first)).filter_map(move |(start, (end, value))| {
            let clipped = (*start).max(range.start)..(*end).min(range.end);
            (clipped.start < clipped.end).then_some((clipped, *value))
        })
    }

    /// Returns the parts of `range` that nothing covers, in order.
    pub fn gaps(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut gaps = Vec::new();
        let mut from = range.start;
        for (covered, _) in self.within(range.clone()) {
            if from < covered.start {
                gaps.push(from..covered.start);
            }
            from = covered.end;
        }
        if from < range.end {
            gaps.push(from..range.end);
        }
        gaps
    }

    /// Removes what lies in `range`, and returns it.
    pub fn remove(&mut self, range: Range<u64>) -> Vec<(Range<u64>, T)> {
        let removed: Vec<_> = self.within(range.clone()).collect();
        for (part, value) in &removed {
            let start = match self.map.range(..=part.start).next_back() {
                Some((start, _)) => *start,
                None => continue,
            };
            let Some((end, _)) = self.map.remove(&start) else { continue };
            self.total -= part.end - part.start;
            if start < part.start {
                self.map.insert(start, (part.start, *value));
            }
            if part.end < end {
                self.map.insert(part.end, (end, *value));
            }
        }
        removed
    }

    /// Gives `range` the value, and returns what was there before.
    pub fn insert(&mut self, range: Range<u64>, value: T) -> Vec<(Range<u64>, T)> {
        if range.start >= range.end {
            return Vec::new();
        }
        let before = self.remove(range.clone());
        self.total += range.end - range.start;
        let (mut start, mut end) = (range.start, range.end);
        if let Some((&left, &(left_end, left_value))) = self.map.range(..start).next_back()
            && left_end == start
            && left_value == value
        {
            start = left;
        }
        if let Some(&(right_end, right_value)) = self.map.get(&end)
            && right_value == value
        {
            self.map.remove(&end);
            end = right_end;
        }
        self.map.insert(start, (end, value));
        before
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SPACE: u64 = 64;

    fn values(map: &RangeMap<u8>) -> Vec<Option<u8>> {
        let mut bytes = vec![None; SPACE as usize];
        for (range, value) in map.iter() {
            for at in range {
                assert!(bytes[at as usize].replace(value).is_none(), "ranges overlap");
            }
        }
        bytes
    }

    proptest! {
        #[test]
        fn a_map_is_what_a_list_of_bytes_is(
            steps in prop::collection::vec((0..SPACE, 0..SPACE, 0u8..3), 0..60)
        ) {
            let mut map = RangeMap::default();
            let mut model = vec![None; SPACE as usize];
            for (a, b, value) in steps {
                let range = a.min(b)..a.max(b);
                let slots = &mut model[range.start as usize..range.end as usize];
                let before: u64 = slots.iter().flatten().count() as u64;
                let removed = match value {
                    0 => map.remove(range.clone()),
                    value => map.insert(range.clone(), value),
                };
                prop_assert_eq!(removed.iter().map(|(r, _)| r.end - r.start).sum::<u64>(), before);
                slots.fill((value != 0).then_some(value));
                prop_assert_eq!(&values(&map), &model);
                let ranges: Vec<_> = map.iter().collect();
                for pair in ranges.windows(2) {
                    prop_assert!(pair[0].0.end < pair[1].0.start || pair[0].1 != pair[1].1);
                }
            }
            for gap in map.gaps(0..SPACE) {
                prop_assert!(model[gap.start as usize..gap.end as usize].iter().all(Option::is_none));
            }
            let covered: u64 = map.gaps(0..SPACE).iter().map(|gap| gap.end - gap.start).sum();
            prop_assert_eq!(map.total() + covered, SPACE);
        }
    }
}
