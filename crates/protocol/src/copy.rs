//! Copies: where they go from and to, and how they are cut into pieces.
//!
//! Places and shapes may come from the other side, so nothing here overflows: addresses wrap, and
//! whoever dereferences one has checked it against what is allocated.

use crate::ArrayId;
use kedge_wire::wire;

/// A host-to-device copy up to this size may travel in the ring.
pub const MAX_INLINE_COPY: usize = 64 << 10;

wire! {
    /// One side of a copy.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Place {
        /// Memory that the proxy maps: the device arenas and the shared arena. `pitch` is bytes
        /// between rows, `slice` bytes between planes.
        Mapped = 1 { addr: u64, pitch: u64, slice: u64 },
        /// The client's private memory, reached with process_vm_readv/writev when the operation
        /// runs; the client waits for it.
        Client = 2 { addr: u64, pitch: u64, slice: u64 },
        /// A CUDA array, from element offset `x_bytes` (bytes), `y` (rows), `z` (planes or layers).
        Array = 3 { array: ArrayId, x_bytes: u64, y: u64, z: u64 },
    }

    /// A copy of `width` bytes × `height` rows × `depth` planes.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Copy3d {
        pub src: Place,
        pub dst: Place,
        pub width: u64,
        pub height: u64,
        pub depth: u64,
    }
}

/// What a copy moves: `width` bytes × `height` rows × `depth` planes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    pub width: u64,
    pub height: u64,
    pub depth: u64,
}

impl Shape {
    pub fn line(width: u64) -> Shape {
        Shape { width, height: 1, depth: 1 }
    }

    pub fn is_empty(self) -> bool {
        self.width == 0 || self.height == 0 || self.depth == 0
    }

    /// Returns how many bytes there are in all; `None` beyond 64 bits.
    pub fn bytes(self) -> Option<u64> {
        self.width.checked_mul(self.height)?.checked_mul(self.depth)
    }

    /// Returns how many bytes there are from the first to the last, with rows `pitch` and planes
    /// `slice` bytes apart; `None` beyond 64 bits, and for an empty shape.
    pub fn reach(self, pitch: u64, slice: u64) -> Option<u64> {
        let planes = slice.checked_mul(self.depth.checked_sub(1)?)?;
        let rows = pitch.checked_mul(self.height.checked_sub(1)?)?;
        planes.checked_add(rows)?.checked_add(self.width)
    }

    /// Returns memory at `addr` that holds the shape without gaps.
    pub fn packed_at(self, addr: u64) -> Place {
        Place::Mapped { addr, pitch: 0, slice: 0 }.packed(self)
    }
}

impl Place {
    /// Returns whether the rows of a shape follow each other here without gaps.
    pub fn is_packed(self, shape: Shape) -> bool {
        match self {
            Place::Mapped { pitch, slice, .. } | Place::Client { pitch, slice, .. } => {
                (shape.height == 1 || pitch == shape.width)
                    && (shape.depth == 1 || Some(slice) == shape.width.checked_mul(shape.height))
            }
            Place::Array { .. } => false,
        }
    }

    /// Returns the same bytes as rows and planes of a shape, without gaps. An array has its own
    /// rows.
    #[must_use]
    pub fn packed(self, shape: Shape) -> Place {
        let (pitch, slice) = (shape.width, shape.width.wrapping_mul(shape.height));
        match self {
            Place::Mapped { addr, .. } => Place::Mapped { addr, pitch, slice },
            Place::Client { addr, .. } => Place::Client { addr, pitch, slice },
            Place::Array { .. } => self,
        }
    }

    /// Returns the address of row `y` of plane `z`; `None` for an array, which has no addresses.
    pub fn row(self, y: u64, z: u64) -> Option<u64> {
        match self {
            Place::Mapped { addr, pitch, slice } | Place::Client { addr, pitch, slice } => {
                let row = addr.wrapping_add(y.wrapping_mul(pitch));
                Some(row.wrapping_add(z.wrapping_mul(slice)))
            }
            Place::Array { .. } => None,
        }
    }

    /// Returns the place further on by `x` bytes, `y` rows and `z` planes.
    #[must_use]
    pub fn advanced(self, x: u64, y: u64, z: u64) -> Place {
        let mut moved = self;
        match &mut moved {
            Place::Mapped { addr, .. } | Place::Client { addr, .. } => {
                *addr = self.row(y, z).unwrap_or(*addr).wrapping_add(x);
            }
            Place::Array { x_bytes, y: row, z: plane, .. } => {
                *x_bytes = x_bytes.wrapping_add(x);
                *row = row.wrapping_add(y);
                *plane = plane.wrapping_add(z);
            }
        }
        moved
    }
}

impl Copy3d {
    pub fn new(src: Place, dst: Place, shape: Shape) -> Copy3d {
        let Shape { width, height, depth } = shape;
        Copy3d { src, dst, width, height, depth }
    }

    pub fn shape(&self) -> Shape {
        Shape { width: self.width, height: self.height, depth: self.depth }
    }

    /// Cuts the copy into pieces of at most `max` bytes each, `max` at least 1.
    pub fn pieces(self, max: u64) -> Pieces {
        let shape = self.shape();
        if shape.is_empty() || max == 0 {
            return Pieces { copy: self, width: 1, rows: 1, count: 0 };
        }
        let width = shape.width.min(max);
        let rows = (max / width).min(shape.height);
        let (across, down) = (shape.width.div_ceil(width), shape.height.div_ceil(rows));
        let count = across.saturating_mul(down).saturating_mul(shape.depth);
        Pieces { copy: self, width, rows, count }
    }
}

/// The pieces of a copy, made as they are asked for: in order, or by their numbers from several
/// threads.
#[derive(Debug, Clone)]
pub struct Pieces {
    copy: Copy3d,
    /// Of a piece: bytes of a row, and rows. Pieces at the edges are smaller.
    width: u64,
    rows: u64,
    count: u64,
}

impl Pieces {
    pub fn count(&self) -> u64 {
        self.count
    }

    pub fn get(&self, index: u64) -> Option<Copy3d> {
        if index >= self.count {
            return None;
        }
        let Copy3d { src, dst, width, height, .. } = self.copy;
        let (across, down) = (width.div_ceil(self.width), height.div_ceil(self.rows));
        let (x, y) = (index % across * self.width, index / across % down * self.rows);
        let z = index / across / down;
        Some(Copy3d {
            src: src.advanced(x, y, z),
            dst: dst.advanced(x, y, z),
            width: self.width.min(width - x),
            height: self.rows.min(height - y),
            depth: 1,
        })
    }

    pub fn iter(&self) -> impl Iterator<Item = Copy3d> {
        (0..self.count).map_while(|index| self.get(index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(addr: u64, pitch: u64, slice: u64) -> Place {
        Place::Client { addr, pitch, slice }
    }

    #[test]
    fn reach_is_from_first_to_last_byte() {
        let shape = Shape { width: 10, height: 3, depth: 2 };
        assert_eq!(shape.reach(100, 1000), Some(1210));
        assert_eq!(shape.bytes(), Some(60));
        assert_eq!(Shape::line(7).reach(0, 0), Some(7));
        assert_eq!(shape.reach(u64::MAX, 0), None);
        assert_eq!(Shape { width: 1, height: 0, depth: 1 }.reach(0, 0), None);
        assert_eq!(Shape { width: u64::MAX, height: 2, depth: 1 }.bytes(), None);
    }

    #[test]
    fn places_know_their_gaps() {
        let shape = Shape { width: 4, height: 3, depth: 2 };
        assert!(client(0, 4, 12).is_packed(shape) && shape.packed_at(9).is_packed(shape));
        assert!(!client(0, 5, 15).is_packed(shape) && !client(0, 4, 16).is_packed(shape));
        assert!(client(0, 0, 0).is_packed(Shape::line(9)));
        let array = Place::Array { array: ArrayId(1), x_bytes: 0, y: 0, z: 0 };
        assert!(!array.is_packed(Shape::line(9)) && array.row(0, 0).is_none());
        let huge = Shape { width: u64::MAX, height: 2, depth: 2 };
        assert!(!client(0, u64::MAX, u64::MAX - 1).is_packed(huge));
    }

    #[test]
    fn places_advance_in_their_own_units() {
        assert_eq!(client(100, 10, 50).advanced(3, 2, 1), client(173, 10, 50));
        assert_eq!(client(100, 10, 50).row(2, 1), Some(170));
        let array = |x_bytes, y, z| Place::Array { array: ArrayId(1), x_bytes, y, z };
        assert_eq!(array(1, 2, 3).advanced(10, 20, 30), array(11, 22, 33));
    }

    /// Every byte of a shape lies in exactly one piece.
    #[test]
    fn pieces_cover_a_copy_once() {
        const MAX: u64 = 1000;
        for (width, height, depth) in [(1, 1, 1), (MAX * 2 + 5, 3, 2), (100, 95, 2), (7, 1, 3)] {
            let shape = Shape { width, height, depth };
            let at = |x_bytes, y, z| Place::Array { array: ArrayId(1), x_bytes, y, z };
            let copy = Copy3d::new(at(0, 0, 0), client(0, width, width * height), shape);
            let pieces = copy.pieces(MAX);
            let (mut total, mut last) = (0, None);
            for piece in pieces.iter() {
                let Place::Array { x_bytes, y, z, .. } = piece.src else { panic!("moved") };
                assert!(piece.shape().bytes().unwrap() <= MAX && !piece.shape().is_empty());
                assert!(x_bytes + piece.width <= width && y + piece.height <= height && z < depth);
                assert_eq!(piece.dst, copy.dst.advanced(x_bytes, y, z));
                assert!(last < Some((z, y, x_bytes)), "in order");
                last = Some((z, y, x_bytes));
                total += piece.shape().bytes().unwrap();
            }
            assert_eq!(Some(total), shape.bytes());
            assert_eq!(pieces.get(pieces.count()), None);
        }
    }

    #[test]
    fn absurd_copies_have_pieces_or_none() {
        let place = client(u64::MAX, u64::MAX, u64::MAX);
        let huge = Shape { width: u64::MAX, height: u64::MAX, depth: u64::MAX };
        let pieces = Copy3d::new(place, place, huge).pieces(1);
        assert_eq!(pieces.count(), u64::MAX);
        assert!(pieces.get(u64::MAX - 1).is_some());
        let empty = Copy3d::new(place, place, Shape { height: 0, ..huge });
        assert_eq!(empty.pieces(1).count(), 0);
        assert_eq!(Copy3d::new(place, place, huge).pieces(0).count(), 0);
    }
}
