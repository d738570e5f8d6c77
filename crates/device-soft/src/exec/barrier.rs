//! Block barriers (`bar`, `barrier.cta`), cluster barriers and fences.

use super::fragment::State;
use super::select::{Arg, Query, Selected};
use super::{Flow, Isa, Op, Warp};
use crate::code::Inst;
use crate::fault::FaultKind;
use crate::spec::{BARRIERS, WARP, WARPGROUP};
use kedge_ptx::ast::{Operand, Type};
use std::sync::atomic::{Ordering, fence};

/// `Inst::aux`: how many sources a barrier has, and what it does.
const COUNTED: u32 = 1 << 4;
const ARRIVE: u32 = 1 << 5;
const REDUCE: u32 = 1 << 6;
const POPC: u32 = 1 << 7;
const AND: u32 = 1 << 8;

/// This family's selector.
pub(crate) fn select(query: &Query<'_>) -> Option<Selected> {
    match query.part(0) {
        "bar" if query.part(1) == "warp" => None,
        "bar" => block_barrier(query, 1),
        "barrier" if query.part(1) == "cluster" => {
            let wait = query.part(2) == "wait";
            Some(Selected::scalar::<ClusterBarrier>([]).aux(u32::from(wait)))
        }
        "barrier" if query.part(1) == "cta" => block_barrier(query, 2),
        "barrier" => block_barrier(query, 1),
        // `fence.proxy.tensormap…acquire` names an address and 128 bytes.
        "membar" | "fence" => {
            let operands = query.instruction.operands.iter().map(|operand| match operand {
                Operand::Address(..) => Arg::Address,
                _ => Arg::Imm,
            });
            Some(Selected::scalar::<Fence>(operands.collect::<Vec<_>>()))
        }
        _ => None,
    }
}

fn block_barrier(query: &Query<'_>, at: usize) -> Option<Selected> {
    let operands = query.instruction.operands.as_slice();
    let u32s = |n: usize| vec![Arg::Src(Type::U32); n];
    let selected = |args: Vec<Arg>, aux: u32| Some(Selected::scalar::<BlockBarrier>(args).aux(aux));
    match query.part(at) {
        "sync" | "" => match operands.len() {
            1 => selected(u32s(1), 0),
            2 => selected(u32s(2), COUNTED),
            _ => None,
        },
        "arrive" if operands.len() == 2 => selected(u32s(2), COUNTED | ARRIVE),
        "red" => {
            let operation = query.part(at + 1);
            let operation = if operation == "aligned" { query.part(at + 2) } else { operation };
            let aux = REDUCE
                | match operation {
                    "popc" => POPC,
                    "and" => AND,
                    "or" => 0,
                    _ => return None,
                };
            let result = if operation == "popc" { Type::U32 } else { Type::Pred };
            let mut args = vec![Arg::Dst(result)];
            args.extend(u32s(operands.len().checked_sub(2)?));
            args.push(Arg::Src(Type::Pred));
            let counted = if operands.len() == 4 { COUNTED } else { 0 };
            matches!(operands.last()?, Operand::Register(_) | Operand::NotRegister(_))
                .then(|| selected(args, aux | counted))?
        }
        _ => None,
    }
}

/// op = [destination (red)], barrier, [count], [predicate (red)].
struct BlockBarrier;

impl Op for BlockBarrier {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        if mask != warp.active {
            return Flow::Split;
        }
        let reduce = inst.aux & REDUCE != 0;
        let counted = inst.aux & COUNTED != 0;
        let first = usize::from(reduce);
        let lane = mask.trailing_zeros() as usize;
        // SAFETY: the selector gave the operands in this order.
        let (id, count, true_lanes) = unsafe {
            let id = warp.row32(inst.op[first])[lane];
            let count = if counted { warp.row32(inst.op[first + 1])[lane] } else { 0 };
            let predicate = inst.op[first + 1 + usize::from(counted)];
            (id, count, if reduce { warp.pred(predicate) & mask } else { 0 })
        };
        if id as usize >= BARRIERS || (counted && !(1..=1024).contains(&count)) {
            let detail = format!("barrier {id} with {count} threads");
            return warp.fault(inst, lane, FaultKind::IllegalInstruction, None, detail);
        }
        // SAFETY: the block outlives the warp's run, and only this warp runs.
        let block = unsafe { &mut *warp.block };
        if !std::mem::take(&mut warp.current.resumed) {
            let threads = mask.count_ones();
            let generation = block.arrive(id as usize, threads, true_lanes.count_ones(), count);
            if inst.aux & ARRIVE != 0 {
                return Flow::Next;
            }
            if block.barriers[id as usize].generation == generation {
                warp.current.state = State::Barrier { id, generation };
                return Flow::Wait;
            }
        }
        if reduce {
            let (trues, arrived) = block.barriers[id as usize].result;
            // SAFETY: op[0] is the destination, of the type that the selector said.
            unsafe {
                if inst.aux & POPC != 0 {
                    warp.set32(inst.op[0], &[trues; WARP], mask);
                } else {
                    let value = if inst.aux & AND != 0 { trues == arrived } else { trues > 0 };
                    warp.set_pred(inst.op[0], if value { u32::MAX } else { 0 }, mask);
                }
            }
        }
        Flow::Next
    }
}

/// Where the four warps of a warpgroup meet (`wgmma.wait_group`).
pub(crate) struct WarpgroupBarrier;

impl Op for WarpgroupBarrier {
    unsafe fn run<I: Isa>(warp: &mut Warp, _: &Inst, mask: u32) -> Flow {
        if mask != warp.active {
            return Flow::Split;
        }
        if std::mem::take(&mut warp.current.resumed) {
            return Flow::Next;
        }
        let group = warp.index * WARP as u32 / WARPGROUP;
        let threads = warp.grid().threads.saturating_sub(group * WARPGROUP).min(WARPGROUP);
        let id = BARRIERS as u32 + group;
        // SAFETY: the block outlives the warp's run, and only this warp runs.
        let block = unsafe { &mut *warp.block };
        let generation = block.arrive(id as usize, mask.count_ones(), 0, threads);
        if block.barriers[id as usize].generation != generation {
            return Flow::Next;
        }
        warp.current.state = State::Barrier { id, generation };
        Flow::Wait
    }
}

/// `barrier.cluster.arrive` (aux 0) and `.wait` (aux 1).
struct ClusterBarrier;

impl Op for ClusterBarrier {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        if mask != warp.active {
            return Flow::Split;
        }
        // SAFETY: block and cluster outlive the warp's run, and only this warp runs.
        let cluster = unsafe { &mut *(*warp.block).cluster };
        if inst.aux == 0 {
            warp.cluster_generation = cluster.arrive(mask.count_ones());
            return Flow::Next;
        }
        let generation = warp.cluster_generation;
        let resumed = std::mem::take(&mut warp.current.resumed);
        if resumed || cluster.barrier.generation != generation {
            return Flow::Next;
        }
        warp.current.state = State::Cluster { generation };
        Flow::Wait
    }
}

/// `membar` and `fence`: blocks run on several OS threads.
struct Fence;

impl Op for Fence {
    unsafe fn run<I: Isa>(_: &mut Warp, _: &Inst, _: u32) -> Flow {
        fence(Ordering::SeqCst);
        Flow::Next
    }
}
