//! `alloca`, `stacksave`, `stackrestore`: memory on the thread's stack of a size that is known
//! late.
//!
//! A fragment's lanes take as much as the one of them that wants most, above their frame; a frame's
//! return gives it back.

use super::control::lanes_where;
use super::fragment::Fragment;
use super::select::{Arg, Query, Selected};
use super::{Flow, Isa, Op, Warp};
use crate::code::Inst;
use crate::fault::FaultKind;
use crate::spec::WARP;
use kedge_ptx::ast::{Operand, Type};

/// Alignment of `alloca` where it names none, in bytes.
const ALIGN: u64 = 8;
/// Largest alignment that `alloca` may name, in bytes.
const MAX_ALIGN: u64 = 1 << 16;

/// This family's selector.
pub(crate) fn select(query: &Query<'_>) -> Option<Selected> {
    use Arg::{Dst, Imm, Src};
    if query.name.len() != 2 {
        return None;
    }
    let ty = query.ty(0).filter(|ty| matches!(ty, Type::U32 | Type::U64))?;
    let wide = u32::from(ty == Type::U64);
    match query.part(0) {
        "alloca" => {
            let mut args = vec![Dst(ty), Src(ty)];
            match query.operand(2) {
                Some(Operand::Int(align)) => {
                    let align = *align as u64;
                    if !align.is_power_of_two() || align > MAX_ALIGN {
                        return None;
                    }
                    args.push(Imm);
                }
                Some(_) => return None,
                None => {}
            }
            Some(Selected::scalar::<Alloca>(args).imm(ALIGN).aux(wide))
        }
        "stacksave" => Some(Selected::scalar::<StackSave>([Dst(ty)]).aux(wide)),
        "stackrestore" => Some(Selected::scalar::<StackRestore>([Src(ty)]).aux(wide)),
        _ => None,
    }
}

impl Warp {
    /// Where the current frame's own local memory ends, and what `alloca` takes begins.
    fn frame_end(&self) -> u64 {
        let Fragment { local, function, .. } = self.current;
        // SAFETY: the reference ends with this function.
        let code = unsafe { &self.program().functions[function as usize] };
        u64::from(local) + u64::from(code.local)
    }

    /// A row of the register that the instruction names, as 64-bit values; `wide`: it is in the
    /// 64-bit bank.
    ///
    /// # Safety
    /// `slot` is an operand of that bank.
    unsafe fn row(&self, slot: i32, wide: bool) -> [u64; WARP] {
        // SAFETY: the caller's contract.
        unsafe { if wide { *self.row64(slot) } else { self.row32(slot).map(u64::from) } }
    }

    /// Writes an address in local memory to the lanes of `mask`.
    ///
    /// # Safety
    /// `slot` is a destination in the bank that `wide` names.
    unsafe fn put_address(&mut self, slot: i32, wide: bool, at: u64, mask: u32) {
        // SAFETY: the caller's contract.
        unsafe {
            match wide {
                true => self.set64(slot, &[at; WARP], mask),
                false => self.set32(slot, &[at as u32; WARP], mask),
            }
        }
    }
}

/// `alloca`: op = [address, bytes], imm = alignment, aux = whether they are 64 bits wide.
struct Alloca;

impl Op for Alloca {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let wide = inst.aux != 0;
        // SAFETY: the selector gave the operands.
        let bytes = unsafe { warp.row(inst.op[1], wide) };
        let most = (0..WARP).filter(|lane| mask >> lane & 1 != 0).map(|lane| bytes[lane]).max();
        let most = most.unwrap_or(0);
        let frame = warp.frame_end();
        let at = (frame + u64::from(warp.current.taken)).next_multiple_of(inst.imm.max(1));
        let end = at.checked_add(most).filter(|&end| end <= warp.local_len);
        let Some(end) = end else {
            let lane = lanes_where(mask, |lane| bytes[lane] == most).trailing_zeros() as usize;
            let detail = format!("alloca of {most} bytes: the stack limit is reached");
            return warp.fault(inst, lane, FaultKind::StackOverflow, None, detail);
        };
        // A callee's frame begins there. Local memory is smaller than 4 GiB.
        warp.current.taken = (end - frame).next_multiple_of(16) as u32;
        // SAFETY: the selector gave the operands.
        unsafe { warp.put_address(inst.op[0], wide, at, mask) };
        Flow::Next
    }
}

/// `stacksave`: op = [address], aux as [`Alloca`]'s.
struct StackSave;

impl Op for StackSave {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let at = warp.frame_end() + u64::from(warp.current.taken);
        // SAFETY: the selector gave the operand.
        unsafe { warp.put_address(inst.op[0], inst.aux != 0, at, mask) };
        Flow::Next
    }
}

/// `stackrestore`: op = [address], aux as [`Alloca`]'s. What another lane may still have is kept.
struct StackRestore;

impl Op for StackRestore {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        if mask != warp.active {
            return Flow::Next;
        }
        // SAFETY: the selector gave the operand.
        let saved = unsafe { warp.row(inst.op[0], inst.aux != 0) };
        let most = (0..WARP).filter(|lane| mask >> lane & 1 != 0).map(|lane| saved[lane]).max();
        let taken = most.unwrap_or(0).saturating_sub(warp.frame_end());
        warp.current.taken = warp.current.taken.min(u32::try_from(taken).unwrap_or(u32::MAX));
        Flow::Next
    }
}
