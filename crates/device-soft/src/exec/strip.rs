//! Several loads from one base register at once ([`crate::lower`] joins them).

use super::load_store::{Element, Load};
use super::locate::{AnyGlobal, HALF, Locate, Reach, Shared32};
use super::{Flow, Handlers, Isa, Op, Warp};
use crate::code::Inst;
use std::marker::PhantomData;

/// Most loads of a strip.
pub(crate) const MAX_LOADS: usize = 32;

/// What kind of load may be part of a strip.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Loaded {
    /// Bytes of an element: 4 or 8.
    pub element: u32,
    /// Elements of the vector: 1, 2 or 4.
    pub count: u32,
    /// Global or generic addresses in the 64-bit bank, or else shared ones in the 32-bit bank.
    pub global: bool,
}

/// op = the strip's [`Reach`] (from, to, align, step); for each load its offset, its number of
/// destinations, and these; the base.
pub(crate) struct Strip<P, T>(PhantomData<(P, T)>);

impl Strip<(), ()> {
    pub(crate) fn handlers(loaded: Loaded) -> Handlers {
        match (loaded.global, loaded.element) {
            (false, 4) => Handlers::of::<Strip<Shared32, u32>>(),
            (false, _) => Handlers::of::<Strip<Shared32, u64>>(),
            (true, 4) => Handlers::of::<Strip<AnyGlobal, u32>>(),
            (true, _) => Handlers::of::<Strip<AnyGlobal, u64>>(),
        }
    }
}

/// Operands before the first load.
pub(crate) const HEAD: usize = 4;

/// The loads of a strip's operands: offset and destinations.
#[inline(always)]
fn loads(list: &[i32]) -> impl Iterator<Item = (i32, &[i32])> {
    let mut rest = list.get(HEAD..).unwrap_or(&[]);
    std::iter::from_fn(move || {
        let (&[offset, count], tail) = rest.split_first_chunk()?;
        let (to, tail) = tail.split_at_checked(count as usize)?;
        rest = tail;
        Some((offset, to))
    })
}

impl<P: Locate, T: Rows> Op for Strip<P, T> {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: lowering made the list, and its slots are of this frame and of the banks of `P`
        // and `T`.
        unsafe {
            let list = warp.operands(inst);
            let base = list[list.len() - 1];
            if mask == u32::MAX && Self::whole::<I>(warp, inst, list, base) {
                return Flow::Next;
            }
            one_by_one::<I, P, T>(warp, inst, list, base, mask)
        }
    }
}

impl<P: Locate, T: Rows> Strip<P, T> {
    /// All loads of a whole warp, if each half's lanes have them in rows, or all the same.
    ///
    /// # Safety
    /// As [`Op::run`]'s.
    #[inline(always)]
    unsafe fn whole<I: Isa>(warp: &mut Warp, inst: &Inst, list: &'static [i32], base: i32) -> bool {
        let &[from, to, align, step, ..] = list else { return false };
        let (from, to) = (i64::from(from), i64::from(to));
        let reach = Reach { from, to, align: align as u64, step: step as u64 };
        // SAFETY: the caller's contract.
        let Some(halves) = (unsafe { P::halves::<I>(warp, inst, base, reach) }) else {
            return false;
        };
        for (offset, places) in loads(list) {
            let first = halves.first.map(|base| base.wrapping_offset(offset as isize).cast::<T>());
            for (item, slot) in places.iter().enumerate() {
                let first = first.map(|first| first.wrapping_add(item).cast_const());
                // SAFETY: the slot is of the frame; `halves` found all that lies between the first
                // and the last byte of the strip good, and either one load of each lane after the
                // other or all the same.
                unsafe {
                    let to = T::place(warp, *slot);
                    for (half, first) in first.into_iter().enumerate() {
                        let to = to.add(half * HALF);
                        match halves.step {
                            0 => T::splat_half(first, to),
                            _ if places.len() == 1 => T::copy_half(first, to),
                            _ => {
                                for lane in 0..HALF {
                                    let from = first.add(lane * places.len());
                                    to.add(lane).write(from.read_unaligned());
                                }
                            }
                        }
                    }
                }
            }
        }
        true
    }
}

/// What a strip's rows are made of. Written out, for the compiler finds worse ways.
pub(crate) trait Rows: Element {
    /// A register's row.
    ///
    /// # Safety
    /// `slot` is a destination of the frame, in the element's bank.
    unsafe fn place(warp: &mut Warp, slot: i32) -> *mut Self;
    /// Puts one element into half a row.
    ///
    /// # Safety
    /// `from` is valid for a read, and `to` for half a row, aligned for elements.
    unsafe fn splat_half(from: *const Self, to: *mut Self);
    /// Copies half a row.
    ///
    /// # Safety
    /// Both are valid for half a row.
    unsafe fn copy_half(from: *const Self, to: *mut Self);
}

macro_rules! rows {
    ($($ty:ident $bank:ident;)*) => {
        $(impl Rows for $ty {
            #[inline(always)]
            unsafe fn place(warp: &mut Warp, slot: i32) -> *mut $ty {
                // SAFETY: lowering gave the slot, so it lies in the frame.
                unsafe { warp.$bank.offset(slot as isize).cast() }
            }
            #[inline(always)]
            unsafe fn splat_half(from: *const $ty, to: *mut $ty) {
                // SAFETY: the caller's contract.
                unsafe { to.cast::<[$ty; HALF]>().write([from.read_unaligned(); HALF]) }
            }
            #[inline(always)]
            unsafe fn copy_half(from: *const $ty, to: *mut $ty) {
                // SAFETY: the caller's contract.
                unsafe {
                    let half = from.cast::<[$ty; HALF]>().read_unaligned();
                    to.cast::<[$ty; HALF]>().write(half);
                }
            }
        })*
    };
}

rows! { u32 r32; u64 r64; }

/// Each load by itself, as if it had not been joined.
///
/// # Safety
/// As [`Op::run`]'s.
#[inline(never)]
unsafe fn one_by_one<I: Isa, P: Locate, T: Element>(
    warp: &mut Warp,
    inst: &Inst,
    list: &'static [i32],
    base: i32,
    mask: u32,
) -> Flow {
    for (offset, to) in loads(list) {
        let mut one = inst.clone();
        one.imm = i64::from(offset) as u64;
        one.op[..to.len()].copy_from_slice(to);
        one.op[to.len()] = base;
        let handlers = match to.len() {
            1 => const { Handlers::of::<Load<P, T, 1>>() },
            2 => const { Handlers::of::<Load<P, T, 2>>() },
            _ => const { Handlers::of::<Load<P, T, 4>>() },
        };
        // SAFETY: the operands are those of such a load, at the level that this machine has.
        let flow = unsafe { handlers.at(I::LEVEL)(warp, &one, mask) };
        if flow != Flow::Next {
            return flow;
        }
    }
    Flow::Next
}
