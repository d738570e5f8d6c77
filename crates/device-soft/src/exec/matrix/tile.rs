//! Tiles of matrices, gathered from and scattered to a warp's registers.

use super::Params;
use crate::exec::{Lane, Warp};
use crate::math::fragment::{self, Element, Layout, Shape};
use crate::spec::WARP;

/// The type that a product is computed in.
pub(super) trait Number: Copy + Default + 'static {
    /// The element of each lane at `index` of the registers in `slot`.
    ///
    /// # Safety
    /// `slot` is an operand of the frame, in the bank that holds `element`.
    unsafe fn gather(warp: &Warp, slot: i32, element: Element, index: usize) -> [Self; WARP];
    /// Stores elements `2·i` (and `2·i + 1` where a register holds two) of each lane.
    ///
    /// # Safety
    /// As [`Self::gather`], of a destination.
    unsafe fn scatter(
        warp: &mut Warp,
        slot: i32,
        element: Element,
        values: [&[Self; WARP]; 2],
        mask: u32,
    );
    fn multiply(params: &Params, a: &[Self], b: &[Self], c: &mut [Self]);
    /// The element at a word's lowest bits.
    fn of(element: Element, word: u32) -> Self;
    fn negated(self) -> Self;
}

impl Number for f32 {
    #[inline(always)]
    unsafe fn gather(warp: &Warp, slot: i32, element: Element, index: usize) -> [f32; WARP] {
        // SAFETY: the caller's contract.
        let words = unsafe { u32::read(warp, slot) };
        let mut out = [0.0; WARP];
        // One loop for each type, so that each vectorises.
        macro_rules! each {
            ($($ty:ident)*) => {
                match element {
                    $(Element::$ty => {
                        for lane in 0..WARP {
                            out[lane] = Element::$ty.float(words[lane], index);
                        }
                    })*
                    _ => {
                        for lane in 0..WARP {
                            out[lane] = f32::from_bits(words[lane]);
                        }
                    }
                }
            };
        }
        each!(F16 Bf16 Tf32 E4m3 E5m2);
        out
    }

    #[inline(always)]
    unsafe fn scatter(
        warp: &mut Warp,
        slot: i32,
        element: Element,
        [low, high]: [&[f32; WARP]; 2],
        mask: u32,
    ) {
        let mut words = [0u32; WARP];
        for lane in 0..WARP {
            words[lane] = element.register(low[lane], high[lane]);
        }
        // SAFETY: the caller's contract.
        unsafe { u32::write(warp, slot, &words, mask) };
    }

    #[inline(always)]
    fn multiply(params: &Params, a: &[f32], b: &[f32], c: &mut [f32]) {
        fragment::multiply_f32(params.shape, a, b, c);
    }

    #[inline(always)]
    fn of(element: Element, word: u32) -> f32 {
        element.float(word, 0)
    }

    #[inline(always)]
    fn negated(self) -> f32 {
        -self
    }
}

impl Number for f64 {
    #[inline(always)]
    unsafe fn gather(warp: &Warp, slot: i32, _: Element, _: usize) -> [f64; WARP] {
        // SAFETY: the caller's contract.
        unsafe { f64::read(warp, slot) }
    }

    #[inline(always)]
    unsafe fn scatter(
        warp: &mut Warp,
        slot: i32,
        _: Element,
        [values, _]: [&[f64; WARP]; 2],
        mask: u32,
    ) {
        // SAFETY: the caller's contract.
        unsafe { f64::write(warp, slot, values, mask) };
    }

    #[inline(always)]
    fn multiply(params: &Params, a: &[f64], b: &[f64], c: &mut [f64]) {
        fragment::multiply_f64(params.shape, a, b, c);
    }

    #[inline(always)]
    fn of(element: Element, word: u32) -> f64 {
        element.float(word, 0).into()
    }

    #[inline(always)]
    fn negated(self) -> f64 {
        -self
    }
}

impl Number for i32 {
    #[inline(always)]
    unsafe fn gather(warp: &Warp, slot: i32, element: Element, index: usize) -> [i32; WARP] {
        // SAFETY: the caller's contract.
        let words = unsafe { u32::read(warp, slot) };
        let mut out = [0; WARP];
        // One loop for each type, so that each vectorises.
        macro_rules! each {
            ($($ty:ident)*) => {
                match element {
                    $(Element::$ty => {
                        for lane in 0..WARP {
                            out[lane] = Element::$ty.int(words[lane], index);
                        }
                    })*
                    _ => out = words.map(|word| word as i32),
                }
            };
        }
        each!(S8 U8 S4 U4);
        out
    }

    #[inline(always)]
    unsafe fn scatter(
        warp: &mut Warp,
        slot: i32,
        _: Element,
        [values, _]: [&[i32; WARP]; 2],
        mask: u32,
    ) {
        // SAFETY: the caller's contract.
        unsafe { i32::write(warp, slot, values, mask) };
    }

    /// Bits come as words, 32 to a column.
    #[inline(always)]
    fn multiply(params: &Params, a: &[i32], b: &[i32], c: &mut [i32]) {
        let Shape { m, n, k } = params.shape;
        if params.a == Element::B1 {
            let words = k / 32;
            for (row, column) in (0..m).flat_map(|row| (0..n).map(move |column| (row, column))) {
                let ones = (0..words).map(|word| {
                    let (a, b) = (a[row * words + word], b[word * n + column]);
                    (if params.xor { a ^ b } else { a & b }).count_ones() as i32
                });
                c[row * n + column] = c[row * n + column].wrapping_add(ones.sum());
            }
        } else {
            multiply_narrow(params, a, b, c);
        }
    }

    #[inline(always)]
    fn of(element: Element, word: u32) -> i32 {
        element.int(word, 0)
    }

    #[inline(always)]
    fn negated(self) -> i32 {
        self.wrapping_neg()
    }
}

/// Elements of at most eight bits and k of at most 64: every sum of products is below 2^24, so
/// single precision computes it exactly, and much faster than integers.
#[inline(always)]
fn multiply_narrow(params: &Params, a: &[i32], b: &[i32], c: &mut [i32]) {
    const MAX_ELEMENTS: usize = 1024;
    #[inline(always)]
    fn floats(from: &[i32]) -> [f32; MAX_ELEMENTS] {
        let mut out = [0.0; MAX_ELEMENTS];
        out.iter_mut().zip(from).for_each(|(out, from)| *out = *from as f32);
        out
    }
    let (left, right, mut sums) = (floats(a), floats(b), [0f32; MAX_ELEMENTS]);
    let size = c.len().min(MAX_ELEMENTS);
    fragment::multiply_f32(params.shape, &left[..a.len()], &right[..b.len()], &mut sums[..size]);
    for (c, sum) in c.iter_mut().zip(sums) {
        // SAFETY: the sum is a whole number below 2^24.
        let sum = unsafe { sum.to_int_unchecked::<i32>() };
        *c = if params.satfinite { c.saturating_add(sum) } else { c.wrapping_add(sum) };
    }
}

/// Columns of A and rows of B that are stored: bits come 32 to a word.
pub(super) fn stored_k(params: &Params) -> usize {
    if params.a == Element::B1 { params.shape.k / 32 } else { params.shape.k }
}

/// Fills a tile of N elements, of which the operand may use fewer, from `slots`.
///
/// # Safety
/// `slots` are operands of the frame, in the bank that holds `element`.
#[inline(always)]
pub(super) unsafe fn gather<T: Number, const N: usize>(
    warp: &Warp,
    slots: &[i32],
    element: Element,
    layout: &Layout,
) -> [T; N] {
    const { assert!(N.is_power_of_two()) };
    let mut tile = [T::default(); N];
    for (register, slot) in layout.distinct(slots).iter().enumerate() {
        for index in 0..element.per_register() {
            // SAFETY: the caller's contract.
            let values = unsafe { T::gather(warp, *slot, element, index) };
            layout.store(&mut tile, layout.offset(register, index), &values);
        }
    }
    tile
}

/// Stores a tile's elements to registers; the inverse of [`gather`].
///
/// # Safety
/// As [`gather`], of destinations.
#[inline(always)]
pub(super) unsafe fn scatter<T: Number, const N: usize>(
    warp: &mut Warp,
    slots: &[i32],
    element: Element,
    layout: &Layout,
    tile: &[T; N],
    mask: u32,
) {
    for (register, slot) in slots.iter().enumerate() {
        let mut values = [[T::default(); WARP]; 2];
        for (index, values) in values.iter_mut().enumerate().take(element.per_register()) {
            *values = layout.load(tile, layout.offset(register, index));
        }
        // SAFETY: the caller's contract.
        unsafe { T::scatter(warp, *slot, element, [&values[0], &values[1]], mask) };
    }
}
