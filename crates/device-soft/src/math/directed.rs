//! Single precision with directed rounding, through double precision and error-free sums.
//!
//! nvcc's `expf` uses `fma.rm.f32`, so this must not be slow; double precision's directed forms are
//! rare and go through [`soft`].

use super::float::canonical;
use super::narrow::add_odd;
use super::soft::{self, F32, F64, Rounding};

/// Rounds an f64 to f32 in direction `rounding`.
#[inline(always)]
pub(crate) fn f64_to_f32(value: f64, rounding: Rounding) -> f32 {
    if rounding == Rounding::Away {
        return away(value);
    }
    let nearest = canonical(value as f32);
    let back = f64::from(nearest);
    let bits = nearest.to_bits();
    // One step towards zero, or (as a number of the other sign) away from it.
    let (wrong, inwards) = match rounding {
        Rounding::Zero => (back.abs() > value.abs(), true),
        Rounding::Down => (back > value, bits >> 31 == 0),
        Rounding::Up => (back < value, bits >> 31 == 1),
        Rounding::Nearest | Rounding::Away => (false, false),
    };
    let step = if inwards { u32::MAX } else { 1 };
    f32::from_bits(bits.wrapping_add(if wrong { step } else { 0 }))
}

fn away(value: f64) -> f32 {
    f32::from_bits(soft::convert(value.to_bits(), F64, F32, Rounding::Away) as u32)
}

/// `a × b + c`, rounded once.
#[inline(always)]
pub(crate) fn fma_f32(a: f32, b: f32, c: f32, rounding: Rounding) -> f32 {
    let product = f64::from(a) * f64::from(b);
    sum(product, f64::from(c), rounding)
}

/// `a + b`
#[inline(always)]
pub(crate) fn add_f32(a: f32, b: f32, rounding: Rounding) -> f32 {
    sum(f64::from(a), f64::from(b), rounding)
}

#[inline(always)]
fn sum(a: f64, b: f64, rounding: Rounding) -> f32 {
    let sum = add_odd(a, b);
    let opposite = a.is_sign_negative() != b.is_sign_negative();
    // An exact zero of opposite signs is −0 when rounding down.
    let sum = if sum == 0.0 && opposite && rounding == Rounding::Down { -0.0 } else { sum };
    f64_to_f32(sum, rounding)
}

/// `a × b`
#[inline(always)]
pub(crate) fn mul_f32(a: f32, b: f32, rounding: Rounding) -> f32 {
    f64_to_f32(f64::from(a) * f64::from(b), rounding)
}

/// `a ÷ b`
pub(crate) fn div_f32(a: f32, b: f32, rounding: Rounding) -> f32 {
    f32::from_bits(soft::div(a.to_bits().into(), b.to_bits().into(), F32, rounding) as u32)
}

/// `√a`
pub(crate) fn sqrt_f32(a: f32, rounding: Rounding) -> f32 {
    f32::from_bits(soft::sqrt(a.to_bits().into(), F32, rounding) as u32)
}

/// `a × b + c`, rounded once.
pub(crate) fn fma_f64(a: f64, b: f64, c: f64, rounding: Rounding) -> f64 {
    f64::from_bits(soft::fma(a.to_bits(), b.to_bits(), c.to_bits(), F64, rounding))
}

/// `a + b`
pub(crate) fn add_f64(a: f64, b: f64, rounding: Rounding) -> f64 {
    f64::from_bits(soft::add(a.to_bits(), b.to_bits(), F64, rounding))
}

/// `a × b`
pub(crate) fn mul_f64(a: f64, b: f64, rounding: Rounding) -> f64 {
    f64::from_bits(soft::mul(a.to_bits(), b.to_bits(), F64, rounding))
}

/// `a ÷ b`
pub(crate) fn div_f64(a: f64, b: f64, rounding: Rounding) -> f64 {
    f64::from_bits(soft::div(a.to_bits(), b.to_bits(), F64, rounding))
}

/// `√a`
pub(crate) fn sqrt_f64(a: f64, rounding: Rounding) -> f64 {
    f64::from_bits(soft::sqrt(a.to_bits(), F64, rounding))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::math::testing::{Random, interesting_f32, interesting_f64};

    fn same(ours: f32, exact: u64, what: &str) {
        let exact = f32::from_bits(exact as u32);
        let equal = ours.to_bits() == exact.to_bits() || (ours.is_nan() && exact.is_nan());
        assert!(equal, "{what}: {ours:e} is not {exact:e}");
    }

    #[test]
    fn fast_paths_agree_with_exact_arithmetic() {
        let mut random = Random::new(6);
        let modes = [Rounding::Nearest, Rounding::Zero, Rounding::Down, Rounding::Up];
        for round in 0..200_000 {
            let rounding = modes[round % 4];
            let [a, b, mut c] = [(); 3].map(|()| interesting_f32(&mut random));
            if random.below(4) == 0 {
                c = -(a * b);
            }
            let [x, y, z] = [a, b, c].map(|value| u64::from(value.to_bits()));
            let what = format!("{rounding:?} {a:e} {b:e} {c:e}");
            same(fma_f32(a, b, c, rounding), soft::fma(x, y, z, F32, rounding), &what);
            same(add_f32(a, b, rounding), soft::add(x, y, F32, rounding), &what);
            same(mul_f32(a, b, rounding), soft::mul(x, y, F32, rounding), &what);
            let wide = interesting_f64(&mut random);
            let exact = soft::convert(wide.to_bits(), F64, F32, rounding);
            same(f64_to_f32(wide, rounding), exact, &format!("{rounding:?} {wide:e}"));
        }
    }
}
