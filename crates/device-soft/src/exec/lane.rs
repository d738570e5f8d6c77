//! Typed views of register rows, and the lane-wise maps that most handlers are.
//!
//! 32-bit rows hold every type of 32 bits or fewer. A narrow value is written sign- or
//! zero-extended by its type, and read by truncation, so that wider reads of narrow results are
//! what PTX says.

use super::{Flow, Warp};
use crate::code::Inst;
use crate::spec::WARP;

/// A type that registers hold.
pub trait Lane: Copy + Default {
    /// # Safety
    /// `slot` is an operand of the current frame, in the bank of `Self`.
    unsafe fn read(warp: &Warp, slot: i32) -> [Self; WARP];
    /// Stores the lanes of `mask`.
    ///
    /// # Safety
    /// As `read`; `slot` is not a pool constant.
    unsafe fn write(warp: &mut Warp, slot: i32, value: &[Self; WARP], mask: u32);
}

macro_rules! lane {
    ($row:ident, $write:ident: $($ty:ty, $from:expr, $to:expr);* $(;)?) => {
        $(impl Lane for $ty {
            #[inline(always)]
            unsafe fn read(warp: &Warp, slot: i32) -> [$ty; WARP] {
                // SAFETY: the caller names a slot of the frame.
                let row = unsafe { warp.$row(slot) };
                let mut out = [<$ty>::default(); WARP];
                for lane in 0..WARP {
                    out[lane] = $from(row[lane]);
                }
                out
            }
            #[inline(always)]
            unsafe fn write(warp: &mut Warp, slot: i32, value: &[$ty; WARP], mask: u32) {
                let mut bits = [0; WARP];
                for lane in 0..WARP {
                    bits[lane] = $to(value[lane]);
                }
                // SAFETY: the caller names a slot of the frame.
                unsafe { warp.$write(slot, &bits, mask) }
            }
        })*
    };
}

lane! { row32, set32:
    u8, |bits: u32| bits as u8, |v: u8| u32::from(v);
    i8, |bits: u32| bits as i8, |v: i8| i32::from(v) as u32;
    u16, |bits: u32| bits as u16, |v: u16| u32::from(v);
    i16, |bits: u32| bits as i16, |v: i16| i32::from(v) as u32;
    u32, |bits: u32| bits, |v: u32| v;
    i32, |bits: u32| bits as i32, |v: i32| v as u32;
    f32, |bits: u32| f32::from_bits(bits), |v: f32| v.to_bits();
}
lane! { row64, set64:
    u64, |bits: u64| bits, |v: u64| v;
    i64, |bits: u64| bits as i64, |v: i64| v as u64;
    f64, |bits: u64| f64::from_bits(bits), |v: f64| v.to_bits();
}

/// `d = f(a)`.
///
/// # Safety
/// As [`crate::code::Handler`]'s, with op = [d, a] in the banks of `D` and `A`.
#[inline(always)]
pub unsafe fn map1<A: Lane, D: Lane>(
    warp: &mut Warp,
    inst: &Inst,
    mask: u32,
    f: impl Fn(A) -> D,
) -> Flow {
    // SAFETY: the operands belong to the frame (the caller's contract).
    unsafe {
        let a = A::read(warp, inst.op[1]);
        let mut out = [D::default(); WARP];
        for lane in 0..WARP {
            out[lane] = f(a[lane]);
        }
        D::write(warp, inst.op[0], &out, mask);
    }
    Flow::Next
}

/// `d = f(a, b)`.
///
/// # Safety
/// As [`map1`]'s, with op = [d, a, b].
#[inline(always)]
pub unsafe fn map2<A: Lane, B: Lane, D: Lane>(
    warp: &mut Warp,
    inst: &Inst,
    mask: u32,
    f: impl Fn(A, B) -> D,
) -> Flow {
    // SAFETY: the operands belong to the frame (the caller's contract).
    unsafe {
        let a = A::read(warp, inst.op[1]);
        let b = B::read(warp, inst.op[2]);
        let mut out = [D::default(); WARP];
        for lane in 0..WARP {
            out[lane] = f(a[lane], b[lane]);
        }
        D::write(warp, inst.op[0], &out, mask);
    }
    Flow::Next
}

/// `d = f(a, b, c)`.
///
/// # Safety
/// As [`map1`]'s, with op = [d, a, b, c].
#[inline(always)]
pub unsafe fn map3<A: Lane, B: Lane, C: Lane, D: Lane>(
    warp: &mut Warp,
    inst: &Inst,
    mask: u32,
    f: impl Fn(A, B, C) -> D,
) -> Flow {
    // SAFETY: the operands belong to the frame (the caller's contract).
    unsafe {
        let a = A::read(warp, inst.op[1]);
        let b = B::read(warp, inst.op[2]);
        let c = C::read(warp, inst.op[3]);
        let mut out = [D::default(); WARP];
        for lane in 0..WARP {
            out[lane] = f(a[lane], b[lane], c[lane]);
        }
        D::write(warp, inst.op[0], &out, mask);
    }
    Flow::Next
}
