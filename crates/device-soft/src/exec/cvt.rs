//! `cvt`: conversions.

use super::lanewise::{LaneFn, Parts, Typed, lane_fns, lanes, lanes_avx2, lanes_sat, lanes_scalar};
use super::{Arg, Flow, Isa, Lane, Level, Op, Query, Selected, Warp};
use crate::code::Inst;
use crate::math::convert::{
    Conversion, FromFloat, Integral, Rmi, Rni, Rpi, Rzi, Scalar, f32_to_tf32,
};
use crate::math::float::{canonical, flush};
use crate::math::narrow::{Brain, Half, Narrow};
use crate::math::soft::Rounding;
use crate::spec::WARP;
use kedge_ptx::ast::Type;
use std::marker::PhantomData;

/// `A as D`, for types that convert as Rust's `as` does: all between integers (truncation, or
/// extension by A's sign), and integers and floats to floats (to nearest).
struct Cast<A, D>(PhantomData<(A, D)>);

macro_rules! casts {
    ($($from:ident: $($to:ident)*;)*) => {$($(
        impl LaneFn for Cast<$from, $to> {
            type In = ($from,);
            type Out = $to;
            #[inline(always)]
            fn apply((a,): ($from,)) -> $to {
                a as $to
            }
        }
    )*)*};
}

casts! {
    u8: u8 u32 u64 f32 f64;
    u16: u16 u32 u64 f32 f64;
    u32: u32 u64 f32 f64;
    u64: u8 u16 u32 u64 i8 i16 f32 f64;
    i8: u16 i8 i32 i64 f32 f64;
    i16: i16 i32 i64 f32 f64;
    i32: f32 f64;
    i64: f32 f64;
    f32: f64;
}

/// `cvt.s64.s32`: the address arithmetic of every loop over an int. LLVM tears the plain loop
/// apart.
struct SignExtend;

impl Op for SignExtend {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: op = [d, a], a 64-bit and a 32-bit slot (the selector).
        unsafe {
            let a = i32::read(warp, inst.op[1]);
            let mut out = [0i64; WARP];
            sign_extend::<I>(&a, &mut out);
            i64::write(warp, inst.op[0], &out, mask);
        }
        Flow::Next
    }
}

#[inline(always)]
fn sign_extend<I: Isa>(from: &[i32; WARP], to: &mut [i64; WARP]) {
    #[cfg(target_arch = "x86_64")]
    if I::LEVEL == Level::Avx512 {
        use std::arch::x86_64::{_mm256_loadu_si256, _mm512_cvtepi32_epi64, _mm512_storeu_si512};
        for part in (0..WARP).step_by(8) {
            // SAFETY: the handler is compiled for this level; eight lanes from `part` are in both
            // rows.
            unsafe {
                let eight = _mm256_loadu_si256(from.as_ptr().add(part).cast());
                let wide = _mm512_cvtepi32_epi64(eight);
                _mm512_storeu_si512(to.as_mut_ptr().add(part).cast(), wide);
            }
        }
        return;
    }
    for lane in 0..WARP {
        to[lane] = from[lane].into();
    }
}

/// Integer to integer. What only differs in the reading of the same bits shares a handler.
fn int_to_int(to: Type, from: Type) -> Option<Selected> {
    use Type::{S8, S16, S32, S64, U8, U16, U32, U64};
    // A narrower result is the low bits, as the narrower type.
    let from = if from.size() < 8 && to.size() <= from.size() { to } else { from };
    let mut selected = match (to, from) {
        (U8, U8) => lanes::<Cast<u8, u8>>(),
        (S8, S8) => lanes::<Cast<i8, i8>>(),
        (U16, U16) => lanes::<Cast<u16, u16>>(),
        (S16, S16) => lanes::<Cast<i16, i16>>(),
        (U32 | S32, U32 | S32) => lanes::<Cast<u32, u32>>(),
        (U16 | S16 | U32 | S32, U8) => lanes::<Cast<u8, u32>>(),
        (U16, S8) => lanes_avx2::<Cast<i8, u16>>(),
        (S16 | U32 | S32, S8) => lanes::<Cast<i8, i32>>(),
        (U32 | S32, U16) => lanes::<Cast<u16, u32>>(),
        (U32 | S32, S16) => lanes::<Cast<i16, i32>>(),
        (U64 | S64, U8) => lanes::<Cast<u8, u64>>(),
        (U64 | S64, U16) => lanes::<Cast<u16, u64>>(),
        (U64 | S64, U32) => lanes::<Cast<u32, u64>>(),
        (U64 | S64, S8) => lanes::<Cast<i8, i64>>(),
        (U64 | S64, S16) => lanes::<Cast<i16, i64>>(),
        (U64 | S64, S32) => Selected::new::<SignExtend>([]),
        (U64 | S64, U64 | S64) => lanes::<Cast<u64, u64>>(),
        (U8, U64 | S64) => lanes_avx2::<Cast<u64, u8>>(),
        (S8, U64 | S64) => lanes_avx2::<Cast<u64, i8>>(),
        (U16, U64 | S64) => lanes_avx2::<Cast<u64, u16>>(),
        (S16, U64 | S64) => lanes_avx2::<Cast<u64, i16>>(),
        (U32 | S32, U64 | S64) => lanes::<Cast<u64, u32>>(),
        _ => return None,
    };
    // Wider registers are extended by the type that the program names.
    selected.args = vec![Arg::Dst(to), Arg::Src(from)];
    Some(selected)
}

/// Integer to float, to nearest.
fn int_to_float(to: Type, from: Type) -> Option<Selected> {
    Some(match (to, from) {
        (Type::F32, Type::U8) => lanes_avx2::<Cast<u8, f32>>(),
        (Type::F32, Type::U16) => lanes_avx2::<Cast<u16, f32>>(),
        (Type::F32, Type::U32) => lanes::<Cast<u32, f32>>(),
        (Type::F32, Type::U64) => lanes::<Cast<u64, f32>>(),
        (Type::F32, Type::S8) => lanes_avx2::<Cast<i8, f32>>(),
        (Type::F32, Type::S16) => lanes_avx2::<Cast<i16, f32>>(),
        (Type::F32, Type::S32) => lanes::<Cast<i32, f32>>(),
        (Type::F32, Type::S64) => lanes::<Cast<i64, f32>>(),
        (Type::F64, Type::U8) => lanes_avx2::<Cast<u8, f64>>(),
        (Type::F64, Type::U16) => lanes_avx2::<Cast<u16, f64>>(),
        (Type::F64, Type::U32) => lanes::<Cast<u32, f64>>(),
        (Type::F64, Type::U64) => lanes::<Cast<u64, f64>>(),
        (Type::F64, Type::S8) => lanes_avx2::<Cast<i8, f64>>(),
        (Type::F64, Type::S16) => lanes_avx2::<Cast<i16, f64>>(),
        (Type::F64, Type::S32) => lanes::<Cast<i32, f64>>(),
        (Type::F64, Type::S64) => lanes::<Cast<i64, f64>>(),
        _ => return None,
    })
}

/// A float that is rounded to an integral value and stored as an integer.
struct ToInt<R, A, D>(PhantomData<(R, A, D)>);

impl<R: Integral, D: Typed + FromFloat + 'static> LaneFn for ToInt<R, f32, D> {
    type In = (f32,);
    type Out = D;
    #[inline(always)]
    fn apply((a,): (f32,)) -> D {
        D::from_f32(R::f32(a))
    }
}

impl<R: Integral, D: Typed + FromFloat + 'static> LaneFn for ToInt<R, f64, D> {
    type In = (f64,);
    type Out = D;
    #[inline(always)]
    fn apply((a,): (f64,)) -> D {
        D::from_f64(R::f64(a))
    }
}

/// f16 and bf16 go through [`General`].
fn to_int(to: Type, from: Type, rounding: Rounding) -> Option<Selected> {
    macro_rules! targets {
        ($r:ident, $a:ident) => {
            match to {
                Type::U32 => lanes::<ToInt<$r, $a, u32>>(),
                Type::S32 => lanes::<ToInt<$r, $a, i32>>(),
                Type::U64 => lanes::<ToInt<$r, $a, u64>>(),
                Type::S64 => lanes::<ToInt<$r, $a, i64>>(),
                Type::U8 => lanes_avx2::<ToInt<$r, $a, u8>>(),
                Type::S8 => lanes_avx2::<ToInt<$r, $a, i8>>(),
                Type::U16 => lanes_avx2::<ToInt<$r, $a, u16>>(),
                Type::S16 => lanes_avx2::<ToInt<$r, $a, i16>>(),
                _ => return None,
            }
        };
    }
    Some(match (from, rounding) {
        (Type::F32, Rounding::Nearest) => targets!(Rni, f32),
        (Type::F32, Rounding::Zero) => targets!(Rzi, f32),
        (Type::F32, Rounding::Down) => targets!(Rmi, f32),
        (Type::F32, Rounding::Up) => targets!(Rpi, f32),
        (Type::F64, Rounding::Nearest) => targets!(Rni, f64),
        (Type::F64, Rounding::Zero) => targets!(Rzi, f64),
        (Type::F64, Rounding::Down) => targets!(Rmi, f64),
        (Type::F64, Rounding::Up) => targets!(Rpi, f64),
        _ => return None,
    })
}

/// A float rounded to an integral float.
struct Round<R, F>(PhantomData<(R, F)>);

impl<R: Integral> LaneFn for Round<R, f32> {
    type In = (f32,);
    type Out = f32;
    #[inline(always)]
    fn apply((a,): (f32,)) -> f32 {
        canonical(R::f32(a))
    }
}

impl<R: Integral> LaneFn for Round<R, f64> {
    type In = (f64,);
    type Out = f64;
    #[inline(always)]
    fn apply((a,): (f64,)) -> f64 {
        R::f64(a)
    }
}

lane_fns! {
    Same32(a: f32) -> f32 { canonical(a) }
    F64ToF32(a: f64) -> f32 { canonical(a as f32) }
    F64ToF32Ftz(a: f64) -> f32 { flush(canonical(a as f32)) }
    F32FtzToF64(a: f32) -> f64 { f64::from(flush(a)) }
    F16ToF32(a: u16) -> f32 { canonical(Half::widen(a)) }
    F32ToF16(a: f32) -> u16 { Half::narrow(a) }
    Bf16ToF32(a: u16) -> f32 { canonical(Brain::widen(a)) }
    F32ToBf16(a: f32) -> u16 { Brain::narrow(a) }
    ToTf32Away(a: f32) -> u32 { f32_to_tf32::<false>(a) }
    ToTf32Even(a: f32) -> u32 { f32_to_tf32::<true>(a) }
    F16ToF64(a: u16) -> f64 { f64::from(Half::widen(a)) }
    /// The first operand goes to the upper half.
    PackF16(a: f32, b: f32) -> u32 { u32::from(Half::narrow(a)) << 16 | u32::from(Half::narrow(b)) }
    PackBf16(a: f32, b: f32) -> u32 {
        u32::from(Brain::narrow(a)) << 16 | u32::from(Brain::narrow(b))
    }
}

/// Float to float without a general form.
fn float_to_float(to: Type, from: Type, cvt: &Conversion) -> Option<Selected> {
    if let Some(rounding) = cvt.integral {
        return match (to, from, rounding) {
            (Type::F32, Type::F32, Rounding::Nearest) => {
                Some(lanes_sat::<Round<Rni, f32>>(cvt.ftz, cvt.sat))
            }
            (Type::F32, Type::F32, Rounding::Zero) => {
                Some(lanes_sat::<Round<Rzi, f32>>(cvt.ftz, cvt.sat))
            }
            (Type::F32, Type::F32, Rounding::Down) => {
                Some(lanes_sat::<Round<Rmi, f32>>(cvt.ftz, cvt.sat))
            }
            (Type::F32, Type::F32, Rounding::Up) => {
                Some(lanes_sat::<Round<Rpi, f32>>(cvt.ftz, cvt.sat))
            }
            (Type::F64, Type::F64, Rounding::Nearest) if !cvt.sat => {
                Some(lanes::<Round<Rni, f64>>())
            }
            (Type::F64, Type::F64, Rounding::Zero) if !cvt.sat => Some(lanes::<Round<Rzi, f64>>()),
            (Type::F64, Type::F64, Rounding::Down) if !cvt.sat => Some(lanes::<Round<Rmi, f64>>()),
            (Type::F64, Type::F64, Rounding::Up) if !cvt.sat => Some(lanes::<Round<Rpi, f64>>()),
            _ => None,
        };
    }
    match (to, from, cvt.rounding) {
        (Type::Tf32, Type::F32, Rounding::Away) => return Some(lanes_avx2::<ToTf32Away>()),
        (Type::Tf32, Type::F32, Rounding::Nearest) => return Some(lanes_avx2::<ToTf32Even>()),
        (_, _, Rounding::Nearest) => {}
        _ => return None,
    }
    match (to, from, cvt.ftz, cvt.sat) {
        (Type::F32, Type::F32, ftz, sat) => Some(lanes_sat::<Same32>(ftz, sat)),
        (_, _, _, true) => None,
        (Type::F32, Type::F64, false, _) => Some(lanes::<F64ToF32>()),
        (Type::F32, Type::F64, true, _) => Some(lanes::<F64ToF32Ftz>()),
        (Type::F64, Type::F32, false, _) => Some(lanes::<Cast<f32, f64>>()),
        (Type::F64, Type::F32, true, _) => Some(lanes::<F32FtzToF64>()),
        (Type::F32, Type::F16, false, _) => Some(lanes::<F16ToF32>()),
        (Type::F16, Type::F32, false, _) => Some(lanes::<F32ToF16>()),
        (Type::F32, Type::Bf16, false, _) => Some(lanes::<Bf16ToF32>()),
        (Type::Bf16, Type::F32, false, _) => Some(lanes::<F32ToBf16>()),
        (Type::F64, Type::F16, false, _) => Some(lanes::<F16ToF64>()),
        _ => None,
    }
}

/// Any conversion: `imm` is the encoded [`Conversion`]. A and D are the unsigned words that hold
/// the source and the destination.
struct General<A, D>(PhantomData<(A, D)>);

impl<A: Typed + Into<u64>, D: Typed + TryFrom<u64>> Op for General<A, D> {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let cvt = Conversion::decode(inst.imm);
        let width = u64::MAX >> (64 - 8 * size_of::<D>());
        // SAFETY: op = [d, a] (the selector).
        unsafe {
            let a = A::read(warp, inst.op[1]);
            let mut out = [D::default(); WARP];
            for lane in 0..WARP {
                out[lane] = D::try_from(cvt.apply(a[lane].into()) & width).unwrap_or_default();
            }
            D::write(warp, inst.op[0], &out, mask);
        }
        Flow::Next
    }
}

fn general(to: Type, from: Type, cvt: &Conversion) -> Option<Selected> {
    let args = [Arg::Dst(to), Arg::Src(from)];
    // A narrow signed result is sign-extended in its 32-bit register.
    let wide = |ty: Type| ty.size() == 8;
    let selected = match (wide(from), wide(to)) {
        (false, false) => Selected::scalar::<General<u32, u32>>(args),
        (false, true) => Selected::scalar::<General<u32, u64>>(args),
        (true, false) => Selected::scalar::<General<u64, u32>>(args),
        (true, true) => Selected::scalar::<General<u64, u64>>(args),
    };
    Some(selected.imm(cvt.encode()))
}

fn scalar(ty: Type) -> Option<Scalar> {
    Some(match ty {
        Type::U8 => Scalar::U8,
        Type::U16 => Scalar::U16,
        Type::U32 => Scalar::U32,
        Type::U64 => Scalar::U64,
        Type::S8 => Scalar::S8,
        Type::S16 => Scalar::S16,
        Type::S32 => Scalar::S32,
        Type::S64 => Scalar::S64,
        Type::F16 => Scalar::F16,
        Type::Bf16 => Scalar::Bf16,
        Type::Tf32 => Scalar::Tf32,
        Type::F32 => Scalar::F32,
        Type::F64 => Scalar::F64,
        _ => return None,
    })
}

fn is_float(ty: Type) -> bool {
    matches!(ty, Type::F16 | Type::Bf16 | Type::Tf32 | Type::F32 | Type::F64)
}

/// Two conversions into, or out of, one register: `aux` 0: d = {cvt a, cvt b} of two f32; 1: of the
/// halves of a (fp8 pairs and f16 pairs). The narrow elements have `imm >> 48` bits in d and
/// `imm >> 56` in a.
struct Pairs;

/// `aux` of [`Pairs`]: the source is a pair in one register.
const FROM_PAIR: u32 = 1;

impl Op for Pairs {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let cvt = Conversion::decode(inst.imm);
        let (to, from) = (inst.imm >> 48 & 0xFF, inst.imm >> 56);
        // SAFETY: op = [d, a] or [d, a, b], 32-bit slots (the selector).
        unsafe {
            let a = u32::read(warp, inst.op[1]);
            let b = if inst.aux == FROM_PAIR { a } else { u32::read(warp, inst.op[2]) };
            let mut out = [0u32; WARP];
            for lane in 0..WARP {
                let (high, low) = if inst.aux == FROM_PAIR {
                    (u64::from(a[lane]) >> from, u64::from(a[lane]) & ((1 << from) - 1))
                } else {
                    (u64::from(a[lane]), u64::from(b[lane]))
                };
                out[lane] = (cvt.apply(high) << to | cvt.apply(low)) as u32;
            }
            u32::write(warp, inst.op[0], &out, mask);
        }
        Flow::Next
    }
}

/// The element of a pair type, and its bits.
fn pair(part: &str) -> Option<(Scalar, u64)> {
    Some(match part {
        "f16x2" => (Scalar::F16, 16),
        "bf16x2" => (Scalar::Bf16, 16),
        "e4m3x2" => (Scalar::E4m3, 8),
        "e5m2x2" => (Scalar::E5m2, 8),
        _ => return None,
    })
}

fn pairs(query: &Query<'_>) -> Option<Selected> {
    let mut parts = Parts::of(query);
    let (to, to_bits) = parts.take_map(pair)?;
    let source = parts.take_map(pair);
    let (from, from_bits) = match source {
        Some(source) => source,
        None if parts.take("f32") => (Scalar::F32, 32),
        None => return None,
    };
    let rounding = parts.rounding()?;
    let (relu, satfinite) = (parts.take("relu"), parts.take("satfinite"));
    if !parts.done() {
        return None;
    }
    if source.is_none() && rounding == Rounding::Nearest && !relu && !satfinite {
        match to {
            Scalar::F16 => return Some(lanes::<PackF16>()),
            Scalar::Bf16 => return Some(lanes::<PackBf16>()),
            _ => {}
        }
    }
    let cvt =
        Conversion { to, from, rounding, integral: None, ftz: false, sat: false, relu, satfinite };
    let imm = cvt.encode() | to_bits << 48 | from_bits << 56;
    let dst = Arg::Dst(if to_bits == 16 { Type::B32 } else { Type::B16 });
    Some(match source {
        None => {
            let args = [dst, Arg::Src(Type::F32), Arg::Src(Type::F32)];
            Selected::scalar::<Pairs>(args).imm(imm)
        }
        Some(_) => {
            let src = Arg::Src(if from_bits == 16 { Type::B32 } else { Type::B16 });
            Selected::scalar::<Pairs>([dst, src]).imm(imm).aux(FROM_PAIR)
        }
    })
}

lane_fns! {
    PackU16(a: i32, b: i32) -> u32 {
        let half = |x: i32| x.clamp(0, 0xFFFF) as u32;
        half(a) << 16 | half(b)
    }
    PackS16(a: i32, b: i32) -> u32 {
        let half = |x: i32| x.clamp(-0x8000, 0x7FFF) as u32 & 0xFFFF;
        half(a) << 16 | half(b)
    }
    PackU8(a: i32, b: i32, c: u32) -> u32 {
        let byte = |x: i32| x.clamp(0, 0xFF) as u32;
        c << 16 | byte(a) << 8 | byte(b)
    }
    PackS8(a: i32, b: i32, c: u32) -> u32 {
        let byte = |x: i32| x.clamp(-0x80, 0x7F) as u32 & 0xFF;
        c << 16 | byte(a) << 8 | byte(b)
    }
    PackU4(a: i32, b: i32, c: u32) -> u32 {
        let nibble = |x: i32| x.clamp(0, 0xF) as u32;
        c << 8 | nibble(a) << 4 | nibble(b)
    }
    PackS4(a: i32, b: i32, c: u32) -> u32 {
        let nibble = |x: i32| x.clamp(-8, 7) as u32 & 0xF;
        c << 8 | nibble(a) << 4 | nibble(b)
    }
    PackU2(a: i32, b: i32, c: u32) -> u32 {
        let pair = |x: i32| x.clamp(0, 3) as u32;
        c << 4 | pair(a) << 2 | pair(b)
    }
    PackS2(a: i32, b: i32, c: u32) -> u32 {
        let pair = |x: i32| x.clamp(-2, 1) as u32 & 3;
        c << 4 | pair(a) << 2 | pair(b)
    }
}

/// `cvt.pack.sat.u16.s32 d, a, b`, `cvt.pack.sat.u8.s32.b32 d, a, b, c`.
fn pack(query: &Query<'_>) -> Option<Selected> {
    let names: Vec<&str> = query.name[1..].iter().map(String::as_str).collect();
    Some(match names[..] {
        ["pack", "sat", "u16", "s32"] => lanes_scalar::<PackU16>(),
        ["pack", "sat", "s16", "s32"] => lanes_scalar::<PackS16>(),
        ["pack", "sat", "u8", "s32", "b32"] => lanes_scalar::<PackU8>(),
        ["pack", "sat", "s8", "s32", "b32"] => lanes_scalar::<PackS8>(),
        ["pack", "sat", "u4", "s32", "b32"] => lanes_scalar::<PackU4>(),
        ["pack", "sat", "s4", "s32", "b32"] => lanes_scalar::<PackS4>(),
        ["pack", "sat", "u2", "s32", "b32"] => lanes_scalar::<PackU2>(),
        ["pack", "sat", "s2", "s32", "b32"] => lanes_scalar::<PackS2>(),
        _ => return None,
    })
}

/// This family's selector.
pub(crate) fn select(query: &Query<'_>) -> Option<Selected> {
    if query.part(0) != "cvt" {
        return None;
    }
    if query.part(1) == "pack" {
        return pack(query);
    }
    if let Some(selected) = pairs(query) {
        return Some(selected);
    }
    let mut parts = Parts::of(query);
    let from = parts.take_type()?;
    let to = parts.take_type()?;
    let integral = parts.take_map(|part| {
        Some(match part {
            "rni" => Rounding::Nearest,
            "rzi" => Rounding::Zero,
            "rmi" => Rounding::Down,
            "rpi" => Rounding::Up,
            _ => return None,
        })
    });
    let cvt = Conversion {
        to: scalar(to)?,
        from: scalar(from)?,
        integral,
        rounding: parts.rounding().unwrap_or(Rounding::Nearest),
        ftz: parts.take("ftz"),
        sat: parts.take("sat"),
        relu: parts.take("relu"),
        satfinite: parts.take("satfinite"),
    };
    if !parts.done() {
        return None;
    }
    let fast = match (is_float(to), is_float(from)) {
        _ if cvt.relu || cvt.satfinite => None,
        (false, false) if !cvt.sat => int_to_int(to, from),
        (true, false) if !cvt.sat && cvt.rounding == Rounding::Nearest => int_to_float(to, from),
        // Floats are clamped to the integer's range in any case, and subnormals are nearest to 0.
        (false, true) => match cvt.integral? {
            Rounding::Down | Rounding::Up if cvt.ftz => None,
            rounding => to_int(to, from, rounding),
        },
        (true, true) => float_to_float(to, from, &cvt),
        _ => None,
    };
    fast.or_else(|| general(to, from, &cvt))
}
