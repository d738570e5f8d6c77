//! Which elements a tensor copy takes: rows along the lowest dimension, one after the other in
//! shared memory (PTX ISA, "Tensors").

use kedge_cuda_types::tensor_map::{MAX_RANK, Mode, TensorMap};

/// A row. Elements outside of the tensor are filled on loads, and left alone on stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Row {
    /// Global address of the first element that is inside.
    pub address: u64,
    /// Elements before it.
    pub skip: u32,
    /// Elements that are inside; 0: none.
    pub count: u32,
}

/// Rows of a copy.
pub(super) fn count(map: &TensorMap) -> u64 {
    match map.mode {
        Mode::Tiled { .. } => (1..usize::from(map.rank)).map(|dim| steps(map, dim)).product(),
        Mode::Im2col { pixels, .. } => pixels.into(),
    }
}

/// Elements that a tile takes along dimension `dim`.
fn steps(map: &TensorMap, dim: usize) -> u64 {
    match map.mode {
        Mode::Tiled { extent } => u64::from(extent[dim]).div_ceil(u64::from(map.steps[dim].max(1))),
        Mode::Im2col { .. } => 1,
    }
}

/// The rows of a copy that begins at `at`; `offsets` {W, H, D} are an im2col load's.
pub(super) fn rows(
    map: &TensorMap,
    at: [i32; MAX_RANK],
    offsets: [u16; 3],
) -> impl Iterator<Item = Row> {
    let map = *map;
    let mut walk = Walk::new(&map, at, offsets);
    (0..count(&map)).map(move |_| {
        let row = walk.row(&map);
        walk.advance(&map);
        row
    })
}

/// The place of a row, in tensor coordinates.
struct Walk {
    first: [i64; MAX_RANK],
    at: [i64; MAX_RANK],
    /// Added to each coordinate before the tensor is looked at.
    offsets: [i64; MAX_RANK],
}

impl Walk {
    fn new(map: &TensorMap, at: [i32; MAX_RANK], offsets: [u16; 3]) -> Walk {
        let first = at.map(i64::from);
        let mut shift = [0; MAX_RANK];
        if let Mode::Im2col { .. } = map.mode {
            let spatial = usize::from(map.rank) - 2;
            for (to, offset) in shift[1..=spatial].iter_mut().zip(offsets) {
                *to = offset.into();
            }
        }
        Walk { first, at: first, offsets: shift }
    }

    fn row(&self, map: &TensorMap) -> Row {
        let mut address = map.address;
        for dim in 1..usize::from(map.rank) {
            let at = self.at[dim] + self.offsets[dim];
            if !(0..map.dims[dim] as i64).contains(&at) {
                return Row { address: 0, skip: 0, count: 0 };
            }
            // What a hostile map makes wrap is checked as any address.
            address = address.wrapping_add((at as u64).wrapping_mul(map.strides[dim - 1]));
        }
        let length = i64::from(map.row_elements());
        let begin = self.at[0].max(0);
        let end = (self.at[0] + length).min(map.dims[0] as i64);
        if begin >= end {
            return Row { address: 0, skip: 0, count: 0 };
        }
        Row {
            address: address.wrapping_add(begin as u64 * u64::from(map.format.size())),
            skip: (begin - self.at[0]) as u32,
            count: (end - begin) as u32,
        }
    }

    fn advance(&mut self, map: &TensorMap) {
        let rank = usize::from(map.rank);
        for dim in 1..rank {
            self.at[dim] += i64::from(map.steps[dim].max(1));
            let (low, high) = match map.mode {
                Mode::Tiled { extent } => {
                    (self.first[dim], self.first[dim] + i64::from(extent[dim]))
                }
                // Pixels of the bounding box; then those of the next image.
                Mode::Im2col { .. } if dim == rank - 1 => return,
                Mode::Im2col { lower, upper, .. } => {
                    (lower[dim - 1].into(), map.dims[dim] as i64 + i64::from(upper[dim - 1]))
                }
            };
            if self.at[dim] < high {
                return;
            }
            self.at[dim] = low;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_cuda_types::tensor_map::{Format, Interleave, Swizzle};

    fn map(rank: u8, dims: [u64; 5], strides: [u64; 4], mode: Mode) -> TensorMap {
        TensorMap {
            format: Format::F32,
            rank,
            address: 0x1000,
            dims,
            strides,
            steps: [1; 5],
            mode,
            interleave: Interleave::None,
            swizzle: Swizzle::None,
            promotion: 0,
            nan_fill: false,
        }
    }

    fn list(map: &TensorMap, at: [i32; 5], offsets: [u16; 3]) -> Vec<(u64, u32, u32)> {
        rows(map, at, offsets).map(|row| (row.address, row.skip, row.count)).collect()
    }

    #[test]
    fn a_tile_is_cut_at_the_edges_of_the_tensor() {
        let mode = Mode::Tiled { extent: [4, 3, 1, 1, 1] };
        let plane = map(2, [6, 5, 1, 1, 1], [32, 0, 0, 0], mode);
        let none = (0, 0, 0);
        assert_eq!(
            list(&plane, [-1, 3, 0, 0, 0], [0; 3]),
            [(0x1000 + 96, 1, 3), (0x1000 + 128, 1, 3), none]
        );
        assert_eq!(list(&plane, [4, -2, 0, 0, 0], [0; 3]), [none, none, (0x1010, 0, 2)]);
        assert_eq!(list(&plane, [6, 0, 0, 0, 0], [0; 3]), [none; 3]);
    }

    #[test]
    fn every_second_row() {
        let mode = Mode::Tiled { extent: [4, 5, 2, 1, 1] };
        let mut cube = map(3, [4, 8, 2, 1, 1], [16, 128, 0, 0], mode);
        cube.steps = [1, 2, 1, 1, 1];
        assert_eq!(count(&cube), 6);
        let rows = list(&cube, [0, 1, 0, 0, 0], [0; 3]);
        let at = |row: u64, plane: u64| (0x1000 + 16 * row + 128 * plane, 0, 4);
        assert_eq!(rows, [at(1, 0), at(3, 0), at(5, 0), at(1, 1), at(3, 1), at(5, 1)]);
    }

    /// A 3 × 3 convolution with a padding of one over 4 × 3 pixels of two images.
    #[test]
    fn columns_walk_the_bounding_box() {
        let mode = Mode::Im2col { lower: [-1; 3], upper: [-1; 3], channels: 4, pixels: 6 };
        let images = map(4, [4, 4, 3, 2, 1], [16, 64, 192, 0], mode);
        let at = |w: u64, h: u64, n: u64| (0x1000 + 16 * w + 64 * h + 192 * n, 0, 4);
        // Position (1, 1) of image 0 is the box's last but one in its last row but none.
        let rows = list(&images, [0, 1, 1, 0, 0], [1, 1, 0]);
        assert_eq!(
            rows,
            [at(2, 2, 0), at(3, 2, 0), at(0, 0, 1), at(1, 0, 1), at(2, 0, 1), at(3, 0, 1)]
        );
        let corner = list(&images, [0, -1, -1, 0, 0], [0, 0, 0]);
        assert_eq!(corner[0], (0, 0, 0), "padding");
        assert_eq!(corner[5], at(0, 0, 0));
    }
}
