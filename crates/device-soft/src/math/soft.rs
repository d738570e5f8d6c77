//! Exact binary floating point in integers: every rounding mode, every format.
//!
//! A finite number is taken apart into sign, exponent and a significand of up to 128 bits, operated
//! on without error (what does not fit leaves a sticky bit), and rounded once. This serves directed
//! rounding, which the host's instructions offer only through a mode register, and conversions to
//! narrow formats. The common round-to-nearest cases run on the host's own arithmetic instead.

/// How a result that does not fit is rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rounding {
    /// `.rn`: to nearest, ties to even.
    Nearest,
    /// `.rna`: to nearest, ties away from zero.
    Away,
    /// `.rz`
    Zero,
    /// `.rm`
    Down,
    /// `.rp`
    Up,
}

/// An interchange format of at most 64 bits, sign bit on top.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Format {
    exponent_bits: u32,
    fraction_bits: u32,
    /// Bits of the largest finite magnitude.
    max_finite: u64,
    /// Bits that a magnitude beyond it becomes: infinity, or NaN where there is none.
    beyond: u64,
    /// The NaN that the hardware generates.
    nan: u64,
}

pub(crate) const F64: Format = ieee(11, 52, 0xFFF8_0000_0000_0000);
pub(crate) const F32: Format = ieee(8, 23, 0x7FFF_FFFF);
pub(crate) const F16: Format = ieee(5, 10, 0x7FFF);
pub(crate) const BF16: Format = ieee(8, 7, 0x7FFF);
pub(crate) const E5M2: Format = ieee(5, 2, 0x7F);
/// No infinity; only all ones is NaN.
pub(crate) const E4M3: Format =
    Format { exponent_bits: 4, fraction_bits: 3, max_finite: 0x7E, beyond: 0x7F, nan: 0x7F };
/// tf32 held in the top 19 bits of 32: rounded as 10 fraction bits, shifted by the caller.
pub(crate) const TF32: Format = ieee(8, 10, 0x3FFFF);

const fn ieee(exponent_bits: u32, fraction_bits: u32, nan: u64) -> Format {
    let infinity = ((1 << exponent_bits) - 1) << fraction_bits;
    Format { exponent_bits, fraction_bits, max_finite: infinity - 1, beyond: infinity, nan }
}

impl Format {
    const fn bias(self) -> i32 {
        (1 << (self.exponent_bits - 1)) - 1
    }

    pub(crate) const fn sign_bit(self) -> u64 {
        1 << (self.exponent_bits + self.fraction_bits)
    }

    pub(crate) const fn nan(self) -> u64 {
        self.nan
    }

    /// Bits of the largest finite magnitude.
    pub(crate) const fn max_finite(self) -> u64 {
        self.max_finite
    }

    const fn signed(self, negative: bool, magnitude: u64) -> u64 {
        if negative { magnitude | self.sign_bit() } else { magnitude }
    }
}

/// `(-1)^negative × significand × 2^exponent`, and a little more where `sticky`: less than one unit
/// of the significand's last place. Wherever `sticky` is set the significand has more bits than any
/// format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Exact {
    pub(crate) negative: bool,
    pub(crate) exponent: i32,
    pub(crate) significand: u128,
    pub(crate) sticky: bool,
}

/// A number taken apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Number {
    Nan,
    Infinite { negative: bool },
    Finite(Exact),
}

use Number::{Finite, Infinite, Nan};

/// Takes `bits` apart.
pub(crate) fn unpack(bits: u64, format: Format) -> Number {
    let negative = bits & format.sign_bit() != 0;
    let magnitude = bits & (format.sign_bit() - 1);
    if magnitude > format.max_finite {
        let infinite = magnitude == format.beyond && format.beyond != format.nan;
        return if infinite { Infinite { negative } } else { Nan };
    }
    let fraction = magnitude & ((1 << format.fraction_bits) - 1);
    let biased = (magnitude >> format.fraction_bits) as i32;
    let (significand, biased) =
        if biased == 0 { (fraction, 1) } else { (fraction | 1 << format.fraction_bits, biased) };
    let exponent = biased - format.bias() - format.fraction_bits as i32;
    Finite(Exact { negative, exponent, significand: u128::from(significand), sticky: false })
}

/// Rounds to `format`'s bits.
pub(crate) fn pack(number: Number, format: Format, rounding: Rounding) -> u64 {
    match number {
        Nan => format.nan,
        Infinite { negative } => format.signed(negative, format.beyond),
        Finite(exact) => round(exact, format, rounding),
    }
}

fn round(x: Exact, format: Format, rounding: Rounding) -> u64 {
    let fraction_bits = format.fraction_bits as i32;
    if x.significand == 0 {
        return format.signed(x.negative, 0);
    }
    let leading = x.exponent + (127 - x.significand.leading_zeros() as i32);
    let lead = leading.max(1 - format.bias());
    // The result's last place is 2^(lead - fraction_bits).
    let drop = lead - fraction_bits - x.exponent;
    let (kept, above_half, half, inexact) = match drop {
        ..=0 => (x.significand << -drop, false, false, x.sticky),
        1..=127 => {
            let rest = x.significand & ((1 << drop) - 1);
            let middle = 1u128 << (drop - 1);
            let above = rest > middle || (rest == middle && x.sticky);
            (x.significand >> drop, above, rest == middle && !x.sticky, rest != 0 || x.sticky)
        }
        _ => (0, false, false, true),
    };
    let up = match rounding {
        Rounding::Nearest => above_half || (half && kept & 1 == 1),
        Rounding::Away => above_half || half,
        Rounding::Zero => false,
        Rounding::Down => inexact && x.negative,
        Rounding::Up => inexact && !x.negative,
    };
    // A carry out of the fraction runs into the exponent, which is what it should do.
    let exponent_field = (lead + format.bias() - 1).max(0) as u64;
    let magnitude = if exponent_field >= 1 << format.exponent_bits {
        format.max_finite + 1
    } else {
        (exponent_field << format.fraction_bits) + kept as u64 + u64::from(up)
    };
    let clamp = match rounding {
        Rounding::Nearest | Rounding::Away => false,
        Rounding::Zero => true,
        Rounding::Down => !x.negative,
        Rounding::Up => x.negative,
    };
    let magnitude = match magnitude <= format.max_finite {
        true => magnitude,
        false if clamp => format.max_finite,
        false => format.beyond,
    };
    format.signed(x.negative, magnitude)
}

/// Rounds bits of one format to another. NaN becomes `to`'s own.
pub(crate) fn convert(bits: u64, from: Format, to: Format, rounding: Rounding) -> u64 {
    pack(unpack(bits, from), to, rounding)
}

/// `a × b`, exact for operands of at most 64 bits each.
fn product(a: Number, b: Number) -> Number {
    match (a, b) {
        (Nan, _) | (_, Nan) => Nan,
        (Finite(a), Finite(b)) => Finite(Exact {
            negative: a.negative != b.negative,
            exponent: a.exponent + b.exponent,
            significand: a.significand * b.significand,
            sticky: false,
        }),
        (Infinite { negative }, Infinite { negative: other }) => {
            Infinite { negative: negative != other }
        }
        (Infinite { negative }, Finite(x)) | (Finite(x), Infinite { negative }) => {
            if x.significand == 0 { Nan } else { Infinite { negative: negative != x.negative } }
        }
    }
}

/// `a + b`, with a sticky bit where it needs more than 124 bits. An exact zero sum of opposite
/// signs is negative only when rounding down.
fn sum(a: Number, b: Number, rounding: Rounding) -> Number {
    let (a, b) = match (a, b) {
        (Nan, _) | (_, Nan) => return Nan,
        (Infinite { negative }, Infinite { negative: other }) if negative != other => return Nan,
        (infinite @ Infinite { .. }, _) | (_, infinite @ Infinite { .. }) => return infinite,
        (Finite(a), Finite(b)) => (a, b),
    };
    let zero = |negative| Exact { negative, exponent: 0, significand: 0, sticky: false };
    let cancelled = || Finite(zero(rounding == Rounding::Down));
    match (a.significand == 0, b.significand == 0) {
        (true, true) if a.negative == b.negative => return Finite(a),
        (true, true) => return cancelled(),
        (true, false) => return Finite(b),
        (false, true) => return Finite(a),
        (false, false) => {}
    }
    let (a, b) = (normalised(a), normalised(b));
    let (big, small) =
        if (b.exponent, b.significand) > (a.exponent, a.significand) { (b, a) } else { (a, b) };
    let distance = (big.exponent - small.exponent) as u32;
    let (aligned, lost) = match distance {
        0..=127 => (small.significand >> distance, small.significand & ((1 << distance) - 1) != 0),
        _ => (0, true),
    };
    let significand = if big.negative == small.negative {
        big.significand + aligned
    } else {
        // What was lost makes the difference smaller: one less, and a little.
        big.significand - aligned - u128::from(lost)
    };
    if significand == 0 {
        return cancelled();
    }
    Finite(Exact { significand, sticky: lost, ..big })
}

/// The same number with its leading bit at position 124, which leaves room for a carry.
fn normalised(x: Exact) -> Exact {
    let up = x.significand.leading_zeros() as i32 - 3;
    debug_assert!(up >= 0, "operands have at most 106 bits");
    Exact { exponent: x.exponent - up, significand: x.significand << up, ..x }
}

/// `a + b`
pub(crate) fn add(a: u64, b: u64, format: Format, rounding: Rounding) -> u64 {
    pack(sum(unpack(a, format), unpack(b, format), rounding), format, rounding)
}

/// `a × b`
pub(crate) fn mul(a: u64, b: u64, format: Format, rounding: Rounding) -> u64 {
    pack(product(unpack(a, format), unpack(b, format)), format, rounding)
}

/// `a × b + c`, rounded once.
pub(crate) fn fma(a: u64, b: u64, c: u64, format: Format, rounding: Rounding) -> u64 {
    let product = product(unpack(a, format), unpack(b, format));
    pack(sum(product, unpack(c, format), rounding), format, rounding)
}

/// `a ÷ b`
pub(crate) fn div(a: u64, b: u64, format: Format, rounding: Rounding) -> u64 {
    let sign = |a: bool, b: bool| a != b;
    let quotient = match (unpack(a, format), unpack(b, format)) {
        (Nan, _) | (_, Nan) | (Infinite { .. }, Infinite { .. }) => Nan,
        (Infinite { negative }, Finite(b)) => Infinite { negative: sign(negative, b.negative) },
        (Finite(a), Infinite { negative }) => {
            Finite(Exact { negative: sign(a.negative, negative), significand: 0, ..a })
        }
        (Finite(a), Finite(b)) => match (a.significand == 0, b.significand == 0) {
            (true, true) => Nan,
            (false, true) => Infinite { negative: sign(a.negative, b.negative) },
            (true, false) => Finite(Exact { negative: sign(a.negative, b.negative), ..a }),
            (false, false) => {
                let a = normalised(a);
                Finite(Exact {
                    negative: sign(a.negative, b.negative),
                    exponent: a.exponent - b.exponent,
                    significand: a.significand / b.significand,
                    sticky: !a.significand.is_multiple_of(b.significand),
                })
            }
        },
    };
    pack(quotient, format, rounding)
}

/// `√a`; the root of a negative number is NaN, of −0 it is −0.
pub(crate) fn sqrt(a: u64, format: Format, rounding: Rounding) -> u64 {
    let root = match unpack(a, format) {
        Finite(a) if a.significand == 0 => Finite(a),
        Infinite { negative: false } => Infinite { negative: false },
        Finite(a) if !a.negative => {
            let mut a = normalised(a);
            if a.exponent & 1 != 0 {
                (a.exponent, a.significand) = (a.exponent - 1, a.significand << 1);
            }
            let root = a.significand.isqrt();
            Finite(Exact {
                negative: false,
                exponent: a.exponent / 2,
                significand: root,
                sticky: root * root != a.significand,
            })
        }
        _ => Nan,
    };
    pack(root, format, rounding)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::math::testing::{Random, interesting_f32, interesting_f64};

    const NEAREST: Rounding = Rounding::Nearest;

    fn same64(ours: u64, host: f64, what: &str) {
        let ours = f64::from_bits(ours);
        let equal = ours.to_bits() == host.to_bits() || (ours.is_nan() && host.is_nan());
        assert!(equal, "{what}: {ours:e} is not {host:e}");
    }

    #[test]
    fn nearest_agrees_with_the_host() {
        let mut random = Random::new(1);
        for _ in 0..20_000 {
            let [a, b, c] = [(); 3].map(|()| interesting_f64(&mut random));
            let [x, y, z] = [a, b, c].map(f64::to_bits);
            same64(add(x, y, F64, NEAREST), a + b, &format!("{a:e}+{b:e}"));
            same64(mul(x, y, F64, NEAREST), a * b, &format!("{a:e}*{b:e}"));
            same64(div(x, y, F64, NEAREST), a / b, &format!("{a:e}/{b:e}"));
            same64(sqrt(x, F64, NEAREST), a.sqrt(), &format!("sqrt {a:e}"));
            same64(fma(x, y, z, F64, NEAREST), a.mul_add(b, c), &format!("fma {a:e} {b:e} {c:e}"));
            let narrowed = convert(x, F64, F32, NEAREST) as u32;
            let host = a as f32;
            assert!(narrowed == host.to_bits() || host.is_nan(), "{a:e} as f32");
        }
    }

    #[test]
    fn directed_results_enclose_the_exact_one() {
        let mut random = Random::new(2);
        for _ in 0..20_000 {
            let [a, b] = [(); 2].map(|()| interesting_f32(&mut random));
            // A product of two f32 is exact in f64.
            let exact = f64::from(a) * f64::from(b);
            if exact.is_nan() {
                continue;
            }
            let at = |mode| {
                let bits = mul(a.to_bits().into(), b.to_bits().into(), F32, mode);
                f64::from(f32::from_bits(bits as u32))
            };
            let (down, up, zero) = (at(Rounding::Down), at(Rounding::Up), at(Rounding::Zero));
            assert!(down <= exact && exact <= up, "{a:e}*{b:e}");
            assert_eq!(zero, if exact < 0.0 { up } else { down }, "{a:e}*{b:e}");
            let tight = down == up || (up as f32) == (down as f32).next_up();
            assert!(tight, "{a:e}*{b:e} in {down:e}..{up:e}");
        }
    }

    #[test]
    fn ends_of_the_ranges() {
        let one_and = |n: f64| (1.0 + n).to_bits();
        // Halfway between 1 and the next f16: even, away, up.
        let tie = one_and(2f64.powi(-11));
        assert_eq!(convert(tie, F64, F16, NEAREST), 0x3C00);
        assert_eq!(convert(tie, F64, F16, Rounding::Away), 0x3C01);
        assert_eq!(convert(tie, F64, F16, Rounding::Up), 0x3C01);
        assert_eq!(convert(65520f64.to_bits(), F64, F16, NEAREST), 0x7C00);
        assert_eq!(convert(65520f64.to_bits(), F64, F16, Rounding::Zero), 0x7BFF);
        assert_eq!(convert(2f64.powi(-24).to_bits(), F64, F16, NEAREST), 1);
        assert_eq!(convert(2f64.powi(-25).to_bits(), F64, F16, NEAREST), 0);
        assert_eq!(convert(2f64.powi(-25).to_bits(), F64, F16, Rounding::Up), 1);
        assert_eq!(convert(1e-300f64.to_bits(), F64, F16, Rounding::Up), 1);
        assert_eq!(convert(448f64.to_bits(), F64, E4M3, NEAREST), 0x7E);
        assert_eq!(convert(500f64.to_bits(), F64, E4M3, NEAREST), 0x7F);
        assert_eq!(convert((-0.0f64).to_bits(), F64, E5M2, NEAREST), 0x80);
        assert_eq!(add(1, 1 | F32.sign_bit(), F32, Rounding::Down), F32.sign_bit());
        assert_eq!(add(1, 1 | F32.sign_bit(), F32, NEAREST), 0);
    }
}
