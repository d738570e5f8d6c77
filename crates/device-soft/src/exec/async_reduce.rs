//! Asynchronous stores and reductions: `st.async`, `red.async`, `cp.reduce.async.bulk`.
//!
//! As asynchronous copies, they are complete when their instruction is.

use super::access::Place;
use super::atomic::{Operation, reducer};
use super::lanewise::{Parts, slots};
use super::mbarrier;
use super::select::{Arg, Query, Selected};
use super::{Flow, Isa, Op, Warp};
use crate::code::Inst;
use crate::memory::Space;
use crate::spec::WARP;
use kedge_ptx::ast::Type;

const COMPLETES: &str = "mbarrier::complete_tx::bytes";

/// This family's selector.
pub(crate) fn select(query: &Query<'_>) -> Option<Selected> {
    match (query.part(0), query.part(1), query.part(2)) {
        ("st", "async", _) => store(query),
        ("red", "async", _) => reduce(query),
        ("cp", "reduce", "async") if query.part(3) == "bulk" && query.part(4) != "tensor" => {
            bulk(query)
        }
        _ => None,
    }
}

/// The bits of an operation's name that say nothing here.
fn take_hints(parts: &mut Parts<'_>, hints: &[&str]) {
    hints.iter().for_each(|hint| {
        parts.take(hint);
    });
}

/// `st.async{.weak}{.ss}.mbarrier::complete_tx::bytes{.vec}.type [a], b, [mbar]`.
fn store(query: &Query<'_>) -> Option<Selected> {
    let mut parts = Parts::of(query);
    let ty = parts.take_type()?;
    let count = match (parts.take("v2"), parts.take("v4")) {
        (true, _) => 2,
        (_, true) => 4,
        _ => 1,
    };
    take_hints(&mut parts, &["async", "weak", "shared::cluster"]);
    if !parts.take(COMPLETES) || !parts.done() || !matches!(ty.size(), 4 | 8) {
        return None;
    }
    let mut args = vec![Arg::Pointer(Space::Shared)];
    args.extend(vec![Arg::Src(ty); count]);
    args.push(Arg::Pointer(Space::Shared));
    let wide = u32::from(ty.size() == 8);
    (query.lanes(1) == count).then(|| Selected::scalar::<Store>(args).aux(count as u32 | wide << 4))
}

/// `st.async`: op = [to, values…, mbarrier], generic addresses.
struct Store;

impl Op for Store {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let count = (inst.aux & 15) as usize;
        let size = if inst.aux >> 4 != 0 { 8 } else { 4 };
        let bytes = (count * size) as u64;
        // SAFETY: the selector gave the operands in this order; `pointer` checks the addresses.
        unsafe {
            let slots = slots(warp, inst, count + 2);
            let (to, barrier) = (*warp.row64(slots[0]), *warp.row64(slots[count + 1]));
            for lane in (0..WARP).filter(|lane| mask >> lane & 1 != 0) {
                let at = match warp.pointer(inst, lane, Place::Generic, to[lane], bytes, bytes) {
                    Ok(at) => at,
                    Err(flow) => return flow,
                };
                for (index, slot) in slots[1..=count].iter().enumerate() {
                    let value = match size {
                        8 => warp.row64(*slot)[lane],
                        _ => warp.row32(*slot)[lane].into(),
                    };
                    let value = value.to_le_bytes();
                    std::ptr::copy_nonoverlapping(value.as_ptr(), at.add(index * size), size);
                }
                if let Err(flow) = mbarrier::complete(warp, inst, lane, barrier[lane], bytes) {
                    return flow;
                }
            }
        }
        Flow::Next
    }
}

/// `red.async.relaxed.cluster{.ss}.mbarrier::complete_tx::bytes.op.type [a], b, [mbar]`.
fn reduce(query: &Query<'_>) -> Option<Selected> {
    let mut parts = Parts::of(query);
    let ty = parts.take_type()?;
    let reduction = parts.take_map(Operation::from_name)?.reduction(ty)?;
    take_hints(&mut parts, &["async", "relaxed", "cluster", "shared::cluster"]);
    if !parts.take(COMPLETES) || !parts.done() || !matches!(ty.size(), 4 | 8) {
        return None;
    }
    let args = [Arg::Pointer(Space::Shared), Arg::Src(ty), Arg::Pointer(Space::Shared)];
    let wide = u32::from(ty.size() == 8);
    Some(Selected::scalar::<Reduce>(args).aux(reduction | wide << 16))
}

/// `red.async`: op = [to, value, mbarrier], generic addresses.
struct Reduce;

impl Op for Reduce {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let reducer = reducer(inst.aux & 0xFFFF);
        let wide = inst.aux >> 16 != 0;
        let bytes = if wide { 8 } else { 4 };
        // SAFETY: the selector gave the operands in this order; `pointer` checks the addresses.
        unsafe {
            let (to, barrier) = (*warp.row64(inst.op[0]), *warp.row64(inst.op[2]));
            for lane in (0..WARP).filter(|lane| mask >> lane & 1 != 0) {
                let value = match wide {
                    true => warp.row64(inst.op[1])[lane],
                    false => warp.row32(inst.op[1])[lane].into(),
                };
                match warp.pointer(inst, lane, Place::Generic, to[lane], bytes, bytes) {
                    Ok(at) => reducer(at, value.to_le_bytes().as_ptr()),
                    Err(flow) => return flow,
                }
                if let Err(flow) = mbarrier::complete(warp, inst, lane, barrier[lane], bytes) {
                    return flow;
                }
            }
        }
        Flow::Next
    }
}

/// `cp.reduce.async.bulk.dst.src.completion{.level}.op{.noftz}.type [dst], [src], size{, [mbar]}
/// {, policy}`.
fn bulk(query: &Query<'_>) -> Option<Selected> {
    let mut parts = Parts::of(query);
    let ty = parts.take_type()?;
    let reduction = parts.take_map(Operation::from_name)?.reduction(ty)?;
    let cluster = parts.take("shared::cluster");
    let global = parts.take("global");
    let completes = parts.take(COMPLETES);
    let grouped = parts.take("bulk_group");
    take_hints(&mut parts, &["reduce", "async", "bulk", "noftz"]);
    let cached = parts.take("L2::cache_hint");
    let known = parts.take("shared::cta") && parts.done() && (cluster, completes) != (true, false);
    if !known || cluster == global || completes == grouped {
        return None;
    }
    let to = if cluster { Space::Shared } else { Space::Global };
    let mut args = vec![Arg::Pointer(to), Arg::Pointer(Space::Shared), Arg::Src(Type::U32)];
    if completes {
        args.push(Arg::Pointer(Space::Shared));
    }
    if cached {
        args.push(Arg::Src(Type::U64));
    }
    let size = ty.size() << 16;
    Some(Selected::scalar::<Bulk>(args).aux(reduction | size).imm(completes.into()))
}

/// `cp.reduce.async.bulk`: op = [to, from, size, [mbarrier]], generic addresses.
struct Bulk;

impl Op for Bulk {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let reducer = reducer(inst.aux & 0xFFFF);
        let step = (inst.aux >> 16) as usize;
        let completes = inst.imm != 0;
        // SAFETY: the selector gave the operands in this order; `pointer` checks the addresses, and
        // every element of a multiple of 16 bytes lies inside and is aligned.
        unsafe {
            let (to, from) = (*warp.row64(inst.op[0]), *warp.row64(inst.op[1]));
            let size = *warp.row32(inst.op[2]);
            let barrier = if completes { *warp.row64(inst.op[3]) } else { [0; WARP] };
            for lane in (0..WARP).filter(|lane| mask >> lane & 1 != 0) {
                let bytes = u64::from(size[lane] & !15);
                let place = Place::Generic;
                let (from, to) = match (
                    warp.pointer(inst, lane, place, from[lane], bytes, 16),
                    warp.pointer(inst, lane, place, to[lane], bytes, 16),
                ) {
                    (Ok(from), Ok(to)) => (from, to),
                    (Err(flow), _) | (_, Err(flow)) => return flow,
                };
                for at in (0..bytes as usize).step_by(step) {
                    reducer(to.add(at), from.add(at));
                }
                if completes
                    && let Err(flow) = mbarrier::complete(warp, inst, lane, barrier[lane], bytes)
                {
                    return flow;
                }
            }
        }
        Flow::Next
    }
}
