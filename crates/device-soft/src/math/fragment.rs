//! Matrix fragments: element types, where `mma` keeps each element, and small matrix products.

use super::narrow::{bf16_to_f32, f16_to_f32, f32_to_f16};

/// An element type of a matrix instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Element {
    F16,
    Bf16,
    Tf32,
    F32,
    F64,
    S8,
    U8,
    S4,
    U4,
    /// A bit; tiles of bits are kept as 32-bit words.
    B1,
    S32,
    E4m3,
    E5m2,
}

impl Element {
    const ALL: [Self; 13] = [
        Self::F16,
        Self::Bf16,
        Self::Tf32,
        Self::F32,
        Self::F64,
        Self::S8,
        Self::U8,
        Self::S4,
        Self::U4,
        Self::B1,
        Self::S32,
        Self::E4m3,
        Self::E5m2,
    ];

    /// From a part of an instruction's name.
    pub(crate) fn named(part: &str) -> Option<Self> {
        Some(match part {
            "f16" => Self::F16,
            "bf16" => Self::Bf16,
            "tf32" => Self::Tf32,
            "f32" => Self::F32,
            "f64" => Self::F64,
            "s8" => Self::S8,
            "u8" => Self::U8,
            "s4" => Self::S4,
            "u4" => Self::U4,
            "b1" => Self::B1,
            "s32" => Self::S32,
            "e4m3" => Self::E4m3,
            "e5m2" => Self::E5m2,
            _ => return None,
        })
    }

    /// The inverse of `self as u8`.
    pub(crate) fn from_index(index: u8) -> Self {
        Self::ALL[usize::from(index) % Self::ALL.len()]
    }

    pub(crate) const fn bits(self) -> u32 {
        match self {
            Self::B1 => 1,
            Self::S4 | Self::U4 => 4,
            Self::S8 | Self::U8 | Self::E4m3 | Self::E5m2 => 8,
            Self::F16 | Self::Bf16 => 16,
            Self::Tf32 | Self::F32 | Self::S32 => 32,
            Self::F64 => 64,
        }
    }

    /// Elements of a register; bits count as one word.
    pub(crate) const fn per_register(self) -> usize {
        match self {
            Self::B1 | Self::F64 => 1,
            _ => 32 / self.bits() as usize,
        }
    }

    /// Element `index` of a register, as f32.
    #[inline(always)]
    pub(crate) fn float(self, word: u32, index: usize) -> f32 {
        let half = (word >> (16 * (index & 1))) as u16;
        let byte = (word >> (8 * (index & 3))) as u8;
        match self {
            Self::F16 => f16_to_f32(half),
            Self::Bf16 => bf16_to_f32(half),
            // The hardware reads the upper 19 bits.
            Self::Tf32 => f32::from_bits(word & 0xFFFF_E000),
            Self::E5m2 => f16_to_f32(u16::from(byte) << 8),
            Self::E4m3 => e4m3_to_f32(byte),
            _ => f32::from_bits(word),
        }
    }

    /// Element `index` of a register, as an integer.
    #[inline(always)]
    pub(crate) fn int(self, word: u32, index: usize) -> i32 {
        match self {
            Self::S8 => i32::from((word >> (8 * index)) as i8),
            Self::U8 => i32::from((word >> (8 * index)) as u8),
            Self::S4 => (word << (28 - 4 * index)) as i32 >> 28,
            Self::U4 => (word >> (4 * index) & 15) as i32,
            _ => word as i32,
        }
    }

    /// The register of an accumulator, of a f32 and (for f16) its neighbour.
    #[inline(always)]
    pub(crate) fn register(self, low: f32, high: f32) -> u32 {
        match self {
            Self::F16 => u32::from(f32_to_f16(low)) | u32::from(f32_to_f16(high)) << 16,
            _ => super::float::canonical(low).to_bits(),
        }
    }
}

/// Exponent bias 7, no infinity.
#[inline(always)]
fn e4m3_to_f32(byte: u8) -> f32 {
    let half = u16::from(byte & 0x80) << 8 | u16::from(byte & 0x7F) << 7;
    // f16's bias is 8 more.
    let value = f16_to_f32(half) * 256.0;
    if byte & 0x7F == 0x7F { f32::NAN } else { value }
}

/// Where a fragment's elements are in a tile stored by rows: an element is at its lane's place plus
/// an offset that depends on the register and the position in it.
pub(crate) struct Layout {
    lanes: [u16; 32],
    /// Elements from a register's first to its next ones.
    element: usize,
    /// Offsets of registers, or of accumulators.
    registers: [u16; 16],
    /// Registers after which the elements repeat.
    distinct: usize,
    /// The lanes' places are 0 to 31.
    in_order: bool,
}

const IN_ORDER: [u16; 32] = {
    let mut lanes = [0; 32];
    let mut lane = 0;
    while lane < 32 {
        lanes[lane] = lane as u16;
        lane += 1;
    }
    lanes
};

impl Layout {
    #[inline(always)]
    fn new(
        lane: impl Fn(usize, usize) -> usize,
        element: usize,
        register: impl Fn(usize) -> usize,
    ) -> Self {
        Self {
            lanes: std::array::from_fn(|at| lane(at / 4, at % 4) as u16),
            element,
            registers: std::array::from_fn(|at| register(at) as u16),
            distinct: usize::MAX,
            in_order: false,
        }
    }

    /// `mma`'s A, of 8 or 16 rows and `columns` columns, with `per` elements in a register (PTX
    /// ISA, "Matrix Fragments for mma").
    pub(crate) fn mma_a(rows: usize, columns: usize, per: usize) -> Self {
        let lane = |group: usize, thread: usize| group * columns + thread * per;
        Self::new(lane, 1, |register| match rows {
            16 => 8 * (register & 1) * columns + 4 * per * (register >> 1),
            _ => 4 * per * register,
        })
    }

    /// `mma`'s B, of `columns` columns.
    pub(crate) fn mma_b(columns: usize, per: usize) -> Self {
        let lane = |group: usize, thread: usize| thread * per * columns + group;
        Self::new(lane, columns, |register| 4 * per * register * columns)
    }

    /// Accumulators eight columns wide, `per` in a register; of a tile of 16 columns, the right
    /// half follows the left.
    #[inline(always)]
    pub(crate) fn accumulators(columns: usize, per: usize) -> Self {
        let lane = |group: usize, thread: usize| group * columns + thread * 2;
        Self::new(lane, 1, |register| {
            let index = register * per;
            8 * (index >> 1 & 1) * columns + (index & 1) + 8 * (index >> 2)
        })
    }

    /// In the order of lanes, then of elements, then of registers: what is cheapest to store. Where
    /// the tile has fewer elements they repeat; `size` is a power of two and a multiple of `32 ·
    /// per`, as all of `wmma`'s are.
    #[inline(always)]
    pub(crate) fn linear(size: usize, per: usize) -> Self {
        debug_assert!(size.is_power_of_two());
        let mut registers = [0; 16];
        for (register, offset) in registers.iter_mut().enumerate() {
            *offset = ((register * per * 32) & (size - 1)) as u16;
        }
        let lanes = IN_ORDER;
        Self { lanes, element: 32, registers, distinct: size / (32 * per), in_order: true }
    }

    /// Registers that hold something that those before them do not.
    pub(crate) fn distinct<'a>(&self, registers: &'a [i32]) -> &'a [i32] {
        &registers[..registers.len().min(self.distinct)]
    }

    /// Stores one element of each lane in a tile.
    #[inline(always)]
    pub(crate) fn store<T: Copy, const N: usize>(
        &self,
        tile: &mut [T; N],
        offset: usize,
        values: &[T; 32],
    ) {
        if self.in_order
            && let Some(place) = tile.get_mut(offset..offset + 32)
        {
            place.copy_from_slice(values);
            return;
        }
        for (lane, value) in self.lanes.iter().zip(values) {
            tile[(usize::from(*lane) + offset) % N] = *value;
        }
    }

    /// One element of each lane from a tile.
    #[inline(always)]
    pub(crate) fn load<T: Copy, const N: usize>(&self, tile: &[T; N], offset: usize) -> [T; 32] {
        if self.in_order
            && let Some(place) = tile.get(offset..offset + 32)
            && let Ok(values) = place.try_into()
        {
            return values;
        }
        self.lanes.map(|lane| tile[(usize::from(lane) + offset) % N])
    }

    /// The offset of an element of a register.
    #[inline(always)]
    pub(crate) fn offset(&self, register: usize, element: usize) -> usize {
        usize::from(self.registers[register % 16]) + element * self.element
    }
}

/// A shape m × n × k.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
}

impl Shape {
    /// From `m16n8k16`.
    pub(crate) fn named(part: &str) -> Option<Self> {
        let (m, rest) = part.strip_prefix('m')?.split_once('n')?;
        let (n, k) = rest.split_once('k')?;
        let number = |digits: &str| digits.parse::<usize>().ok().filter(|x| (1..=256).contains(x));
        Some(Self { m: number(m)?, n: number(n)?, k: number(k)? })
    }
}

/// `c += a × b` for tiles stored by rows.
#[inline(always)]
pub(crate) fn multiply_f32(shape: Shape, a: &[f32], b: &[f32], c: &mut [f32]) {
    // Products of 11-bit significands are exact, so this rounds once a step, as a fused step would.
    multiply(shape, a, b, c, |a, b, c| a * b + c);
}

#[inline(always)]
pub(crate) fn multiply_f64(shape: Shape, a: &[f64], b: &[f64], c: &mut [f64]) {
    multiply(shape, a, b, c, |a, b, c| a.mul_add(b, c));
}

#[inline(always)]
fn multiply<T: Copy + Default>(
    shape: Shape,
    a: &[T],
    b: &[T],
    c: &mut [T],
    step: impl Fn(T, T, T) -> T,
) {
    // The commonest shapes by themselves, so that their loops unroll.
    match (shape.m, shape.n, shape.k) {
        (8, 8, 4) => return multiply_wide::<T, 8>(Shape { m: 8, n: 8, k: 4 }, a, b, c, step),
        (16, 16, 16) => {
            return multiply_wide::<T, 16>(Shape { m: 16, n: 16, k: 16 }, a, b, c, step);
        }
        _ => {}
    }
    match shape.n {
        8 => multiply_wide::<T, 8>(shape, a, b, c, step),
        16 => multiply_wide::<T, 16>(shape, a, b, c, step),
        32 => multiply_wide::<T, 32>(shape, a, b, c, step),
        n => {
            for (at, c) in c.iter_mut().enumerate() {
                let (row, column) = (at / n, at % n);
                *c = (0..shape.k).fold(*c, |c, i| step(a[row * shape.k + i], b[i * n + column], c));
            }
        }
    }
}

/// With N columns: a row of accumulators stays in vector registers.
#[inline(always)]
fn multiply_wide<T: Copy + Default, const N: usize>(
    shape: Shape,
    a: &[T],
    b: &[T],
    c: &mut [T],
    step: impl Fn(T, T, T) -> T,
) {
    for (a, c) in a.chunks_exact(shape.k).zip(c.chunks_exact_mut(N)) {
        let mut sums = [T::default(); N];
        sums.copy_from_slice(c);
        for (a, b) in a.iter().zip(b.chunks_exact(N)) {
            for at in 0..N {
                sums[at] = step(*a, b[at], sums[at]);
            }
        }
        c.copy_from_slice(&sums);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::math::soft::{self, E4M3, F32, Rounding};

    fn covers(layout: &Layout, size: usize, registers: usize, per: usize) {
        let mut seen = vec![0; size];
        for register in 0..registers {
            for element in 0..per {
                let offset = layout.offset(register, element);
                for lane in layout.lanes {
                    seen[usize::from(lane) + offset] += 1;
                }
            }
        }
        let times = registers * per * 32 / size;
        assert!(seen.iter().all(|count| *count == times), "{seen:?}");
    }

    #[test]
    fn fragments_cover_their_tiles() {
        for (rows, registers, per) in [(16, 4, 2), (16, 2, 2), (16, 4, 1), (16, 4, 4), (8, 1, 4)] {
            let columns = 4 * per * registers * 8 / rows;
            covers(&Layout::mma_a(rows, columns, per), rows * columns, registers, per);
        }
        covers(&Layout::mma_b(8, 2), 128, 2, 2);
        covers(&Layout::mma_b(8, 4), 256, 2, 4);
        covers(&Layout::accumulators(8, 1), 128, 4, 1);
        covers(&Layout::accumulators(16, 2), 256, 4, 2);
        covers(&Layout::linear(256, 2), 256, 8, 2);
        covers(&Layout::linear(128, 2), 128, 8, 2);
        covers(&Layout::linear(128, 4), 128, 1, 4);
    }

    #[test]
    fn fragments_follow_the_reference() {
        let at = |layout: &Layout, register, lane: usize, element| {
            usize::from(layout.lanes[lane]) + layout.offset(register, element)
        };
        // m16n8k16 of f16, lane 5.
        let a = Layout::mma_a(16, 16, 2);
        assert_eq!((at(&a, 0, 5, 1), at(&a, 3, 5, 0)), (16 + 3, 9 * 16 + 10));
        assert_eq!(at(&Layout::mma_b(8, 2), 1, 5, 1), 11 * 8 + 1);
        assert_eq!(at(&Layout::accumulators(8, 1), 3, 5, 0), 9 * 8 + 3);
        assert_eq!(at(&Layout::accumulators(8, 2), 1, 5, 1), 9 * 8 + 3);
    }

    #[test]
    fn elements() {
        assert_eq!(Element::S4.int(0xF0, 1), -1);
        assert_eq!(Element::U4.int(0xF0, 1), 15);
        assert_eq!(Element::S8.int(0x8000, 1), -128);
        for byte in 0..=255u8 {
            let exact = soft::convert(byte.into(), E4M3, F32, Rounding::Nearest) as u32;
            let ours = Element::E4m3.float(byte.into(), 0);
            assert!(ours.to_bits() == exact || ours.is_nan() && f32::from_bits(exact).is_nan());
        }
        assert_eq!(Shape::named("m16n8k32"), Some(Shape { m: 16, n: 8, k: 32 }));
        assert_eq!(Shape::named("m16n8"), None);
    }

    #[test]
    fn products() {
        let shape = Shape { m: 2, n: 2, k: 3 };
        let mut c = [1.0, 0.0, 0.0, 0.0];
        let (a, b) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0, 0.0, 0.0, 1.0, 1.0, 1.0]);
        multiply_f32(shape, &a, &b, &mut c);
        assert_eq!(c, [5.0, 5.0, 10.0, 11.0]);
    }
}
