//! Regions, their blocks, and the lists by which events find the blocks that matter to them.

use crate::set::PageSet;
use crate::types::{Attach, BLOCK, NodeId, Pages, Place};
use std::collections::{BTreeMap, BTreeSet};

/// A region's first page, and which of its blocks.
pub(crate) type Key = (u64, u32);

/// What one allocation has.
#[derive(Debug, Clone)]
pub(crate) struct Region {
    pub(crate) pages: Pages,
    pub(crate) attach: Attach,
    /// When it came to be; 0 once bytes have been sent, or copied by a device. In a region that is
    /// younger than the last launch that could have touched it, what the host has not opened is
    /// zero everywhere.
    pub(crate) born: u64,
    pub(crate) blocks: Vec<Block>,
    /// A copy may have read some of it since it was attached as it is.
    pub(crate) read: bool,
    /// The node that it was allocated for.
    pub(crate) home: NodeId,
    /// Its blocks never leave the node: they are a part of something larger there, and count for
    /// nothing of the quota.
    pub(crate) fixed: bool,
    /// When a launch was last told to use it.
    pub(crate) used: u64,
    /// How many blocks lie on each node.
    pub(crate) on: BTreeMap<NodeId, u32>,
    /// How many lie in host memory for want of room.
    pub(crate) away: u32,
}

/// Pages that lie in one place.
#[derive(Debug, Clone)]
pub(crate) struct Block {
    pub(crate) place: Place,
    /// Pages that the host's view has open; on a node alone.
    pub(crate) readable: PageSet,
    /// Those that it may write, and that the node therefore has not got.
    pub(crate) writable: PageSet,
    /// It stands in its class's list of blocks that the host has open.
    pub(crate) listed: bool,
    /// It is in host memory because it must be, or because the program prefers it.
    pub(crate) stays: bool,
    /// The host has touched it while a kernel ran.
    pub(crate) contended: bool,
    /// Open pages that the host has touched, and those read ahead for a walk.
    pub(crate) touched: PageSet,
    /// Pages that it is expected to touch again.
    pub(crate) again: PageSet,
}

impl Block {
    pub(crate) fn new(place: Place) -> Block {
        let [readable, writable, touched, again] = [PageSet::EMPTY; 4];
        let [listed, stays, contended] = [false; 3];
        Block { place, readable, writable, listed, stays, contended, touched, again }
    }
}

impl Region {
    /// Creates a region without blocks.
    pub(crate) fn new(pages: Pages, attach: Attach, home: NodeId, born: u64) -> Region {
        let (blocks, on) = (Vec::new(), BTreeMap::new());
        Region {
            pages,
            attach,
            born,
            blocks,
            read: false,
            home,
            fixed: false,
            used: born,
            on,
            away: 0,
        }
    }

    /// Returns which block holds a page of the region, and where.
    pub(crate) fn index(&self, page: u64) -> u32 {
        (page / BLOCK - self.pages.start / BLOCK) as u32
    }

    /// Returns the pages of a block. Blocks are cut at multiples of their length, as a device's
    /// mappings are.
    pub(crate) fn block_pages(&self, index: u32) -> Pages {
        let start = (self.pages.start / BLOCK + u64::from(index)) * BLOCK;
        start.max(self.pages.start)..(start + BLOCK).min(self.pages.end)
    }

    /// Iterates over the blocks that stand in their class's list of those that the host has open.
    pub(crate) fn listed(&self) -> impl Iterator<Item = Key> {
        let listed = (0..).zip(&self.blocks).filter(|(_, block)| block.listed);
        listed.map(|(index, _)| (self.pages.start, index))
    }

    /// Iterates over the blocks that hold some of `pages`, and which those are.
    pub(crate) fn parts(&self, pages: &Pages) -> impl Iterator<Item = (u32, Pages)> + use<> {
        let (first, whole) = (self.pages.start / BLOCK, self.pages.clone());
        let pages = pages.start.max(whole.start)..pages.end.min(whole.end);
        let blocks =
            if pages.is_empty() { 0..0 } else { pages.start / BLOCK..(pages.end - 1) / BLOCK + 1 };
        blocks.map(move |block| {
            let part = (block * BLOCK).max(pages.start)..((block + 1) * BLOCK).min(pages.end);
            ((block - first) as u32, part)
        })
    }
}

/// Returns the set of a block's offsets that some of its pages are.
pub(crate) fn offsets(pages: &Pages) -> PageSet {
    let base = pages.start / BLOCK * BLOCK;
    PageSet::of(pages.start - base..pages.end - base)
}

/// Iterates over the pages that a set of a block's offsets are; `inside` is any page of the block.
pub(crate) fn runs(inside: u64, set: PageSet) -> impl Iterator<Item = Pages> {
    let base = inside / BLOCK * BLOCK;
    set.runs().map(move |run| base + run.start..base + run.end)
}

/// The regions that the same work may touch.
#[derive(Debug, Clone, Default)]
pub(crate) struct Class {
    /// Blocks that the host has open: all that a launch looks at.
    pub(crate) open: BTreeSet<Key>,
    /// Blocks by their place.
    pub(crate) homes: BTreeMap<Place, BTreeSet<Key>>,
    /// Blocks of which some pages are expected to be touched again, and others that were.
    pub(crate) again: BTreeSet<Key>,
    /// When work was last launched that may touch them.
    pub(crate) launched: u64,
}

impl Class {
    pub(crate) fn settle(&mut self, key: Key, at: Place) {
        self.homes.entry(at).or_default().insert(key);
    }

    pub(crate) fn leave(&mut self, key: Key, from: Place) {
        if let Some(keys) = self.homes.get_mut(&from) {
            keys.remove(&key);
            if keys.is_empty() {
                self.homes.remove(&from);
            }
        }
    }
}
