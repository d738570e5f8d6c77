//! Integer arithmetic: sums, products, division, minimum, maximum, dot products.

use super::lanewise::{Parts, by_bits, by_int, by_type, lane_fns, lanes, lanes_avx2, lanes_scalar};
use super::{Query, Selected};
use crate::math::int::{self, Int};
use kedge_ptx::ast::Type;

lane_fns! {
    <T: Int> Add(a: T, b: T) -> T { a.add(b) }
    <T: Int> Sub(a: T, b: T) -> T { a.sub(b) }
    <T: Int> MulLo(a: T, b: T) -> T { a.mul_lo(b) }
    <T: Int> MulHi(a: T, b: T) -> T { a.mul_hi(b) }
    <T: Int> MadLo(a: T, b: T, c: T) -> T { a.mul_lo(b).add(c) }
    <T: Int> MadHi(a: T, b: T, c: T) -> T { a.mul_hi(b).add(c) }
    <T: Int> Sad(a: T, b: T, c: T) -> T { c.add(a.distance(b)) }
    <T: Int> Div(a: T, b: T) -> T { a.div(b) }
    <T: Int> Rem(a: T, b: T) -> T { a.rem(b) }
    <T: Int> Abs(a: T) -> T { a.abs() }
    <T: Int> Neg(a: T) -> T { a.neg() }
    <T: Int> Min(a: T, b: T) -> T { if a < b { a } else { b } }
    <T: Int> Max(a: T, b: T) -> T { if a > b { a } else { b } }
    <T: Int> MinRelu(a: T, b: T) -> T { a.min(b).max(T::default()) }
    <T: Int> MaxRelu(a: T, b: T) -> T { a.max(b).max(T::default()) }

    DivU32(a: u32, b: u32) -> u32 { int::div_u32(a, b) }
    DivS32(a: i32, b: i32) -> i32 { int::div_s32(a, b) }
    RemU32(a: u32, b: u32) -> u32 { int::rem_u32(a, b) }
    RemS32(a: i32, b: i32) -> i32 { int::rem_s32(a, b) }
    AddSat(a: i32, b: i32) -> i32 { a.saturating_add(b) }
    SubSat(a: i32, b: i32) -> i32 { a.saturating_sub(b) }
    MadHiSat(a: i32, b: i32, c: i32) -> i32 { a.mul_hi(b).saturating_add(c) }
    MulWideU16(a: u16, b: u16) -> u32 { a.mul_wide(b) }
    MulWideS16(a: i16, b: i16) -> i32 { a.mul_wide(b) }
    MulWideU32(a: u32, b: u32) -> u64 { a.mul_wide(b) }
    MulWideS32(a: i32, b: i32) -> i64 { a.mul_wide(b) }
    MadWideU16(a: u16, b: u16, c: u32) -> u32 { a.mul_wide(b).wrapping_add(c) }
    MadWideS16(a: i16, b: i16, c: i32) -> i32 { a.mul_wide(b).wrapping_add(c) }
    MadWideU32(a: u32, b: u32, c: u64) -> u64 { a.mul_wide(b).wrapping_add(c) }
    MadWideS32(a: i32, b: i32, c: i64) -> i64 { a.mul_wide(b).wrapping_add(c) }
    Add3(a: u32, b: u32, c: u32) -> u32 { a.wrapping_add(b).wrapping_add(c) }
    Mul24LoU(a: u32, b: u32) -> u32 { int::mul24_lo_u32(a, b) }
    Mul24LoS(a: i32, b: i32) -> i32 { int::mul24_lo_s32(a, b) }
    Mul24HiU(a: u32, b: u32) -> u32 { int::mul24_hi_u32(a, b) }
    Mul24HiS(a: i32, b: i32) -> i32 { int::mul24_hi_s32(a, b) }
    Mad24LoU(a: u32, b: u32, c: u32) -> u32 { int::mul24_lo_u32(a, b).wrapping_add(c) }
    Mad24LoS(a: i32, b: i32, c: i32) -> i32 { int::mul24_lo_s32(a, b).wrapping_add(c) }
    Mad24HiU(a: u32, b: u32, c: u32) -> u32 { int::mul24_hi_u32(a, b).wrapping_add(c) }
    Mad24HiS(a: i32, b: i32, c: i32) -> i32 { int::mul24_hi_s32(a, b).wrapping_add(c) }
    Mad24HiSat(a: i32, b: i32, c: i32) -> i32 { int::mul24_hi_s32(a, b).saturating_add(c) }

    Dp4aUU(a: u32, b: u32, c: u32) -> u32 { int::dp4a::<false, false>(a, b, c) }
    Dp4aUS(a: u32, b: u32, c: u32) -> u32 { int::dp4a::<false, true>(a, b, c) }
    Dp4aSU(a: u32, b: u32, c: u32) -> u32 { int::dp4a::<true, false>(a, b, c) }
    Dp4aSS(a: u32, b: u32, c: u32) -> u32 { int::dp4a::<true, true>(a, b, c) }
    Dp2aUULo(a: u32, b: u32, c: u32) -> u32 { int::dp2a::<false, false, false>(a, b, c) }
    Dp2aUSLo(a: u32, b: u32, c: u32) -> u32 { int::dp2a::<false, true, false>(a, b, c) }
    Dp2aSULo(a: u32, b: u32, c: u32) -> u32 { int::dp2a::<true, false, false>(a, b, c) }
    Dp2aSSLo(a: u32, b: u32, c: u32) -> u32 { int::dp2a::<true, true, false>(a, b, c) }
    Dp2aUUHi(a: u32, b: u32, c: u32) -> u32 { int::dp2a::<false, false, true>(a, b, c) }
    Dp2aUSHi(a: u32, b: u32, c: u32) -> u32 { int::dp2a::<false, true, true>(a, b, c) }
    Dp2aSUHi(a: u32, b: u32, c: u32) -> u32 { int::dp2a::<true, false, true>(a, b, c) }
    Dp2aSSHi(a: u32, b: u32, c: u32) -> u32 { int::dp2a::<true, true, true>(a, b, c) }

    AddS16x2(a: u32, b: u32) -> u32 { halves(a, b, u16::wrapping_add) }
    MinS16x2(a: u32, b: u32) -> u32 { halves(a, b, |x, y| (x as i16).min(y as i16) as u16) }
    MaxS16x2(a: u32, b: u32) -> u32 { halves(a, b, |x, y| (x as i16).max(y as i16) as u16) }
    MinU16x2(a: u32, b: u32) -> u32 { halves(a, b, u16::min) }
    MaxU16x2(a: u32, b: u32) -> u32 { halves(a, b, u16::max) }
    MinReluS16x2(a: u32, b: u32) -> u32 {
        halves(a, b, |x, y| (x as i16).min(y as i16).max(0) as u16)
    }
    MaxReluS16x2(a: u32, b: u32) -> u32 {
        halves(a, b, |x, y| (x as i16).max(y as i16).max(0) as u16)
    }
}

/// `f` of the low and of the high halves.
#[inline(always)]
fn halves(a: u32, b: u32, f: impl Fn(u16, u16) -> u16) -> u32 {
    let low = f(a as u16, b as u16);
    let high = f((a >> 16) as u16, (b >> 16) as u16);
    u32::from(low) | u32::from(high) << 16
}

/// This family's selector.
pub(crate) fn select(query: &Query<'_>) -> Option<Selected> {
    let mut parts = Parts::of(query);
    match query.part(0) {
        "dp4a" | "dp2a" => return dot_product(query),
        "add" | "sub" | "mul" | "mad" | "mul24" | "mad24" | "sad" | "div" | "rem" | "abs"
        | "neg" | "min" | "max" => {}
        _ => return None,
    }
    if let Some(selected) = packed(query) {
        return Some(selected);
    }
    let sat = parts.take("sat");
    // nvcc writes `max.s32.relu`, the reference `max.relu.s32`.
    let relu = parts.take("relu");
    let ty = parts.take_type()?;
    let half = parts.take_first();
    if !parts.done() {
        return None;
    }
    match (query.part(0), half, sat, relu) {
        ("add", None, false, false) => by_bits!(ty, Add),
        ("sub", None, false, false) => by_bits!(ty, Sub),
        ("sad", None, false, false) => by_int!(ty, Sad, lanes_scalar),
        ("div", None, false, false) if ty == Type::U32 => Some(lanes::<DivU32>()),
        ("div", None, false, false) if ty == Type::S32 => Some(lanes::<DivS32>()),
        ("rem", None, false, false) if ty == Type::U32 => Some(lanes::<RemU32>()),
        ("rem", None, false, false) if ty == Type::S32 => Some(lanes::<RemS32>()),
        ("div", None, false, false) => by_int!(ty, Div, lanes_scalar),
        ("rem", None, false, false) => by_int!(ty, Rem, lanes_scalar),
        ("abs", None, false, false) => by_type!(ty, Abs: S16 => i16, S32 => i32, S64 => i64),
        ("neg", None, false, false) => by_type!(ty, Neg: S16 => i16, S32 => i32, S64 => i64),
        ("min", None, false, false) => by_int!(ty, Min),
        ("max", None, false, false) => by_int!(ty, Max),
        ("min", None, false, true) => by_type!(ty, MinRelu: S32 => i32),
        ("max", None, false, true) => by_type!(ty, MaxRelu: S32 => i32),
        ("add", None, true, false) if ty == Type::S32 => Some(lanes::<AddSat>()),
        ("sub", None, true, false) if ty == Type::S32 => Some(lanes::<SubSat>()),
        (_, Some(half), sat, false) => product(query.part(0), half, ty, sat),
        _ => None,
    }
}

fn product(opcode: &str, half: &str, ty: Type, sat: bool) -> Option<Selected> {
    if sat {
        return match (opcode, half, ty) {
            ("mad", "hi", Type::S32) => Some(lanes_scalar::<MadHiSat>()),
            ("mad24", "hi", Type::S32) => Some(lanes_scalar::<Mad24HiSat>()),
            _ => None,
        };
    }
    match (opcode, half, ty) {
        ("mul", "lo", _) => by_bits!(ty, MulLo),
        ("mul", "hi", _) => by_int!(ty, MulHi),
        ("mad", "lo", _) => by_bits!(ty, MadLo),
        ("mad", "hi", _) => by_int!(ty, MadHi, lanes_scalar),
        ("mul", "wide", Type::U16) => Some(lanes_avx2::<MulWideU16>()),
        ("mul", "wide", Type::S16) => Some(lanes_avx2::<MulWideS16>()),
        ("mul", "wide", Type::U32) => Some(lanes::<MulWideU32>()),
        ("mul", "wide", Type::S32) => Some(lanes::<MulWideS32>()),
        ("mad", "wide", Type::U16) => Some(lanes_avx2::<MadWideU16>()),
        ("mad", "wide", Type::S16) => Some(lanes_avx2::<MadWideS16>()),
        ("mad", "wide", Type::U32) => Some(lanes::<MadWideU32>()),
        ("mad", "wide", Type::S32) => Some(lanes::<MadWideS32>()),
        ("mul24", "lo", Type::U32) => Some(lanes_avx2::<Mul24LoU>()),
        ("mul24", "lo", Type::S32) => Some(lanes_avx2::<Mul24LoS>()),
        ("mul24", "hi", Type::U32) => Some(lanes_avx2::<Mul24HiU>()),
        ("mul24", "hi", Type::S32) => Some(lanes_avx2::<Mul24HiS>()),
        ("mad24", "lo", Type::U32) => Some(lanes_avx2::<Mad24LoU>()),
        ("mad24", "lo", Type::S32) => Some(lanes_avx2::<Mad24LoS>()),
        ("mad24", "hi", Type::U32) => Some(lanes_avx2::<Mad24HiU>()),
        ("mad24", "hi", Type::S32) => Some(lanes_avx2::<Mad24HiS>()),
        _ => None,
    }
}

/// Two 16-bit numbers in a register.
fn packed(query: &Query<'_>) -> Option<Selected> {
    let mut parts = Parts::of(query);
    let signed = parts.take("s16x2");
    if !signed && !parts.take("u16x2") {
        return None;
    }
    let relu = parts.take("relu");
    if !parts.done() {
        return None;
    }
    match (query.part(0), signed, relu) {
        ("add", _, false) => Some(lanes_avx2::<AddS16x2>()),
        ("min", true, false) => Some(lanes_avx2::<MinS16x2>()),
        ("max", true, false) => Some(lanes_avx2::<MaxS16x2>()),
        ("min", false, false) => Some(lanes_avx2::<MinU16x2>()),
        ("max", false, false) => Some(lanes_avx2::<MaxU16x2>()),
        ("min", true, true) => Some(lanes_avx2::<MinReluS16x2>()),
        ("max", true, true) => Some(lanes_avx2::<MaxReluS16x2>()),
        _ => None,
    }
}

/// `dp4a.atype.btype`, `dp2a.lo.atype.btype`.
fn dot_product(query: &Query<'_>) -> Option<Selected> {
    let mut parts = Parts::of(query);
    let signed = |ty| match ty {
        Type::S32 => Some(true),
        Type::U32 => Some(false),
        _ => None,
    };
    let b = signed(parts.take_type()?)?;
    let a = signed(parts.take_type()?)?;
    let half = parts.take_first();
    if !parts.done() {
        return None;
    }
    match (query.part(0), half, a, b) {
        ("dp4a", None, false, false) => Some(lanes::<Dp4aUU>()),
        ("dp4a", None, false, true) => Some(lanes::<Dp4aUS>()),
        ("dp4a", None, true, false) => Some(lanes::<Dp4aSU>()),
        ("dp4a", None, true, true) => Some(lanes::<Dp4aSS>()),
        ("dp2a", Some("lo"), false, false) => Some(lanes_avx2::<Dp2aUULo>()),
        ("dp2a", Some("lo"), false, true) => Some(lanes_avx2::<Dp2aUSLo>()),
        ("dp2a", Some("lo"), true, false) => Some(lanes_avx2::<Dp2aSULo>()),
        ("dp2a", Some("lo"), true, true) => Some(lanes_avx2::<Dp2aSSLo>()),
        ("dp2a", Some("hi"), false, false) => Some(lanes_avx2::<Dp2aUUHi>()),
        ("dp2a", Some("hi"), false, true) => Some(lanes_avx2::<Dp2aUSHi>()),
        ("dp2a", Some("hi"), true, false) => Some(lanes_avx2::<Dp2aSUHi>()),
        ("dp2a", Some("hi"), true, true) => Some(lanes_avx2::<Dp2aSSHi>()),
        _ => None,
    }
}
