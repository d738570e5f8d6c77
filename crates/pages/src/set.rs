//! A set of a block's pages.

use crate::types::BLOCK;
use std::ops::{BitAnd, BitOr, Range, Sub};

const WORDS: usize = BLOCK as usize / 64;

/// A set of offsets into a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PageSet([u64; WORDS]);

impl PageSet {
    pub const EMPTY: PageSet = PageSet([0; WORDS]);

    /// Returns the set of all offsets of a range.
    pub fn of(range: Range<u64>) -> PageSet {
        let mut set = PageSet::EMPTY;
        for (index, word) in set.0.iter_mut().enumerate() {
            let base = index as u64 * 64;
            let (from, to) = (range.start.clamp(base, base + 64), range.end.clamp(base, base + 64));
            *word = below(to - base) & !below(from - base);
        }
        set
    }

    pub fn contains(&self, offset: u64) -> bool {
        self.0.get(offset as usize / 64).is_some_and(|word| word >> (offset % 64) & 1 == 1)
    }

    pub fn is_empty(&self) -> bool {
        *self == PageSet::EMPTY
    }

    pub fn len(&self) -> u64 {
        self.0.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// Iterates over the ranges of offsets that follow each other, in order.
    pub fn runs(self) -> impl Iterator<Item = Range<u64>> {
        let mut at = 0;
        std::iter::from_fn(move || {
            let start = self.next(at, true)?;
            let end = self.next(start, false).unwrap_or(BLOCK);
            at = end;
            Some(start..end)
        })
    }

    /// Returns the first offset from `at` on that is in the set, or that is not.
    fn next(&self, at: u64, inside: bool) -> Option<u64> {
        let mut mask = !below(at % 64);
        for index in at as usize / 64..WORDS {
            let word = if inside { self.0[index] } else { !self.0[index] } & mask;
            if word != 0 {
                return Some(index as u64 * 64 + u64::from(word.trailing_zeros()));
            }
            mask = u64::MAX;
        }
        None
    }

    fn with(self, other: PageSet, join: impl Fn(u64, u64) -> u64) -> PageSet {
        PageSet(std::array::from_fn(|index| join(self.0[index], other.0[index])))
    }
}

/// A word whose lowest `count` bits are set.
fn below(count: u64) -> u64 {
    if count >= 64 { u64::MAX } else { (1 << count) - 1 }
}

impl BitOr for PageSet {
    type Output = PageSet;
    fn bitor(self, other: PageSet) -> PageSet {
        self.with(other, |a, b| a | b)
    }
}

impl BitAnd for PageSet {
    type Output = PageSet;
    fn bitand(self, other: PageSet) -> PageSet {
        self.with(other, |a, b| a & b)
    }
}

impl Sub for PageSet {
    type Output = PageSet;
    fn sub(self, other: PageSet) -> PageSet {
        self.with(other, |a, b| a & !b)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn runs_are_what_was_put_in(
            ranges in prop::collection::vec((0..=BLOCK, 0..=BLOCK), 0..6),
            out in (0..=BLOCK, 0..=BLOCK),
        ) {
            let mut plain = [false; BLOCK as usize];
            let mut set = PageSet::EMPTY;
            for (a, b) in ranges {
                set = set | PageSet::of(a..b);
                (a..b).for_each(|at| plain[at as usize] = true);
            }
            set = set - PageSet::of(out.0..out.1);
            (out.0..out.1).for_each(|at| plain[at as usize] = false);
            let mut told = [false; BLOCK as usize];
            let mut last = None;
            for run in set.runs() {
                prop_assert!(run.start < run.end && last.is_none_or(|end| end < run.start));
                last = Some(run.end);
                run.for_each(|at| told[at as usize] = true);
            }
            prop_assert_eq!(told, plain);
            prop_assert_eq!(set.len(), plain.iter().filter(|it| **it).count() as u64);
            prop_assert!((0..BLOCK).all(|at| set.contains(at) == plain[at as usize]));
        }
    }
}
