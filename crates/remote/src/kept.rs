//! What a sender keeps until the other end has it: bytes in order, in the pieces in which they
//! were given. Whoever gives many at once gives the memory that has them, so that they are not
//! copied.

use crate::link::locked;
use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::{Arc, Mutex};

/// Room of a piece for what is given a few bytes at a time.
const PIECE: usize = 64 << 10;
/// Pieces that are kept for whoever makes the next large one, and the shortest and longest of
/// these.
const SPARE: usize = 8;
const LARGE: std::ops::RangeInclusive<usize> = 256 << 10..=4 << 20;

/// Memory of large pieces that are of no more use.
#[derive(Debug, Default)]
pub(crate) struct Pool(Mutex<Vec<Vec<u8>>>);

impl Pool {
    /// Returns a piece of so many bytes, of any value.
    pub(crate) fn piece(&self, len: usize) -> Vec<u8> {
        let mut piece = locked(&self.0).pop().unwrap_or_default();
        piece.resize(len, 0);
        piece
    }

    /// Takes a piece that is of no more use.
    pub(crate) fn give(&self, piece: Vec<u8>) {
        let mut pieces = locked(&self.0);
        if pieces.len() < SPARE && LARGE.contains(&piece.capacity()) {
            pieces.push(piece);
        }
    }

    /// Gives memory back that has not been needed.
    pub(crate) fn give_back(&self) {
        locked(&self.0).clear();
    }
}

#[derive(Debug, Default)]
pub(crate) struct Kept {
    pieces: VecDeque<Vec<u8>>,
    /// Bytes of the first that are dropped.
    dropped: usize,
    len: usize,
    /// For the next that are made.
    small: Vec<u8>,
    pool: Arc<Pool>,
}

impl Kept {
    /// Returns where the memory of large pieces goes when they are dropped.
    pub(crate) fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Returns how many bytes there are.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds bytes.
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.len += bytes.len();
        let has_room = |last: &Vec<u8>| last.capacity() - last.len() >= bytes.len();
        if !self.pieces.back().is_some_and(has_room) {
            let mut piece = std::mem::take(&mut self.small);
            piece.reserve_exact(bytes.len().max(PIECE));
            self.pieces.push_back(piece);
        }
        if let Some(last) = self.pieces.back_mut() {
            last.extend_from_slice(bytes);
        }
    }

    /// Adds a piece as it is; of a few bytes, only these.
    pub(crate) fn give(&mut self, piece: Vec<u8>) {
        if piece.len() >= *LARGE.start() {
            self.len += piece.len();
            self.pieces.push_back(piece);
        } else {
            self.add(&piece);
            self.pool.give(piece);
        }
    }

    /// Drops the first bytes, of which there are so many.
    pub(crate) fn drop_first(&mut self, count: usize) {
        self.len -= count;
        self.dropped += count;
        while let Some(len) = self.pieces.front().map(Vec::len)
            && self.dropped >= len
        {
            self.dropped -= len;
            let mut piece = self.pieces.pop_front().unwrap_or_default();
            if piece.capacity() == PIECE {
                piece.clear();
                self.small = piece;
            } else {
                self.pool.give(piece);
            }
        }
    }

    /// Returns the bytes from `from` on, `most` of them at most, as far as `ROOM` pieces have them.
    pub(crate) fn slices<'a, const ROOM: usize>(
        &'a self,
        from: usize,
        most: usize,
        into: &mut Slices<'a, ROOM>,
    ) {
        let (mut skip, mut left) = (self.dropped + from, most);
        for piece in &self.pieces {
            if left == 0 || into.count == ROOM {
                return;
            }
            match piece.get(skip..).filter(|rest| !rest.is_empty()) {
                Some(rest) => {
                    let slice = &rest[..rest.len().min(left)];
                    (skip, left) = (0, left - slice.len());
                    into.add(slice);
                }
                None => skip -= piece.len(),
            }
        }
    }
}

/// Some slices that are sent together.
pub(crate) struct Slices<'a, const ROOM: usize> {
    all: [&'a [u8]; ROOM],
    count: usize,
}

impl<'a, const ROOM: usize> Slices<'a, ROOM> {
    pub(crate) fn new() -> Slices<'a, ROOM> {
        Slices { all: [&[]; ROOM], count: 0 }
    }

    /// Adds one, for which there must be room, unless it is empty.
    pub(crate) fn add(&mut self, slice: &'a [u8]) {
        if !slice.is_empty() {
            self.all[self.count] = slice;
            self.count += 1;
        }
    }

    pub(crate) fn get(&self) -> &[&'a [u8]] {
        &self.all[..self.count]
    }

    /// Returns how many bytes there are.
    pub(crate) fn len(&self) -> usize {
        self.get().iter().map(|slice| slice.len()).sum()
    }

    pub(crate) fn for_system(&self) -> [IoSlice<'a>; ROOM] {
        self.all.map(IoSlice::new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Beside a plain row of bytes, in all kinds of pieces.
    #[test]
    fn it_has_what_was_given_less_what_was_dropped() {
        let (mut kept, mut plain) = (Kept::default(), Vec::new());
        let (mut noise, mut next) = (7u64, 0u8);
        let mut below = |most: usize| {
            noise ^= noise << 13;
            noise ^= noise >> 7;
            noise ^= noise << 17;
            (noise % most as u64) as usize
        };
        for _ in 0..3000 {
            let len = [0, 1, 20, 5000, 70_000, 300_000][below(6)];
            let mut bytes = |piece: &mut [u8]| {
                piece.iter_mut().for_each(|byte| {
                    next = next.wrapping_mul(5).wrapping_add(17);
                    *byte = next;
                });
            };
            if below(2) == 0 {
                let mut piece = kept.pool().piece(len);
                bytes(&mut piece);
                plain.extend_from_slice(&piece);
                kept.give(piece);
            } else {
                let mut piece = vec![0; len];
                bytes(&mut piece);
                plain.extend_from_slice(&piece);
                kept.add(&piece);
            }
            let from = below(plain.len() + 1);
            let mut slices = Slices::<5>::new();
            kept.slices(from, 1 << 18, &mut slices);
            let found = slices.get().concat();
            assert_eq!(found[..], plain[from..from + found.len()]);
            assert!(found.len() == (plain.len() - from).min(1 << 18) || slices.get().len() == 5);
            let count = if below(20) == 0 { plain.len() } else { below(plain.len() + 1) };
            kept.drop_first(count);
            plain.drain(..count);
            assert_eq!((kept.len(), kept.is_empty()), (plain.len(), plain.is_empty()));
        }
    }

    /// An idle link takes no memory each time that something is said by it.
    #[test]
    fn a_few_bytes_use_the_same_room_again() {
        let mut kept = Kept::default();
        kept.add(&[1; 100]);
        let at = kept.pieces[0].as_ptr();
        for _ in 0..2000 {
            kept.drop_first(kept.len());
            kept.add(&[2; 100]);
        }
        assert_eq!((kept.pieces.len(), kept.pieces[0].as_ptr(), kept.len()), (1, at, 100));
    }
}
