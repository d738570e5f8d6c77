//! `tensormap.replace` and `tensormap.cp_fenceproxy`: changing a tensor map on the device.

use super::super::lanewise::Parts;
use super::super::select::{Arg, Query, Selected};
use super::super::{Flow, Isa, Op, Warp};
use crate::code::Inst;
use crate::fault::FaultKind;
use crate::memory::Space;
use crate::spec::WARP;
use kedge_cuda_types::tensor_map::{
    Format, Interleave, MAX_RANK, Mode, Swizzle, TENSOR_MAP_ALIGN, TENSOR_MAP_BYTES, TensorMap,
};
use kedge_ptx::ast::{Operand, Type};

/// A field, in the reference's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
enum Field {
    GlobalAddress,
    Rank,
    BoxDim,
    GlobalDim,
    GlobalStride,
    ElementStride,
    Elemtype,
    InterleaveLayout,
    SwizzleMode,
    FillMode,
}

const FIELDS: [(&str, Field); 10] = [
    ("global_address", Field::GlobalAddress),
    ("rank", Field::Rank),
    ("box_dim", Field::BoxDim),
    ("global_dim", Field::GlobalDim),
    ("global_stride", Field::GlobalStride),
    ("element_stride", Field::ElementStride),
    ("elemtype", Field::Elemtype),
    ("interleave_layout", Field::InterleaveLayout),
    ("swizzle_mode", Field::SwizzleMode),
    ("fill_mode", Field::FillMode),
];

/// The selector of `tensormap.*`.
pub(super) fn select(query: &Query<'_>) -> Option<Selected> {
    match query.part(1) {
        "replace" => replace(query),
        "cp_fenceproxy" => {
            let args = [Arg::Pointer(Space::Global), Arg::Pointer(Space::Shared), Arg::Imm];
            let whole = query.operand(2) == Some(&Operand::Int(TENSOR_MAP_BYTES as i64));
            whole.then(|| Selected::scalar::<CopyMap>(args))
        }
        _ => None,
    }
}

/// `tensormap.replace.tile.field{.ss}.b1024.type [addr]{, ord}, new`.
fn replace(query: &Query<'_>) -> Option<Selected> {
    let mut parts = Parts::of(query);
    let ty = parts.take_type()?;
    let space = match (parts.take("global"), parts.take("shared::cta")) {
        (true, _) => Space::Global,
        (_, true) => Space::Shared,
        _ => Space::Generic,
    };
    let field = |part: &str| FIELDS.iter().find(|(name, _)| *name == part).map(|(_, field)| *field);
    let field = parts.take_map(field)?;
    let known = parts.take("replace") && parts.take("tile") && parts.take("b1024");
    if !known || !parts.done() || !matches!(ty, Type::B32 | Type::B64) {
        return None;
    }
    let mut ordinal = 0;
    let mut args = vec![Arg::Pointer(space)];
    if query.instruction.operands.len() == 3 {
        let Operand::Int(at) = query.operand(1)? else { return None };
        ordinal = u32::try_from(*at).ok().filter(|at| (*at as usize) < MAX_RANK)?;
        args.push(Arg::Imm);
    }
    args.push(Arg::Src(ty));
    let wide = u32::from(ty == Type::B64) << 16;
    Some(Selected::scalar::<Replace>(args).aux(field as u32 | ordinal << 8 | wide))
}

/// op = [map, new value], a generic address.
struct Replace;

impl Op for Replace {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let (_, field) = FIELDS[(inst.aux & 255) as usize % FIELDS.len()];
        let ordinal = (inst.aux >> 8 & 255) as usize % MAX_RANK;
        for lane in (0..WARP).filter(|lane| mask >> lane & 1 != 0) {
            // SAFETY: the selector gave the operands in this order.
            let (addr, value) = unsafe {
                let value = match inst.aux >> 16 & 1 != 0 {
                    true => warp.row64(inst.op[1])[lane],
                    false => warp.row32(inst.op[1])[lane].into(),
                };
                (warp.row64(inst.op[0])[lane], value)
            };
            let size = TENSOR_MAP_BYTES as u64;
            let Some(memory) =
                warp.resolve(inst, lane, Space::Generic, addr, size, TENSOR_MAP_ALIGN)
            else {
                return Flow::Fault;
            };
            let memory = memory.cast::<[u8; TENSOR_MAP_BYTES]>();
            // SAFETY: `resolve` checked that many bytes.
            let held = TensorMap::decode_unchecked(&unsafe { memory.read() });
            let Some(changed) = held.and_then(|map| changed(map, field, ordinal, value)) else {
                let what = format!("no tensor map, or no {field:?} of {value:#x}");
                return warp.fault(inst, lane, FaultKind::IllegalInstruction, Some(addr), what);
            };
            // SAFETY: `resolve` checked that many bytes.
            unsafe { memory.write(changed.encode()) };
        }
        Flow::Next
    }
}

/// `map` with another value in a field; None where the field has no such value. What the fields say
/// together is checked when the map is used.
fn changed(mut map: TensorMap, field: Field, ordinal: usize, value: u64) -> Option<TensorMap> {
    let small = u32::try_from(value).ok();
    match field {
        Field::GlobalAddress => map.address = value,
        // The field holds one less.
        Field::Rank => map.rank = u8::try_from(value).ok()?.checked_add(1)?,
        Field::BoxDim => match &mut map.mode {
            Mode::Tiled { extent } => extent[ordinal] = u16::try_from(value).ok()?,
            Mode::Im2col { .. } => return None,
        },
        Field::GlobalDim => map.dims[ordinal] = small.filter(|n| *n > 0)?.into(),
        Field::GlobalStride => *map.strides.get_mut(ordinal)? = value,
        Field::ElementStride => map.steps[ordinal] = u8::try_from(value).ok()?,
        Field::Elemtype => map.format = element_type(small?)?,
        Field::InterleaveLayout => map.interleave = Interleave::from_raw(small?)?,
        Field::SwizzleMode => map.swizzle = Swizzle::from_raw(small?)?,
        Field::FillMode => map.nan_fill = matches!(value, 1),
    }
    Some(map)
}

/// The reference numbers element types otherwise than `CUtensorMapDataType` does.
fn element_type(number: u32) -> Option<Format> {
    match number {
        8 => Some(Format::F32Ftz),
        9 => Some(Format::F64),
        10 => Some(Format::Bf16),
        _ => Format::from_raw(number),
    }
}

/// `tensormap.cp_fenceproxy`: op = [to, from], generic addresses. The lanes copy the same map.
struct CopyMap;

impl Op for CopyMap {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let lane = mask.trailing_zeros() as usize % WARP;
        // SAFETY: the selector gave the operands in this order.
        let (to, from) = unsafe { (warp.row64(inst.op[0])[lane], warp.row64(inst.op[1])[lane]) };
        let mut resolve = |addr: u64| {
            let size = TENSOR_MAP_BYTES as u64;
            warp.resolve(inst, lane, Space::Generic, addr, size, TENSOR_MAP_ALIGN)
        };
        let (Some(to), Some(from)) = (resolve(to), resolve(from)) else { return Flow::Fault };
        // SAFETY: `resolve` checked that many bytes.
        unsafe { std::ptr::copy(from, to, TENSOR_MAP_BYTES) };
        Flow::Next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_change_one_by_one() {
        let map = TensorMap {
            format: Format::F16,
            rank: 2,
            address: 0x1000,
            dims: [64, 64, 1, 1, 1],
            strides: [128, 0, 0, 0],
            steps: [1; 5],
            mode: Mode::Tiled { extent: [64, 8, 1, 1, 1] },
            interleave: Interleave::None,
            swizzle: Swizzle::None,
            promotion: 0,
            nan_fill: false,
        };
        let to = |field, ordinal, value| changed(map, field, ordinal, value);
        assert_eq!(to(Field::Rank, 0, 2).unwrap().rank, 3);
        assert_eq!(to(Field::GlobalDim, 1, 7).unwrap().dims, [64, 7, 1, 1, 1]);
        assert_eq!(to(Field::GlobalStride, 0, 256).unwrap().strides[0], 256);
        assert_eq!(to(Field::GlobalStride, 4, 256), None);
        assert_eq!(to(Field::SwizzleMode, 0, 3).unwrap().swizzle, Swizzle::B128);
        assert_eq!(to(Field::SwizzleMode, 0, 9), None);
        let formats = [7, 8, 9, 10, 11].map(|n| to(Field::Elemtype, 0, n).unwrap().format);
        let expected = [Format::F32, Format::F32Ftz, Format::F64, Format::Bf16, Format::Tf32];
        assert_eq!(formats, expected);
        assert_eq!(to(Field::GlobalDim, 0, 0), None);
    }
}
