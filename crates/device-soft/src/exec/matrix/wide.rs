//! Products of the commonest shapes for vectors of 512 bits: whole registers are unpacked at once,
//! and eight rows of accumulators stay in vector registers while k goes by. Everything else, and
//! every other level, goes by [`super::tile`], with the same results.

use super::{Params, slots};
use crate::code::Inst;
use crate::exec::{Flow, Handlers, Isa, Lane, Level, Op, Warp};
use crate::math::fragment::Element;
use crate::spec::WARP;
use std::arch::x86_64::*;
use std::marker::PhantomData;

/// The form that takes any mask, called and not compiled anew.
///
/// # Safety
/// As [`crate::code::Handler`]'s.
#[inline(always)]
unsafe fn generic<G: Op>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
    // SAFETY: the caller's contract.
    unsafe { Handlers::of::<G>().at(Level::Avx512)(warp, inst, mask) }
}

/// An operand type, by what is in a register.
pub(super) trait Operand {
    /// Elements of a register.
    const PER: usize;
    /// Element `index` of each lane, as single precision.
    ///
    /// # Safety
    /// The CPU has AVX-512.
    unsafe fn unpack(words: &[u32; WARP], index: usize) -> [f32; WARP];
}

pub(super) struct F16;
pub(super) struct Bf16;
pub(super) struct Tf32;
pub(super) struct S8;
pub(super) struct U8;

impl Operand for F16 {
    const PER: usize = 2;
    #[inline(always)]
    unsafe fn unpack(words: &[u32; WARP], index: usize) -> [f32; WARP] {
        let mut out = [0.0; WARP];
        // SAFETY: the caller's contract; both halves of `words` and of `out` are 16 elements long.
        unsafe {
            let shift = _mm_cvtsi32_si128(16 * index as i32);
            for part in [0, 16] {
                let word =
                    _mm512_srl_epi32(_mm512_loadu_si512(words[part..].as_ptr().cast()), shift);
                let value = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(word));
                _mm512_storeu_ps(out[part..].as_mut_ptr(), value);
            }
        }
        out
    }
}

/// Implements [`Operand`] by a function of one word that the compiler vectorises.
macro_rules! operand {
    ($($name:ident $per:literal |$word:ident, $index:ident| $body:expr;)*) => {
        $(impl Operand for $name {
            const PER: usize = $per;
            #[inline(always)]
            unsafe fn unpack(words: &[u32; WARP], $index: usize) -> [f32; WARP] {
                let mut out = [0.0; WARP];
                for lane in 0..WARP {
                    let $word = words[lane];
                    out[lane] = $body;
                }
                out
            }
        })*
    };
}

operand! {
    Bf16 2 |word, index| f32::from_bits(if index == 0 { word << 16 } else { word & 0xFFFF_0000 });
    // The hardware reads the upper 19 bits.
    Tf32 1 |word, _index| f32::from_bits(word & 0xFFFF_E000);
    S8 4 |word, index| ((word << (24 - 8 * index)) as i32 >> 24) as f32;
    U8 4 |word, index| (word >> (8 * index) & 0xFF) as i32 as f32;
}

/// An accumulator type, in blocks of 8 × 8 as `mma` keeps them: lane 4·row + pair has columns
/// 2·pair (even) and 2·pair + 1 (odd).
pub(super) trait Accumulator {
    /// Registers of a block.
    const REGISTERS: usize;
    /// What is added after the products, if sums do not start from it.
    type Kept: Copy + Default;
    /// What the sums of products start from, in even and in odd columns.
    ///
    /// # Safety
    /// `slots` are [`Self::REGISTERS`] operands of the frame; the CPU has AVX-512.
    unsafe fn start(warp: &Warp, slots: &[i32]) -> ([[f32; WARP]; 2], Self::Kept);
    /// Stores the sums.
    ///
    /// # Safety
    /// As [`Self::start`], of destinations.
    unsafe fn finish(
        warp: &mut Warp,
        slots: &[i32],
        kept: Self::Kept,
        sums: &[[f32; WARP]; 2],
        satfinite: bool,
    );
}

pub(super) struct InF32;
pub(super) struct InF16;
pub(super) struct InS32;

impl Accumulator for InF32 {
    const REGISTERS: usize = 2;
    type Kept = ();
    #[inline(always)]
    unsafe fn start(warp: &Warp, slots: &[i32]) -> ([[f32; WARP]; 2], ()) {
        // SAFETY: the caller's contract.
        unsafe { ([f32::read(warp, slots[0]), f32::read(warp, slots[1])], ()) }
    }
    #[inline(always)]
    unsafe fn finish(warp: &mut Warp, slots: &[i32], (): (), sums: &[[f32; WARP]; 2], _: bool) {
        for (slot, sums) in slots.iter().zip(sums) {
            let mut words = [0; WARP];
            for lane in 0..WARP {
                words[lane] = Element::F32.register(sums[lane], 0.0);
            }
            // SAFETY: the caller's contract.
            unsafe { u32::write(warp, *slot, &words, u32::MAX) };
        }
    }
}

impl Accumulator for InF16 {
    const REGISTERS: usize = 1;
    type Kept = ();
    #[inline(always)]
    unsafe fn start(warp: &Warp, slots: &[i32]) -> ([[f32; WARP]; 2], ()) {
        // SAFETY: the caller's contract.
        unsafe {
            let words = warp.row32(slots[0]);
            ([F16::unpack(words, 0), F16::unpack(words, 1)], ())
        }
    }
    #[inline(always)]
    unsafe fn finish(
        warp: &mut Warp,
        slots: &[i32],
        (): (),
        [even, odd]: &[[f32; WARP]; 2],
        _: bool,
    ) {
        let mut words = [0; WARP];
        for lane in 0..WARP {
            words[lane] = Element::F16.register(even[lane], odd[lane]);
        }
        // SAFETY: the caller's contract.
        unsafe { u32::write(warp, slots[0], &words, u32::MAX) };
    }
}

/// The products of bytes are summed from zero: below 2^24, single precision is exact.
impl Accumulator for InS32 {
    const REGISTERS: usize = 2;
    type Kept = [[i32; WARP]; 2];
    #[inline(always)]
    unsafe fn start(warp: &Warp, slots: &[i32]) -> ([[f32; WARP]; 2], Self::Kept) {
        // SAFETY: the caller's contract.
        let kept = unsafe { [i32::read(warp, slots[0]), i32::read(warp, slots[1])] };
        ([[0.0; WARP]; 2], kept)
    }
    #[inline(always)]
    unsafe fn finish(
        warp: &mut Warp,
        slots: &[i32],
        kept: Self::Kept,
        sums: &[[f32; WARP]; 2],
        satfinite: bool,
    ) {
        for column in 0..2 {
            let mut words = [0; WARP];
            for lane in 0..WARP {
                // SAFETY: a whole number below 2^24.
                let sum = unsafe { sums[column][lane].to_int_unchecked::<i32>() };
                let from: i32 = kept[column][lane];
                words[lane] =
                    if satfinite { from.saturating_add(sum) } else { from.wrapping_add(sum) };
            }
            // SAFETY: the caller's contract.
            unsafe { i32::write(warp, slots[column], &words, u32::MAX) };
        }
    }
}

/// Where 32 elements go that two vectors hold by turns, and back: lane `i` of the low result is
/// element `i` of (even 0, odd 0, even 1, …).
#[inline(always)]
unsafe fn zip(even: __m512, odd: __m512) -> [__m512; 2] {
    // SAFETY: the caller has AVX-512.
    unsafe {
        let low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        let high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
        [_mm512_permutex2var_ps(even, low, odd), _mm512_permutex2var_ps(even, high, odd)]
    }
}

#[inline(always)]
unsafe fn unzip(low: __m512, high: __m512) -> [__m512; 2] {
    // SAFETY: the caller has AVX-512.
    unsafe {
        let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
        [_mm512_permutex2var_ps(low, even, high), _mm512_permutex2var_ps(low, odd, high)]
    }
}

/// Writes a block of accumulators into eight rows of a tile, from `column` on.
#[inline(always)]
unsafe fn put_block<const N: usize>(
    rows: &mut [[f32; N]; 8],
    column: usize,
    [even, odd]: &[[f32; WARP]; 2],
) {
    assert!(column + 8 <= N);
    // SAFETY: the caller has AVX-512; each store is of eight elements at a column that has as many
    // behind it.
    unsafe {
        for half in 0..2 {
            let even = _mm512_loadu_ps(even[16 * half..].as_ptr());
            let odd = _mm512_loadu_ps(odd[16 * half..].as_ptr());
            for (pair, two) in zip(even, odd).into_iter().enumerate() {
                let row = 4 * half + 2 * pair;
                _mm256_storeu_ps(rows[row].as_mut_ptr().add(column), _mm512_castps512_ps256(two));
                let upper = _mm512_extractf32x8_ps::<1>(two);
                _mm256_storeu_ps(rows[row + 1].as_mut_ptr().add(column), upper);
            }
        }
    }
}

/// The inverse of [`put_block`].
#[inline(always)]
unsafe fn take_block<const N: usize>(rows: &[[f32; N]; 8], column: usize) -> [[f32; WARP]; 2] {
    assert!(column + 8 <= N);
    let mut out = [[0.0; WARP]; 2];
    // SAFETY: the caller has AVX-512; each load is of eight elements at a column that has as many
    // behind it.
    unsafe {
        for half in 0..2 {
            let two = |row: usize| {
                let low = _mm512_castps256_ps512(_mm256_loadu_ps(rows[row].as_ptr().add(column)));
                let high = _mm256_loadu_ps(rows[row + 1].as_ptr().add(column));
                _mm512_insertf32x8::<1>(low, high)
            };
            let [even, odd] = unzip(two(4 * half), two(4 * half + 2));
            _mm512_storeu_ps(out[0][16 * half..].as_mut_ptr(), even);
            _mm512_storeu_ps(out[1][16 * half..].as_mut_ptr(), odd);
        }
    }
    out
}

/// A vector of N elements, written out: left to itself the compiler turns these loops inside out.
trait Row<const N: usize>: Copy {
    type Element: Copy;
    /// # Safety
    /// The CPU has AVX-512, here and below.
    unsafe fn load(from: &[Self::Element; N]) -> Self;
    unsafe fn store(self, to: &mut [Self::Element; N]);
    /// `self + a · b`, rounded once.
    unsafe fn plus(self, a: Self::Element, b: Self) -> Self;
}

macro_rules! row {
    ($($row:ident $n:literal $element:ident $load:ident $store:ident $splat:ident $fma:ident;)*) => {
        $(impl Row<$n> for $row {
            type Element = $element;
            #[inline(always)]
            unsafe fn load(from: &[$element; $n]) -> Self {
                // SAFETY: the array is a vector long.
                unsafe { $load(from.as_ptr()) }
            }
            #[inline(always)]
            unsafe fn store(self, to: &mut [$element; $n]) {
                // SAFETY: the array is a vector long.
                unsafe { $store(to.as_mut_ptr(), self) }
            }
            #[inline(always)]
            unsafe fn plus(self, a: $element, b: Self) -> Self {
                // SAFETY: the caller's contract.
                unsafe { $fma($splat(a), b, self) }
            }
        })*
    };
}

row! {
    __m512 16 f32 _mm512_loadu_ps _mm512_storeu_ps _mm512_set1_ps _mm512_fmadd_ps;
    __m256 8 f32 _mm256_loadu_ps _mm256_storeu_ps _mm256_set1_ps _mm256_fmadd_ps;
    __m512d 8 f64 _mm512_loadu_pd _mm512_storeu_pd _mm512_set1_pd _mm512_fmadd_pd;
}

/// `sums += a · b` for eight rows, of which each is `stride` further in `a`; `place` says where the
/// first row has its element k.
///
/// # Safety
/// `a` is long enough for all of these places; the CPU has AVX-512.
#[inline(always)]
unsafe fn eight_rows<V: Row<N>, const N: usize, const K: usize>(
    sums: &mut [[V::Element; N]; 8],
    b: &[[V::Element; N]; K],
    a: &[V::Element],
    stride: usize,
    place: impl Fn(usize) -> usize,
) {
    // SAFETY: the caller's contract.
    unsafe {
        let [s0, s1, s2, s3, s4, s5, s6, s7] = &*sums;
        let mut kept = [
            V::load(s0),
            V::load(s1),
            V::load(s2),
            V::load(s3),
            V::load(s4),
            V::load(s5),
            V::load(s6),
            V::load(s7),
        ];
        for (k, b) in b.iter().enumerate() {
            let (first, b) = (place(k), V::load(b));
            for (row, kept) in kept.iter_mut().enumerate() {
                *kept = kept.plus(*a.get_unchecked(first + row * stride), b);
            }
        }
        for (kept, sums) in kept.into_iter().zip(sums) {
            kept.store(sums);
        }
    }
}

/// `wmma.mma` of 16 × 16 × K.
pub(super) struct Wmma<G, O, C, const K: usize>(PhantomData<(G, O, C)>);

impl<G: Op, O: Operand, C: Accumulator, const K: usize> Op for Wmma<G, O, C, K> {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: the selector saw to the operands' types and lengths; this is for AVX-512 only.
        unsafe {
            if mask != u32::MAX {
                return generic::<G>(warp, inst, mask);
            }
            let operands = wmma_operands(warp, inst);
            wmma16::<O, C, K>(warp, operands, Params::decode(inst.imm).satfinite);
        }
        Flow::Next
    }
}

/// Operands lie in order ([`crate::math::fragment::Layout::linear`]), accumulators as two of
/// `mma`'s side by side.
///
/// # Safety
/// d, c have 4 · `C::REGISTERS` slots each, a, b at least 16 · K / 32 / `O::PER`; all lanes are
/// active; the CPU has AVX-512.
#[inline(always)]
unsafe fn wmma16<O: Operand, C: Accumulator, const K: usize>(
    warp: &mut Warp,
    [d, a, b, c]: [&[i32]; 4],
    satfinite: bool,
) {
    let mut left = [[0.0f32; K]; 16];
    let mut right = [[0.0f32; 16]; K];
    let mut sums = [[[0.0f32; 16]; 8]; 2];
    // SAFETY: the caller's contract.
    unsafe {
        in_order::<O>(warp, a, left.as_flattened_mut());
        in_order::<O>(warp, b, right.as_flattened_mut());
        let mut kept = [C::Kept::default(); 4];
        for block in 0..4 {
            let (start, keep) = C::start(warp, &c[block * C::REGISTERS..]);
            kept[block] = keep;
            put_block(&mut sums[block % 2], block / 2 * 8, &start);
        }
        for half in 0..2 {
            let rows = left[8 * half..].as_flattened();
            eight_rows::<__m512, 16, K>(&mut sums[half], &right, rows, K, |k| k);
        }
        for block in 0..4 {
            let end = take_block(&sums[block % 2], block / 2 * 8);
            let slots = &d[block * C::REGISTERS..];
            C::finish(warp, slots, kept[block], &end, satfinite);
        }
    }
}

/// Fills a tile whose elements lie in the order of lanes, then of elements, then of registers.
#[inline(always)]
unsafe fn in_order<O: Operand>(warp: &Warp, slots: &[i32], tile: &mut [f32]) {
    for (slot, part) in slots.iter().zip(tile.chunks_exact_mut(WARP * O::PER)) {
        for index in 0..O::PER {
            // SAFETY: the caller's contract.
            let values = unsafe { O::unpack(warp.row32(*slot), index) };
            part[index * WARP..][..WARP].copy_from_slice(&values);
        }
    }
}

/// `wmma.mma` of m8n8k4 in double precision.
pub(super) struct WmmaF64<G>(PhantomData<G>);

impl<G: Op> Op for WmmaF64<G> {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: the selector saw to the operands' types and lengths; this is for AVX-512 only.
        unsafe {
            if mask != u32::MAX {
                return generic::<G>(warp, inst, mask);
            }
            let operands = slots(warp, inst, 6);
            wmma_f64(warp, [&operands[..2], &operands[2..3], &operands[3..4], &operands[4..]]);
        }
        Flow::Next
    }
}

/// Everything lies in order.
///
/// # Safety
/// d, c have two slots, a, b one; all lanes are active; the CPU has AVX-512.
#[inline(always)]
unsafe fn wmma_f64(warp: &mut Warp, [d, a, b, c]: [&[i32]; 4]) {
    // SAFETY: the caller's contract.
    unsafe {
        let a = f64::read(warp, a[0]);
        let mut right = [[0.0f64; 8]; 4];
        right.as_flattened_mut().copy_from_slice(&f64::read(warp, b[0]));
        let mut sums = [[0.0f64; 8]; 8];
        for half in 0..2 {
            let from = f64::read(warp, c[half]);
            sums.as_flattened_mut()[half * WARP..][..WARP].copy_from_slice(&from);
        }
        eight_rows::<__m512d, 8, 4>(&mut sums, &right, &a, 4, |k| k);
        for half in 0..2 {
            let mut out = [0.0; WARP];
            out.copy_from_slice(&sums.as_flattened()[half * WARP..][..WARP]);
            f64::write(warp, d[half], &out, u32::MAX);
        }
    }
}

/// `mma` of 16 × 8 × K.
pub(super) struct Mma<G, O, C, const K: usize>(PhantomData<(G, O, C)>);

impl<G: Op, O: Operand, C: Accumulator, const K: usize> Op for Mma<G, O, C, K> {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let (cd, ab) = (2 * C::REGISTERS, K / (4 * O::PER));
        // SAFETY: the selector saw to the operands' types and lengths; this is for AVX-512 only.
        unsafe {
            if mask != u32::MAX {
                return generic::<G>(warp, inst, mask);
            }
            let slots = slots(warp, inst, 2 * cd + 3 * ab);
            let (d, slots) = slots.split_at(cd);
            let (a, slots) = slots.split_at(2 * ab);
            let (b, c) = slots.split_at(ab);
            mma16x8::<O, C, K>(warp, [d, a, b, c], Params::decode(inst.imm).satfinite);
        }
        Flow::Next
    }
}

/// The product of fragments as the reference's figures have them.
///
/// # Safety
/// d, c have 2 · `C::REGISTERS` slots, a K / (2 · `O::PER`) of them, b half as many; all lanes are
/// active; the CPU has AVX-512.
#[inline(always)]
unsafe fn mma16x8<O: Operand, C: Accumulator, const K: usize>(
    warp: &mut Warp,
    [d, a, b, c]: [&[i32]; 4],
    satfinite: bool,
) {
    // Of each half of the rows, in the order of registers, elements of a lane, rows, lanes of a
    // row.
    let mut left = [[[0.0f32; K]; 8]; 2];
    let mut right = [[0.0f32; 8]; K];
    let mut sums = [[[0.0f32; 8]; 8]; 2];
    let step = 4 * O::PER;
    // SAFETY: the caller's contract.
    unsafe {
        for (register, slot) in a.iter().take(2 * K / step).enumerate() {
            for index in 0..O::PER {
                let values = O::unpack(warp.row32(*slot), index);
                let rows = left[register % 2].as_flattened_mut();
                let first = (register / 2 * O::PER + index) * WARP;
                rows[first..first + WARP].copy_from_slice(&values);
            }
        }
        for (register, slot) in b.iter().take(K / step).enumerate() {
            let words = columns_first(warp.row32(*slot));
            for index in 0..O::PER {
                let values = O::unpack(&words, index);
                for quad in 0..4 {
                    let k = register * step + quad * O::PER + index;
                    right[k].copy_from_slice(&values[8 * quad..][..8]);
                }
            }
        }
        let mut kept = [C::Kept::default(); 2];
        for half in 0..2 {
            let (start, keep) = C::start(warp, &c[half * C::REGISTERS..]);
            kept[half] = keep;
            put_block(&mut sums[half], 0, &start);
            let rows = left[half].as_flattened();
            eight_rows::<__m256, 8, K>(&mut sums[half], &right, rows, 4, |k| {
                (k / step * O::PER + k % O::PER) * WARP + k % step / O::PER
            });
        }
        for half in 0..2 {
            let end = take_block(&sums[half], 0);
            C::finish(warp, &d[half * C::REGISTERS..], kept[half], &end, satfinite);
        }
    }
}

/// Words of (column, quarter) in the order (quarter, column).
#[inline(always)]
unsafe fn columns_first(words: &[u32; WARP]) -> [u32; WARP] {
    let mut out = [0; WARP];
    // SAFETY: the caller has AVX-512; both arrays are 32 words long.
    unsafe {
        let low = _mm512_loadu_si512(words.as_ptr().cast());
        let high = _mm512_loadu_si512(words[16..].as_ptr().cast());
        let index = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
        let first = _mm512_permutex2var_epi32(low, index, high);
        let index = _mm512_add_epi32(index, _mm512_set1_epi32(2));
        let second = _mm512_permutex2var_epi32(low, index, high);
        _mm512_storeu_si512(out.as_mut_ptr().cast(), first);
        _mm512_storeu_si512(out[16..].as_mut_ptr().cast(), second);
    }
    out
}

/// The operands d, a, b, c of a `wmma.mma`, whose lengths are in `aux`.
///
/// # Safety
/// `inst` was lowered for such an instruction.
#[inline(always)]
unsafe fn wmma_operands<'a>(warp: &Warp, inst: &'a Inst) -> [&'a [i32]; 4] {
    let [d, a, b, c] = [0, 8, 16, 24].map(|at| (inst.aux >> at & 0xFF) as usize);
    // SAFETY: the caller's contract.
    let slots = unsafe { slots(warp, inst, d + a + b + c) };
    let (first, slots) = slots.split_at(d);
    let (second, slots) = slots.split_at(a);
    let (third, fourth) = slots.split_at(b);
    [first, second, third, fourth]
}
