//! Steps that lowering adds around instructions: widths, signs, negated predicates.

use super::control::lanes_where;
use super::{Flow, Isa, Op, Warp, map1};
use crate::code::Inst;

macro_rules! adapt {
    ($($(#[$doc:meta])* $name:ident: |$a:ident: $from:ty| -> $to:ty { $body:expr })*) => {
        $($(#[$doc])*
        pub(crate) struct $name;

        impl Op for $name {
            #[inline(always)]
            unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
                // SAFETY: lowering emits it with operands of these banks.
                unsafe { map1(warp, inst, mask, |$a: $from| -> $to { $body }) }
            }
        })*
    };
}

adapt! {
    /// The low half of a 64-bit register.
    Truncate: |a: u64| -> u32 { a as u32 }
    ZeroExtend: |a: u32| -> u64 { u64::from(a) }
    SignExtend: |a: i32| -> i64 { i64::from(a) }
    Neg32: |a: u32| -> u32 { a.wrapping_neg() }
    Neg64: |a: u64| -> u64 { a.wrapping_neg() }
    NegF32: |a: f32| -> f32 { -a }
    NegF64: |a: f64| -> f64 { -a }
}

/// `d = !p`.
pub(crate) struct NotPred;

impl Op for NotPred {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: lowering emits it with two predicates.
        unsafe {
            let value = !warp.pred(inst.op[1]);
            warp.set_pred(inst.op[0], value, mask);
        }
        Flow::Next
    }
}

/// `d = a != 0`: special registers that are predicates.
pub(crate) struct NonZero;

impl Op for NonZero {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: lowering emits it with a predicate and a 32-bit register.
        unsafe {
            let value = warp.row32(inst.op[1]);
            let bits = lanes_where(mask, |lane| value[lane] != 0);
            warp.set_pred(inst.op[0], bits, mask);
        }
        Flow::Next
    }
}

/// `d = a + imm` on 64 bits: address conversions.
pub(crate) struct AddImm64;

impl Op for AddImm64 {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let imm = inst.imm;
        // SAFETY: lowering emits it with operands of these banks.
        unsafe { map1(warp, inst, mask, |a: u64| a.wrapping_add(imm)) }
    }
}
