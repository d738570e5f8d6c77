//! The hardware's approximate functions, computed in double precision and rounded once.
//!
//! All are at least as accurate as the ISA reference demands, free of branches and of library
//! calls, so that loops over lanes vectorise. Special values follow the reference's tables.

/// 2^x: error below 2^-26 relative before rounding; 0 and +∞ beyond the range.
#[inline(always)]
pub(crate) fn ex2(x: f32) -> f32 {
    ex2_f64(f64::from(x)) as f32
}

/// 2^x in double precision, good to about 1e-12 relative, for `|x|` up to some thousand.
#[inline(always)]
fn ex2_f64(x: f64) -> f64 {
    // Beyond ±200 the f32 result is 0 or infinite in any case.
    let x = if x > 200.0 { 200.0 } else { x };
    let x = if x < -200.0 { -200.0 } else { x };
    // Adding 1.5·2^52 rounds to an integer and leaves it in the low bits.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    let shifted = x + ROUND;
    let rest = (x - (shifted - ROUND)) * std::f64::consts::LN_2;
    let exponent = (shifted.to_bits() << 52).wrapping_add(1023 << 52);
    // e^rest for |rest| ≤ ln(2)/2: the Taylor series to the 9th term.
    let mut power = 1.0 / 362_880.0;
    for term in [40320.0, 5040.0, 720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0] {
        power = power * rest + 1.0 / term;
    }
    power * f64::from_bits(exponent)
}

/// log₂ x
#[inline(always)]
pub(crate) fn lg2(x: f32) -> f32 {
    let wide = f64::from(x);
    let bits = wide.to_bits();
    // Split x = m·2^e with m in [√½, √2).
    const ROOT_HALF: u64 = 0x3FE6_A09E_667F_3BCD;
    let shifted = bits.wrapping_sub(ROOT_HALF);
    let exponent = (shifted as i64) >> 52;
    let mantissa = f64::from_bits(bits.wrapping_sub((exponent as u64) << 52));
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let square = s * s;
    // atanh's series: log m = 2(s + s³/3 + s⁵/5 + …), |s| ≤ 0.172.
    let mut series = 1.0 / 13.0;
    for odd in [11.0, 9.0, 7.0, 5.0, 3.0, 1.0] {
        series = series * square + 1.0 / odd;
    }
    let log = series * s * (2.0 * std::f64::consts::LOG2_E) + exponent as i32 as f64;
    let log = if x == 0.0 { f64::NEG_INFINITY } else { log };
    let log = if x == f32::INFINITY { f64::INFINITY } else { log };
    (if x < 0.0 || x.is_nan() { f64::NAN } else { log }) as f32
}

/// Whether sine and cosine of `x` take [`far_sin`] and [`far_cos`]: the reduction loses accuracy.
#[inline(always)]
pub(crate) fn is_far(x: f32) -> bool {
    x.abs() > 1e8
}

#[cold]
pub(crate) fn far_sin(x: f32) -> f32 {
    f64::from(x).sin() as f32
}

#[cold]
pub(crate) fn far_cos(x: f32) -> f32 {
    f64::from(x).cos() as f32
}

/// sin x, for an x that is not [far](is_far).
#[inline(always)]
pub(crate) fn sin(x: f32) -> f32 {
    quadrant(x, 0)
}

/// cos x, for an x that is not [far](is_far).
#[inline(always)]
pub(crate) fn cos(x: f32) -> f32 {
    quadrant(x, 1)
}

/// sin(x + quarter·π/2)
#[inline(always)]
fn quadrant(x: f32, quarter: u64) -> f32 {
    const ROUND: f64 = 6_755_399_441_055_744.0;
    // π/2 in two parts, the first with 33 bits: its product with a count of up to 2^20 is exact.
    const HIGH: f64 = 1.570_796_326_734_125_6;
    const LOW: f64 = 6.077_100_506_506_192e-11;
    let x = f64::from(x);
    let shifted = x * std::f64::consts::FRAC_2_PI + ROUND;
    let count = shifted - ROUND;
    let rest = (x - count * HIGH) - count * LOW;
    let square = rest * rest;
    let mut sine = -1.0 / 39_916_800.0;
    for term in [362_880.0, -5040.0, 120.0, -6.0, 1.0] {
        sine = sine * square + 1.0 / term;
    }
    let mut cosine = 1.0 / 479_001_600.0;
    for term in [-3_628_800.0, 40320.0, -720.0, 24.0, -2.0, 1.0] {
        cosine = cosine * square + 1.0 / term;
    }
    let which = shifted.to_bits().wrapping_add(quarter);
    let value = if which & 1 == 0 { sine * rest } else { cosine };
    (if which & 2 == 0 { value } else { -value }) as f32
}

/// tanh x
#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    let wide = f64::from(x.abs());
    let wide = if wide > 20.0 { 20.0 } else { wide };
    let power = ex2_f64(wide * (2.0 * std::f64::consts::LOG2_E));
    let tanh = ((power - 1.0) / (power + 1.0)) as f32;
    // Below 2^-12 the cubic term vanishes.
    let tanh = if x.abs() < 2.44e-4 { x.abs() } else { tanh };
    if x.is_nan() { x } else { tanh.copysign(x) }
}

/// 1/√x, within one unit of the last place.
#[inline(always)]
pub(crate) fn rsqrt(x: f32) -> f32 {
    let rough = 1.0 / x.sqrt();
    // One Newton step, with x·rough² held exactly in two parts.
    let high = x * rough;
    let low = x.mul_add(rough, -high);
    let rest = (-high).mul_add(rough, 1.0) - low * rough;
    let better = (0.5 * rough).mul_add(rest, rough);
    // Infinite, zero and NaN results stay; a subnormal x would lose its low part.
    if rest.abs() < 0.5 { better } else { rough }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::math::testing::{Random, interesting_f32};

    /// Within one unit of the last place of the true value, or of 2^-149.
    fn close(ours: f32, exact: f64, what: &str) {
        if exact.is_nan() {
            return assert!(ours.is_nan(), "{what} = {ours:e}");
        }
        let rounded = exact as f32;
        let near = ours == rounded || ours == rounded.next_up() || ours == rounded.next_down();
        assert!(near, "{what}: {ours:e} is not {rounded:e}");
    }

    #[test]
    fn accurate_to_the_last_place() {
        let mut random = Random::new(8);
        for _ in 0..200_000 {
            let x = interesting_f32(&mut random);
            let wide = f64::from(x);
            close(ex2(x), wide.exp2(), &format!("ex2 {x:e}"));
            close(lg2(x), wide.log2(), &format!("lg2 {x:e}"));
            close(rsqrt(x), 1.0 / wide.sqrt(), &format!("rsqrt {x:e}"));
            close(tanh(x), wide.tanh(), &format!("tanh {x:e}"));
            let angle = x % 1000.0;
            let absolute = (f64::from(sin(angle)) - f64::from(angle).sin()).abs();
            assert!(absolute < 1e-7 || angle.is_nan(), "sin {angle:e}");
            let absolute = (f64::from(cos(angle)) - f64::from(angle).cos()).abs();
            assert!(absolute < 1e-7 || angle.is_nan(), "cos {angle:e}");
            let bounded = is_far(x) || sin(x).is_nan() || sin(x).abs() <= 1.0;
            assert!(bounded, "sin {x:e}");
            assert!(!is_far(x) || far_sin(x).abs() <= 1.0 || x.is_infinite());
        }
    }

    #[test]
    fn special_values() {
        assert_eq!((ex2(f32::NEG_INFINITY), ex2(f32::INFINITY)), (0.0, f32::INFINITY));
        assert_eq!(
            (ex2(0.0), ex2(-0.0), ex2(10.0), ex2(-126.0)),
            (1.0, 1.0, 1024.0, 2f32.powi(-126))
        );
        assert_eq!((lg2(0.0), lg2(-0.0)), (f32::NEG_INFINITY, f32::NEG_INFINITY));
        assert_eq!((lg2(1.0), lg2(8.0), lg2(0.25)), (0.0, 3.0, -2.0));
        assert!(lg2(-1.0).is_nan() && ex2(f32::NAN).is_nan() && far_cos(f32::INFINITY).is_nan());
        assert_eq!(sin(-0.0).to_bits(), 0x8000_0000);
        assert_eq!((rsqrt(0.0), rsqrt(-0.0)), (f32::INFINITY, f32::NEG_INFINITY));
        assert_eq!((tanh(f32::INFINITY), tanh(-1e30)), (1.0, -1.0));
    }
}
