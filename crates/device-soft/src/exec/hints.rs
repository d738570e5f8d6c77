//! Instructions that only advise, address questions, and sleep.

use super::control::{Nop, Sleep, lanes_where};
use super::select::{Arg, Query, Selected};
use super::{Flow, Isa, Op, Warp, map1};
use crate::code::Inst;
use crate::memory::{
    LOCAL_WINDOW, LOCAL_WINDOW_LEN, PARAM_WINDOW, PARAM_WINDOW_LEN, SHARED_STRIDE, SHARED_WINDOW,
    SHARED_WINDOWS, shared_in_block,
};
use kedge_ptx::ast::{Operand, Type};

/// This family's selector.
pub(crate) fn select(query: &Query<'_>) -> Option<Selected> {
    use Arg::{Address, Dst, Imm, Src};
    let operands = query.instruction.operands.as_slice();
    match query.part(0) {
        "prefetch" | "prefetchu" | "discard" | "applypriority" => {
            let args = operands.iter().map(|operand| match operand {
                Operand::Address(..) => Address,
                _ => Imm,
            });
            Some(Selected::scalar::<Nop>(args.collect::<Vec<_>>()))
        }
        "griddepcontrol" | "setmaxnreg" | "pmevent" => {
            Some(Selected::scalar::<Nop>(vec![Imm; operands.len()]))
        }
        "createpolicy" => {
            let args = operands.iter().enumerate().map(|(index, operand)| match operand {
                _ if index == 0 => Dst(Type::B64),
                Operand::Address(..) => Address,
                _ => Src(Type::B32),
            });
            Some(Selected::scalar::<Policy>(args.collect::<Vec<_>>()))
        }
        "nanosleep" => Some(Selected::scalar::<Sleep>([Src(Type::U32)])),
        "isspacep" => {
            let (base, len) = match query.part(1) {
                "shared" | "shared::cta" => (SHARED_WINDOW, SHARED_STRIDE),
                "shared::cluster" => (SHARED_WINDOW, SHARED_STRIDE * SHARED_WINDOWS),
                "local" => (LOCAL_WINDOW, LOCAL_WINDOW_LEN),
                "param" | "param::entry" => (PARAM_WINDOW, PARAM_WINDOW_LEN),
                // Whatever is in no window is global; constants are there, too.
                "global" | "const" => (0, 0),
                _ => return None,
            };
            let log2 = if len == 0 { 0 } else { len.trailing_zeros() };
            let args = [Dst(Type::Pred), Src(Type::U64)];
            Some(Selected::scalar::<InWindow>(args).imm(base).aux(log2))
        }
        "mapa" if query.ty(0)?.size() == 8 => {
            let args = [Dst(Type::U64), Src(Type::U64), Src(Type::U32)];
            Some(Selected::scalar::<MapRank64>(args))
        }
        "mapa" => {
            let args = [Dst(Type::U32), Src(Type::U32), Src(Type::U32)];
            Some(Selected::scalar::<MapRank32>(args))
        }
        "getctarank" if query.ty(0)?.size() == 8 => {
            Some(Selected::scalar::<RankOf64>([Dst(Type::U32), Src(Type::U64)]))
        }
        "getctarank" => Some(Selected::scalar::<RankOf32>([Dst(Type::U32), Src(Type::U32)])),
        _ => None,
    }
}

/// `createpolicy`: a cache policy that nothing reads.
struct Policy;

impl Op for Policy {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: op[0] is a 64-bit destination.
        unsafe { warp.set64(inst.op[0], &[0; 32], mask) };
        Flow::Next
    }
}

/// `isspacep`: op = [p, address]; imm and 2^aux are the window, or 0 and 1 for what is in none.
struct InWindow;

impl Op for InWindow {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: the selector gave the operands in this order.
        unsafe {
            let addr = warp.row64(inst.op[1]);
            let inside = |base: u64, len: u64, addr: u64| addr.wrapping_sub(base) < len;
            let bits = lanes_where(mask, |lane| {
                if inst.imm == 0 {
                    let shared = SHARED_STRIDE * SHARED_WINDOWS;
                    !inside(SHARED_WINDOW, shared, addr[lane])
                        && !inside(LOCAL_WINDOW, LOCAL_WINDOW_LEN, addr[lane])
                        && !inside(PARAM_WINDOW, PARAM_WINDOW_LEN, addr[lane])
                } else {
                    inside(inst.imm, 1 << inst.aux, addr[lane])
                }
            });
            warp.set_pred(inst.op[0], bits, mask);
        }
        Flow::Next
    }
}

/// `mapa.u64`: the address of the same variable in block `rank` of the cluster.
struct MapRank64;

impl Op for MapRank64 {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: the selector gave the operands in this order.
        unsafe {
            let (addr, rank) = (*warp.row64(inst.op[1]), *warp.row32(inst.op[2]));
            let out = std::array::from_fn(|lane| shared_in_block(addr[lane], rank[lane]));
            warp.set64(inst.op[0], &out, mask);
        }
        Flow::Next
    }
}

/// `mapa.shared::cluster.u32`.
struct MapRank32;

impl Op for MapRank32 {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: the selector gave the operands in this order.
        unsafe {
            let (addr, rank) = (*warp.row32(inst.op[1]), *warp.row32(inst.op[2]));
            let stride = SHARED_STRIDE as u32;
            let out = std::array::from_fn(|lane| {
                let window = rank[lane].wrapping_add(1).wrapping_mul(stride);
                (addr[lane] & (stride - 1)).wrapping_add(window)
            });
            warp.set32(inst.op[0], &out, mask);
        }
        Flow::Next
    }
}

/// `getctarank.u64` of a generic address.
struct RankOf64;

impl Op for RankOf64 {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: the selector gave the operands' types.
        unsafe {
            let own = (*warp.block).rank;
            map1(warp, inst, mask, |addr: u64| {
                let window = addr.wrapping_sub(SHARED_WINDOW) / SHARED_STRIDE;
                window.checked_sub(1).map_or(own, |rank| rank as u32)
            })
        }
    }
}

/// `getctarank.shared::cluster.u32`.
struct RankOf32;

impl Op for RankOf32 {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: the selector gave the operands' types.
        unsafe {
            let own = (*warp.block).rank;
            map1(warp, inst, mask, |addr: u32| {
                (addr / SHARED_STRIDE as u32).checked_sub(1).unwrap_or(own)
            })
        }
    }
}
