//! Blocks whose host pages are in the shared arena, where devices can map them, and no longer in
//! the file.
//!
//! A block comes there when it is to be host memory for the first time, and stays until its
//! allocation ends; where it lies on a device again, these are the pages that the program touches.

use kedge_pages::{BLOCK, PAGE, Pages};
use std::collections::BTreeMap;

/// What the view has of a lodged block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shown {
    /// The file still, closed.
    File,
    /// The arena's pages; a touch of what is not there is a fault.
    Watched,
    /// The arena's pages as they are.
    Open,
}

/// Lodged blocks by their numbers: where each begins in the arena.
#[derive(Debug, Default)]
pub(super) struct Lodged(BTreeMap<u64, (u64, Shown)>);

impl Lodged {
    pub(super) fn insert(&mut self, block: u64, arena: u64, shown: Shown) {
        self.0.insert(block, (arena, shown));
    }

    pub(super) fn of(&self, block: u64) -> Option<(u64, Shown)> {
        self.0.get(&block).copied()
    }

    /// Returns where the byte at a device address is in the arena, if its block is lodged.
    pub(super) fn find(&self, addr: u64) -> Option<u64> {
        let (arena, _) = self.0.get(&(addr / PAGE / BLOCK))?;
        Some(arena + addr % (BLOCK * PAGE))
    }

    /// Ends what lies in some pages.
    pub(super) fn remove(&mut self, pages: &Pages) {
        let blocks = pages.start / BLOCK..pages.end.div_ceil(BLOCK);
        let gone: Vec<u64> = self.0.range(blocks).map(|(block, _)| *block).collect();
        gone.iter().for_each(|block| _ = self.0.remove(block));
    }

    /// This is another process, in which whatever is mapped of the arena is watched.
    pub(super) fn rebuilt(&mut self) {
        for (_, shown) in self.0.values_mut() {
            if *shown == Shown::Open {
                *shown = Shown::Watched;
            }
        }
    }

    /// Divides pages into runs that are not lodged, and parts of lodged blocks: with their
    /// addresses in the arena.
    pub(super) fn parts(&self, pages: &Pages) -> Vec<(Pages, Option<u64>)> {
        let (mut parts, mut at) = (Vec::new(), pages.start);
        let blocks = pages.start / BLOCK..pages.end.div_ceil(BLOCK);
        for block in self.0.range(blocks).map(|(block, _)| *block) {
            let (start, end) = (block * BLOCK, (block + 1) * BLOCK);
            let (start, end) = (start.max(pages.start), end.min(pages.end));
            if at < start {
                parts.push((at..start, None));
            }
            parts.push((start..end, self.find(start * PAGE)));
            at = end;
        }
        if at < pages.end {
            parts.push((at..pages.end, None));
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_divided_by_where_they_are() {
        let mut lodged = Lodged::default();
        lodged.insert(3, 0x10_0000, Shown::File);
        lodged.insert(4, 0x90_0000, Shown::Open);
        let parts = lodged.parts(&(2 * BLOCK + 7..6 * BLOCK));
        let expected = [
            (2 * BLOCK + 7..3 * BLOCK, None),
            (3 * BLOCK..4 * BLOCK, Some(0x10_0000)),
            (4 * BLOCK..5 * BLOCK, Some(0x90_0000)),
            (5 * BLOCK..6 * BLOCK, None),
        ];
        assert_eq!(parts, expected);
        let inside = lodged.parts(&(4 * BLOCK + 5..4 * BLOCK + 6));
        assert_eq!(inside, [(4 * BLOCK + 5..4 * BLOCK + 6, Some(0x90_5000))]);
        assert_eq!(lodged.find((3 * BLOCK + 1) * PAGE + 9), Some(0x10_1009));
        lodged.rebuilt();
        assert_eq!(lodged.of(4), Some((0x90_0000, Shown::Watched)));
        assert_eq!(lodged.of(3), Some((0x10_0000, Shown::File)));
        lodged.remove(&(3 * BLOCK..4 * BLOCK));
        assert_eq!(lodged.find(3 * BLOCK * PAGE), None);
        assert_eq!(lodged.parts(&(0..9)), [(0..9, None)]);
    }
}
