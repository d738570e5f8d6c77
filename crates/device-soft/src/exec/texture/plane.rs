//! Samples of plain textures, 32 lanes at a time: one level, one or two dimensions, the commonest
//! formats. The results are those of [`super::sample`], to the bit; a lane that this cannot do (a
//! border) is left to it.

use super::sample::Geometry;
use super::{AddressMode, ArrayView, Sampler, TextureView};
use crate::math::sampling::floor;
use crate::math::texel::Channel;
use crate::spec::WARP;

type Row<T> = [T; WARP];

/// A texture that can be sampled this way.
pub(super) struct Plane<'a> {
    array: &'a ArrayView,
    sampler: &'a Sampler,
    kind: Kind,
    dimensions: usize,
    integral: bool,
    linear: bool,
}

/// How an element becomes registers.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// 32-bit channels, as they are.
    Words,
    /// Bytes, as integers.
    Bytes,
    /// Bytes, as numbers from 0 to 1.
    Shares,
}

/// The elements along a dimension that each lane reads.
struct Steps {
    first: Row<u32>,
    second: Row<u32>,
    /// Share of the second.
    weight: Row<f32>,
    /// Lanes that read the border.
    outside: u32,
}

impl<'a> Plane<'a> {
    /// `view` as a plane; `None` where only the general way will do.
    pub(super) fn of(view: &'a TextureView, geometry: Geometry, integral: bool) -> Option<Self> {
        let (array, sampler) = (&view.levels[0], &view.sampler);
        let dimensions = match geometry {
            Geometry::D1 => 1,
            Geometry::D2 => 2,
            _ => return None,
        };
        let kind = match array.format.channel {
            Channel::F32 | Channel::U32 | Channel::S32 => Kind::Words,
            Channel::U8 if sampler.read_as_integer => Kind::Bytes,
            Channel::U8 if !sampler.srgb => Kind::Shares,
            _ => return None,
        };
        // Integer coordinates mean linear memory here, where what is beyond the end is zero.
        let memory = dimensions == 1 && array.owner.is_none();
        let repeats = |mode: &AddressMode| matches!(mode, AddressMode::Wrap | AddressMode::Mirror);
        let odd = view.levels.len() != 1
            || array.size[..2].iter().any(|size| *size > i32::MAX as u32)
            || integral && !memory
            || !sampler.normalised && sampler.address[..dimensions].iter().any(repeats);
        let float = array.format.channel == Channel::F32 || kind == Kind::Shares;
        let linear = sampler.linear && float && !integral;
        (!odd).then_some(Self { array, sampler, kind, dimensions, integral, linear })
    }

    /// Samples at `at` (f32 bits or integers, by dimension) and gives the lanes that it left alone.
    #[inline(always)]
    pub(super) fn sample(&self, at: [&Row<u32>; 2], out: &mut [Row<u32>; 4]) -> u32 {
        let x = self.steps(0, at[0]);
        let y = if self.dimensions == 2 { self.steps(1, at[1]) } else { Steps::none() };
        let channels = self.array.format.channels as usize;
        let one = if self.kind == Kind::Shares || self.array.format.channel == Channel::F32 {
            1f32.to_bits()
        } else {
            1
        };
        *out = [[0; WARP], [0; WARP], [0; WARP], [one; WARP]];
        if !self.linear {
            for (channel, row) in out.iter_mut().enumerate().take(channels) {
                *row = self.channel(channel, &x.first, &y.first);
            }
            return x.outside | y.outside;
        }
        for (channel, row) in out.iter_mut().enumerate().take(channels) {
            let mut sum = [0f32; WARP];
            for corner in 0..1 << self.dimensions {
                let (right, low) = (corner & 1 != 0, corner & 2 != 0);
                let from_x = if right { &x.second } else { &x.first };
                let from_y = if low { &y.second } else { &y.first };
                let texel = self.channel(channel, from_x, from_y);
                for lane in 0..WARP {
                    let of_x = if right { x.weight[lane] } else { 1.0 - x.weight[lane] };
                    let of_y = if low { y.weight[lane] } else { 1.0 - y.weight[lane] };
                    let weight = of_x * of_y;
                    // An element without a share may be infinite.
                    let part = weight * f32::from_bits(texel[lane]);
                    sum[lane] += if weight == 0.0 { 0.0 } else { part };
                }
            }
            *row = sum.map(f32::to_bits);
        }
        x.outside | y.outside
    }

    #[inline(always)]
    fn steps(&self, dimension: usize, at: &Row<u32>) -> Steps {
        let size = self.array.size[dimension];
        if self.integral {
            let index = at.map(|at| at as i32);
            return Steps::placed(index, index, [0.0; WARP], size, AddressMode::Border);
        }
        let mode = self.sampler.address[dimension];
        let mut position = at.map(f32::from_bits);
        if self.sampler.normalised {
            fold(&mut position, mode);
            position.iter_mut().for_each(|position| *position *= size as f32);
        }
        let mut weight = [0.0; WARP];
        if !self.linear {
            let index = position.map(|position| floor(position) as i32);
            return Steps::placed(index, index, weight, size, mode);
        }
        let (mut first, mut second) = ([0; WARP], [0; WARP]);
        for lane in 0..WARP {
            let position = position[lane] - 0.5;
            let below = floor(position);
            let share = floor((position - below) * 256.0 + 0.5) / 256.0;
            weight[lane] = if share.is_finite() { share } else { 0.0 };
            first[lane] = below as i32;
            second[lane] = (below as i32).saturating_add(1);
        }
        Steps::placed(first, second, weight, size, mode)
    }

    /// One channel of the elements at (`x`, `y`), which are inside.
    #[inline(always)]
    fn channel(&self, channel: usize, x: &Row<u32>, y: &Row<u32>) -> Row<u32> {
        let (bytes, pitch) = (u64::from(self.array.format.bytes()), self.array.row_pitch);
        let offset = channel as u64 * u64::from(self.array.format.channel_bytes());
        let base = self.array.base + offset;
        let mut out = [0; WARP];
        for lane in 0..WARP {
            let from = base + u64::from(y[lane]) * pitch + u64::from(x[lane]) * bytes;
            // SAFETY: the coordinates are inside, and the whole view is memory: its owner keeps it,
            // or `lookup` found it valid.
            out[lane] = unsafe {
                match self.kind {
                    Kind::Words => (from as *const u32).read_unaligned(),
                    Kind::Bytes | Kind::Shares => u32::from(*(from as *const u8)),
                }
            };
        }
        if self.kind == Kind::Shares {
            out = out.map(|byte| (byte as f32 / 255.0).to_bits());
        }
        out
    }
}

impl Steps {
    /// A dimension that the texture does not have.
    fn none() -> Self {
        Self { first: [0; WARP], second: [0; WARP], weight: [0.0; WARP], outside: 0 }
    }

    /// Indices, which a repeating mode has folded to within one of the inside, moved there.
    #[inline(always)]
    fn placed(
        first: Row<i32>,
        second: Row<i32>,
        weight: Row<f32>,
        size: u32,
        mode: AddressMode,
    ) -> Self {
        let size = size as i32;
        let mut steps = Self { weight, ..Self::none() };
        for (from, to) in [(first, &mut steps.first), (second, &mut steps.second)] {
            for lane in 0..WARP {
                let mut index = from[lane];
                if mode == AddressMode::Wrap {
                    index += if index < 0 { size } else { 0 };
                    index -= if index >= size { size } else { 0 };
                }
                to[lane] = index.clamp(0, size - 1) as u32;
            }
            if mode == AddressMode::Border {
                for lane in 0..WARP {
                    let outside = from[lane] < 0 || from[lane] >= size;
                    steps.outside |= u32::from(outside) << lane;
                }
            }
        }
        steps
    }
}

/// Folds normalised coordinates into [0, 1] where the mode repeats.
#[inline(always)]
fn fold(position: &mut Row<f32>, mode: AddressMode) {
    match mode {
        AddressMode::Wrap => {
            position.iter_mut().for_each(|position| *position -= floor(*position));
        }
        AddressMode::Mirror => {
            for position in position {
                let below = floor(*position);
                let fraction = *position - below;
                let odd = below - 2.0 * floor(below * 0.5) == 1.0;
                *position = if odd { 1.0 - fraction } else { fraction };
            }
        }
        AddressMode::Clamp | AddressMode::Border => {}
    }
}

#[cfg(test)]
mod tests {
    use super::super::sample::{self, Point};
    use super::*;
    use kedge_protocol::{Texture, TextureSource};

    /// Every combination that a plane takes, against the general way.
    #[test]
    fn planes_sample_as_everything_else_does() {
        let memory: Vec<u32> =
            (0..4 * 7 * 5).map(|i: u32| (i as f32 * 0.37 - 9.0).to_bits()).collect();
        let coordinates: Row<f32> = std::array::from_fn(|lane| match lane {
            0 => f32::NAN,
            1 => f32::INFINITY,
            2 => -0.0,
            3 => 1.0,
            4 => -1e30,
            lane => (lane as f32 - 14.0) * 0.173,
        });
        let mut compared = 0;
        for (format, channels) in [(0x20, 1), (0x20, 4), (0x03, 2), (0x01, 4), (0x01, 1)] {
            for (geometry, dimensions) in [(Geometry::D1, 1), (Geometry::D2, 2)] {
                for case in 0..4 * 2 * 4 {
                    let (address, filter, flags) = (case % 4, case / 4 % 2, case / 8);
                    let texture = Texture {
                        surface: false,
                        source: TextureSource::Linear { addr: 0, format, channels, bytes: 0 },
                        address: [address, (address + 1) % 4, 0],
                        filter,
                        flags,
                        border: [0.25, 0.5, 0.75, 1.0],
                        mipmap_filter: 0,
                        mipmap_bias: 0.0,
                        mipmap_clamp: [0.0; 2],
                        view_format: 0,
                    };
                    let (rows, pitch) = if dimensions == 2 { (5, 7 * 16) } else { (1, 7 * 16) };
                    let base = memory.as_ptr() as u64;
                    let array = ArrayView::pitched(base, format, channels, 7, rows, pitch).unwrap();
                    let view = TextureView::new(&texture, vec![array]).unwrap();
                    for integral in [false, true] {
                        compared += compare(&view, geometry, integral, &coordinates);
                    }
                }
            }
        }
        assert!(compared > 5000, "{compared}");
    }

    fn compare(view: &TextureView, geometry: Geometry, integral: bool, at: &Row<f32>) -> usize {
        let Some(plane) = Plane::of(view, geometry, integral) else { return 0 };
        let scale = if view.sampler.normalised || integral { 1.0 } else { 5.0 };
        let bits = |offset: usize| -> Row<u32> {
            std::array::from_fn(|lane| {
                let at = at[(lane + offset) % WARP] * scale;
                if integral { (at * 4.0) as i32 as u32 } else { at.to_bits() }
            })
        };
        let (x, y) = (bits(0), bits(5));
        let mut out = [[0; WARP]; 4];
        let left = plane.sample([&x, &y], &mut out);
        let mut compared = 0;
        for lane in (0..WARP).filter(|lane| left >> lane & 1 == 0) {
            let point = Point { layer: 0, at: [x[lane], y[lane], 0], integral, lod: 0.0 };
            let general = sample::sample(view, geometry, &point);
            let here = out.map(|row| row[lane]);
            let zero = |bits: u32| if bits == (-0f32).to_bits() { 0 } else { bits };
            assert_eq!(here.map(zero), general.map(zero), "lane {lane} of {:?}", view.sampler);
            compared += 1;
        }
        compared
    }
}
