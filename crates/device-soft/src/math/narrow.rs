//! f16 and bf16: conversions, and arithmetic as single precision rounded once more.
//!
//! Everything is branch-free so that 32-lane loops vectorise. Results are those of the format
//! itself: where two roundings would differ from one, the first rounds to odd (which keeps the
//! information that the second needs, given two more bits of precision).

use super::soft::{self, BF16, F16};

/// The NaN that half-precision instructions generate, in both formats.
pub(crate) const NAN: u16 = 0x7FFF;

/// Exact.
#[inline(always)]
pub(crate) fn f16_to_f32(half: u16) -> f32 {
    let magnitude = u32::from(half & 0x7FFF);
    // The exponent's bias grows from 15 to 127; infinity and NaN keep an exponent of all ones.
    let bias = if magnitude >= 0x7C00 { 224 } else { 112 };
    let normal = (magnitude << 13) + (bias << 23);
    // Subnormals count steps of 2^-24. (Multiplying f32 subnormals would be slow on the host.)
    let small = (magnitude as i32 as f32 * f32::from_bits(0x3380_0000)).to_bits();
    let magnitude = if magnitude < 0x400 { small } else { normal };
    f32::from_bits(magnitude | (u32::from(half & 0x8000) << 16))
}

/// To nearest even; NaN becomes [`NAN`].
#[inline(always)]
pub(crate) fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let magnitude = bits & 0x7FFF_FFFF;
    let odd = (magnitude >> 13) & 1;
    let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xFFF + odd) >> 13;
    // Adding one half leaves a last place of 2^-24, f16's smallest step.
    let small = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let result = if magnitude < 0x3880_0000 { small } else { normal };
    let result = if magnitude >= 0x477F_F000 { 0x7C00 } else { result };
    let result = result as u16 | (bits >> 16) as u16 & 0x8000;
    if magnitude > 0x7F80_0000 { NAN } else { result }
}

/// Exact.
#[inline(always)]
pub(crate) fn bf16_to_f32(half: u16) -> f32 {
    f32::from_bits(u32::from(half) << 16)
}

/// To nearest even; NaN becomes [`NAN`].
#[inline(always)]
pub(crate) fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16;
    if value.is_nan() { NAN } else { rounded as u16 }
}

/// To single precision, rounded to odd: an inexact result has its last bit set.
#[inline(always)]
pub(crate) fn f64_to_f32_odd(value: f64) -> f32 {
    let nearest = value as f32;
    let back = f64::from(nearest);
    let bits = nearest.to_bits();
    let toward = if back.abs() > value.abs() { bits.wrapping_sub(1) } else { bits | 1 };
    let adjust = back != value && bits & 1 == 0 && !value.is_nan();
    f32::from_bits(if adjust { toward } else { bits })
}

/// `a + b`, rounded to odd, in double precision.
#[inline(always)]
pub(crate) fn add_odd(a: f64, b: f64) -> f64 {
    let sum = a + b;
    // Knuth's TwoSum: `error` is exactly what `sum` lacks.
    let b_part = sum - a;
    let error = (a - (sum - b_part)) + (b - b_part);
    let bits = sum.to_bits();
    let away = (error > 0.0) == (sum > 0.0);
    let toward = if away { bits | 1 } else { bits.wrapping_sub(1) };
    let adjust = error != 0.0 && bits & 1 == 0 && sum.is_finite() && !error.is_nan();
    f64::from_bits(if adjust { toward } else { bits })
}

/// As [`add_odd`], in single precision.
#[inline(always)]
fn add_odd_f32(a: f32, b: f32) -> f32 {
    let sum = a + b;
    let b_part = sum - a;
    let error = (a - (sum - b_part)) + (b - b_part);
    let bits = sum.to_bits();
    let away = (error > 0.0) == (sum > 0.0);
    let toward = if away { bits | 1 } else { bits.wrapping_sub(1) };
    let adjust = error != 0.0 && bits & 1 == 0 && sum.is_finite() && !error.is_nan();
    f32::from_bits(if adjust { toward } else { bits })
}

/// A 16-bit format that computes through f32.
pub(crate) trait Narrow: Copy + 'static {
    const FORMAT: soft::Format;
    fn widen(bits: u16) -> f32;
    /// To nearest even.
    fn narrow(value: f32) -> u16;

    /// From double precision, rounded once.
    #[inline(always)]
    fn narrow_f64(value: f64) -> u16 {
        Self::narrow(f64_to_f32_odd(value))
    }

    #[inline(always)]
    fn add(a: u16, b: u16) -> u16 {
        Self::narrow(Self::widen(a) + Self::widen(b))
    }

    #[inline(always)]
    fn sub(a: u16, b: u16) -> u16 {
        Self::narrow(Self::widen(a) - Self::widen(b))
    }

    /// The product is exact in double precision.
    #[inline(always)]
    fn mul(a: u16, b: u16) -> u16 {
        Self::narrow_f64(f64::from(Self::widen(a)) * f64::from(Self::widen(b)))
    }

    #[inline(always)]
    fn fma(a: u16, b: u16, c: u16) -> u16 {
        let product = f64::from(Self::widen(a)) * f64::from(Self::widen(b));
        Self::narrow_f64(add_odd(product, f64::from(Self::widen(c))))
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Half;
#[derive(Debug, Clone, Copy)]
pub(crate) struct Brain;

impl Narrow for Half {
    const FORMAT: soft::Format = F16;

    #[inline(always)]
    fn widen(bits: u16) -> f32 {
        f16_to_f32(bits)
    }

    #[inline(always)]
    fn narrow(value: f32) -> u16 {
        f32_to_f16(value)
    }

    /// The product is exact in single precision already.
    #[inline(always)]
    fn mul(a: u16, b: u16) -> u16 {
        f32_to_f16(f16_to_f32(a) * f16_to_f32(b))
    }

    #[inline(always)]
    fn fma(a: u16, b: u16, c: u16) -> u16 {
        f32_to_f16(add_odd_f32(f16_to_f32(a) * f16_to_f32(b), f16_to_f32(c)))
    }
}

impl Narrow for Brain {
    const FORMAT: soft::Format = BF16;

    #[inline(always)]
    fn widen(bits: u16) -> f32 {
        bf16_to_f32(bits)
    }

    #[inline(always)]
    fn narrow(value: f32) -> u16 {
        f32_to_bf16(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::math::soft::{F32, Rounding};
    use crate::math::testing::{Random, interesting_f32};

    #[test]
    fn every_half_survives_a_round_trip() {
        for bits in 0..=u16::MAX {
            let wide = f16_to_f32(bits);
            let exact = soft::convert(bits.into(), F16, F32, Rounding::Nearest) as u32;
            assert!(wide.to_bits() == exact || wide.is_nan(), "{bits:04x}");
            let expected = if wide.is_nan() { NAN } else { bits };
            assert_eq!(f32_to_f16(wide), expected);
            let wide = bf16_to_f32(bits);
            assert_eq!(f32_to_bf16(wide), if wide.is_nan() { NAN } else { bits });
        }
    }

    #[test]
    fn narrowing_agrees_with_exact_rounding() {
        let mut random = Random::new(3);
        for _ in 0..100_000 {
            let value = interesting_f32(&mut random);
            let bits = u64::from(value.to_bits());
            let to = |format| soft::convert(bits, F32, format, Rounding::Nearest) as u16;
            assert_eq!(f32_to_f16(value), to(F16), "{value:e}");
            assert_eq!(f32_to_bf16(value), to(BF16), "{value:e}");
        }
    }

    fn arithmetic<N: Narrow>(seed: u64) {
        let mut random = Random::new(seed);
        let nearest = Rounding::Nearest;
        for _ in 0..200_000 {
            let [a, b, c] = [(); 3].map(|()| random.bits() as u16);
            // Near cancellation, where double rounding would show.
            let c = if random.below(2) == 0 { N::mul(a, b) ^ 0x8000 ^ (c & 1) } else { c };
            let [x, y, z] = [a, b, c].map(u64::from);
            assert_eq!(N::add(a, b), soft::add(x, y, N::FORMAT, nearest) as u16, "{a:x}+{b:x}");
            assert_eq!(N::mul(a, b), soft::mul(x, y, N::FORMAT, nearest) as u16, "{a:x}*{b:x}");
            let fused = soft::fma(x, y, z, N::FORMAT, nearest) as u16;
            assert_eq!(N::fma(a, b, c), fused, "fma {a:x} {b:x} {c:x}");
        }
    }

    #[test]
    fn arithmetic_is_rounded_once() {
        arithmetic::<Half>(4);
        arithmetic::<Brain>(5);
    }
}
