//! Regions, their blocks, and the lists by which an event finds the blocks that it concerns.

use crate::set::PageSet;
use crate::types::{Attach, BLOCK, NodeId, Pages, Place};
use std::collections::{BTreeMap, BTreeSet};

/// A block: its region's first page, and its index in the region.
pub(crate) type Key = (u64, u32);

/// One allocation of managed memory.
#[derive(Debug, Clone)]
pub(crate) struct Region {
    pub(crate) pages: Pages,
    pub(crate) attach: Attach,
    /// When the region was created; 0 once bytes have been sent to a node, or copied by a device.
    /// If no launch that could touch the region has come since, pages that the host has not opened
    /// are zero everywhere.
    pub(crate) born: u64,
    pub(crate) blocks: Vec<Block>,
    /// Whether a copy may have read some of it since the last change of attachment.
    pub(crate) read: bool,
    /// The node that it was allocated for.
    pub(crate) home: NodeId,
    /// Whether its blocks stay on the node for good, as a part of a larger object there; they do
    /// not count towards the quota.
    pub(crate) fixed: bool,
    /// When a launch that uses it was last announced.
    pub(crate) used: u64,
    /// The number of blocks on each node.
    pub(crate) on: BTreeMap<NodeId, u32>,
    /// The number of blocks that are in host memory because the node has no room.
    pub(crate) displaced: u32,
}

/// Pages that lie in one place together.
#[derive(Debug, Clone)]
pub(crate) struct Block {
    pub(crate) place: Place,
    /// Pages that the host may read; for a block on a node.
    pub(crate) readable: PageSet,
    /// Pages that the host may write, so that the node's copy of them is stale.
    pub(crate) writable: PageSet,
    /// Whether it is in its class's list of open blocks ([`Class::open`]).
    pub(crate) listed: bool,
    /// Whether it is in host memory because it must be, or because the program prefers that.
    pub(crate) stays: bool,
    /// Whether the host has touched it while a kernel ran.
    pub(crate) contended: bool,
    /// Open pages that the host has touched, and those that were read ahead.
    pub(crate) touched: PageSet,
    /// Pages that the host is expected to touch again.
    pub(crate) again: PageSet,
}

impl Block {
    /// Creates a block that the host has not opened.
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
            displaced: 0,
        }
    }

    /// Returns the index of the block that holds `page`.
    pub(crate) fn index(&self, page: u64) -> u32 {
        (page / BLOCK - self.pages.start / BLOCK) as u32
    }

    /// Returns the pages of a block. Blocks begin at multiples of [`BLOCK`], as a device's mappings
    /// do.
    pub(crate) fn block_pages(&self, index: u32) -> Pages {
        let start = (self.pages.start / BLOCK + u64::from(index)) * BLOCK;
        start.max(self.pages.start)..(start + BLOCK).min(self.pages.end)
    }

    /// Iterates over the blocks that are in their class's list of open blocks.
    pub(crate) fn listed(&self) -> impl Iterator<Item = Key> {
        let listed = (0..).zip(&self.blocks).filter(|(_, block)| block.listed);
        listed.map(|(index, _)| (self.pages.start, index))
    }

    /// Splits `pages` at block boundaries: iterates over the index of each block and its pages.
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

/// Converts pages of one block to their offsets in the block.
pub(crate) fn offsets(pages: &Pages) -> PageSet {
    let base = pages.start / BLOCK * BLOCK;
    PageSet::of(pages.start - base..pages.end - base)
}

/// Converts offsets in a block back to runs of pages; `inside` is any page of the block.
pub(crate) fn runs(inside: u64, set: PageSet) -> impl Iterator<Item = Pages> {
    let base = inside / BLOCK * BLOCK;
    set.runs().map(move |run| base + run.start..base + run.end)
}

/// The regions that the same work may touch: those of one attachment.
#[derive(Debug, Clone, Default)]
pub(crate) struct Class {
    /// Blocks that the host has open; a launch looks at no others.
    pub(crate) open: BTreeSet<Key>,
    /// Blocks by their place.
    pub(crate) homes: BTreeMap<Place, BTreeSet<Key>>,
    /// Blocks with pages that the host is expected to touch again, or was.
    pub(crate) again: BTreeSet<Key>,
    /// When work that may touch these regions was last launched.
    pub(crate) launched: u64,
}

impl Class {
    /// Notes that a block lies at `at`.
    pub(crate) fn settle(&mut self, key: Key, at: Place) {
        self.homes.entry(at).or_default().insert(key);
    }

    /// Notes that a block does not lie at `from` any more.
    pub(crate) fn leave(&mut self, key: Key, from: Place) {
        if let Some(keys) = self.homes.get_mut(&from) {
            keys.remove(&key);
            if keys.is_empty() {
                self.homes.remove(&from);
            }
        }
    }
}
