//! `mov`: copies, and packing and unpacking of vectors.

use super::lanewise::{Parts, Typed, lane_fns, lanes};
use super::{Arg, Flow, Isa, Op, Query, Selected, Warp};
use crate::code::Inst;
use crate::spec::WARP;
use kedge_ptx::ast::{Operand, Type};
use std::marker::PhantomData;

lane_fns! {
    Copy16(a: u16) -> u16 { a }
    Copy32(a: u32) -> u32 { a }
    Copy64(a: u64) -> u64 { a }
    Pack2x8(a: u8, b: u8) -> u16 { u16::from_le_bytes([a, b]) }
    Pack4x8(a: u8, b: u8, c: u8, d: u8) -> u32 { u32::from_le_bytes([a, b, c, d]) }
    Pack2x16(a: u16, b: u16) -> u32 { u32::from(a) | u32::from(b) << 16 }
    Pack4x16(a: u16, b: u16, c: u16, d: u16) -> u64 {
        u64::from(a) | u64::from(b) << 16 | u64::from(c) << 32 | u64::from(d) << 48
    }
    Pack2x32(a: u32, b: u32) -> u64 { u64::from(a) | u64::from(b) << 32 }
}

/// Splits a register into `N` parts of E, lowest first.
struct Unpack<S, E, const N: usize>(PhantomData<(S, E)>);

impl<S: Typed + Into<u64>, E: Typed + TryFrom<u64>, const N: usize> Op for Unpack<S, E, N> {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let width = size_of::<E>() * 8;
        let part = u64::MAX >> (64 - width);
        // SAFETY: op = [d0, …, dN-1, a] (the selector).
        unsafe {
            let source = S::read(warp, inst.op[N]);
            for index in 0..N {
                let mut out = [E::default(); WARP];
                for lane in 0..WARP {
                    let bits: u64 = source[lane].into();
                    out[lane] = E::try_from(bits >> (index * width) & part).unwrap_or_default();
                }
                E::write(warp, inst.op[index], &out, mask);
            }
        }
        Flow::Next
    }
}

/// `mov.b128 d, {a, b}`: a 128-bit register is a pair of slots.
struct Pack2x64;

impl Op for Pack2x64 {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: op = [d, a, b] (the selector).
        unsafe {
            let halves = [1, 2].map(|at| *warp.row64(inst.op[at]));
            warp.set64(inst.op[0], &halves[0], mask);
            warp.set64(inst.op[0] + 1, &halves[1], mask);
        }
        Flow::Next
    }
}

/// `mov.b128 {a, b}, s`.
struct Unpack2x64;

impl Op for Unpack2x64 {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: op = [a, b, s] (the selector).
        unsafe {
            let halves = [0, 1].map(|half| *warp.row64(inst.op[2] + half));
            warp.set64(inst.op[0], &halves[0], mask);
            warp.set64(inst.op[1], &halves[1], mask);
        }
        Flow::Next
    }
}

/// `mov.b128 d, s`.
struct Copy128;

impl Op for Copy128 {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: op = [d, s] (the selector).
        unsafe {
            let halves = [0, 1].map(|half| *warp.row64(inst.op[1] + half));
            warp.set64(inst.op[0], &halves[0], mask);
            warp.set64(inst.op[0] + 1, &halves[1], mask);
        }
        Flow::Next
    }
}

/// `mov.pred d, a`.
struct CopyPred;

impl Op for CopyPred {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: op = [d, a], predicate slots (the selector).
        unsafe {
            let bits = warp.pred(inst.op[1]);
            warp.set_pred(inst.op[0], bits, mask);
        }
        Flow::Next
    }
}

/// This family's selector. Addresses of symbols and special registers arrive as values.
pub(crate) fn select(query: &Query<'_>) -> Option<Selected> {
    if query.part(0) != "mov" {
        return None;
    }
    let mut parts = Parts::of(query);
    let ty = parts.take_type()?;
    if !parts.done() {
        return None;
    }
    let vector = |index| match query.operand(index) {
        Some(Operand::Vector(items)) => items.len(),
        _ => 0,
    };
    match (vector(0), vector(1)) {
        (0, 0) => copy(ty),
        (0, count) => pack(ty, count),
        (count, 0) => unpack(ty, count),
        _ => None,
    }
}

/// Selects `mov.ty d, a` of a register or constant; None for a type that `mov` lacks.
pub(crate) fn copy(ty: Type) -> Option<Selected> {
    let args = [Arg::Dst(ty), Arg::Src(ty)];
    let mut selected = match (ty, ty.size()) {
        (Type::Pred, _) => return Some(Selected::scalar::<CopyPred>(args)),
        (_, 16) => return Some(Selected::scalar::<Copy128>(args)),
        (_, 2) => lanes::<Copy16>(),
        (_, 4) => lanes::<Copy32>(),
        (_, 8) => lanes::<Copy64>(),
        _ => return None,
    };
    // An `0f…` constant must be read as the instruction's own type.
    selected.args = args.into();
    Some(selected)
}

fn pack(ty: Type, count: usize) -> Option<Selected> {
    Some(match (ty.size(), count) {
        (2, 2) => lanes::<Pack2x8>(),
        (4, 4) => lanes::<Pack4x8>(),
        (4, 2) => lanes::<Pack2x16>(),
        (8, 4) => lanes::<Pack4x16>(),
        (8, 2) => lanes::<Pack2x32>(),
        (16, 2) => {
            let args = [Arg::Dst(ty), Arg::Src(Type::B64), Arg::Src(Type::B64)];
            Selected::scalar::<Pack2x64>(args)
        }
        _ => return None,
    })
}

fn unpack(ty: Type, count: usize) -> Option<Selected> {
    fn args<S: Typed, E: Typed>(count: usize) -> Vec<Arg> {
        let mut args = vec![Arg::Dst(E::TYPE); count];
        args.push(Arg::Src(S::TYPE));
        args
    }
    Some(match (ty.size(), count) {
        (2, 2) => Selected::scalar::<Unpack<u16, u8, 2>>(args::<u16, u8>(2)),
        (4, 4) => Selected::scalar::<Unpack<u32, u8, 4>>(args::<u32, u8>(4)),
        (4, 2) => Selected::new::<Unpack<u32, u16, 2>>(args::<u32, u16>(2)),
        (8, 4) => Selected::new::<Unpack<u64, u16, 4>>(args::<u64, u16>(4)),
        (8, 2) => Selected::new::<Unpack<u64, u32, 2>>(args::<u64, u32>(2)),
        (16, 2) => {
            let args = [Arg::Dst(Type::B64), Arg::Dst(Type::B64), Arg::Src(ty)];
            Selected::scalar::<Unpack2x64>(args)
        }
        _ => return None,
    })
}
