//! Address arithmetic on whole warps with AVX-512: the compiler unrolls reductions over 32 lanes
//! into scalar code, so the hottest ones are written out.

use crate::spec::WARP;
use std::arch::x86_64::*;

/// `base + offset` with the first active lane's value for inactive lanes; whether every sum is at
/// most `top` and a multiple of `align` (a power of two).
///
/// # Safety
/// The CPU has AVX-512 F; `mask` is not 0.
#[inline(always)]
pub(crate) unsafe fn offsets32(
    base: &[u32; WARP],
    offset: u32,
    mask: u32,
    top: u32,
    align: u32,
    out: &mut [u32; WARP],
) -> bool {
    // SAFETY: the caller's contract; the arrays are 32 words long.
    unsafe {
        let mut low = _mm512_loadu_si512(base.as_ptr().cast());
        let mut high = _mm512_loadu_si512(base.as_ptr().add(16).cast());
        if mask != u32::MAX {
            let stand_in = _mm512_set1_epi32(base[mask.trailing_zeros() as usize % WARP] as i32);
            low = _mm512_mask_mov_epi32(stand_in, mask as u16, low);
            high = _mm512_mask_mov_epi32(stand_in, (mask >> 16) as u16, high);
        }
        let offset = _mm512_set1_epi32(offset as i32);
        low = _mm512_add_epi32(low, offset);
        high = _mm512_add_epi32(high, offset);
        _mm512_storeu_si512(out.as_mut_ptr().cast(), low);
        _mm512_storeu_si512(out.as_mut_ptr().add(16).cast(), high);
        let top = _mm512_set1_epi32(top as i32);
        let beyond = _mm512_cmpgt_epu32_mask(_mm512_max_epu32(low, high), top);
        let skew = _mm512_set1_epi32(align as i32 - 1);
        let skewed = _mm512_test_epi32_mask(_mm512_or_si512(low, high), skew);
        beyond | skewed == 0
    }
}

/// Whether in each half of the warp lane `i`'s value is `step * i` more than the half's first.
///
/// # Safety
/// The CPU has AVX-512 F.
#[inline(always)]
pub(crate) unsafe fn steps32(values: &[u32; WARP], step: u32) -> bool {
    // SAFETY: the caller's contract; the array is 32 words long.
    unsafe {
        let low = _mm512_loadu_si512(values.as_ptr().cast());
        let high = _mm512_loadu_si512(values.as_ptr().add(16).cast());
        let step = _mm512_set1_epi32(step as i32);
        let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        let steps = _mm512_mullo_epi32(lanes, step);
        let want_low = _mm512_add_epi32(_mm512_set1_epi32(values[0] as i32), steps);
        let want_high = _mm512_add_epi32(_mm512_set1_epi32(values[16] as i32), steps);
        let wrong = _mm512_xor_si512(low, want_low);
        let wrong = _mm512_or_si512(wrong, _mm512_xor_si512(high, want_high));
        _mm512_test_epi32_mask(wrong, wrong) == 0
    }
}

/// `base + offset` with the first active lane's value for inactive lanes; whether every sum is
/// between `lo` and `lo + room` and a multiple of `align` (a power of two).
///
/// # Safety
/// The CPU has AVX-512 F; `mask` is not 0.
#[inline(always)]
pub(crate) unsafe fn addresses64(
    base: &[u64; WARP],
    offset: u64,
    mask: u32,
    lo: u64,
    room: u64,
    align: u64,
    out: &mut [u64; WARP],
) -> bool {
    // SAFETY: the caller's contract; the arrays are 32 double words long.
    unsafe {
        let offset = _mm512_set1_epi64(offset as i64);
        let lo = _mm512_set1_epi64(lo as i64);
        let stand_in = _mm512_set1_epi64(base[mask.trailing_zeros() as usize % WARP] as i64);
        let mut farthest = _mm512_setzero_si512();
        let mut all = _mm512_setzero_si512();
        for part in 0..4 {
            let mut value = _mm512_loadu_si512(base.as_ptr().add(part * 8).cast());
            value = _mm512_mask_mov_epi64(stand_in, (mask >> (part * 8)) as u8, value);
            value = _mm512_add_epi64(value, offset);
            _mm512_storeu_si512(out.as_mut_ptr().add(part * 8).cast(), value);
            farthest = _mm512_max_epu64(farthest, _mm512_sub_epi64(value, lo));
            all = _mm512_or_si512(all, value);
        }
        let beyond = _mm512_cmpgt_epu64_mask(farthest, _mm512_set1_epi64(room as i64));
        let skewed = _mm512_test_epi64_mask(all, _mm512_set1_epi64(align as i64 - 1));
        beyond | skewed == 0
    }
}

/// Whether in each half of the warp lane `i`'s value is `step * i` more than the half's first.
///
/// # Safety
/// The CPU has AVX-512 F.
#[inline(always)]
pub(crate) unsafe fn steps64(values: &[u64; WARP], step: u64) -> bool {
    // SAFETY: the caller's contract; the array is 32 double words long.
    unsafe {
        let s = step as i64;
        let lanes = _mm512_setr_epi64(0, s, 2 * s, 3 * s, 4 * s, 5 * s, 6 * s, 7 * s);
        let eight = _mm512_set1_epi64(8 * s);
        let mut wrong = _mm512_setzero_si512();
        for half in [0, 16] {
            let mut want = _mm512_add_epi64(_mm512_set1_epi64(values[half] as i64), lanes);
            for part in [0, 8] {
                let value = _mm512_loadu_si512(values.as_ptr().add(half + part).cast());
                wrong = _mm512_or_si512(wrong, _mm512_xor_si512(value, want));
                want = _mm512_add_epi64(want, eight);
            }
        }
        _mm512_test_epi64_mask(wrong, wrong) == 0
    }
}
