//! Where in a process's memory what is still to come belongs.

use kedge_image::Source;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Memory that comes from one place of one extent.
#[derive(Debug, Clone)]
pub(super) struct Piece {
    pub(super) source: Arc<Source>,
    /// Its first address when it was captured: where the extent has it.
    pub(super) origin: u64,
    pub(super) start: u64,
    pub(super) end: u64,
}

/// What is still to come, by the address where it belongs now.
#[derive(Debug, Clone, Default)]
pub(super) struct Pieces(BTreeMap<u64, Piece>);

impl Pieces {
    pub(super) fn of(sources: Vec<Source>) -> Pieces {
        let mut pieces = Pieces::default();
        for mut source in sources {
            let parts = std::mem::take(&mut source.parts);
            let source = Arc::new(source);
            for (start, end) in parts {
                pieces.put(Piece { source: source.clone(), origin: start, start, end });
            }
        }
        pieces
    }

    fn put(&mut self, piece: Piece) {
        if piece.start < piece.end {
            self.0.insert(piece.start, piece);
        }
    }

    /// Puts back what of `piece` begins at `start`.
    pub(super) fn keep(&mut self, piece: &Piece, start: u64) {
        self.put(piece.part(start, piece.end));
    }

    /// The piece that `address` lies in, taken out; else `None`.
    pub(super) fn take_at(&mut self, address: u64) -> Option<Piece> {
        let (start, piece) = self.0.range(..=address).next_back()?;
        let start = (piece.end > address).then_some(*start)?;
        self.0.remove(&start)
    }

    /// The first one, taken out.
    pub(super) fn take_first(&mut self) -> Option<Piece> {
        self.0.pop_first().map(|(_, piece)| piece)
    }

    /// Takes out what lies between `start` and `end`: in order, cut off there.
    pub(super) fn take(&mut self, start: u64, end: u64) -> Vec<Piece> {
        let before = self.0.range(..start).next_back().map(|(at, _)| *at);
        let inside = self.0.range(start..end).map(|(at, _)| *at);
        let mut taken = Vec::new();
        for at in before.into_iter().chain(inside).collect::<Vec<_>>() {
            let Some(piece) = self.0.remove(&at) else { continue };
            let (left, right) = (piece.end.min(start), piece.start.max(end));
            self.put(piece.part(piece.start, left));
            self.put(piece.part(right, piece.end));
            let inner = piece.part(piece.start.max(start), piece.end.min(end));
            if inner.start < inner.end {
                taken.push(inner);
            }
        }
        taken
    }

    /// What lay from `from` on lies from `to` on, which has replaced what was there.
    pub(super) fn move_to(&mut self, from: u64, to: u64, length: u64) {
        let moved = self.take(from, from.saturating_add(length));
        self.take(to, to.saturating_add(length));
        for piece in moved {
            let at = |address: u64| address - from + to;
            let (start, end) = (at(piece.start), at(piece.end));
            self.put(Piece { start, end, ..piece });
        }
    }
}

impl Piece {
    fn part(&self, start: u64, end: u64) -> Piece {
        let origin = self.origin.wrapping_add(start.wrapping_sub(self.start));
        Piece { source: self.source.clone(), origin, start, end }
    }

    /// Where its bytes are among the extent's.
    pub(super) fn offset(&self) -> usize {
        (self.origin - self.source.extent.address) as usize
    }

    pub(super) fn len(&self) -> usize {
        (self.end - self.start) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_image::Codec;
    use kedge_image::layout::{Extent, Kind};

    fn pieces(parts: &[(u64, u64)]) -> Pieces {
        let extent = Extent {
            kind: Kind::Memory,
            codec: Codec::Raw,
            stored: 0,
            decoded: 100 << 12,
            address: 0,
            offset: 0,
            checksum: 0,
            object: 0,
        };
        Pieces::of(vec![Source { layer: 0, extent, parts: parts.to_vec() }])
    }

    /// Start, end, and where it came from.
    fn all(pieces: &Pieces) -> Vec<(u64, u64, u64)> {
        pieces.0.values().map(|piece| (piece.start, piece.end, piece.origin)).collect()
    }

    #[test]
    fn what_is_dropped_is_no_longer_to_come() {
        let mut pieces = pieces(&[(10, 20), (30, 40)]);
        pieces.take(15, 33);
        assert_eq!(all(&pieces), [(10, 15, 10), (33, 40, 33)]);
        assert_eq!(pieces.take(34, 35).len(), 1);
        assert_eq!(all(&pieces), [(10, 15, 10), (33, 34, 33), (35, 40, 35)]);
        assert!(pieces.take(15, 33).is_empty() && pieces.take_at(34).is_none());
        assert_eq!(pieces.take_at(39).map(|piece| (piece.start, piece.origin)), Some((35, 35)));
        assert_eq!(all(&pieces), [(10, 15, 10), (33, 34, 33)]);
    }

    #[test]
    fn what_is_moved_keeps_where_it_comes_from() {
        let mut pieces = pieces(&[(10, 20), (50, 60)]);
        pieces.move_to(15, 52, 10);
        assert_eq!(all(&pieces), [(10, 15, 10), (50, 52, 50), (52, 57, 15)]);
        pieces.move_to(54, 100, 2);
        assert_eq!(all(&pieces)[2..], [(52, 54, 15), (56, 57, 19), (100, 102, 17)]);
    }
}
