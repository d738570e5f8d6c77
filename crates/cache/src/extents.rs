//! What of one file the cache holds, and in which tier.
//!
//! A tier keeps a file's bytes in a shadow of that file, at the offsets that they have below. What
//! is held is known by the byte; what it takes of the tier, by the block.

use crate::ranges::RangeMap;
use std::ops::Range;

/// A block of a tier, the unit in which its memory is taken and given back.
pub const BLOCK: u64 = 4096;

/// The place of a tier in the list of tiers.
pub type TierIndex = usize;

/// The most tiers that a cache has.
pub const TIERS: usize = 4;

/// Returns the whole blocks that `range` touches, in bytes.
pub fn blocks_of(range: &Range<u64>) -> Range<u64> {
    range.start / BLOCK * BLOCK..range.end.div_ceil(BLOCK) * BLOCK
}

/// Part of a file, and where its newest bytes are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The bytes.
    pub range: Range<u64>,
    /// The tier that holds them; `None` for the file below.
    pub tier: Option<TierIndex>,
}

/// Blocks of a tier that nothing needs any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Freed {
    /// The tier.
    pub tier: TierIndex,
    /// Whole blocks, in bytes.
    pub range: Range<u64>,
}

/// A part that is on its way from a tier to the file below.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flight {
    /// The bytes.
    pub range: Range<u64>,
    /// The tier that they come from.
    pub tier: TierIndex,
}

/// What a write has changed.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Bytes of blocks that the tier holds in addition.
    pub taken: u64,
    /// What other tiers held, and is older now.
    pub superseded: Vec<Flight>,
    /// Blocks that were freed by that.
    pub freed: Vec<Freed>,
}

/// The parts of a file that are not below yet.
#[derive(Debug, Default)]
pub struct Extents {
    dirty: RangeMap<TierIndex>,
    /// Parts that are being written below. They may be dirty again meanwhile.
    flying: RangeMap<TierIndex>,
    /// Blocks held, by tier.
    held: [RangeMap<()>; TIERS],
}

impl Extents {
    /// Returns whether all of the file is below.
    pub fn is_clean(&self) -> bool {
        self.dirty.is_empty() && self.flying.is_empty()
    }

    /// Returns whether something waits to be drained.
    pub fn is_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Returns whether something of `range` is on its way below.
    pub fn is_in_flight(&self, range: Range<u64>) -> bool {
        self.flying.within(range).next().is_some()
    }

    /// Returns the bytes that are not below yet.
    pub fn unwritten(&self) -> u64 {
        self.dirty.total() + self.flying.total()
    }

    /// Returns what of `range` is not below yet, in order; parts that touch are one.
    pub fn unwritten_within(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut held = RangeMap::default();
        for map in [&self.dirty, &self.flying] {
            for (part, _) in map.within(range.clone()) {
                held.insert(part, ());
            }
        }
        held.iter().map(|(range, ())| range).collect()
    }

    /// Returns of how many parts that is.
    pub fn parts(&self) -> usize {
        self.dirty.len() + self.flying.len()
    }

    /// Returns the bytes of blocks that `tier` holds.
    pub fn held_by(&self, tier: TierIndex) -> u64 {
        self.held[tier].total()
    }

    /// Returns whether all of `range` is dirty in `tier`.
    pub fn is_dirty_in(&self, range: &Range<u64>, tier: TierIndex) -> bool {
        let parts = self.dirty.within(range.clone()).filter(|(_, other)| *other == tier);
        parts.map(|(part, _)| part.end - part.start).sum::<u64>() == range.end - range.start
    }

    /// Returns whether `tier` holds blocks of `range`.
    pub fn holds(&self, tier: TierIndex, range: Range<u64>) -> bool {
        self.held[tier].within(range).next().is_some()
    }

    /// Returns whether something is on its way below from `tier`.
    pub fn is_in_flight_from(&self, tier: TierIndex) -> bool {
        self.flying.iter().any(|(_, other)| other == tier)
    }

    /// Returns where the last part of `length` bytes begins, at a multiple of that, that is dirty
    /// in `tier` as a whole, of which nothing is in flight, and that `free` allows.
    pub fn last_whole_part(
        &self,
        tier: TierIndex,
        length: u64,
        free: impl Fn(u64) -> bool,
    ) -> Option<u64> {
        let dirty = self.dirty.iter().rev().filter(|(_, other)| *other == tier);
        dirty
            .flat_map(|(range, _)| {
                let (first, end) = (range.start.div_ceil(length), range.end / length);
                (first..end).rev().map(|part| part * length)
            })
            .find(|start| !self.is_in_flight(*start..*start + length) && free(*start))
    }

    /// Returns where the last byte that is not below ends.
    pub fn end(&self) -> u64 {
        self.dirty.end().max(self.flying.end()).unwrap_or(0)
    }

    /// Iterates over what is dirty, in order.
    pub fn dirty(&self) -> impl Iterator<Item = (Range<u64>, TierIndex)> + '_ {
        self.dirty.iter()
    }

    /// Iterates over what of a flight's bytes is dirty in the flight's own tier.
    pub fn dirty_within(&self, flight: &Flight) -> impl Iterator<Item = (Range<u64>, TierIndex)> {
        let tier = flight.tier;
        self.dirty.within(flight.range.clone()).filter(move |(_, other)| *other == tier)
    }

    /// Returns what a new daemon needs of `tier`: what is dirty, and what is on its way and has not
    /// been written anew. No other tier has newer bytes of it.
    pub fn needed_of(&self, tier: TierIndex) -> Vec<Range<u64>> {
        let mut needed = RangeMap::default();
        for (range, _) in self.flying.iter().filter(|(_, other)| *other == tier) {
            for gap in self.dirty.gaps(range) {
                needed.insert(gap, ());
            }
        }
        for (range, _) in self.dirty.iter().filter(|(_, other)| *other == tier) {
            needed.insert(range, ());
        }
        needed.iter().map(|(range, ())| range).collect()
    }

    /// Returns the tier of those that `which` picks that holds something of `range`.
    pub fn holder(
        &self,
        range: &Range<u64>,
        which: impl Fn(TierIndex) -> bool,
    ) -> Option<TierIndex> {
        let held = self.dirty.within(range.clone()).chain(self.flying.within(range.clone()));
        held.map(|(_, tier)| tier).find(|tier| which(*tier))
    }

    /// Returns where the newest bytes of `range` are, in order and without gaps.
    pub fn pieces(&self, range: Range<u64>) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let held = |range, tier| Piece { range, tier: Some(tier) };
        pieces.extend(self.dirty.within(range.clone()).map(|(r, tier)| held(r, tier)));
        for gap in self.dirty.gaps(range) {
            pieces.extend(self.flying.within(gap.clone()).map(|(r, tier)| held(r, tier)));
            let below = self.flying.gaps(gap);
            pieces.extend(below.into_iter().map(|range| Piece { range, tier: None }));
        }
        pieces.sort_by_key(|piece| piece.range.start);
        pieces
    }

    /// Notes that `tier` has the newest bytes of `range`.
    pub fn write(&mut self, range: Range<u64>, tier: TierIndex) -> Written {
        let blocks = blocks_of(&range);
        let taken =
            self.held[tier].gaps(blocks.clone()).iter().map(|gap| gap.end - gap.start).sum();
        self.held[tier].insert(blocks, ());
        let before = self.dirty.insert(range, tier);
        let superseded: Vec<Flight> = before
            .into_iter()
            .filter(|(_, other)| *other != tier)
            .map(|(range, tier)| Flight { range, tier })
            .collect();
        let freed = superseded.iter().flat_map(|old| self.reclaim(old)).collect();
        Written { taken, superseded, freed }
    }

    /// Takes the first dirty part at or after `from`, of at most `most` bytes.
    ///
    /// A part that goes on ends at a multiple of `align`, so that what follows begins at one.
    pub fn take(&mut self, from: u64, most: u64, align: u64) -> Option<Flight> {
        let (range, tier) = self.dirty.within(from..u64::MAX).next()?;
        let limit = range.start.saturating_add(most);
        let mut end = range.end.min(limit);
        if end < range.end && end / align * align > range.start {
            end = end / align * align;
        }
        // What is on its way already must land first, or old bytes could come last.
        if self.is_in_flight(range.start..end) {
            let before = self.flying.gaps(range.start..end).into_iter().next();
            match before {
                Some(gap) if gap.start == range.start => end = gap.end,
                _ => {
                    let landing = self.flying.within(range.start..end).next()?.0.end;
                    return self.take(landing, most, align);
                }
            }
        }
        self.dirty.remove(range.start..end);
        self.flying.insert(range.start..end, tier);
        Some(Flight { range: range.start..end, tier })
    }

    /// Notes that a flight is below, and returns the blocks that were freed.
    pub fn landed(&mut self, flight: &Flight) -> Vec<Freed> {
        self.flying.remove(flight.range.clone());
        self.reclaim(flight)
    }

    /// Notes that a flight could not be written below: it is dirty again.
    ///
    /// Returns what of it another tier has newer bytes of, and the blocks that were freed by that.
    pub fn failed(&mut self, flight: &Flight) -> (Vec<Flight>, Vec<Freed>) {
        self.flying.remove(flight.range.clone());
        for gap in self.dirty.gaps(flight.range.clone()) {
            self.dirty.insert(gap, flight.tier);
        }
        let newer = self.dirty.within(flight.range.clone()).filter(|(_, t)| *t != flight.tier);
        let superseded = newer.map(|(range, _)| Flight { range, tier: flight.tier }).collect();
        (superseded, self.reclaim(flight))
    }

    /// Forgets what is dirty in `tier`, which is gone, and returns it and the blocks that were
    /// freed.
    pub fn forget_tier(&mut self, tier: TierIndex) -> (Vec<Flight>, Vec<Freed>) {
        let gone: Vec<_> = self.dirty.iter().filter(|(_, other)| *other == tier).collect();
        let (mut parts, mut freed) = (Vec::new(), Vec::new());
        for (range, _) in gone {
            let (forgotten, blocks) = self.forget(range);
            parts.extend(forgotten);
            freed.extend(blocks);
        }
        (parts, freed)
    }

    /// Forgets what is dirty in `range`, and returns it and the blocks that were freed.
    pub fn forget(&mut self, range: Range<u64>) -> (Vec<Flight>, Vec<Freed>) {
        let parts = self.dirty.remove(range).into_iter();
        let parts: Vec<Flight> = parts.map(|(range, tier)| Flight { range, tier }).collect();
        let freed = parts.iter().flat_map(|part| self.reclaim(part)).collect();
        (parts, freed)
    }

    /// Gives up the blocks of `old` in its tier that nothing else there needs.
    fn reclaim(&mut self, old: &Flight) -> Vec<Freed> {
        let tier = old.tier;
        let mut needed = RangeMap::default();
        let around = blocks_of(&old.range);
        for map in [&self.dirty, &self.flying] {
            for (range, _) in map.within(around.clone()).filter(|(_, other)| *other == tier) {
                needed.insert(blocks_of(&range), ());
            }
        }
        let mut freed = Vec::new();
        for gap in needed.gaps(around) {
            let gone = self.held[tier].remove(gap);
            freed.extend(gone.into_iter().map(|(range, ())| Freed { tier, range }));
        }
        freed
    }
}

#[cfg(test)]
#[path = "extents_tests.rs"]
mod tests;
