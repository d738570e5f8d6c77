//! `mma.sync.m8n8k4` of f16: four products, each of the threads of two quads (PTX ISA, "Matrix
//! Fragments for mma.m8n8k4 with .f16 floating point type").

use super::mma::register_type;
use super::slots;
use crate::code::Inst;
use crate::exec::lanewise::Parts;
use crate::exec::{Arg, Flow, Isa, Lane, Op, Query, Selected, Warp};
use crate::math::fragment::Element;
use crate::spec::WARP;

/// The order of A's and B's elements in a fragment, and the accumulators' types; packed in `aux`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Form {
    a_by_column: bool,
    b_by_row: bool,
    c: Element,
    d: Element,
}

impl Form {
    fn encode(self) -> u32 {
        let single = |element| u32::from(element == Element::F32);
        u32::from(self.a_by_column)
            | u32::from(self.b_by_row) << 1
            | single(self.c) << 2
            | single(self.d) << 3
    }

    fn decode(aux: u32) -> Self {
        let element = |bit: u32| if aux >> bit & 1 != 0 { Element::F32 } else { Element::F16 };
        Self { a_by_column: aux & 1 != 0, b_by_row: aux & 2 != 0, c: element(2), d: element(3) }
    }
}

/// Registers of accumulators.
fn registers(element: Element) -> usize {
    if element == Element::F32 { 8 } else { 4 }
}

/// Which of the four products a lane works for.
fn product(lane: usize) -> usize {
    lane / 4 % 4
}

/// Row and column of accumulator `i` of a lane.
fn accumulator(element: Element, lane: usize, i: usize) -> (usize, usize) {
    let half = 4 * (lane / 16);
    match element {
        Element::F32 => (half + (lane & 1) + (i & 2), (i & 4) + (lane & 2) + (i & 1)),
        _ => (half + lane % 4, i),
    }
}

type Tile<const R: usize, const C: usize> = [[[f32; C]; R]; 4];

/// op = d, a (2), b (2), c.
struct Products;

impl Op for Products {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let form = Form::decode(inst.aux);
        let (d_len, c_len) = (registers(form.d), registers(form.c));
        // SAFETY: the operands are d, a, b, c, of these lengths, in 32-bit slots (the selector).
        unsafe {
            let slots = slots(warp, inst, d_len + 4 + c_len);
            let (d, slots) = slots.split_at(d_len);
            let mut words = [[0u32; WARP]; 12];
            for (row, slot) in words.iter_mut().zip(slots) {
                *row = u32::read(warp, *slot);
            }
            let sums = compute(form, &words);
            for (register, slot) in d.iter().enumerate() {
                let mut out = [0; WARP];
                for (lane, word) in out.iter_mut().enumerate() {
                    let per = 8 / d_len;
                    let value = |index: usize| {
                        let (row, column) = accumulator(form.d, lane, per * register + index);
                        sums[product(lane)][row][column]
                    };
                    *word = form.d.register(value(0), value(per - 1));
                }
                u32::write(warp, *slot, &out, mask);
            }
        }
        Flow::Next
    }
}

/// The products of registers a (2), b (2) and c.
fn compute(form: Form, words: &[[u32; WARP]; 12]) -> Tile<8, 8> {
    let (mut a, mut b): (Tile<8, 4>, Tile<4, 8>) = ([[[0.0; 4]; 8]; 4], [[[0.0; 8]; 4]; 4]);
    let mut sums: Tile<8, 8> = [[[0.0; 8]; 8]; 4];
    for lane in 0..WARP {
        let (product, half) = (product(lane), 4 * (lane / 16));
        for i in 0..4 {
            let element = |first: usize| Element::F16.float(words[first + i / 2][lane], i % 2);
            let (row, k) = if form.a_by_column { (i, lane % 4) } else { (lane % 4, i) };
            a[product][half + row][k] = element(0);
            let (k, column) = if form.b_by_row { (lane % 4, i) } else { (i, lane % 4) };
            b[product][k][half + column] = element(2);
        }
        let per = 8 / registers(form.c);
        for i in 0..8 {
            let (row, column) = accumulator(form.c, lane, i);
            sums[product][row][column] = form.c.float(words[4 + i / per][lane], i % per);
        }
    }
    for ((sums, a), b) in sums.iter_mut().zip(&a).zip(&b) {
        for (sums, a) in sums.iter_mut().zip(a) {
            for (a, b) in a.iter().zip(b) {
                for (sum, b) in sums.iter_mut().zip(b) {
                    *sum += a * b;
                }
            }
        }
    }
    sums
}

/// `mma.sync.aligned.m8n8k4.alayout.blayout.dtype.f16.f16.ctype d, a, b, c`.
pub(super) fn select(query: &Query<'_>) -> Option<Selected> {
    let mut parts = Parts::of(query);
    if !parts.take("sync") || !parts.take("aligned") || !parts.take("m8n8k4") {
        return None;
    }
    let mut by_column = || {
        parts.take_map(|part| match part {
            "row" => Some(false),
            "col" => Some(true),
            _ => None,
        })
    };
    let (a_by_column, b_by_row) = (by_column()?, !by_column()?);
    let mut element = || parts.take_map(Element::named);
    let (d, a, b, c) = (element()?, element()?, element()?, element()?);
    let sums = [Element::F16, Element::F32];
    let right = (a, b) == (Element::F16, Element::F16) && sums.contains(&c) && sums.contains(&d);
    let lengths = [registers(d), 2, 2, registers(c)];
    if !right || !parts.done() || [0, 1, 2, 3].map(|i| query.lanes(i)) != lengths {
        return None;
    }
    let mut args = vec![Arg::Dst(register_type(d)); lengths[0]];
    args.extend(vec![Arg::Src(register_type(a)); 4]);
    args.extend(vec![Arg::Src(register_type(c)); lengths[3]]);
    let form = Form { a_by_column, b_by_row, c, d };
    Some(Selected::new::<Products>(args).aux(form.encode()))
}
