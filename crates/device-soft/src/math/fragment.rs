//! Matrix fragments: element types, where `mma` keeps each element, and small matrix products.

use super::narrow::{bf16_to_f32, f16_to_f32, f32_to_f16};

/// Most elements of one operand tile: 16 × 64 four-bit ones.
pub(crate) const TILE: usize = 1024;

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

/// (row, column) of element `element` of register `register` of lane `lane` in `mma`'s A, whose tile has
/// 8 or 16 rows, with `per` elements in a register (PTX ISA, "Matrix Fragments for mma").
#[inline(always)]
pub(crate) fn mma_a(
    rows: usize,
    per: usize,
    register: usize,
    lane: usize,
    element: usize,
) -> (usize, usize) {
    let (group, thread) = (lane / 4, lane % 4);
    let (row, block) =
        if rows == 16 { (group + 8 * (register & 1), register >> 1) } else { (group, register) };
    (row, thread * per + element + 4 * per * block)
}

/// As [`mma_a`], in B.
#[inline(always)]
pub(crate) fn mma_b(per: usize, register: usize, lane: usize, element: usize) -> (usize, usize) {
    (lane % 4 * per + element + 4 * per * register, lane / 4)
}

/// (row, column) of accumulator `index` of lane `lane` in a tile eight columns wide.
#[inline(always)]
pub(crate) fn mma_c(index: usize, lane: usize) -> (usize, usize) {
    (lane / 4 + 8 * (index >> 1), lane % 4 * 2 + (index & 1))
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
pub(crate) fn multiply_i32(shape: Shape, a: &[i32], b: &[i32], c: &mut [i32]) {
    multiply(shape, a, b, c, |a, b, c| a.wrapping_mul(b).wrapping_add(c));
}

#[inline(always)]
fn multiply<T: Copy>(shape: Shape, a: &[T], b: &[T], c: &mut [T], step: impl Fn(T, T, T) -> T) {
    for (a, c) in a.chunks_exact(shape.k).zip(c.chunks_exact_mut(shape.n)).take(shape.m) {
        for (a, b) in a.iter().zip(b.chunks_exact(shape.n)) {
            for (c, b) in c.iter_mut().zip(b) {
                *c = step(*a, *b, *c);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::math::soft::{self, E4M3, F32, Rounding};

    #[test]
    fn fragments_cover_their_tiles_once() {
        for (rows, registers, per) in [(16, 4, 2), (16, 2, 2), (16, 4, 1), (16, 4, 4), (8, 1, 4)] {
            let columns = 4 * per * registers * 8 / rows;
            let mut seen = vec![0; rows * columns];
            for register in 0..registers {
                for lane in 0..32 {
                    for element in 0..per {
                        let (row, column) = mma_a(rows, per, register, lane, element);
                        seen[row * columns + column] += 1;
                    }
                }
            }
            assert!(seen.iter().all(|count| *count == 1), "{rows} {registers} {per}");
        }
        let mut seen = [0; 128];
        for index in 0..4 {
            for lane in 0..32 {
                let (row, column) = mma_c(index, lane);
                seen[row * 8 + column] += 1;
            }
        }
        assert_eq!(seen, [1; 128]);
        // From the reference's figures: m16n8k16 f16, lane 5.
        assert_eq!((mma_a(16, 2, 0, 5, 1), mma_a(16, 2, 3, 5, 0)), ((1, 3), (9, 10)));
        assert_eq!((mma_b(2, 1, 5, 1), mma_c(3, 5)), ((11, 1), (9, 3)));
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
        let mut c = [1, 0, 0, 0];
        multiply_i32(shape, &[1, 2, 3, 4, 5, 6], &[1, 0, 0, 1, 1, 1], &mut c);
        assert_eq!(c, [5, 5, 10, 11]);
    }
}
