//! Control flow: branches, calls, exits.

use super::fragment::{Frame, State};
use super::warp::Warp;
use super::{Flow, Isa, Op};
use crate::builtin::Builtin;
use crate::code::Inst;
use crate::fault::FaultKind;
use crate::spec::WARP;
use std::time::{Duration, Instant};

/// A call instruction's description; `Inst::imm` is its index in `Program::calls`.
#[derive(Debug, Clone, Default)]
pub(crate) struct CallSite {
    pub target: Target,
    /// Outgoing parameters: (offset in the caller's local frame, in the callee's, bytes).
    pub arguments: Vec<Copy>,
    /// Results: (offset in the caller's local frame, in the callee's, bytes).
    pub results: Vec<Copy>,
    /// What the caller's frame takes of each bank, and of local memory: where the callee's begins.
    pub frame: [u32; 4],
}

#[derive(Debug, Clone, std::marker::Copy)]
pub(crate) struct Copy {
    pub caller: u32,
    pub callee: u32,
    pub bytes: u32,
}

#[derive(Debug, Clone, std::marker::Copy, Default)]
pub(crate) enum Target {
    Function(u32),
    Builtin(Builtin),
    /// The address is in `op[0]`, 64-bit bank.
    #[default]
    Indirect,
}

/// A device function's address is `FUNCTION_BASE + FUNCTION_STRIDE * index`: small and opaque, as
/// on real devices. Builtins are numbered from `BUILTIN_INDEX`.
pub(crate) const FUNCTION_BASE: u64 = 0x100;
pub(crate) const FUNCTION_STRIDE: u64 = 0x10;
pub(crate) const BUILTIN_INDEX: u64 = 1 << 24;

/// The address that a program sees for function `index`.
pub(crate) fn function_address(index: u32) -> u64 {
    FUNCTION_BASE + FUNCTION_STRIDE * u64::from(index)
}

/// `bra`: the run loop does the rest.
pub(crate) struct Branch;

impl Op for Branch {
    #[inline(always)]
    unsafe fn run<I: Isa>(_: &mut Warp, _: &Inst, _: u32) -> Flow {
        Flow::Branch
    }
}

/// `brx.idx`: op[0] is the index (32-bit bank), imm the number of a target list.
pub(crate) struct BranchIndexed;

impl Op for BranchIndexed {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        if mask != warp.active {
            return Flow::Split;
        }
        // SAFETY: op[0] is a 32-bit operand.
        let index = *unsafe { warp.row32(inst.op[0]) };
        // SAFETY: the reference ends with this handler.
        let program = unsafe { warp.program() };
        let Some(targets) = program.branch_targets.get(inst.imm as usize) else {
            return warp.fault(inst, 0, FaultKind::IllegalInstruction, None, "no target list");
        };
        let pc = warp.pc_of(inst);
        let first = mask.trailing_zeros() as usize;
        let Some(&target) = targets.get(index[first] as usize) else {
            return warp.fault(inst, first, FaultKind::InvalidPc, None, "brx.idx out of its list");
        };
        let group = lanes_where(mask, |lane| index[lane] == index[first]);
        if group != mask {
            // The others come back to this instruction after this group has gone its way.
            let other = warp.current.branch_off(mask & !group, pc);
            warp.others.push(other);
            warp.current.mask = group;
        }
        warp.current.pc = target;
        warp.fuel -= 1;
        Flow::Reschedule
    }
}

/// `call`.
pub(crate) struct Call;

impl Op for Call {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        if mask != warp.active {
            return Flow::Split;
        }
        // SAFETY: the reference ends with this handler.
        let program = unsafe { warp.program() };
        let site = &program.calls[inst.imm as usize];
        let function = match site.target {
            Target::Function(function) => function,
            // SAFETY: the site's arguments lie in this frame.
            Target::Builtin(builtin) => return unsafe { builtin.call(warp, inst, mask, site) },
            // SAFETY: an indirect call has its address in op[0].
            Target::Indirect => match unsafe { resolve_indirect(warp, inst, mask) } {
                Ok(Target::Function(function)) => function,
                Ok(Target::Builtin(builtin)) => {
                    let mask = warp.active;
                    // SAFETY: the site's arguments lie in this frame.
                    let flow = unsafe { builtin.call(warp, inst, mask, site) };
                    if flow != Flow::Next {
                        return flow;
                    }
                    // Lanes that call another function still stand at this instruction.
                    warp.current.pc = warp.pc_of(inst) + 1;
                    return Flow::Reschedule;
                }
                Ok(Target::Indirect) | Err(_) => return Flow::Fault,
            },
        };
        warp.enter(inst, site, function)
    }
}

/// Narrows the current fragment to the lanes that call the same function as its first one.
///
/// # Safety
/// op[0] is the address, in the 64-bit bank.
unsafe fn resolve_indirect(warp: &mut Warp, inst: &Inst, mask: u32) -> Result<Target, Flow> {
    // SAFETY: the caller's contract.
    let address = *unsafe { warp.row64(inst.op[0]) };
    let first = mask.trailing_zeros() as usize;
    let group = lanes_where(mask, |lane| address[lane] == address[first]);
    let index = address[first].wrapping_sub(FUNCTION_BASE);
    let functions = warp.grid().spec.program.functions.len() as u64;
    let target = if index % FUNCTION_STRIDE != 0 {
        None
    } else if index / FUNCTION_STRIDE < functions {
        Some(Target::Function((index / FUNCTION_STRIDE) as u32))
    } else {
        let builtin = (index / FUNCTION_STRIDE).checked_sub(BUILTIN_INDEX);
        builtin.and_then(Builtin::from_index).map(Target::Builtin)
    };
    let Some(target) = target else {
        let detail = "call of an address that is no function";
        return Err(warp.fault(inst, first, FaultKind::InvalidPc, Some(address[first]), detail));
    };
    if group != mask {
        let pc = warp.pc_of(inst);
        let other = warp.current.branch_off(mask & !group, pc);
        warp.others.push(other);
        warp.current.mask = group;
        warp.active = group;
    }
    Ok(target)
}

impl Warp {
    /// Enters `function` with the current fragment: arguments, frame, place.
    fn enter(&mut self, inst: &Inst, site: &CallSite, function: u32) -> Flow {
        // SAFETY: the reference ends with this function.
        let code = unsafe { &self.program().functions[function as usize] };
        let [frame32, frame64, frame_pred, frame_local] = site.frame;
        let caller = self.current.local;
        let local = caller + frame_local + self.current.taken;
        if u64::from(local) + u64::from(code.local) > self.local_len {
            let lane = self.active.trailing_zeros() as usize;
            let detail = format!("call of {}: the stack limit is reached", code.name);
            return self.fault(inst, lane, FaultKind::StackOverflow, None, detail);
        }
        for copy in &site.arguments {
            // SAFETY: both ranges lie in the lanes' local memory, as checked above.
            unsafe { self.copy_local(caller + copy.caller, local + copy.callee, copy.bytes) };
        }
        let return_pc = self.pc_of(inst) + 1;
        let current = &mut self.current;
        current.frames.push(Frame {
            return_pc,
            base32: current.base32,
            base64: current.base64,
            base_pred: current.base_pred,
            local: caller,
            function: current.function,
            taken: std::mem::take(&mut current.taken),
        });
        current.base32 += frame32;
        current.base64 += frame64;
        current.base_pred += frame_pred;
        current.local = local;
        current.function = function;
        current.pc = code.entry;
        self.banks.reserve(
            (current.base32 + code.frame32) as usize,
            (current.base64 + code.frame64) as usize,
            (current.base_pred + code.frame_pred) as usize,
        );
        self.fuel -= 1;
        Flow::Reschedule
    }

    /// Copies `bytes` of local memory from `from` to `to` in every active lane.
    ///
    /// # Safety
    /// Both ranges lie within `local_len`.
    unsafe fn copy_local(&mut self, from: u32, to: u32, bytes: u32) {
        // SAFETY: the caller's contract.
        unsafe {
            match bytes {
                4 => self.copy_lanes(from, to, |from, to| {
                    to.cast::<[u8; 4]>().write(from.cast::<[u8; 4]>().read())
                }),
                8 => self.copy_lanes(from, to, |from, to| {
                    to.cast::<[u8; 8]>().write(from.cast::<[u8; 8]>().read())
                }),
                _ => self.copy_lanes(from, to, |from, to| std::ptr::copy(from, to, bytes as usize)),
            }
        }
    }

    /// Calls `copy` with the places at `from` and `to` in every active lane's local memory.
    ///
    /// # Safety
    /// Both lie within `local_len`.
    #[inline(always)]
    unsafe fn copy_lanes(&mut self, from: u32, to: u32, copy: impl Fn(*const u8, *mut u8)) {
        for lane in (0..WARP).filter(|lane| self.active >> lane & 1 != 0) {
            // SAFETY: the caller's contract.
            unsafe {
                let base = self.local.add(lane * self.local_len as usize);
                copy(base.add(from as usize), base.add(to as usize));
            }
        }
    }
}

/// `ret`: to the caller, or out of the kernel.
pub(crate) struct Return;

impl Op for Return {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        if mask != warp.active && !warp.current.frames.is_empty() {
            return Flow::Split;
        }
        let Some(frame) = warp.current.frames.pop() else { return leave(warp, inst, mask) };
        // SAFETY: the reference ends with this handler.
        let program = unsafe { warp.program() };
        // The instruction before the place of return is the call.
        let site = &program.calls[program.code[frame.return_pc as usize - 1].imm as usize];
        let callee = warp.current.local;
        for copy in &site.results {
            // SAFETY: both frames lie in the lanes' local memory.
            unsafe { warp.copy_local(callee + copy.callee, frame.local + copy.caller, copy.bytes) };
        }
        let current = &mut warp.current;
        current.base32 = frame.base32;
        current.base64 = frame.base64;
        current.base_pred = frame.base_pred;
        current.local = frame.local;
        current.function = frame.function;
        current.taken = frame.taken;
        current.pc = frame.return_pc;
        Flow::Reschedule
    }
}

/// `exit`.
pub(crate) struct Exit;

impl Op for Exit {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        leave(warp, inst, mask)
    }
}

/// Ends the lanes of `mask`.
fn leave(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
    // SAFETY: the block outlives the warp's run, and only this warp runs.
    unsafe { (*warp.block).exit(mask.count_ones()) };
    warp.current.pc = warp.pc_of(inst) + 1;
    warp.exit(mask);
    Flow::Reschedule
}

/// `trap`.
pub(crate) struct Trap;

impl Op for Trap {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        warp.fault(inst, mask.trailing_zeros() as usize, FaultKind::Trap, None, "trap")
    }
}

/// An instruction without effect here (`pmevent`, prefetches, hints).
pub(crate) struct Nop;

impl Op for Nop {
    #[inline(always)]
    unsafe fn run<I: Isa>(_: &mut Warp, _: &Inst, _: u32) -> Flow {
        Flow::Next
    }
}

/// `nanosleep`: op = [nanoseconds]. Others run meanwhile.
pub(crate) struct Sleep;

impl Op for Sleep {
    unsafe fn run<I: Isa>(_: &mut Warp, _: &Inst, _: u32) -> Flow {
        Flow::Sleep
    }
}

impl Warp {
    /// Puts the lanes of `mask` to sleep for as long as each asks, behind the `nanosleep` that the
    /// fragment has come to; `pc` is the next instruction.
    pub(super) fn fall_asleep(&mut self, inst: &Inst, mask: u32, pc: u32) {
        // SAFETY: op[0] is a 32-bit source.
        let wanted = unsafe { *self.row32(inst.op[0]) }.map(|t| t.min(MAX_SLEEP));
        let now = Instant::now();
        self.current.pc = pc;
        // The lanes that the guard leaves out go on, and one fragment for each length sleeps.
        let mut next = self.current.branch_off(self.active & !mask, pc);
        let mut left = mask;
        while left != 0 {
            let time = wanted[left.trailing_zeros() as usize];
            let same = lanes_where(left, |lane| wanted[lane] == time);
            left &= !same;
            let mut asleep = self.current.branch_off(same, pc);
            let until = now + Duration::from_nanos(time.into());
            asleep.state = State::Asleep { until };
            self.others.push(std::mem::replace(&mut next, asleep));
        }
        self.current = next;
        self.others.retain(|fragment| fragment.mask != 0);
        self.active = self.current.mask;
    }
}

/// Longest `nanosleep`, in nanoseconds (PTX ISA: one millisecond).
const MAX_SLEEP: u32 = 1_000_000;

/// The lanes of `mask` for which `f` holds.
#[inline(always)]
pub(crate) fn lanes_where(mask: u32, f: impl Fn(usize) -> bool) -> u32 {
    (0..WARP).fold(0, |out, lane| out | u32::from(mask >> lane & 1 != 0 && f(lane)) << lane)
}
