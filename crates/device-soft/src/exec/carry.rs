//! Extended-precision integers: `add.cc`, `addc`, `sub.cc`, `subc`, `mad.cc`, `madc`.
//!
//! The carry flag is a bit of each lane in [`Warp::carry`]. `sub.cc` leaves a borrow there: the
//! flag means what the matching `subc` needs.

use super::lanewise::{Inputs, Parts, Typed};
use super::{Arg, Flow, Isa, Lane, Op, Query, Selected, Warp};
use crate::code::Inst;
use crate::math::int::Int;
use crate::spec::WARP;
use kedge_ptx::ast::Type;
use std::marker::PhantomData;

/// A word with carry in and out.
pub(crate) trait CarryWord: Int + Typed {
    fn add_carry(self, other: Self, carry: bool) -> (Self, bool);
    fn sub_borrow(self, other: Self, borrow: bool) -> (Self, bool);
}

macro_rules! carry_word {
    ($($ty:ident)*) => {$(
        impl CarryWord for $ty {
            #[inline(always)]
            fn add_carry(self, other: Self, carry: bool) -> (Self, bool) {
                let (sum, first) = self.overflowing_add(other);
                let (sum, second) = sum.overflowing_add($ty::from(carry));
                (sum, first || second)
            }
            #[inline(always)]
            fn sub_borrow(self, other: Self, borrow: bool) -> (Self, bool) {
                let (difference, first) = self.overflowing_sub(other);
                let (difference, second) = difference.overflowing_sub($ty::from(borrow));
                (difference, first || second)
            }
        }
    )*};
}
carry_word!(u32 u64);

/// `aux`: the flag is read.
const IN: u32 = 1;
/// `aux`: the flag is written.
const OUT: u32 = 2;

/// `add{c}{.cc}` and `sub{c}{.cc}`.
struct Sum<T, const SUB: bool>(PhantomData<T>);

impl<T: CarryWord, const SUB: bool> Op for Sum<T, SUB> {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: op = [d, a, b] in T's bank (the selector).
        unsafe {
            let (a, b) = <(T, T)>::read(warp, &inst.op[1..]);
            finish(warp, inst, mask, |lane, carry| {
                if SUB {
                    a[lane].sub_borrow(b[lane], carry)
                } else {
                    a[lane].add_carry(b[lane], carry)
                }
            });
        }
        Flow::Next
    }
}

/// `mad{c}.lo/.hi{.cc}`; the product is P's, which for `.hi` depends on the sign.
struct Mad<T, P, const HI: bool>(PhantomData<(T, P)>);

impl<T: CarryWord, P: Int + Typed, const HI: bool> Op for Mad<T, P, HI> {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: op = [d, a, b, c], all in the bank of T and P, which are of one size (the
        // selector).
        unsafe {
            let (a, b) = <(P, P)>::read(warp, &inst.op[1..]);
            let mut product = [P::default(); WARP];
            for lane in 0..WARP {
                product[lane] = if HI { a[lane].mul_hi(b[lane]) } else { a[lane].mul_lo(b[lane]) };
            }
            let (c,) = <(T,)>::read(warp, &inst.op[3..]);
            let product = unsigned::<T, P>(&product);
            finish(warp, inst, mask, |lane, carry| product[lane].add_carry(c[lane], carry));
        }
        Flow::Next
    }
}

/// The same bits as T.
#[inline(always)]
fn unsigned<T: Typed, P: Typed>(from: &[P; WARP]) -> [T; WARP] {
    const { assert!(size_of::<T>() == size_of::<P>()) };
    // SAFETY: T and P are integers of one size.
    unsafe { std::mem::transmute_copy(from) }
}

/// Stores each lane's result and, if `aux` says so, its carry.
///
/// # Safety
/// `op[0]` is a destination in T's bank.
#[inline(always)]
unsafe fn finish<T: Lane>(
    warp: &mut Warp,
    inst: &Inst,
    mask: u32,
    step: impl Fn(usize, bool) -> (T, bool),
) {
    let carries = if inst.aux & IN != 0 { warp.carry } else { 0 };
    let mut out = [T::default(); WARP];
    let mut flags = 0;
    for (lane, slot) in out.iter_mut().enumerate() {
        let (value, carry) = step(lane, carries >> lane & 1 != 0);
        *slot = value;
        flags |= u32::from(carry) << lane;
    }
    // SAFETY: the caller's contract.
    unsafe { T::write(warp, inst.op[0], &out, mask) };
    if inst.aux & OUT != 0 {
        warp.carry = warp.carry & !mask | flags & mask;
    }
}

/// This family's selector.
pub(crate) fn select(query: &Query<'_>) -> Option<Selected> {
    let mut parts = Parts::of(query);
    let opcode = query.part(0);
    let reads = matches!(opcode, "addc" | "subc" | "madc");
    if !reads && !matches!(opcode, "add" | "sub" | "mad") {
        return None;
    }
    let writes = parts.take("cc");
    if !reads && !writes {
        return None;
    }
    let ty = parts.take_type()?;
    let half = parts.take_first();
    if !parts.done() {
        return None;
    }
    let two = || [Arg::Dst(ty), Arg::Src(ty), Arg::Src(ty)];
    let three = || [Arg::Dst(ty), Arg::Src(ty), Arg::Src(ty), Arg::Src(ty)];
    let selected = match (&opcode[..3], half, ty) {
        ("add", None, Type::U32 | Type::S32) => Selected::new::<Sum<u32, false>>(two()),
        ("add", None, Type::U64 | Type::S64) => Selected::new::<Sum<u64, false>>(two()),
        ("sub", None, Type::U32 | Type::S32) => Selected::new::<Sum<u32, true>>(two()),
        ("sub", None, Type::U64 | Type::S64) => Selected::new::<Sum<u64, true>>(two()),
        ("mad", Some("lo"), Type::U32 | Type::S32) => {
            Selected::new::<Mad<u32, u32, false>>(three())
        }
        ("mad", Some("lo"), Type::U64 | Type::S64) => {
            Selected::new::<Mad<u64, u64, false>>(three())
        }
        ("mad", Some("hi"), Type::U32) => Selected::new::<Mad<u32, u32, true>>(three()),
        ("mad", Some("hi"), Type::S32) => Selected::new::<Mad<u32, i32, true>>(three()),
        ("mad", Some("hi"), Type::U64) => Selected::new::<Mad<u64, u64, true>>(three()),
        ("mad", Some("hi"), Type::S64) => Selected::new::<Mad<u64, i64, true>>(three()),
        _ => return None,
    };
    Some(selected.aux((u32::from(reads) * IN) | (u32::from(writes) * OUT)))
}
