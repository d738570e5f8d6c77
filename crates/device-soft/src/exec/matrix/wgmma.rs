//! `wgmma`: matrix products of a warpgroup. B lies in shared memory, A there or in registers.
//!
//! Each warp computes its own 16 of the 64 rows when it executes the instruction, so that nothing
//! is asynchronous. But one warp may tell the others, after `wgmma.wait_group`, that the shared
//! memory is free: the four warps of a warpgroup therefore wait for each other there.

use super::mma::register_type;
use super::tile::{self, Number, stored_k};
use super::{Params, slots};
use crate::code::Inst;
use crate::exec::barrier::WarpgroupBarrier;
use crate::exec::control::Nop;
use crate::exec::lanewise::Parts;
use crate::exec::{Arg, Flow, Isa, Op, Query, Selected, Warp};
use crate::fault::FaultKind;
use crate::math::fragment::{Element, Layout, Shape};
use crate::memory::SHARED_WINDOW;
use crate::spec::WARP;
use kedge_ptx::ast::{Operand, Type};
use std::marker::PhantomData;

/// Rows that one warp computes, and columns that it computes in one step.
const ROWS: usize = 16;
const COLUMNS: usize = 8;

/// The instruction's modifiers that [`Params`] lacks; the shape there is that of one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Form {
    /// Columns of the product, in steps of [`COLUMNS`].
    steps: usize,
    a_in_registers: bool,
    negate: bool,
    /// Whether A is M-major, and B N-major.
    transposed: [bool; 2],
}

impl Form {
    fn encode(self) -> u32 {
        self.steps as u32
            | u32::from(self.a_in_registers) << 8
            | u32::from(self.negate) << 9
            | u32::from(self.transposed[0]) << 10
            | u32::from(self.transposed[1]) << 11
    }

    fn decode(aux: u32) -> Form {
        let bit = |at: u32| aux >> at & 1 != 0;
        Form {
            steps: (aux & 255) as usize,
            a_in_registers: bit(8),
            negate: bit(9),
            transposed: [bit(10), bit(11)],
        }
    }
}

/// A matrix in shared memory (PTX ISA, "Matrix Descriptor" and "Strides" of wgmma).
#[derive(Debug, Clone, Copy)]
struct Matrix {
    /// Address of the first element in shared memory.
    start: u64,
    /// Leading dimension byte offset.
    leading: u64,
    /// Stride dimension byte offset.
    stride: u64,
    /// The 128-byte line of the swizzle's pattern at which the matrix begins.
    base: u64,
    /// Bytes of the swizzle's pattern; 16 for none.
    span: u64,
    /// Whether consecutive elements are of one column of k, and not of one row.
    transposed: bool,
    /// Bytes of an element.
    size: u64,
}

impl Matrix {
    /// Decodes a descriptor; `size` is an element's bytes.
    fn new(descriptor: u64, transposed: bool, size: u64) -> Matrix {
        let field = |at: u32| (descriptor >> at & 0x3FFF) << 4;
        Matrix {
            start: field(0),
            leading: field(16),
            stride: field(32),
            base: descriptor >> 49 & 7,
            span: [16, 128, 64, 32][(descriptor >> 62) as usize],
            transposed,
            size,
        }
    }

    /// Returns the shared memory address of the element in row `mn` (of A, or of B's transpose) and
    /// column `k`.
    fn place(&self, mn: u64, k: u64) -> u64 {
        let (swizzled, chunks) = (self.span > 16, self.span / 16);
        let offset = if self.transposed {
            let (unit, within) = (mn * self.size / 16, mn * self.size % 16);
            let (line, group) = (k % 8, k / 8);
            within
                + match swizzled {
                    false => unit * self.stride + line * 16 + group * self.leading,
                    true => {
                        unit % chunks * 16
                            + unit / chunks * self.leading
                            + line * self.span
                            + group * self.stride
                    }
                }
        } else {
            let bytes = k * self.size;
            let column = if swizzled { bytes } else { bytes / 16 * self.leading + bytes % 16 };
            mn % 8 * self.span + mn / 8 * self.stride + column
        };
        let addr = (self.start + offset) & 0x3FFFF;
        let line = (addr >> 7).wrapping_sub(self.base) & (chunks - 1);
        addr ^ line << 4
    }

    /// Reads an element into the lowest bits of a word.
    ///
    /// # Errors
    /// The element's address, if that is beyond the block's shared memory.
    fn word(&self, warp: &Warp, mn: u64, k: u64) -> Result<u32, u64> {
        let addr = self.place(mn, k);
        if addr + self.size > warp.shared_len {
            return Err(addr);
        }
        let from = warp.shared.wrapping_add(addr as usize);
        let mut word = [0; 4];
        // SAFETY: the bytes end within the block's shared memory, which is checked above, and
        // `size` is 4 at most (`stored_bytes`).
        unsafe { std::ptr::copy_nonoverlapping(from, word.as_mut_ptr(), self.size as usize) };
        Ok(u32::from_le_bytes(word))
    }
}

/// Returns the bytes that an element takes in shared memory, 4 at most; single bits come 32 to a
/// word.
fn stored_bytes(element: Element) -> u64 {
    u64::from(element.bits().div_ceil(8)).max(if element == Element::B1 { 4 } else { 1 })
}

/// The operation, computed in `T`. Its operands are d, a, b, scale-d, and d again.
struct Wgmma<T>(PhantomData<T>);

impl<T: Number> Op for Wgmma<T> {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        if let Err(flow) = warp.converge(inst, mask) {
            return flow;
        }
        // SAFETY: `select` lists the operands of every `Wgmma` in this order.
        match unsafe { multiply::<T>(warp, inst, mask) } {
            Ok(()) => Flow::Next,
            Err(addr) => {
                let kind = FaultKind::IllegalAddress;
                let what = "wgmma: the descriptor's matrix is not in shared memory";
                let lane = mask.trailing_zeros() as usize % WARP;
                warp.fault(inst, lane, kind, Some(SHARED_WINDOW + addr), what)
            }
        }
    }
}

/// Computes a warp's rows of the product; the error is an address beyond shared memory.
///
/// # Safety
/// `inst` has the operands of [`Wgmma`].
#[inline(always)]
unsafe fn multiply<T: Number>(warp: &mut Warp, inst: &Inst, mask: u32) -> Result<(), u64> {
    let (params, form) = (Params::decode(inst.imm), Form::decode(inst.aux));
    let k = stored_k(&params);
    let each = ROWS * COLUMNS / WARP / params.d.per_register();
    let (d_len, a_len) = (form.steps * each, if form.a_in_registers { 4 } else { 1 });
    let lane = mask.trailing_zeros() as usize % WARP;
    // SAFETY: the caller promises these operands, and `d_len` and `a_len` are their lengths.
    unsafe {
        let slots = slots(warp, inst, 2 * d_len + a_len + 2);
        let (d, rest) = slots.split_at(d_len);
        let (a, rest) = rest.split_at(a_len);
        let mut left = if form.a_in_registers {
            let layout = Layout::mma_a(ROWS, k, params.a.per_register());
            tile::gather::<T, 512>(warp, a, params.a, &layout)
        } else {
            let descriptor = warp.row64(a[0])[lane];
            let matrix = Matrix::new(descriptor, form.transposed[0], stored_bytes(params.a));
            let first = ROWS * (warp.index as usize % 4);
            read::<T, 512>(warp, &matrix, params.a, |at| (first + at / k, at % k), ROWS * k)?
        };
        if form.negate {
            left = left.map(T::negated);
        }
        let descriptor = warp.row64(rest[0])[lane];
        let matrix = Matrix::new(descriptor, form.transposed[1], stored_bytes(params.b));
        let accumulates = warp.pred(rest[1]) >> lane & 1 != 0;
        let layout = Layout::accumulators(COLUMNS, params.d.per_register());
        for (step, d) in d.chunks_exact(each).enumerate() {
            let place = |at: usize| (step * COLUMNS + at % COLUMNS, at / COLUMNS);
            let right = read::<T, 256>(warp, &matrix, params.b, place, k * COLUMNS)?;
            let mut sums = [T::default(); ROWS * COLUMNS];
            if accumulates {
                sums = tile::gather::<T, { ROWS * COLUMNS }>(warp, d, params.c, &layout);
            }
            T::multiply(&params, &left[..ROWS * k], &right[..k * COLUMNS], &mut sums);
            tile::scatter::<T, { ROWS * COLUMNS }>(warp, d, params.d, &layout, &sums, mask);
        }
    }
    Ok(())
}

/// Reads `count` elements of a matrix in shared memory; `place` gives the (row, k) of each. The
/// error is an address beyond shared memory.
#[inline(always)]
fn read<T: Number, const N: usize>(
    warp: &Warp,
    matrix: &Matrix,
    element: Element,
    place: impl Fn(usize) -> (usize, usize),
    count: usize,
) -> Result<[T; N], u64> {
    let mut out = [T::default(); N];
    for (at, value) in out.iter_mut().enumerate().take(count) {
        let (mn, k) = place(at);
        *value = T::of(element, matrix.word(warp, mn as u64, k as u64)?);
    }
    Ok(out)
}

/// Returns whether hardware has a product of these types; they determine k.
fn exists(params: &Params, k: usize) -> bool {
    use Element::{B1, Bf16, E4m3, E5m2, F16, F32, S8, S32, Tf32, U8};
    match (params.a, params.b) {
        (F16, F16) => k == 16 && matches!(params.d, F16 | F32),
        (Bf16, Bf16) => k == 16 && params.d == F32,
        (Tf32, Tf32) => k == 8 && params.d == F32,
        (E4m3 | E5m2, E4m3 | E5m2) => k == 32 && matches!(params.d, F16 | F32),
        (S8 | U8, S8 | U8) => k == 32 && params.d == S32,
        (B1, B1) => k == 256 && params.d == S32,
        _ => false,
    }
}

/// Selects `wgmma.mma_async.sync.aligned.shape{.satfinite}.dtype.atype.btype{.and.popc} d, a, b,
/// scale-d {, negations}{, transpositions}`, `wgmma.fence`, `.commit_group` and `.wait_group`.
pub(super) fn select(query: &Query<'_>) -> Option<Selected> {
    match query.part(1) {
        "fence" | "commit_group" => return Some(Selected::scalar::<Nop>([])),
        "wait_group" => return Some(Selected::scalar::<WarpgroupBarrier>([Arg::Imm])),
        "mma_async" => {}
        _ => return None,
    }
    let mut parts = Parts::of(query);
    let known = parts.take("mma_async") && parts.take("sync") && parts.take("aligned");
    let Shape { m, n, k } = parts.take_map(Shape::named)?;
    let satfinite = parts.take("satfinite");
    let mut element = || parts.take_map(Element::named);
    let (d, a, b) = (element()?, element()?, element()?);
    let bits = parts.take("and") && parts.take("popc");
    let shape = Shape { m: ROWS, n: COLUMNS, k };
    let params = Params { shape, a, b, c: d, d, satfinite, xor: false };
    if !known || !parts.done() || m != 64 || !n.is_multiple_of(8) || !exists(&params, k) {
        return None;
    }
    let float = matches!(d, Element::F16 | Element::F32);
    let flags = flags(query)?;
    let a_in_registers = matches!(query.operand(1)?, Operand::Vector(_));
    let (negations, transpositions) = flags.split_at(flags.len().min(if float { 2 } else { 0 }));
    let expected = if a.bits() != 16 { 0 } else { 2 - usize::from(a_in_registers) };
    let negations: Vec<bool> = negations.iter().map(|flag| *flag == -1).collect();
    let [first, second] = match negations.as_slice() {
        [] => [false; 2],
        [first, second] => [*first, *second],
        _ => return None,
    };
    let transposed = match transpositions {
        [] => [false; 2],
        [b] => [false, *b == 1],
        [a, b] => [*a == 1, *b == 1],
        _ => return None,
    };
    let lengths = [64 * n / 128 / d.per_register(), if a_in_registers { 4 } else { 1 }];
    if transpositions.len() > expected
        || bits != (a == Element::B1)
        || [query.lanes(0), query.lanes(1)] != lengths
    {
        return None;
    }
    let negate = first != second;
    let form = Form { steps: n / COLUMNS, a_in_registers, negate, transposed };
    let mut args = vec![Arg::Update(register_type(d)); lengths[0]];
    args.extend(vec![
        Arg::Src(if a_in_registers { register_type(a) } else { Type::B64 });
        lengths[1]
    ]);
    args.extend([Arg::Src(Type::B64), Arg::Src(Type::Pred)]);
    args.extend(vec![Arg::Known; flags.len()]);
    let selected = match d {
        Element::S32 => Selected::new::<Wgmma<i32>>(args),
        _ => Selected::new::<Wgmma<f32>>(args),
    };
    Some(selected.imm(params.encode()).aux(form.encode()))
}

/// Returns the constants after scale-d; `None` if one operand there is no constant.
fn flags(query: &Query<'_>) -> Option<Vec<i64>> {
    let after = query.instruction.operands.get(4..)?;
    let constant = |operand: &Operand| match operand {
        Operand::Int(value) => Some(*value),
        _ => None,
    };
    after.iter().map(constant).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(mode: u64, transposed: bool) -> Matrix {
        let field = |bytes: u64| bytes >> 4;
        let descriptor = field(0x400) | field(0x1000) << 16 | field(0x2000) << 32 | mode << 62;
        Matrix::new(descriptor, transposed, 2)
    }

    #[test]
    fn elements_lie_where_the_canonical_layouts_say() {
        // K-major: core matrices of 8 rows of 16 bytes, or rows of a swizzle's span.
        assert_eq!(matrix(0, false).place(9, 9), 0x400 + 0x2000 + 16 + 0x1000 + 2);
        assert_eq!(matrix(1, false).place(9, 9), 0x400 + 0x2000 + 128 + (18 ^ 16));
        assert_eq!(matrix(2, false).place(10, 9), 0x400 + 0x2000 + 128 + (18 ^ 16));
        assert_eq!(matrix(3, false).place(12, 1), 0x400 + 0x2000 + 128 + (2 ^ 16));
        // MN-major: 8 elements of a row, then the rows of k.
        assert_eq!(matrix(0, true).place(9, 9), 0x400 + 0x2000 + 2 + 16 + 0x1000);
        assert_eq!(matrix(1, true).place(73, 9), 0x400 + 0x1000 + 0x2000 + 128 + (18 ^ 16));
    }

    #[test]
    fn forms_survive_encoding() {
        let form =
            Form { steps: 32, a_in_registers: true, negate: false, transposed: [false, true] };
        assert_eq!(Form::decode(form.encode()), form);
    }
}
