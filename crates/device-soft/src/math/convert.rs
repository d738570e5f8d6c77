//! `cvt`: any scalar type to any other, exactly by the reference.
//!
//! [`Conversion::apply`] is general and slow. The functions below it are the common cases in a form
//! that vectorises; tests hold them to the general one.

use super::float;
use super::soft::{self, BF16, E4M3, E5M2, Exact, F16, F32, F64, Format, Number, Rounding, TF32};

/// A scalar type of `cvt`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Scalar {
    U8,
    U16,
    U32,
    U64,
    S8,
    S16,
    S32,
    S64,
    F16,
    Bf16,
    Tf32,
    F32,
    F64,
    E4m3,
    E5m2,
}

impl Scalar {
    const ALL: [Self; 15] = [
        Self::U8,
        Self::U16,
        Self::U32,
        Self::U64,
        Self::S8,
        Self::S16,
        Self::S32,
        Self::S64,
        Self::F16,
        Self::Bf16,
        Self::Tf32,
        Self::F32,
        Self::F64,
        Self::E4m3,
        Self::E5m2,
    ];

    /// Bits of an integer type and whether it is signed.
    const fn integer(self) -> Option<(u32, bool)> {
        Some(match self {
            Self::U8 => (8, false),
            Self::U16 => (16, false),
            Self::U32 => (32, false),
            Self::U64 => (64, false),
            Self::S8 => (8, true),
            Self::S16 => (16, true),
            Self::S32 => (32, true),
            Self::S64 => (64, true),
            _ => return None,
        })
    }

    /// The format of a floating type.
    const fn format(self) -> Format {
        match self {
            Self::F16 => F16,
            Self::Bf16 => BF16,
            Self::Tf32 => TF32,
            Self::F32 => F32,
            Self::E4m3 => E4M3,
            Self::E5m2 => E5M2,
            _ => F64,
        }
    }
}

/// A `cvt` instruction, for one lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Conversion {
    pub(crate) to: Scalar,
    pub(crate) from: Scalar,
    /// How a floating result is rounded.
    pub(crate) rounding: Rounding,
    /// `.rni`, `.rzi`, `.rmi`, `.rpi`.
    pub(crate) integral: Option<Rounding>,
    pub(crate) ftz: bool,
    pub(crate) sat: bool,
    pub(crate) relu: bool,
    /// Beyond the range is the largest finite number.
    pub(crate) satfinite: bool,
}

const ROUNDINGS: [Rounding; 5] =
    [Rounding::Nearest, Rounding::Away, Rounding::Zero, Rounding::Down, Rounding::Up];

impl Conversion {
    /// In 64 bits, for an instruction's immediate.
    pub(crate) fn encode(&self) -> u64 {
        let rounding = |r| ROUNDINGS.iter().position(|x| *x == r).unwrap_or(0) as u64;
        let integral = self.integral.map_or(7, rounding);
        let flags = u64::from(self.ftz)
            | u64::from(self.sat) << 1
            | u64::from(self.relu) << 2
            | u64::from(self.satfinite) << 3;
        self.to as u64
            | (self.from as u64) << 8
            | rounding(self.rounding) << 16
            | integral << 24
            | flags << 32
    }

    /// What [`Self::encode`] encoded.
    pub(crate) fn decode(bits: u64) -> Self {
        let byte = |at: u32| (bits >> at & 0xFF) as usize;
        Self {
            to: Scalar::ALL[byte(0) % 15],
            from: Scalar::ALL[byte(8) % 15],
            rounding: ROUNDINGS[byte(16) % 5],
            integral: ROUNDINGS.get(byte(24)).copied(),
            ftz: bits >> 32 & 1 != 0,
            sat: bits >> 33 & 1 != 0,
            relu: bits >> 34 & 1 != 0,
            satfinite: bits >> 35 & 1 != 0,
        }
    }

    /// Converts the low bits of `bits`. A narrow result is zero- or sign-extended to 64 bits by its
    /// type.
    pub(crate) fn apply(&self, bits: u64) -> u64 {
        match (self.from.integer(), self.to.integer()) {
            (Some(from), Some(to)) => self.int_to_int(extend(bits, from), to),
            (Some(from), None) => {
                let value = extend(bits, from);
                self.finish(Number::Finite(Exact {
                    negative: value < 0,
                    exponent: 0,
                    significand: value.unsigned_abs(),
                    sticky: false,
                }))
            }
            (None, to) => {
                let value = f64::from_bits(soft::convert(
                    self.flushed(bits, self.from),
                    self.from.format(),
                    F64,
                    Rounding::Nearest,
                ));
                let value = self.integral.map_or(value, |rounding| round(value, rounding));
                match to {
                    Some(to) => float_to_int(value, self.from, to),
                    None => self.finish(soft::unpack(value.to_bits(), F64)),
                }
            }
        }
    }

    fn int_to_int(&self, value: i128, to: (u32, bool)) -> u64 {
        if !self.sat {
            return extend(value as u64, to) as u64;
        }
        let (low, high) = range(to);
        value.clamp(low, high) as u64
    }

    /// A number as bits of the floating type `to`.
    fn finish(&self, number: Number) -> u64 {
        let format = self.to.format();
        let negative = match number {
            Number::Finite(exact) => exact.negative,
            Number::Infinite { negative } => negative,
            Number::Nan => return if self.sat { 0 } else { self.placed(format.nan()) },
        };
        if (self.relu || self.sat) && negative {
            return 0;
        }
        let mut bits = soft::pack(number, format, self.rounding);
        let magnitude = bits & (format.sign_bit() - 1);
        if self.satfinite && magnitude > format.max_finite() {
            bits = format.max_finite() | bits & format.sign_bit();
        }
        let one = soft::convert(1f64.to_bits(), F64, format, Rounding::Zero);
        if self.sat && bits > one {
            bits = one;
        }
        self.placed(self.flushed(bits, self.to))
    }

    /// tf32 stands in the upper bits of its register.
    fn placed(&self, bits: u64) -> u64 {
        if self.to == Scalar::Tf32 { bits << 13 } else { bits }
    }

    fn flushed(&self, bits: u64, scalar: Scalar) -> u64 {
        if self.ftz && scalar == Scalar::F32 {
            float::flush(f32::from_bits(bits as u32)).to_bits().into()
        } else {
            bits & (scalar.format().sign_bit() << 1).wrapping_sub(1)
        }
    }
}

fn extend(bits: u64, (width, signed): (u32, bool)) -> i128 {
    let unused = 64 - width;
    if signed {
        i128::from((bits << unused) as i64 >> unused)
    } else {
        i128::from(bits << unused >> unused)
    }
}

fn range((width, signed): (u32, bool)) -> (i128, i128) {
    if signed { (-(1 << (width - 1)), (1 << (width - 1)) - 1) } else { (0, (1 << width) - 1) }
}

fn round(value: f64, rounding: Rounding) -> f64 {
    match rounding {
        Rounding::Nearest => value.round_ties_even(),
        Rounding::Away => value.round(),
        Rounding::Zero => value.trunc(),
        Rounding::Down => value.floor(),
        Rounding::Up => value.ceil(),
    }
}

/// `value` is integral, infinite or NaN.
fn float_to_int(value: f64, from: Scalar, to: (u32, bool)) -> u64 {
    if value.is_nan() {
        let top = from == Scalar::F64 || to.0 == 64;
        return if top { extend(1 << (to.0 - 1), to) as u64 } else { 0 };
    }
    let (low, high) = range(to);
    (value as i128).clamp(low, high) as u64
}

/// A direction of rounding to an integer, known when the code is compiled.
pub(crate) trait Integral: 'static {
    fn f32(value: f32) -> f32;
    fn f64(value: f64) -> f64;
}

macro_rules! integral {
    ($($name:ident $method:ident;)*) => {$(
        pub(crate) struct $name;
        impl Integral for $name {
            #[inline(always)]
            fn f32(value: f32) -> f32 {
                value.$method()
            }
            #[inline(always)]
            fn f64(value: f64) -> f64 {
                value.$method()
            }
        }
    )*};
}

integral! {
    Rni round_ties_even;
    Rzi trunc;
    Rmi floor;
    Rpi ceil;
}

/// A type that floats convert to, clamped; NaN as the hardware gives.
pub(crate) trait FromFloat: Copy {
    fn from_f32(value: f32) -> Self;
    fn from_f64(value: f64) -> Self;
}

/// `$value as $ty`, in comparisons and one conversion: Rust's own form does not vectorise. `$end`
/// is the first float beyond the type, `$last` the last one inside.
macro_rules! clamped {
    ($value:expr, $ty:ident, $float:ident, $last:expr, $end:expr, $nan:expr) => {{
        let value: $float = $value;
        let least = $ty::MIN as $float;
        // NaN fails both comparisons and becomes the least.
        let above = if value > least { value } else { least };
        let inside = if above < $end { above } else { $last };
        // SAFETY: `inside` is a number from `least` to `$last`, which the type holds.
        let converted = unsafe { inside.to_int_unchecked::<$ty>() };
        let converted = if value >= $end { $ty::MAX } else { converted };
        if value.is_nan() { $nan } else { converted }
    }};
}

macro_rules! from_float {
    ($($ty:ident $last32:literal $last64:literal $end:literal: $nan32:expr, $nan64:expr;)*) => {$(
        impl FromFloat for $ty {
            #[inline(always)]
            fn from_f32(value: f32) -> Self {
                clamped!(value, $ty, f32, $last32, $end, $nan32)
            }
            #[inline(always)]
            fn from_f64(value: f64) -> Self {
                clamped!(value, $ty, f64, $last64, $end, $nan64)
            }
        }
    )*};
}

from_float! {
    u8 255.0 255.0 256.0: 0, 1 << 7;
    i8 127.0 127.0 128.0: 0, i8::MIN;
    u16 65535.0 65535.0 65536.0: 0, 1 << 15;
    i16 32767.0 32767.0 32768.0: 0, i16::MIN;
    u32 4_294_967_040.0 4_294_967_295.0 4_294_967_296.0: 0, 1 << 31;
    i32 2_147_483_520.0 2_147_483_647.0 2_147_483_648.0: 0, i32::MIN;
    u64 18_446_742_974_197_923_840.0 18_446_744_073_709_549_568.0 18_446_744_073_709_551_616.0:
        1 << 63, 1 << 63;
    i64 9_223_371_487_098_961_920.0 9_223_372_036_854_774_784.0 9_223_372_036_854_775_808.0:
        i64::MIN, i64::MIN;
}

/// f32 to tf32, to nearest with ties away from zero (`cvt.rna.tf32.f32`) or, with `EVEN`, to even.
#[inline(always)]
pub(crate) fn f32_to_tf32<const EVEN: bool>(value: f32) -> u32 {
    let bits = value.to_bits();
    let half = if EVEN { 0xFFF + (bits >> 13 & 1) } else { 0x1000 };
    let rounded = bits.wrapping_add(half) & 0xFFFF_E000;
    if bits & 0x7FFF_FFFF > 0x7F80_0000 { 0x7FFF_E000 } else { rounded }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::math::narrow;
    use crate::math::testing::{Random, interesting_f32, interesting_f64};

    fn plain(to: Scalar, from: Scalar) -> Conversion {
        Conversion {
            to,
            from,
            rounding: Rounding::Nearest,
            integral: None,
            ftz: false,
            sat: false,
            relu: false,
            satfinite: false,
        }
    }

    #[test]
    fn integers() {
        let cvt = plain(Scalar::S8, Scalar::S32);
        assert_eq!(cvt.apply(0x1FF), u64::MAX);
        assert_eq!(Conversion { sat: true, ..cvt }.apply(0x1FF), 127);
        let cvt = Conversion { sat: true, ..plain(Scalar::U16, Scalar::S32) };
        assert_eq!((cvt.apply(0xFFFF_FFFF), cvt.apply(70_000)), (0, 65_535));
        assert_eq!(plain(Scalar::U64, Scalar::S16).apply(0x8000), 0xFFFF_FFFF_FFFF_8000);
        assert_eq!(plain(Scalar::F32, Scalar::U64).apply(u64::MAX), 0x5F80_0000);
        let down = Conversion { rounding: Rounding::Zero, ..plain(Scalar::F32, Scalar::U64) };
        assert_eq!(down.apply(u64::MAX), 0x5F7F_FFFF);
    }

    #[test]
    fn fast_paths_agree() {
        let mut random = Random::new(9);
        let to_int = |to, from| Conversion { integral: Some(Rounding::Zero), ..plain(to, from) };
        for _ in 0..50_000 {
            let x = interesting_f32(&mut random);
            let bits = u64::from(x.to_bits());
            let cvt = to_int(Scalar::S32, Scalar::F32);
            assert_eq!(i32::from_f32(Rzi::f32(x)), cvt.apply(bits) as i32, "{x:e}");
            let cvt = to_int(Scalar::S8, Scalar::F32);
            assert_eq!(i8::from_f32(Rzi::f32(x)), cvt.apply(bits) as i8, "{x:e}");
            let cvt = to_int(Scalar::U16, Scalar::F32);
            assert_eq!(u16::from_f32(Rzi::f32(x)), cvt.apply(bits) as u16, "{x:e}");
            let even = plain(Scalar::Tf32, Scalar::F32);
            assert_eq!(f32_to_tf32::<true>(x), even.apply(bits) as u32, "{x:e}");
            let away = Conversion { rounding: Rounding::Away, ..even };
            assert_eq!(f32_to_tf32::<false>(x), away.apply(bits) as u32, "{x:e}");
            let cvt = to_int(Scalar::U32, Scalar::F32);
            assert_eq!(u32::from_f32(Rzi::f32(x)), cvt.apply(bits) as u32, "{x:e}");
            let cvt = to_int(Scalar::S64, Scalar::F32);
            assert_eq!(i64::from_f32(Rzi::f32(x)), cvt.apply(bits) as i64, "{x:e}");
            let cvt = to_int(Scalar::U64, Scalar::F32);
            assert_eq!(u64::from_f32(Rzi::f32(x)), cvt.apply(bits), "{x:e}");
            let half = plain(Scalar::F16, Scalar::F32).apply(bits) as u16;
            assert_eq!(narrow::f32_to_f16(x), half, "{x:e}");
            let y = interesting_f64(&mut random);
            let cvt = to_int(Scalar::S64, Scalar::F64);
            assert_eq!(i64::from_f64(Rzi::f64(y)), cvt.apply(y.to_bits()) as i64, "{y:e}");
            let cvt = to_int(Scalar::U64, Scalar::F64);
            assert_eq!(u64::from_f64(Rzi::f64(y)), cvt.apply(y.to_bits()), "{y:e}");
            let cvt = to_int(Scalar::S32, Scalar::F64);
            assert_eq!(i32::from_f64(Rzi::f64(y)), cvt.apply(y.to_bits()) as i32, "{y:e}");
            let cvt = to_int(Scalar::U32, Scalar::F64);
            assert_eq!(u32::from_f64(Rzi::f64(y)), cvt.apply(y.to_bits()) as u32, "{y:e}");
        }
    }

    #[test]
    fn modifiers() {
        let f = |x: f32| u64::from(x.to_bits());
        let sat = Conversion { sat: true, ..plain(Scalar::F32, Scalar::F32) };
        assert_eq!((sat.apply(f(7.0)), sat.apply(f(-1.0)), sat.apply(f(f32::NAN))), (f(1.0), 0, 0));
        let fp8 = Conversion { satfinite: true, ..plain(Scalar::E4m3, Scalar::F32) };
        assert_eq!((fp8.apply(f(1e9)), fp8.apply(f(-1e9)), fp8.apply(f(1.0))), (0x7E, 0xFE, 0x38));
        assert_eq!(plain(Scalar::F16, Scalar::E5m2).apply(0x3C), 0x3C00);
        let tf32 = Conversion { rounding: Rounding::Away, ..plain(Scalar::Tf32, Scalar::F32) };
        assert_eq!(tf32.apply(0x3F80_1000), 0x3F80_2000);
        let relu = Conversion { relu: true, ..plain(Scalar::F16, Scalar::F32) };
        assert_eq!((relu.apply(f(-2.0)), relu.apply(f(f32::NAN))), (0, 0x7FFF));
        let ftz = Conversion { ftz: true, ..plain(Scalar::F32, Scalar::F64) };
        assert_eq!(ftz.apply((-1e-40f64).to_bits()), 0x8000_0000);
        let rni =
            Conversion { integral: Some(Rounding::Nearest), ..plain(Scalar::F16, Scalar::F16) };
        assert_eq!(rni.apply(0x3E00), 0x4000);
        for cvt in [sat, fp8, tf32, relu, ftz, rni] {
            assert_eq!(Conversion::decode(cvt.encode()), cvt);
        }
    }
}
