//! Video instructions: scalars with their selectors, and packed ones without: what CUDA's SIMD
//! intrinsics become.

use super::lanewise::{Inputs, Parts};
use super::{Arg, Flow, Isa, Lane, Op, Query, Selected, Warp};
use crate::code::Inst;
use crate::math::video::{Combine, Operation, Part, Relation, Video, Wide};
use crate::spec::WARP;
use kedge_ptx::ast::{Operand, Type};

/// op = d, a, b, c; `imm` is the encoded [`Video`], `aux` [`NO_C`] where there is no c.
struct Compute;

const NO_C: u32 = 1;

impl Op for Compute {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let video = Video::decode(inst.imm);
        // SAFETY: op = three or four 32-bit slots (the selector).
        unsafe {
            let (a, b) = <(u32, u32)>::read(warp, &inst.op[1..]);
            let c = if inst.aux != NO_C { u32::read(warp, inst.op[3]) } else { [0; WARP] };
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

fn wide(part: &str) -> Option<Wide> {
    match part {
        "wrap" => Some(Wide::Wrap),
        "clamp" => Some(Wide::Clamp),
        _ => None,
    }
}

/// What part of a scalar operand's register is meant; None where there is no such part.
fn part(operand: &Operand, elements: u32) -> Option<Part> {
    match operand {
        Operand::Component(_, name) if elements == 1 => Part::named(name),
        Operand::Component(..) => None,
        _ => Some(Part::WHOLE),
    }
}

/// `vadd{2,4}.dtype.atype.btype{.sat}{.op2} d, a, b{, c}`, `vset{2,4}.atype.btype.cmp{.op2} …`,
/// `vshl.dtype.atype.u32{.sat}.mode{.op2} …`.
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
        "vshl" if elements == 1 => Operation::ShiftLeft(parts.take_map(wide)?),
        "vshr" if elements == 1 => Operation::ShiftRight(parts.take_map(wide)?),
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
    let (d, a, b, c) = match query.instruction.operands.as_slice() {
        [d, a, b] => (d, a, b, None),
        [d, a, b, c] => (d, a, b, Some(c)),
        _ => return None,
    };
    let part_d = part(d, elements)?;
    let video = Video {
        operation,
        elements,
        signed_a,
        signed_b,
        signed_d,
        saturate,
        combine,
        part_a: part(a, elements)?,
        part_b: part(b, elements)?,
        part_d,
    };
    // A part replaces one of c's; an operation with c gives a whole register.
    let replaces = part_d != Part::WHOLE;
    let needs_c = replaces || combine != Combine::None;
    let plain_c = !matches!(c, Some(Operand::Component(..)));
    if !parts.done() || needs_c && c.is_none() || replaces && combine != Combine::None || !plain_c {
        return None;
    }
    let mut args = vec![Arg::Dst(Type::U32)];
    args.extend(vec![Arg::Src(Type::U32); query.instruction.operands.len() - 1]);
    let aux = if c.is_some() { 0 } else { NO_C };
    Some(Selected::scalar::<Compute>(args).imm(video.encode()).aux(aux))
}
