//! Instructions by which the lanes of a warp work together: shuffles, votes, matches, reductions.
//!
//! A `.sync` form waits until every lane of its member mask that has not exited is there. Lanes may
//! name different masks at once (the tiles of a cooperative group); each group is served on its
//! own.

use super::control::lanes_where;
use super::fragment::State;
use super::select::{Arg, Query, Selected};
use super::{Flow, Isa, Op, Warp};
use crate::code::Inst;
use crate::spec::WARP;
use kedge_ptx::ast::{Operand, Type};

/// This family's selector.
pub(crate) fn select(query: &Query<'_>) -> Option<Selected> {
    use Arg::{Dst, Src};
    let u32s = |n: usize| vec![Src(Type::U32); n];
    let sync = query.has("sync");
    match query.part(0) {
        "shfl" => {
            let mode = ["up", "down", "bfly", "idx"].iter().position(|m| query.has(m))? as u32;
            let pair = matches!(query.operand(0)?, Operand::Pair(..));
            let mut args = vec![Dst(Type::B32)];
            if pair {
                args.push(Dst(Type::Pred));
            }
            args.extend(u32s(3 + usize::from(sync)));
            let selected = Selected::new::<Shuffle>(args);
            Some(selected.aux(mode | u32::from(pair) << 2 | u32::from(sync) << 3))
        }
        "vote" => {
            let mode = ["all", "any", "uni", "ballot"].iter().position(|m| query.has(m))? as u32;
            let result = if mode == 3 { Type::B32 } else { Type::Pred };
            let mut args = vec![Dst(result), Src(Type::Pred)];
            args.extend(u32s(usize::from(sync)));
            Some(Selected::scalar::<Vote>(args).aux(mode | u32::from(sync) << 3))
        }
        "match" => {
            let all = query.has("all");
            let pair = matches!(query.operand(0)?, Operand::Pair(..));
            let ty = query.ty(0)?;
            let mut args = vec![Dst(Type::B32)];
            if pair {
                args.push(Dst(Type::Pred));
            }
            args.extend([Src(ty), Src(Type::U32)]);
            let aux = u32::from(all) | u32::from(pair) << 2 | u32::from(ty.size() == 8) << 3;
            Some(Selected::scalar::<Match>(args).aux(aux))
        }
        "redux" => {
            let ty = query.ty(0)?;
            let operation =
                ["add", "min", "max", "and", "or", "xor"].iter().position(|m| query.has(m))? as u32;
            let kind = match ty {
                Type::U32 | Type::B32 => 0,
                Type::S32 => 1,
                Type::F32 if matches!(operation, 1 | 2) => 2,
                _ => return None,
            };
            let flags = u32::from(query.has("abs")) << 8 | u32::from(query.has("NaN")) << 9;
            let args = [Dst(ty), Src(ty), Src(Type::U32)];
            Some(Selected::scalar::<Reduce>(args).aux(operation | kind << 4 | flags))
        }
        "activemask" => Some(Selected::scalar::<ActiveMask>([Dst(Type::B32)])),
        "elect" => {
            let args = [Dst(Type::B32), Dst(Type::Pred), Src(Type::U32)];
            Some(Selected::scalar::<Elect>(args))
        }
        "bar" if query.part(1) == "warp" => Some(Selected::scalar::<WarpBarrier>([Src(Type::U32)])),
        "barrier" if query.part(1) == "warp" => {
            Some(Selected::scalar::<WarpBarrier>([Src(Type::U32)]))
        }
        _ => None,
    }
}

/// Waits for the lanes that the member masks in `slot` name. Err: what the handler returns for now.
///
/// # Safety
/// `slot` is a 32-bit operand.
#[inline(always)]
unsafe fn assemble(warp: &mut Warp, inst: &Inst, mask: u32, slot: i32) -> Result<(), Flow> {
    if mask != warp.active {
        return Err(Flow::Split);
    }
    if mask == warp.live {
        // Nobody is elsewhere.
        warp.current.resumed = false;
        return Ok(());
    }
    // SAFETY: the caller's contract.
    let members = *unsafe { warp.row32(slot) };
    warp.assemble(inst, mask, &members)
}

impl Warp {
    /// Waits until every lane that has not exited is at `inst`. Err: what the handler returns for
    /// now.
    pub(crate) fn converge(&mut self, inst: &Inst, mask: u32) -> Result<(), Flow> {
        if mask != self.active {
            return Err(Flow::Split);
        }
        if mask == self.live {
            self.current.resumed = false;
            return Ok(());
        }
        self.assemble(inst, mask, &[u32::MAX; WARP])
    }

    #[cold]
    #[inline(never)]
    fn assemble(&mut self, inst: &Inst, mask: u32, members: &[u32; WARP]) -> Result<(), Flow> {
        if std::mem::take(&mut self.current.resumed) {
            return Ok(());
        }
        let live = self.live;
        let served = lanes_where(mask, |lane| members[lane] & live & !mask == 0);
        if served == mask {
            return Ok(());
        }
        let union = |lanes: u32| {
            (0..WARP).filter(|lane| lanes >> lane & 1 != 0).fold(0, |all, l| all | members[l])
        };
        if served == 0 {
            self.current.state = State::Sync(union(mask));
            return Err(Flow::Wait);
        }
        // Groups that are complete go on; the others wait here.
        let pc = self.pc_of(inst);
        let mut waiting = self.current.branch_off(mask & !served, pc);
        waiting.state = State::Sync(union(mask & !served));
        self.others.push(waiting);
        self.current.mask = served;
        self.current.pc = pc;
        self.current.resumed = true;
        Err(Flow::Reschedule)
    }
}

/// Calls `f` for each group of lanes with the same member mask: (the group, members that are here).
#[inline(always)]
fn for_groups(mask: u32, members: &[u32; WARP], mut f: impl FnMut(u32, u32)) {
    let mut left = mask;
    while left != 0 {
        let own = members[left.trailing_zeros() as usize];
        let group = lanes_where(left, |lane| members[lane] == own);
        f(group, own & mask);
        left &= !group;
    }
}

/// `shfl`: op = [d, [p], a, b, c, [members]].
struct Shuffle;

impl Op for Shuffle {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let pair = inst.aux >> 2 & 1 != 0;
        let at = 1 + usize::from(pair);
        // SAFETY: the selector gave the operands in this order.
        unsafe {
            if inst.aux >> 3 & 1 != 0
                && let Err(flow) = assemble(warp, inst, mask, inst.op[at + 3])
            {
                return flow;
            }
            let a = *warp.row32(inst.op[at]);
            let (b, c) = (*warp.row32(inst.op[at + 1]), *warp.row32(inst.op[at + 2]));
            let mode = inst.aux & 3;
            let mut source = [0u32; WARP];
            let mut inside = 0u32;
            for lane in 0..WARP {
                let (own, shift) = (lane as i32, (b[lane] & 31) as i32);
                let segment = (c[lane] >> 8 & 31) as i32;
                let bound = (own & segment) | ((c[lane] & 31) as i32 & !segment);
                let (from, ok) = match mode {
                    0 => (own - shift, own - shift >= bound),
                    1 => (own + shift, own + shift <= bound),
                    2 => (own ^ shift, own ^ shift <= bound),
                    _ => {
                        let from = (own & segment) | (shift & !segment);
                        (from, from <= bound)
                    }
                };
                source[lane] = if ok { from as u32 & 31 } else { lane as u32 };
                inside |= u32::from(ok) << lane;
            }
            let mut out = [0; WARP];
            for lane in 0..WARP {
                out[lane] = a[source[lane] as usize % WARP];
            }
            warp.set32(inst.op[0], &out, mask);
            if pair {
                warp.set_pred(inst.op[1], inside, mask);
            }
        }
        Flow::Next
    }
}

/// `vote`: op = [d, p, [members]].
struct Vote;

impl Op for Vote {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let sync = inst.aux >> 3 & 1 != 0;
        // SAFETY: the selector gave the operands in this order.
        unsafe {
            if sync && let Err(flow) = assemble(warp, inst, mask, inst.op[2]) {
                return flow;
            }
            let members = if sync { *warp.row32(inst.op[2]) } else { [u32::MAX; WARP] };
            let value = warp.pred(inst.op[1]);
            for_groups(mask, &members, |group, present| {
                let yes = value & present;
                let result = match inst.aux & 7 {
                    0 => yes == present,
                    1 => yes != 0,
                    2 => yes == present || yes == 0,
                    _ => return warp.set32(inst.op[0], &[yes; WARP], group),
                };
                warp.set_pred(inst.op[0], if result { u32::MAX } else { 0 }, group);
            });
        }
        Flow::Next
    }
}

/// `match.any` and `match.all`: op = [d, [p], a, members].
struct Match;

impl Op for Match {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let (all, pair) = (inst.aux & 1 != 0, inst.aux >> 2 & 1 != 0);
        let at = 1 + usize::from(pair);
        // SAFETY: the selector gave the operands in this order.
        unsafe {
            if let Err(flow) = assemble(warp, inst, mask, inst.op[at + 1]) {
                return flow;
            }
            let members = *warp.row32(inst.op[at + 1]);
            let values = if inst.aux >> 3 & 1 != 0 {
                *warp.row64(inst.op[at])
            } else {
                warp.row32(inst.op[at]).map(u64::from)
            };
            for_groups(mask, &members, |group, present| {
                let mut out = [0; WARP];
                let mut same = 0;
                for lane in (0..WARP).filter(|lane| group >> lane & 1 != 0) {
                    let equal = lanes_where(present, |other| values[other] == values[lane]);
                    let whole = equal == present;
                    out[lane] = if all && !whole { 0 } else { equal };
                    same |= u32::from(whole) << lane;
                }
                warp.set32(inst.op[0], &out, group);
                if pair {
                    warp.set_pred(inst.op[1], same, group);
                }
            });
        }
        Flow::Next
    }
}

/// `redux.sync`: op = [d, a, members].
struct Reduce;

impl Op for Reduce {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: the selector gave the operands in this order.
        unsafe {
            if let Err(flow) = assemble(warp, inst, mask, inst.op[2]) {
                return flow;
            }
            let members = *warp.row32(inst.op[2]);
            let values = *warp.row32(inst.op[1]);
            for_groups(mask, &members, |group, present| {
                let lanes = (0..WARP).filter(|lane| present >> lane & 1 != 0);
                let result = lanes.map(|lane| values[lane]).reduce(|a, b| combine(inst.aux, a, b));
                warp.set32(inst.op[0], &[result.unwrap_or(0); WARP], group);
            });
        }
        Flow::Next
    }
}

/// One step of `redux.sync`; `aux` as the selector packed it.
fn combine(aux: u32, a: u32, b: u32) -> u32 {
    match (aux & 15, aux >> 4 & 15) {
        (0, _) => a.wrapping_add(b),
        (1, 0) => a.min(b),
        (2, 0) => a.max(b),
        (1, 1) => (a as i32).min(b as i32) as u32,
        (2, 1) => (a as i32).max(b as i32) as u32,
        (operation, 2) => {
            let absolute = aux >> 8 & 1 != 0;
            let value = |bits: u32| {
                let value = f32::from_bits(bits);
                if absolute { value.abs() } else { value }
            };
            let (x, y) = (value(a), value(b));
            if aux >> 9 & 1 != 0 && (x.is_nan() || y.is_nan()) {
                return 0x7fff_ffff;
            }
            (if operation == 1 { x.min(y) } else { x.max(y) }).to_bits()
        }
        (3, _) => a & b,
        (4, _) => a | b,
        _ => a ^ b,
    }
}

/// `activemask`.
struct ActiveMask;

impl Op for ActiveMask {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: op[0] is a 32-bit destination.
        unsafe { warp.set32(inst.op[0], &[mask; WARP], mask) };
        Flow::Next
    }
}

/// `elect.sync`: op = [d, p, members]; the lowest member leads.
struct Elect;

impl Op for Elect {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: the selector gave the operands in this order.
        unsafe {
            if let Err(flow) = assemble(warp, inst, mask, inst.op[2]) {
                return flow;
            }
            let members = *warp.row32(inst.op[2]);
            for_groups(mask, &members, |group, present| {
                let leader = present.trailing_zeros() % WARP as u32;
                warp.set32(inst.op[0], &[leader; WARP], group);
                warp.set_pred(inst.op[1], 1 << leader, group);
            });
        }
        Flow::Next
    }
}

/// `bar.warp.sync`: op = [members].
struct WarpBarrier;

impl Op for WarpBarrier {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: op[0] is a 32-bit operand.
        match unsafe { assemble(warp, inst, mask, inst.op[0]) } {
            Ok(()) => Flow::Next,
            Err(flow) => flow,
        }
    }
}
