//! Logic, shifts, bit fields, permutations.

use super::lanewise::{Inputs, Parts, by_bits, by_int, lane_fns, lanes};
use super::{Arg, Flow, Isa, Lane, Op, Query, Selected, Warp};
use crate::code::Inst;
use crate::math::bits;
use crate::math::int::Int;
use crate::spec::WARP;
use kedge_ptx::ast::{Operand, Type};

/// Bits of registers.
pub(crate) trait Word:
    Int
    + std::ops::BitAnd<Output = Self>
    + std::ops::BitOr<Output = Self>
    + std::ops::BitXor<Output = Self>
    + std::ops::Not<Output = Self>
{
}
impl Word for u16 {}
impl Word for u32 {}
impl Word for u64 {}

lane_fns! {
    <T: Word> And(a: T, b: T) -> T { a & b }
    <T: Word> Or(a: T, b: T) -> T { a | b }
    <T: Word> Xor(a: T, b: T) -> T { a ^ b }
    <T: Word> Not(a: T) -> T { !a }
    <T: Word> Shl(a: T, b: u32) -> T { a.shl(b) }
    <T: Int> Shr(a: T, b: u32) -> T { a.shr(b) }

    // Pairs of steps.
    AddAnd(a: u32, b: u32, c: u32) -> u32 { a.wrapping_add(b) & c }
    AddShl(a: u32, b: u32, c: u32) -> u32 { Int::shl(a.wrapping_add(b), c) }
    AndShl(a: u32, b: u32, c: u32) -> u32 { Int::shl(a & b, c) }
    ShlAdd(a: u32, b: u32, c: u32) -> u32 { Int::shl(a, b).wrapping_add(c) }
    ShlAnd(a: u32, b: u32, c: u32) -> u32 { Int::shl(a, b) & c }

    Cnot16(a: u16) -> u16 { u16::from(a == 0) }
    Cnot32(a: u32) -> u32 { u32::from(a == 0) }
    Cnot64(a: u64) -> u64 { u64::from(a == 0) }
    Popc32(a: u32) -> u32 { a.count_ones() }
    Popc64(a: u64) -> u32 { a.count_ones() }
    Clz32(a: u32) -> u32 { a.leading_zeros() }
    Clz64(a: u64) -> u32 { a.leading_zeros() }
    Brev32(a: u32) -> u32 { a.reverse_bits() }
    Brev64(a: u64) -> u64 { a.reverse_bits() }
    BfindU32(a: u32) -> u32 { bits::bfind_u32(a) }
    BfindS32(a: i32) -> u32 { bits::bfind_u32((a ^ a >> 31) as u32) }
    BfindU64(a: u64) -> u32 { bits::bfind_u64(a) }
    BfindS64(a: i64) -> u32 { bits::bfind_u64((a ^ a >> 63) as u64) }
    ShiftAmtU32(a: u32) -> u32 { shift_amount(bits::bfind_u32(a), 31) }
    ShiftAmtS32(a: i32) -> u32 { shift_amount(bits::bfind_u32((a ^ a >> 31) as u32), 31) }
    ShiftAmtU64(a: u64) -> u32 { shift_amount(bits::bfind_u64(a), 63) }
    ShiftAmtS64(a: i64) -> u32 { shift_amount(bits::bfind_u64((a ^ a >> 63) as u64), 63) }
    BfeU32(a: u32, b: u32, c: u32) -> u32 { bits::bfe_u32(a, b, c) }
    BfeS32(a: u32, b: u32, c: u32) -> u32 { bits::bfe_s32(a, b, c) }
    BfeU64(a: u64, b: u32, c: u32) -> u64 { bits::bfe_u64(a, b, c) }
    BfeS64(a: u64, b: u32, c: u32) -> u64 { bits::bfe_s64(a, b, c) }
    Bfi32(a: u32, b: u32, c: u32, d: u32) -> u32 { bits::bfi_b32(a, b, c, d) }
    Bfi64(a: u64, b: u64, c: u32, d: u32) -> u64 { bits::bfi_b64(a, b, c, d) }
    BmskClamp(a: u32, b: u32) -> u32 { bits::bmsk(a, b, true) }
    BmskWrap(a: u32, b: u32) -> u32 { bits::bmsk(a, b, false) }
    SzextClampU(a: u32, b: u32) -> u32 { bits::szext(a, b, true, false) }
    SzextClampS(a: u32, b: u32) -> u32 { bits::szext(a, b, true, true) }
    SzextWrapU(a: u32, b: u32) -> u32 { bits::szext(a, b, false, false) }
    SzextWrapS(a: u32, b: u32) -> u32 { bits::szext(a, b, false, true) }
    Fns(a: u32, b: u32, c: i32) -> u32 { bits::fns(a, b, c) }
    ShfLeftClamp(a: u32, b: u32, c: u32) -> u32 { bits::funnel_left(a, b, c.min(32)) }
    ShfLeftWrap(a: u32, b: u32, c: u32) -> u32 { bits::funnel_left(a, b, c & 31) }
    ShfRightClamp(a: u32, b: u32, c: u32) -> u32 { bits::funnel_right(a, b, c.min(32)) }
    ShfRightWrap(a: u32, b: u32, c: u32) -> u32 { bits::funnel_right(a, b, c & 31) }
    Prmt(a: u32, b: u32, c: u32) -> u32 { bits::prmt(a, b, c) }
}

/// `bfind.shiftamt`: how far the found bit is from the top one.
#[inline(always)]
fn shift_amount(found: u32, top: u32) -> u32 {
    if found == u32::MAX { found } else { top - found }
}

/// `lop3.b32` with its table in `imm`.
struct Lop3;

impl Op for Lop3 {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let table = inst.imm as u8;
        // SAFETY: op = [d, a, b, c], 32-bit slots (the selector).
        unsafe {
            let (a, b, c) = <(u32, u32, u32)>::read(warp, &inst.op[1..]);
            let mut out = [0u32; WARP];
            for lane in 0..WARP {
                out[lane] = bits::lop3(a[lane], b[lane], c[lane], table);
            }
            u32::write(warp, inst.op[0], &out, mask);
        }
        Flow::Next
    }
}

/// `lop3.and/or/xor.b32 d|p, a, b, c, table, q`: p = (d ≠ 0) op q, with aux 0, 1, 2 for op.
struct Lop3Pred;

impl Op for Lop3Pred {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let table = inst.imm as u8;
        // SAFETY: op = [d, p, a, b, c, q] (the selector): d, a, b, c 32-bit slots.
        unsafe {
            let (a, b, c) = <(u32, u32, u32)>::read(warp, &inst.op[2..]);
            let mut out = [0u32; WARP];
            let mut set = 0;
            for lane in 0..WARP {
                out[lane] = bits::lop3(a[lane], b[lane], c[lane], table);
                set |= u32::from(out[lane] != 0) << lane;
            }
            let other = warp.pred(inst.op[5]);
            let combined = match inst.aux {
                0 => set & other,
                1 => set | other,
                _ => set ^ other,
            };
            u32::write(warp, inst.op[0], &out, mask);
            warp.set_pred(inst.op[1], combined, mask);
        }
        Flow::Next
    }
}

/// `prmt` in a named mode: `imm` holds the four selectors, the low two bits of c choose.
struct PrmtMode;

impl Op for PrmtMode {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: op = [d, a, b, c], 32-bit slots (the selector).
        unsafe {
            let (a, b, c) = <(u32, u32, u32)>::read(warp, &inst.op[1..]);
            let mut out = [0u32; WARP];
            for lane in 0..WARP {
                let selector = (inst.imm >> (16 * (c[lane] & 3))) as u32 & 0xFFFF;
                out[lane] = bits::prmt(a[lane], b[lane], selector);
            }
            u32::write(warp, inst.op[0], &out, mask);
        }
        Flow::Next
    }
}

/// Logic on predicates: `imm` is the truth table, bit a·2 + b.
struct PredLogic;

impl Op for PredLogic {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let table = |bit: u64| 0u32.wrapping_sub((inst.imm >> bit) as u32 & 1);
        // SAFETY: op = [d, a, b], predicate slots (the selector).
        unsafe {
            let (a, b) = (warp.pred(inst.op[1]), warp.pred(inst.op[2]));
            let bits =
                table(0) & !a & !b | table(1) & !a & b | table(2) & a & !b | table(3) & a & b;
            warp.set_pred(inst.op[0], bits, mask);
        }
        Flow::Next
    }
}

/// `not.pred d, a`.
struct PredNot;

impl Op for PredNot {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: op = [d, a], predicate slots (the selector).
        unsafe {
            let bits = !warp.pred(inst.op[1]);
            warp.set_pred(inst.op[0], bits, mask);
        }
        Flow::Next
    }
}

/// This family's selector.
pub(crate) fn select(query: &Query<'_>) -> Option<Selected> {
    let opcode = query.part(0);
    let mut parts = Parts::of(query);
    match opcode {
        "lop3" => return lop3(query),
        "prmt" => return prmt(&mut parts),
        "shf" => return funnel(&mut parts),
        _ => {}
    }
    let ty = parts.take_type()?;
    if ty == Type::Pred {
        return if parts.done() { pred_logic(opcode) } else { None };
    }
    let shift_amount = parts.take("shiftamt");
    let wrap = parts.take("wrap");
    let clamp = parts.take("clamp");
    if !parts.done() || (shift_amount && opcode != "bfind") {
        return None;
    }
    match (opcode, ty) {
        ("bmsk", Type::B32) if clamp => return Some(lanes::<BmskClamp>()),
        ("bmsk", Type::B32) if wrap => return Some(lanes::<BmskWrap>()),
        ("szext", Type::U32) if clamp => return Some(lanes::<SzextClampU>()),
        ("szext", Type::S32) if clamp => return Some(lanes::<SzextClampS>()),
        ("szext", Type::U32) if wrap => return Some(lanes::<SzextWrapU>()),
        ("szext", Type::S32) if wrap => return Some(lanes::<SzextWrapS>()),
        _ if wrap || clamp => return None,
        _ => {}
    }
    match (opcode, ty) {
        ("and", _) => by_bits!(ty, And),
        ("or", _) => by_bits!(ty, Or),
        ("xor", _) => by_bits!(ty, Xor),
        ("not", _) => by_bits!(ty, Not),
        ("shl", _) => by_bits!(ty, Shl),
        ("shr", Type::B16 | Type::B32 | Type::B64) => by_bits!(ty, Shr),
        ("shr", _) => by_int!(ty, Shr),
        ("cnot", Type::B16) => Some(lanes::<Cnot16>()),
        ("cnot", Type::B32) => Some(lanes::<Cnot32>()),
        ("cnot", Type::B64) => Some(lanes::<Cnot64>()),
        ("popc", Type::B32) => Some(lanes::<Popc32>()),
        ("popc", Type::B64) => Some(lanes::<Popc64>()),
        ("clz", Type::B32) => Some(lanes::<Clz32>()),
        ("clz", Type::B64) => Some(lanes::<Clz64>()),
        ("brev", Type::B32) => Some(lanes::<Brev32>()),
        ("brev", Type::B64) => Some(lanes::<Brev64>()),
        ("bfind", Type::U32) if shift_amount => Some(lanes::<ShiftAmtU32>()),
        ("bfind", Type::S32) if shift_amount => Some(lanes::<ShiftAmtS32>()),
        ("bfind", Type::U64) if shift_amount => Some(lanes::<ShiftAmtU64>()),
        ("bfind", Type::S64) if shift_amount => Some(lanes::<ShiftAmtS64>()),
        ("bfind", Type::U32) => Some(lanes::<BfindU32>()),
        ("bfind", Type::S32) => Some(lanes::<BfindS32>()),
        ("bfind", Type::U64) => Some(lanes::<BfindU64>()),
        ("bfind", Type::S64) => Some(lanes::<BfindS64>()),
        ("bfe", Type::U32) => Some(lanes::<BfeU32>()),
        ("bfe", Type::S32) => Some(lanes::<BfeS32>()),
        ("bfe", Type::U64) => Some(lanes::<BfeU64>()),
        ("bfe", Type::S64) => Some(lanes::<BfeS64>()),
        ("bfi", Type::B32) => Some(lanes::<Bfi32>()),
        ("bfi", Type::B64) => Some(lanes::<Bfi64>()),
        ("fns", Type::B32) => Some(lanes::<Fns>()),
        _ => None,
    }
}

fn pred_logic(opcode: &str) -> Option<Selected> {
    const PRED: Type = Type::Pred;
    let table = match opcode {
        "not" => return Some(Selected::scalar::<PredNot>([Arg::Dst(PRED), Arg::Src(PRED)])),
        "and" => 0b1000,
        "or" => 0b1110,
        "xor" => 0b0110,
        _ => return None,
    };
    let args = [Arg::Dst(PRED), Arg::Src(PRED), Arg::Src(PRED)];
    Some(Selected::scalar::<PredLogic>(args).imm(table))
}

fn lop3(query: &Query<'_>) -> Option<Selected> {
    const WORD: Type = Type::B32;
    let mut parts = Parts::of(query);
    if parts.take_type()? != WORD {
        return None;
    }
    let combine = parts.take_map(|part| ["and", "or", "xor"].iter().position(|p| *p == part));
    if !parts.done() {
        return None;
    }
    let source = Arg::Src(WORD);
    match (combine, query.operand(0)?) {
        (None, Operand::Pair(..)) => None,
        (None, _) => {
            let args = [Arg::Dst(WORD), source, source, source, Arg::Imm];
            Some(Selected::new::<Lop3>(args))
        }
        (Some(op), Operand::Pair(..)) => {
            let pred = Arg::Src(Type::Pred);
            let dst = [Arg::Dst(WORD), Arg::Dst(Type::Pred)];
            let args = [&dst[..], &[source, source, source, Arg::Imm, pred]].concat();
            Some(Selected::new::<Lop3Pred>(args).aux(op as u32))
        }
        _ => None,
    }
}

fn prmt(parts: &mut Parts<'_>) -> Option<Selected> {
    // The mode stands after the type: `prmt.b32.f4e`.
    if !parts.take("b32") {
        return None;
    }
    let Some(mode) = parts.take_first() else { return Some(lanes::<Prmt>()) };
    let selectors = bits::prmt_mode(mode.as_bytes())?;
    let packed = selectors.iter().rev().fold(0, |all, one| all << 16 | u64::from(*one));
    let word = Type::B32;
    let args = [Arg::Dst(word), Arg::Src(word), Arg::Src(word), Arg::Src(word)];
    parts.done().then(|| Selected::scalar::<PrmtMode>(args).imm(packed))
}

fn funnel(parts: &mut Parts<'_>) -> Option<Selected> {
    let direction = parts.take_first()?;
    let mode = parts.take_first()?;
    if parts.take_type()? != Type::B32 || !parts.done() {
        return None;
    }
    Some(match (direction, mode) {
        ("l", "clamp") => lanes::<ShfLeftClamp>(),
        ("l", "wrap") => lanes::<ShfLeftWrap>(),
        ("r", "clamp") => lanes::<ShfRightClamp>(),
        ("r", "wrap") => lanes::<ShfRightWrap>(),
        _ => return None,
    })
}
