//! Video instructions, scalar and packed, without selectors: what CUDA's SIMD intrinsics become.

use super::lanewise::{Inputs, Parts};
use super::{Arg, Flow, Isa, Lane, Op, Query, Selected, Warp};
use crate::code::Inst;
use crate::math::video::{Combine, Operation, Relation, Video};
use crate::spec::WARP;
use kedge_ptx::ast::{Operand, Type};

/// op = d, a, b, c; `aux` is the encoded [`Video`], and [`NO_C`] where there is no c.
struct Compute;

const NO_C: u32 = 1 << 31;

impl Op for Compute {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let video = Video::decode(inst.aux);
        // SAFETY: op = three or four 32-bit slots (the selector).
        unsafe {
            let (a, b) = <(u32, u32)>::read(warp, &inst.op[1..]);
            let c = if inst.aux & NO_C == 0 { u32::read(warp, inst.op[3]) } else { [0; WARP] };
            let mut out = [0; WARP];
            for lane in 0..WARP {
                out[lane] = video.apply(a[lane], b[lane], c[lane]);
            }
            u32::write(warp, inst.op[0], &out, mask);
        }
        Flow::Next
    }
}

fn relation(part: &str) -> Option<Relation> {
    Some(match part {
        "eq" => Relation::Eq,
        "ne" => Relation::Ne,
        "lt" => Relation::Lt,
        "le" => Relation::Le,
        "gt" => Relation::Gt,
        "ge" => Relation::Ge,
        _ => return None,
    })
}

/// `vadd{2,4}.dtype.atype.btype{.sat}{.op2} d, a, b{, c}`, `vset{2,4}.atype.btype.cmp{.op2} …`.
pub(crate) fn select(query: &Query<'_>) -> Option<Selected> {
    let opcode = query.part(0);
    let (stem, elements) = match opcode.strip_suffix(['2', '4']) {
        Some(stem) if opcode.ends_with('2') => (stem, 2),
        Some(stem) => (stem, 4),
        None => (opcode, 1),
    };
    let mut parts = Parts::of(query);
    let operation = match stem {
        "vadd" => Operation::Add,
        "vsub" => Operation::Sub,
        "vabsdiff" => Operation::AbsDiff,
        "vmin" => Operation::Min,
        "vmax" => Operation::Max,
        "vavrg" if elements > 1 => Operation::Average,
        "vset" => Operation::Set(parts.take_map(relation)?),
        _ => return None,
    };
    let saturate = parts.take("sat");
    let combine = match (parts.take("add"), parts.take("min"), parts.take("max")) {
        (false, false, false) => Combine::None,
        (true, false, false) => Combine::Add,
        (false, true, false) if elements == 1 => Combine::Min,
        (false, false, true) if elements == 1 => Combine::Max,
        _ => return None,
    };
    let mut signed = || match parts.take_type()? {
        Type::S32 => Some(true),
        Type::U32 => Some(false),
        _ => None,
    };
    let (signed_b, signed_a) = (signed()?, signed()?);
    let signed_d = if matches!(operation, Operation::Set(_)) { false } else { signed()? };
    let operands = &query.instruction.operands;
    let plain = !operands.iter().any(|operand| matches!(operand, Operand::Component(..)));
    let has_c = operands.len() == 4;
    if !parts.done()
        || !plain
        || !(3..=4).contains(&operands.len())
        || (combine != Combine::None && !has_c)
    {
        return None;
    }
    let video = Video { operation, elements, signed_a, signed_b, signed_d, saturate, combine };
    let mut args = vec![Arg::Dst(Type::U32)];
    args.extend(vec![Arg::Src(Type::U32); operands.len() - 1]);
    let aux = video.encode() | if has_c { 0 } else { NO_C };
    Some(Selected::scalar::<Compute>(args).aux(aux))
}
