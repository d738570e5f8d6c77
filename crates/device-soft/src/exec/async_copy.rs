//! Asynchronous copies: `cp.async` and `cp.async.bulk`.
//!
//! A copy is complete when its instruction is: hardware may be that fast, too. What remains is to
//! tell the mbarriers of it.

use super::access::Place;
use super::control::Nop;
use super::locate::{AnyGlobal, HALF, Halves, Locate, Pointers, offset64};
use super::mbarrier;
use super::select::{Arg, Query, Selected};
use super::{Flow, Isa, Op, Warp};
use crate::code::Inst;
use crate::memory::{SHARED_WINDOW, Space, shared_in_block};
use crate::spec::WARP;
use kedge_ptx::ast::{Operand, Type};

/// This family's selector.
pub(crate) fn select(query: &Query<'_>) -> Option<Selected> {
    match (query.part(0), query.part(1), query.part(2)) {
        ("cp", "async", "mbarrier") => mbarrier::select_copied(query),
        // Copies are complete already.
        ("cp", "async", "commit_group" | "wait_group" | "wait_all") => nothing(query),
        ("cp", "async", "bulk") => match query.part(3) {
            "commit_group" | "wait_group" => nothing(query),
            "prefetch" if query.part(4) != "tensor" => {
                let mut args = vec![Arg::Pointer(Space::Global), Arg::Src(Type::U32)];
                if query.has("L2::cache_hint") {
                    args.push(Arg::Src(Type::U64));
                }
                Some(Selected::scalar::<Nop>(args))
            }
            "prefetch" => None,
            _ => bulk(query),
        },
        ("cp", "async", _) => copy(query),
        ("mbarrier", ..) => mbarrier::select(query),
        _ => None,
    }
}

fn nothing(query: &Query<'_>) -> Option<Selected> {
    Some(Selected::scalar::<Nop>(vec![Arg::Imm; query.instruction.operands.len()]))
}

/// What `cp.async`'s fourth operand says.
/// How many bytes a lane copies: 4, 8 or 16.
const BYTES: u32 = 31;
const SOURCE_BYTES: u32 = 1 << 5;
const IGNORE: u32 = 1 << 6;

/// `cp.async.ca.shared.global [dst], [src], bytes{, source bytes | ignore}{, policy}`.
fn copy(query: &Query<'_>) -> Option<Selected> {
    let operands = query.instruction.operands.as_slice();
    let Operand::Int(bytes @ (4 | 8 | 16)) = operands.get(2)? else { return None };
    let mut args = vec![Arg::Pointer(Space::Shared), Arg::Pointer(Space::Global), Arg::Imm];
    let mut aux = *bytes as u32;
    for (index, operand) in operands.iter().enumerate().skip(3) {
        // A 64-bit operand is a cache policy.
        let ty = query.register_type(operand).unwrap_or(Type::U32);
        args.push(Arg::Src(ty));
        if index == 3 && ty == Type::Pred {
            aux |= IGNORE;
        } else if index == 3 && ty.size() <= 4 {
            aux |= SOURCE_BYTES;
        }
    }
    Some(Selected::new::<Copy>(args).aux(aux))
}

/// `cp.async`: op = [to, from, [source bytes or ignore]], generic addresses.
struct Copy;

impl Op for Copy {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let bytes = u64::from(inst.aux & BYTES);
        // SAFETY: the selector gave the operands in this order.
        unsafe {
            let whole = if inst.aux & SOURCE_BYTES != 0 {
                let taken = warp.row32(inst.op[2]);
                taken.iter().fold(true, |all, n| all & (u64::from(*n) >= bytes))
            } else {
                inst.aux & IGNORE == 0 || warp.pred(inst.op[2]) == 0
            };
            if whole && let Some(flow) = copy_whole::<I>(warp, inst, mask, bytes) {
                return flow;
            }
            Copy::by_lanes(warp, inst, mask)
        }
    }
}

impl Copy {
    /// Lane by lane, each perhaps less than its bytes.
    ///
    /// # Safety
    /// As [`Op::run`]'s.
    #[inline(never)]
    unsafe fn by_lanes(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let bytes = u64::from(inst.aux & BYTES);
        // SAFETY: the selector gave the operands in this order; `pointer` checks the addresses.
        unsafe {
            let (to, from) = (*warp.row64(inst.op[0]), *warp.row64(inst.op[1]));
            let mut taken = [bytes; WARP];
            if inst.aux & SOURCE_BYTES != 0 {
                taken = warp.row32(inst.op[2]).map(|n| u64::from(n).min(bytes));
            } else if inst.aux & IGNORE != 0 {
                let ignored = warp.pred(inst.op[2]);
                taken =
                    std::array::from_fn(|lane| if ignored >> lane & 1 != 0 { 0 } else { bytes });
            }
            for lane in (0..WARP).filter(|lane| mask >> lane & 1 != 0) {
                let mut value = [0u8; 16];
                if taken[lane] > 0 {
                    let place = Place::Generic;
                    match warp.pointer(inst, lane, place, from[lane], taken[lane], bytes) {
                        Ok(from) => std::ptr::copy_nonoverlapping(
                            from,
                            value.as_mut_ptr(),
                            taken[lane] as usize,
                        ),
                        Err(flow) => return flow,
                    }
                }
                match warp.pointer(inst, lane, Place::Generic, to[lane], bytes, bytes) {
                    Ok(to) => {
                        std::ptr::copy_nonoverlapping(value.as_ptr(), to, bytes as usize);
                    }
                    Err(flow) => return flow,
                }
            }
        }
        Flow::Next
    }
}

/// `cp.async` where every lane copies all of its bytes into the block's own shared memory. None:
/// some lane's address is elsewhere.
///
/// # Safety
/// op[0] and op[1] are operands of the 64-bit bank; `bytes` is 4, 8 or 16.
#[inline(always)]
unsafe fn copy_whole<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32, bytes: u64) -> Option<Flow> {
    // SAFETY: the caller's contract.
    let to = offset64(unsafe { warp.row64(inst.op[0]) }, SHARED_WINDOW.wrapping_neg(), mask);
    let room = warp.shared_len.checked_sub(bytes)?;
    let (mut beyond, mut low) = (false, 0);
    for lane in 0..WARP {
        beyond |= to[lane] > room;
        low |= to[lane];
    }
    if beyond || low & (bytes - 1) != 0 {
        return None;
    }
    // SAFETY: the caller's contract.
    let from = match unsafe { AnyGlobal::at::<I>(warp, inst, inst.op[1], 0, mask, bytes) } {
        Ok(from) => from,
        Err(flow) => return Some(flow),
    };
    AnyGlobal::foresee(warp, inst, &Halves { first: [from.at(0), from.at(HALF)], step: bytes });
    macro_rules! each {
        ($ty:ty) => {{
            let mut left = mask;
            while left != 0 {
                let lane = left.trailing_zeros() as usize;
                left &= left - 1;
                // SAFETY: the offsets were checked above, the sources by `locate`.
                unsafe {
                    let value = from.at(lane).cast::<$ty>().read_unaligned();
                    warp.shared.add(to[lane] as usize).cast::<$ty>().write_unaligned(value);
                }
            }
        }};
    }
    match bytes {
        4 => each!(u32),
        8 => each!(u64),
        _ => each!(u128),
    }
    Some(Flow::Next)
}

/// What a bulk copy's operands say besides addresses and size.
const TELLS: u32 = 1;
const MULTICAST: u32 = 2;

/// `cp.async.bulk.DST.SRC.… [dst], [src], size{, [mbarrier]}{, blocks}{, policy}`.
fn bulk(query: &Query<'_>) -> Option<Selected> {
    let space = |part: &str| match part {
        "global" => Some(Space::Global),
        "shared::cta" | "shared::cluster" => Some(Space::Shared),
        _ => None,
    };
    if query.has("cp_mask") {
        return None;
    }
    let (to, from) = (space(query.part(3))?, space(query.part(4))?);
    let mut args = vec![Arg::Pointer(to), Arg::Pointer(from), Arg::Src(Type::U32)];
    let mut aux = 0;
    if query.has("mbarrier::complete_tx::bytes") {
        aux |= TELLS;
        args.push(Arg::Pointer(Space::Shared));
    }
    if query.has("multicast::cluster") {
        aux |= MULTICAST;
        args.push(Arg::Src(Type::U16));
    }
    let policies = query.instruction.operands.len().checked_sub(args.len())?;
    args.extend(vec![Arg::Src(Type::U64); policies]);
    Some(Selected::scalar::<Bulk>(args).aux(aux))
}

/// `cp.async.bulk`: op = [to, from, size, [mbarrier], [blocks]], generic addresses.
struct Bulk;

impl Op for Bulk {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let tells = inst.aux & TELLS != 0;
        // SAFETY: the selector gave the operands in this order; `pointer` checks the addresses.
        unsafe {
            let (to, from) = (*warp.row64(inst.op[0]), *warp.row64(inst.op[1]));
            let size = *warp.row32(inst.op[2]);
            let barrier = if tells { *warp.row64(inst.op[3]) } else { [0; WARP] };
            let blocks = match inst.aux & MULTICAST != 0 {
                true => Some(*warp.row32(inst.op[3 + usize::from(tells)])),
                false => None,
            };
            for lane in (0..WARP).filter(|lane| mask >> lane & 1 != 0) {
                let bytes = u64::from(size[lane]);
                let place = Place::Generic;
                let from = match warp.pointer(inst, lane, place, from[lane], bytes, 16) {
                    Ok(from) => from,
                    Err(flow) => return flow,
                };
                let targets = Targets::of(to[lane], barrier[lane], blocks.map(|b| b[lane]));
                for (to, barrier) in targets {
                    match warp.pointer(inst, lane, place, to, bytes, 16) {
                        Ok(to) => std::ptr::copy(from, to, bytes as usize),
                        Err(flow) => return flow,
                    }
                    if tells && let Err(flow) = mbarrier::complete(warp, inst, lane, barrier, bytes)
                    {
                        return flow;
                    }
                }
            }
        }
        Flow::Next
    }
}

/// Where a copy goes: (destination, mbarrier), in one block or, multicast, at the same offsets in
/// several blocks of the cluster.
pub(super) struct Targets {
    to: u64,
    barrier: u64,
    /// Blocks that are left, by rank; None: the one that the addresses say.
    blocks: Option<u32>,
    done: bool,
}

impl Targets {
    pub(super) fn of(to: u64, barrier: u64, blocks: Option<u32>) -> Targets {
        Targets { to, barrier, blocks: blocks.map(|mask| mask & 0xFFFF), done: false }
    }
}

impl Iterator for Targets {
    type Item = (u64, u64);

    fn next(&mut self) -> Option<(u64, u64)> {
        let Some(left) = &mut self.blocks else {
            return (!std::mem::replace(&mut self.done, true)).then_some((self.to, self.barrier));
        };
        let rank = left.trailing_zeros();
        if rank == u32::BITS {
            return None;
        }
        *left &= *left - 1;
        Some((shared_in_block(self.to, rank), shared_in_block(self.barrier, rank)))
    }
}
