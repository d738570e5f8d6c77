//! Sampling a texture: levels, filtering, formats.

use super::{AddressMode, ArrayView, Sampler, TextureView};
use crate::math::sampling::{Axis, Taps, cube_face};
use crate::math::texel::MAX_BYTES;

/// A texture instruction's geometry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Geometry {
    D1,
    D2,
    D3,
    A1d,
    A2d,
    Cube,
    ACube,
}

impl Geometry {
    pub(super) fn named(part: &str) -> Option<Self> {
        Some(match part {
            "1d" => Self::D1,
            "2d" => Self::D2,
            "3d" => Self::D3,
            "a1d" => Self::A1d,
            "a2d" => Self::A2d,
            "cube" => Self::Cube,
            "acube" => Self::ACube,
            _ => return None,
        })
    }

    pub(super) fn from_index(index: u32) -> Self {
        let all = [Self::D1, Self::D2, Self::D3, Self::A1d, Self::A2d, Self::Cube, Self::ACube];
        all[index as usize % all.len()]
    }

    /// Whether the first coordinate is an integer layer.
    pub(super) fn layered(self) -> bool {
        matches!(self, Self::A1d | Self::A2d | Self::ACube)
    }

    /// Coordinates besides the layer.
    pub(super) fn coordinates(self) -> usize {
        match self {
            Self::D1 | Self::A1d => 1,
            Self::D2 | Self::A2d => 2,
            Self::D3 | Self::Cube | Self::ACube => 3,
        }
    }

    /// Dimensions that are filtered.
    fn filtered(self) -> usize {
        match self {
            Self::Cube | Self::ACube => 2,
            _ => self.coordinates(),
        }
    }
}

/// Where one lane samples.
#[derive(Debug, Clone, Copy)]
pub(super) struct Point {
    pub(super) layer: u32,
    /// f32 bits, or integers with `integral`.
    pub(super) at: [u32; 3],
    pub(super) integral: bool,
    /// Level of detail; 0 without a mipmap.
    pub(super) lod: f32,
}

/// Rows of elements in memory, at one level.
struct Level<'a> {
    array: &'a ArrayView,
    sampler: &'a Sampler,
    geometry: Geometry,
}

/// The four channels at `point`.
pub(super) fn sample(view: &TextureView, geometry: Geometry, point: &Point) -> [u32; 4] {
    let sampler = &view.sampler;
    let last = (view.levels.len() - 1) as f32;
    let [least, most] = sampler.mipmap_clamp;
    let level = |number: usize| Level { array: &view.levels[number], sampler, geometry };
    if last == 0.0 {
        return level(0).sample(point);
    }
    if point.integral {
        // An element of a level, which nothing of the sampler moves.
        return level(point.lod.clamp(0.0, last) as usize).sample(point);
    }
    let lod = (point.lod + sampler.mipmap_bias).max(least).min(most.max(least));
    let lod = if lod.is_nan() { 0.0 } else { lod.clamp(0.0, last) };
    if !sampler.mipmap_linear || !level(0).is_float() {
        return level((lod + 0.5).floor().min(last) as usize).sample(point);
    }
    let fine = lod.floor();
    let weight = ((lod - fine) * 256.0 + 0.5).floor() / 256.0;
    let near = level(fine as usize).sample(point);
    let far = level((fine + 1.0).min(last) as usize).sample(point);
    std::array::from_fn(|channel| {
        let [near, far] = [near, far].map(|texel| f32::from_bits(texel[channel]));
        (near + (far - near) * weight).to_bits()
    })
}

/// `tld4`: one channel of the four elements that a 2D linear sample would blend, counter-clockwise
/// from the lower left.
pub(super) fn gather(
    view: &TextureView,
    geometry: Geometry,
    point: &Point,
    channel: usize,
) -> [u32; 4] {
    let level = Level { array: &view.levels[0], sampler: &view.sampler, geometry };
    let (layer, taps) = level.taps(point, true);
    [(0, 1), (1, 1), (1, 0), (0, 0)].map(|(i, j)| {
        level.element([taps[0].index[i], taps[1].index[j], Some(0)], layer)[channel & 3]
    })
}

/// The level of detail for derivatives of the coordinates, for `tex.grad`.
pub(super) fn level_of_detail(
    view: &TextureView,
    geometry: Geometry,
    dx: [f32; 3],
    dy: [f32; 3],
) -> f32 {
    let size = view.levels[0].size;
    let length = |d: [f32; 3]| {
        let squares = (0..geometry.filtered()).map(|i| (d[i] * size[i] as f32).powi(2));
        squares.sum::<f32>().sqrt()
    };
    length(dx).max(length(dy)).log2()
}

impl Level<'_> {
    /// Whether a sample's channels are f32.
    fn is_float(&self) -> bool {
        use crate::math::texel::Channel;
        let format = self.array.format;
        matches!(format.channel, Channel::F16 | Channel::F32)
            || format.normalises() && !self.sampler.read_as_integer
    }

    fn axis(&self, dimension: usize) -> Axis {
        let cube = matches!(self.geometry, Geometry::Cube | Geometry::ACube);
        Axis {
            size: self.array.size[dimension],
            // Faces are clamped: seams are not blended.
            mode: if cube { AddressMode::Clamp } else { self.sampler.address[dimension] },
            normalised: self.sampler.normalised || cube,
        }
    }

    /// The layer, and the elements along each dimension.
    #[inline]
    fn taps(&self, point: &Point, linear: bool) -> (u32, [Taps; 3]) {
        let mut layer = point.layer;
        let mut at = point.at.map(f32::from_bits);
        if matches!(self.geometry, Geometry::Cube | Geometry::ACube) {
            let (face, s, t) = cube_face(at);
            layer = layer.saturating_mul(6).saturating_add(face);
            at = [s, t, 0.0];
        }
        let mut taps = [Taps { index: [Some(0), None], weight: 0.0 }; 3];
        for (dimension, taps) in taps.iter_mut().enumerate().take(self.geometry.filtered()) {
            let axis = self.axis(dimension);
            *taps = if point.integral {
                Taps {
                    index: [self.integral(dimension, point.at[dimension] as i32), None],
                    weight: 0.0,
                }
            } else if linear {
                axis.linear(at[dimension])
            } else {
                axis.nearest(at[dimension])
            };
        }
        (layer, taps)
    }

    /// An integer coordinate: in linear memory, beyond the end is zero.
    fn integral(&self, dimension: usize, at: i32) -> Option<u32> {
        let linear_memory = self.geometry == Geometry::D1 && self.array.owner.is_none();
        let mode = if linear_memory { AddressMode::Border } else { self.axis(dimension).mode };
        Axis { size: self.array.size[dimension], mode, normalised: false }.element(at.into())
    }

    #[inline]
    fn sample(&self, point: &Point) -> [u32; 4] {
        let linear = self.sampler.linear && self.is_float() && !point.integral;
        let (layer, taps) = self.taps(point, linear);
        if !linear {
            return self.element(taps.map(|taps| taps.index[0]), layer);
        }
        let corners = 1 << self.geometry.filtered();
        let mut sum = [0f32; 4];
        for corner in 0..corners {
            let side = |dimension: usize| corner >> dimension & 1;
            let mut weight = 1.0;
            for (dimension, taps) in taps.iter().enumerate().take(self.geometry.filtered()) {
                weight *= if side(dimension) == 1 { taps.weight } else { 1.0 - taps.weight };
            }
            if weight == 0.0 {
                continue;
            }
            let index = [0, 1, 2].map(|dimension: usize| taps[dimension].index[side(dimension)]);
            let texel = self.element(index, layer).map(f32::from_bits);
            for (sum, channel) in sum.iter_mut().zip(texel) {
                *sum += weight * channel;
            }
        }
        sum.map(f32::to_bits)
    }

    /// The channels of one element; the border where a coordinate is outside.
    #[inline]
    fn element(&self, [x, y, z]: [Option<u32>; 3], layer: u32) -> [u32; 4] {
        let (Some(x), Some(y), Some(z)) = (x, y, z) else { return self.border() };
        let z = match self.geometry {
            Geometry::D1 | Geometry::D2 => 0,
            Geometry::D3 => z,
            _ => layer.min(self.array.size[2] - 1),
        };
        let bytes = self.array.read([x, y, z]);
        self.array.format.decode(&bytes, !self.sampler.read_as_integer, self.sampler.srgb)
    }

    fn border(&self) -> [u32; 4] {
        if self.is_float() {
            self.sampler.border.map(f32::to_bits)
        } else {
            self.sampler.border.map(|channel| channel as i32 as u32)
        }
    }
}

impl ArrayView {
    /// Bytes from the first element to the end of the last. None: more than an address space.
    pub(super) fn extent(&self) -> Option<u64> {
        let row = u64::from(self.size[0]).checked_mul(self.format.bytes().into())?;
        let rows = u64::from(self.size[1] - 1).checked_mul(self.row_pitch)?;
        let slices = u64::from(self.size[2] - 1).checked_mul(self.slice_pitch)?;
        row.checked_add(rows)?.checked_add(slices)
    }

    /// Address of byte `x` of row `y` of slice `z`, which are inside.
    pub(super) fn address(&self, x: u64, y: u32, z: u32) -> u64 {
        self.base + u64::from(z) * self.slice_pitch + u64::from(y) * self.row_pitch + x
    }

    /// An element's bytes.
    #[inline]
    fn read(&self, [x, y, z]: [u32; 3]) -> [u8; MAX_BYTES] {
        debug_assert!(x < self.size[0] && y < self.size[1] && z < self.size[2]);
        let size = self.format.bytes() as usize;
        let from = self.address(u64::from(x) * size as u64, y, z) as *const u8;
        let mut bytes = [0; MAX_BYTES];
        // SAFETY: the coordinates are inside (they come from `Axis`, or are clamped), and the whole
        // view is memory: its owner keeps it, or `lookup` found it valid. An element is at most 16
        // bytes. The sizes are told apart so that none becomes a call of memcpy.
        unsafe {
            let to = bytes.as_mut_ptr();
            match size {
                1 => to.write(from.read()),
                2 => to.cast::<[u8; 2]>().write(from.cast::<[u8; 2]>().read()),
                4 => to.cast::<[u8; 4]>().write(from.cast::<[u8; 4]>().read()),
                8 => to.cast::<[u8; 8]>().write(from.cast::<[u8; 8]>().read()),
                16 => to.cast::<[u8; 16]>().write(from.cast::<[u8; 16]>().read()),
                _ => std::ptr::copy_nonoverlapping(from, to, size.min(MAX_BYTES)),
            }
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_protocol::{ArrayDesc, Texture, TextureSource};
    use std::sync::Arc;

    /// 4 × 3 elements of f32, x + 10·y, from flags and filter.
    fn view(filter: u32, flags: u32, address: u32) -> TextureView {
        let data: Arc<Vec<f32>> =
            Arc::new((0..12).map(|i| (i % 4) as f32 + 10.0 * (i / 4) as f32).collect());
        let desc = ArrayDesc {
            device: 0,
            width: 4,
            height: 3,
            depth: 0,
            format: 0x20,
            channels: 1,
            flags: 0,
        };
        let base = data.as_ptr() as u64;
        let array = ArrayView::array(base, &desc, 16, 48, Some(data)).unwrap();
        let texture = Texture {
            surface: false,
            source: TextureSource::Linear { addr: 0, format: 0, channels: 0, bytes: 0 },
            address: [address; 3],
            filter,
            flags,
            border: [-1.0; 4],
            mipmap_filter: 0,
            mipmap_bias: 0.0,
            mipmap_clamp: [0.0; 2],
            view_format: 0,
        };
        TextureView::new(&texture, vec![array]).unwrap()
    }

    fn at(view: &TextureView, x: f32, y: f32) -> f32 {
        let at = [x.to_bits(), y.to_bits(), 0];
        let point = Point { layer: 0, at, integral: false, lod: 0.0 };
        f32::from_bits(sample(view, Geometry::D2, &point)[0])
    }

    #[test]
    fn nearest() {
        let clamp = view(0, 0, 1);
        assert_eq!((at(&clamp, 2.7, 1.2), at(&clamp, -5.0, 9.0)), (12.0, 20.0));
        let border = view(0, 0, 3);
        assert_eq!(at(&border, -0.5, 1.0), -1.0);
        let wrap = view(0, 2, 0);
        assert_eq!((at(&wrap, 1.3, 0.5), at(&wrap, -0.1, -0.1)), (11.0, 23.0));
    }

    #[test]
    fn linear() {
        let clamp = view(1, 0, 1);
        assert_eq!((at(&clamp, 1.5, 1.5), at(&clamp, 2.0, 2.0)), (11.0, 16.5));
        assert_eq!(at(&clamp, 0.0, 0.0), 0.0);
        let border = view(1, 0, 3);
        assert_eq!(at(&border, 0.0, 0.5), -0.5);
    }

    #[test]
    fn gathered() {
        let clamp = view(1, 0, 1);
        let at = [2f32.to_bits(), 2f32.to_bits(), 0];
        let point = Point { layer: 0, at, integral: false, lod: 0.0 };
        let got = gather(&clamp, Geometry::D2, &point, 0).map(f32::from_bits);
        assert_eq!(got, [21.0, 22.0, 12.0, 11.0]);
    }
}
