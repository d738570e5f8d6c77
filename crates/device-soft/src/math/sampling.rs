//! From a texture coordinate to elements and weights (CUDA programming guide, "Texture Fetching").

/// What becomes of a coordinate outside a texture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddressMode {
    Wrap,
    Clamp,
    Mirror,
    Border,
}

/// The one or two elements along a dimension that a coordinate reads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Taps {
    /// None: outside, where the border colour is.
    pub(crate) index: [Option<u32>; 2],
    /// Share of the second element, in 1/256; 0 without linear filtering.
    pub(crate) weight: f32,
}

/// One dimension's rules.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Axis {
    /// Elements; at least 1.
    pub(crate) size: u32,
    pub(crate) mode: AddressMode,
    /// The coordinate runs from 0 to 1.
    pub(crate) normalised: bool,
}

impl Axis {
    /// The element at an integer coordinate.
    #[inline]
    pub(crate) fn element(&self, index: i64) -> Option<u32> {
        let size = i64::from(self.size);
        // Every mode keeps what is inside; the rest divides.
        if (0..size).contains(&index) {
            return Some(index as u32);
        }
        let inside = match self.mode {
            AddressMode::Clamp => index.clamp(0, size - 1),
            AddressMode::Wrap => index.rem_euclid(size),
            AddressMode::Mirror => {
                let within = index.rem_euclid(2 * size);
                within.min(2 * size - 1 - within)
            }
            AddressMode::Border => return None,
        };
        Some(inside as u32)
    }

    /// The coordinate in elements. Repeating modes fold it first, in the coordinate's own
    /// precision.
    #[inline]
    fn position(&self, coordinate: f32) -> f32 {
        let size = self.size as f32;
        if !self.normalised {
            return coordinate;
        }
        let folded = match self.mode {
            AddressMode::Wrap => coordinate - floor(coordinate),
            AddressMode::Mirror => {
                let fraction = coordinate - floor(coordinate);
                let odd = floor(coordinate).rem_euclid(2.0) == 1.0;
                if odd { 1.0 - fraction } else { fraction }
            }
            AddressMode::Clamp | AddressMode::Border => coordinate,
        };
        folded * size
    }

    /// The nearest element to `coordinate`, moved by `offset` elements.
    #[inline]
    pub(crate) fn nearest(&self, coordinate: f32) -> Taps {
        // `as` clamps, and takes NaN to 0.
        let index = self.element(floor(self.position(coordinate)) as i64);
        Taps { index: [index, None], weight: 0.0 }
    }

    /// The two elements around `coordinate`. Their weight has 8 bits of fraction, as the
    /// hardware's.
    #[inline]
    pub(crate) fn linear(&self, coordinate: f32) -> Taps {
        let position = self.position(coordinate) - 0.5;
        let below = floor(position);
        let weight = floor((position - below) * 256.0 + 0.5) / 256.0;
        let first = below as i64;
        Taps {
            index: [self.element(first), self.element(first.saturating_add(1))],
            weight: if weight.is_finite() { weight } else { 0.0 },
        }
    }
}

/// `f32::floor`, which the baseline instruction set calls as a function.
#[inline(always)]
pub(crate) fn floor(x: f32) -> f32 {
    /// From here on every f32 is an integer.
    const INTEGERS: f32 = 8_388_608.0;
    let cut = x as i32 as f32;
    let below = if cut > x { cut - 1.0 } else { cut };
    // Not a number fails the comparison and stays.
    if x.abs() < INTEGERS { below } else { x }
}

/// A cube's face, and the coordinates on it, both in [0, 1].
pub(crate) fn cube_face([x, y, z]: [f32; 3]) -> (u32, f32, f32) {
    let (ax, ay, az) = (x.abs(), y.abs(), z.abs());
    let (face, major, s, t) = if ax >= ay && ax >= az {
        if x >= 0.0 { (0, ax, -z, -y) } else { (1, ax, z, -y) }
    } else if ay >= az {
        if y >= 0.0 { (2, ay, x, z) } else { (3, ay, x, -z) }
    } else if z >= 0.0 {
        (4, az, x, -y)
    } else {
        (5, az, -x, -y)
    };
    (face, (s / major + 1.0) / 2.0, (t / major + 1.0) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn axis(size: u32, mode: AddressMode, normalised: bool) -> Axis {
        Axis { size, mode, normalised }
    }

    #[test]
    fn coordinates_outside() {
        let index = |mode, at| axis(4, mode, true).element(at);
        assert_eq!([-1, 4, 9].map(|at| index(AddressMode::Clamp, at)), [0, 3, 3].map(Some));
        assert_eq!([-1, 4, 9].map(|at| index(AddressMode::Wrap, at)), [3, 0, 1].map(Some));
        assert_eq!([-1, 4, 9].map(|at| index(AddressMode::Mirror, at)), [0, 3, 1].map(Some));
        assert_eq!([-1, 4, 3].map(|at| index(AddressMode::Border, at)), [None, None, Some(3)]);
    }

    #[test]
    fn nearest_elements() {
        let at = |mode, x| axis(4, mode, true).nearest(x).index[0];
        assert_eq!(at(AddressMode::Clamp, 0.5), Some(2));
        assert_eq!(at(AddressMode::Wrap, 1.25), Some(1));
        assert_eq!(at(AddressMode::Wrap, -0.25), Some(3));
        assert_eq!(at(AddressMode::Mirror, 1.1), Some(3));
        assert_eq!(axis(4, AddressMode::Clamp, false).nearest(2.9).index[0], Some(2));
        assert_eq!(axis(4, AddressMode::Border, false).nearest(-0.1).index[0], None);
        assert_eq!(axis(4, AddressMode::Clamp, false).nearest(f32::NAN).index[0], Some(0));
    }

    #[test]
    fn linear_weights_have_eight_bits() {
        let clamp = axis(4, AddressMode::Clamp, false);
        assert_eq!(clamp.linear(1.5), Taps { index: [Some(1), Some(2)], weight: 0.0 });
        assert_eq!(clamp.linear(1.75), Taps { index: [Some(1), Some(2)], weight: 0.25 });
        assert_eq!(clamp.linear(0.0), Taps { index: [Some(0), Some(0)], weight: 0.5 });
        assert_eq!(clamp.linear(1.501).weight, 0.0);
        assert_eq!(clamp.linear(1.502).weight, 1.0 / 256.0);
        let wrap = axis(4, AddressMode::Wrap, true);
        assert_eq!(wrap.linear(0.0).index, [Some(3), Some(0)]);
        assert_eq!(clamp.linear(f32::INFINITY).index, [Some(3), Some(3)]);
    }

    #[test]
    fn floors_are_the_library_s() {
        let values = [0.0, 0.5, 1.0, -0.5, -1.0, -1.5, 8e6, -8e6, 1e9, -3e30, 0.999_999_94];
        for x in values {
            assert_eq!(floor(x), x.floor(), "{x}");
        }
        assert!(floor(f32::NAN).is_nan() && floor(f32::INFINITY) == f32::INFINITY);
    }

    #[test]
    fn cube_faces() {
        assert_eq!(cube_face([1.0, 0.0, 0.0]), (0, 0.5, 0.5));
        assert_eq!(cube_face([-2.0, 0.0, 2.0 / 2.0]).0, 1);
        assert_eq!(cube_face([0.0, 0.0, -1.0]), (5, 0.5, 0.5));
        assert_eq!(cube_face([0.5, 1.0, 0.0]), (2, 0.75, 0.5));
    }
}
