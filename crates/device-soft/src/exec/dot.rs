//! A sum of products of what two strips of shared memory hold ([`crate::lower`] makes it).

use super::load_store::{Element, rows};
use super::locate::{HALF, Halves, Locate, Reach, Shared32};
use super::strip::HEAD;
use super::{Flow, Handlers, Isa, Lane, Op, Warp};
use crate::code::Inst;
use crate::math::float::canonical;
use crate::spec::WARP;
use std::marker::PhantomData;

/// op = both strips' [`Reach`]es (from, to, align, step); for each product both factors' offsets;
/// [`Ends`].
pub(crate) struct Dot<T>(PhantomData<T>);

/// The operands after the last product's.
pub(crate) struct Ends<O> {
    pub first: O,
    pub second: O,
    pub start: O,
    pub result: O,
}

impl<O> Ends<O> {
    pub(crate) fn list(self) -> [O; 4] {
        [self.first, self.second, self.start, self.result]
    }
}

impl Dot<()> {
    /// For elements of 4 or 8 bytes.
    pub(crate) fn handlers(bytes: u32) -> Handlers {
        match bytes {
            4 => Handlers::of::<Dot<f32>>(),
            _ => Handlers::of::<Dot<f64>>(),
        }
    }
}

/// What is multiplied.
pub(crate) trait Real: Lane + 'static {
    type Bits: Element;
    fn of(bits: Self::Bits) -> Self;
    fn multiply_add(self, factor: Self, addend: Self) -> Self;
    /// As one operation's result is: NaN stays NaN in a sum, so that it is enough to do it last.
    fn clean(self) -> Self;
}

macro_rules! real {
    ($($ty:ident $bits:ident $clean:expr;)*) => {
        $(impl Real for $ty {
            type Bits = $bits;
            #[inline(always)]
            fn of(bits: $bits) -> $ty {
                $ty::from_bits(bits)
            }
            #[inline(always)]
            fn multiply_add(self, factor: $ty, addend: $ty) -> $ty {
                self.mul_add(factor, addend)
            }
            #[inline(always)]
            fn clean(self) -> $ty {
                $clean(self)
            }
        })*
    };
}

real! { f32 u32 canonical; f64 u64 std::convert::identity; }

/// The operands, taken apart.
#[derive(Clone, Copy)]
struct Parts {
    reach: [Reach; 2],
    offsets: &'static [i32],
    bases: [i32; 2],
    start: i32,
    result: i32,
}

impl Parts {
    #[inline(always)]
    fn of(list: &'static [i32]) -> Option<Parts> {
        let (first, rest) = list.split_first_chunk::<HEAD>()?;
        let (second, rest) = rest.split_first_chunk::<HEAD>()?;
        let (offsets, &[a, b, start, result]) = rest.split_last_chunk()?;
        let reach = |&[from, to, align, step]: &[i32; HEAD]| Reach {
            from: i64::from(from),
            to: i64::from(to),
            align: align as u64,
            step: step as u64,
        };
        Some(Parts { reach: [reach(first), reach(second)], offsets, bases: [a, b], start, result })
    }
}

impl<T: Real> Op for Dot<T> {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: lowering made the list, and its slots are of this frame and of the banks of
        // addresses and of `T`.
        unsafe {
            let Some(parts) = Parts::of(warp.operands(inst)) else { return Flow::Next };
            if mask == u32::MAX
                && let Some(sum) = whole::<I, T>(warp, inst, parts)
            {
                T::write(warp, parts.result, &sum, mask);
                return Flow::Next;
            }
            one_by_one::<I, T>(warp, inst, parts, mask)
        }
    }
}

/// The sums of a whole warp, if each half's lanes have their elements in rows, or all the same.
///
/// # Safety
/// As [`Op::run`]'s.
#[inline(always)]
unsafe fn whole<I: Isa, T: Real>(warp: &Warp, inst: &Inst, parts: Parts) -> Option<[T; WARP]> {
    // SAFETY: the caller's contract; `sum` is given halves whose reach is good.
    unsafe {
        let a = Shared32::halves::<I>(warp, inst, parts.bases[0], parts.reach[0])?;
        let b = Shared32::halves::<I>(warp, inst, parts.bases[1], parts.reach[1])?;
        let start = T::read(warp, parts.start);
        let row = size_of::<T>() as u64;
        Some(match (a.step, b.step) {
            (0, 0) => sum::<T, true, true>(&a, &b, parts.offsets, start),
            (0, step) if step == row => sum::<T, true, false>(&a, &b, parts.offsets, start),
            (step, 0) if step == row => sum::<T, false, true>(&a, &b, parts.offsets, start),
            (step, other) if step == row && other == row => {
                sum::<T, false, false>(&a, &b, parts.offsets, start)
            }
            _ => return None,
        })
    }
}

/// `start` and the products of what lies at the `offsets`, in pairs, from `a` and `b`: the same
/// element for each lane of a half (`A`, `B`), or a row.
///
/// # Safety
/// The elements are there.
#[inline(always)]
unsafe fn sum<T: Real, const A: bool, const B: bool>(
    a: &Halves,
    b: &Halves,
    offsets: &[i32],
    start: [T; WARP],
) -> [T; WARP] {
    let mut sums = [[T::default(); HALF]; 2];
    sums[0].copy_from_slice(&start[..HALF]);
    sums[1].copy_from_slice(&start[HALF..]);
    for pair in offsets.chunks_exact(2) {
        for half in 0..2 {
            // SAFETY: the caller's contract.
            let x = unsafe { elements::<T, A>(a.first[half].wrapping_offset(pair[0] as isize)) };
            // SAFETY: the caller's contract.
            let y = unsafe { elements::<T, B>(b.first[half].wrapping_offset(pair[1] as isize)) };
            for lane in 0..HALF {
                sums[half][lane] = x[lane].multiply_add(y[lane], sums[half][lane]);
            }
        }
    }
    let mut out = start;
    for lane in 0..HALF {
        out[lane] = sums[0][lane].clean();
        out[HALF + lane] = sums[1][lane].clean();
    }
    out
}

/// Half a warp's elements: all the same, or a row.
///
/// # Safety
/// They are there.
#[inline(always)]
unsafe fn elements<T: Real, const SAME: bool>(at: *const u8) -> [T; HALF] {
    // SAFETY: the caller's contract.
    unsafe {
        match SAME {
            true => [at.cast::<T>().read_unaligned(); HALF],
            false => at.cast::<[T; HALF]>().read_unaligned(),
        }
    }
}

/// Each product by itself, as if they had not been joined.
///
/// # Safety
/// As [`Op::run`]'s.
#[inline(never)]
unsafe fn one_by_one<I: Isa, T: Real>(
    warp: &mut Warp,
    inst: &Inst,
    parts: Parts,
    mask: u32,
) -> Flow {
    let bytes = size_of::<T>() as u64;
    // SAFETY: the caller's contract; `locate` checked the pointers.
    unsafe {
        let mut sum = T::read(warp, parts.start);
        for pair in parts.offsets.chunks_exact(2) {
            let mut factors = [[T::default(); WARP]; 2];
            for (at, factor) in factors.iter_mut().enumerate() {
                let one = Inst { imm: i64::from(pair[at]) as u64, ..inst.clone() };
                let located = Shared32::locate::<I>(warp, &one, parts.bases[at], mask, bytes);
                let pointers = match located {
                    Ok(pointers) => pointers,
                    Err(flow) => return flow,
                };
                let [bits] = rows::<I, _, T::Bits, 1>(&pointers);
                *factor = bits.map(T::of);
            }
            for lane in 0..WARP {
                sum[lane] = factors[0][lane].multiply_add(factors[1][lane], sum[lane]);
            }
        }
        T::write(warp, parts.result, &sum.map(T::clean), mask);
    }
    Flow::Next
}
