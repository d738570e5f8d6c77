//! Floating-point arithmetic on f32 and f64.

use super::{Arg, Flow, Isa, Op, Query, Selected, Warp, map2, map3};
use crate::code::Inst;
use kedge_ptx::ast::Type;

/// `add{.rn}.f32`.
struct AddF32;

impl Op for AddF32 {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: the selector gave the operands' types.
        unsafe { map2(warp, inst, mask, |a: f32, b: f32| a + b) }
    }
}

/// `fma.rn.f32`.
struct FmaF32;

impl Op for FmaF32 {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: the selector gave the operands' types.
        unsafe { map3(warp, inst, mask, |a: f32, b: f32, c: f32| a.mul_add(b, c)) }
    }
}

/// This family's selector.
pub fn select(query: &Query<'_>) -> Option<Selected> {
    use Arg::{Dst, Src};
    let ty = query.ty(0)?;
    match (query.part(0), query.part(1), ty) {
        ("add", "f32" | "rn", Type::F32) => {
            Some(Selected::new::<AddF32>([Dst(ty), Src(ty), Src(ty)]))
        }
        ("fma", "rn", Type::F32) if query.name.len() == 3 => {
            Some(Selected::new::<FmaF32>([Dst(ty), Src(ty), Src(ty), Src(ty)]))
        }
        _ => None,
    }
}
