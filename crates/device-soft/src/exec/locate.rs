//! From the registers of a memory instruction to checked pointers, a warp at a time.

use super::warp::Warp;
#[cfg(target_arch = "x86_64")]
use super::wide;
use super::{Flow, Isa, Level};
use crate::code::Inst;
use crate::spec::WARP;

/// How many warps' turns ahead [`Locate::foresee`] looks.
const TURNS_AHEAD: u64 = 4;

/// Asks for the cache line of `at`, which need not be memory.
#[inline(always)]
fn prefetch(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing and never faults.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Lanes of half a warp.
pub(crate) const HALF: usize = WARP / 2;

/// Pointers of all lanes; a lane that does not take part has another lane's.
pub(crate) trait Pointers {
    fn at(&self, lane: usize) -> *mut u8;
    /// Whether in each half of the warp lane `i`'s pointer is `i * bytes` further than the half's
    /// first: a row of a tile 16 wide; with 0, that a half's lanes all have the same.
    fn by_halves<I: Isa>(&self, bytes: u64) -> bool;
    /// # Safety
    /// Every pointer is valid for reading 4 bytes.
    unsafe fn gather32<I: Isa>(&self) -> [u32; WARP];
    /// # Safety
    /// Every pointer is valid for reading 8 bytes.
    unsafe fn gather64<I: Isa>(&self) -> [u64; WARP];
}

/// Pointers anywhere.
pub(crate) struct Wide(pub [u64; WARP]);

impl Pointers for Wide {
    #[inline(always)]
    fn at(&self, lane: usize) -> *mut u8 {
        self.0[lane] as *mut u8
    }

    #[inline(always)]
    fn by_halves<I: Isa>(&self, bytes: u64) -> bool {
        #[cfg(target_arch = "x86_64")]
        if I::LEVEL == Level::Avx512 {
            // SAFETY: the handler is compiled for this level.
            return unsafe { wide::steps64(&self.0, bytes) };
        }
        let mut difference = 0;
        for lane in 0..HALF {
            let step = lane as u64 * bytes;
            difference |= self.0[lane] ^ self.0[0].wrapping_add(step);
            difference |= self.0[HALF + lane] ^ self.0[HALF].wrapping_add(step);
        }
        difference == 0
    }

    #[inline(always)]
    unsafe fn gather32<I: Isa>(&self) -> [u32; WARP] {
        let mut out = [0; WARP];
        #[cfg(target_arch = "x86_64")]
        if I::LEVEL == Level::Avx512 {
            use std::arch::x86_64::*;
            for part in 0..4 {
                // SAFETY: the handler is compiled for this level; the caller vouches for the
                // pointers.
                unsafe {
                    let index = _mm512_loadu_si512(self.0.as_ptr().add(part * 8).cast());
                    let got = _mm512_i64gather_epi32::<1>(index, std::ptr::null());
                    _mm256_storeu_si256(out.as_mut_ptr().add(part * 8).cast(), got);
                }
            }
            return out;
        }
        for lane in 0..WARP {
            // SAFETY: the caller vouches for the pointers.
            out[lane] = unsafe { (self.0[lane] as *const u32).read_unaligned() };
        }
        out
    }

    #[inline(always)]
    unsafe fn gather64<I: Isa>(&self) -> [u64; WARP] {
        let mut out = [0; WARP];
        #[cfg(target_arch = "x86_64")]
        if I::LEVEL == Level::Avx512 {
            use std::arch::x86_64::*;
            for part in 0..4 {
                // SAFETY: the level says that there is AVX-512, the pointers are the caller's, and
                // each store is of eight words of `out`.
                unsafe {
                    let index = _mm512_loadu_si512(self.0.as_ptr().add(part * 8).cast());
                    let got = _mm512_i64gather_epi64::<1>(index, std::ptr::null());
                    _mm512_storeu_si512(out.as_mut_ptr().add(part * 8).cast(), got);
                }
            }
            return out;
        }
        for lane in 0..WARP {
            // SAFETY: the caller vouches for the pointers.
            out[lane] = unsafe { (self.0[lane] as *const u64).read_unaligned() };
        }
        out
    }
}

/// Offsets from one base: shared and local memory.
pub(crate) struct Near {
    pub base: *mut u8,
    pub offset: [u32; WARP],
}

impl Pointers for Near {
    #[inline(always)]
    fn at(&self, lane: usize) -> *mut u8 {
        self.base.wrapping_add(self.offset[lane] as usize)
    }

    #[inline(always)]
    fn by_halves<I: Isa>(&self, bytes: u64) -> bool {
        #[cfg(target_arch = "x86_64")]
        if I::LEVEL == Level::Avx512 {
            // SAFETY: the handler is compiled for this level.
            return unsafe { wide::steps32(&self.offset, bytes as u32) };
        }
        let mut difference = 0;
        for lane in 0..HALF {
            let step = lane as u32 * bytes as u32;
            difference |= self.offset[lane] ^ self.offset[0].wrapping_add(step);
            difference |= self.offset[HALF + lane] ^ self.offset[HALF].wrapping_add(step);
        }
        difference == 0
    }

    #[inline(always)]
    unsafe fn gather32<I: Isa>(&self) -> [u32; WARP] {
        let mut out = [0; WARP];
        #[cfg(target_arch = "x86_64")]
        if I::LEVEL == Level::Avx512 {
            use std::arch::x86_64::*;
            for part in 0..2 {
                // SAFETY: the handler is compiled for this level; offsets are below 2^31 (shared
                // and local memory of a warp are smaller), and the caller vouches for the pointers.
                unsafe {
                    let index = _mm512_loadu_si512(self.offset.as_ptr().add(part * 16).cast());
                    let got = _mm512_i32gather_epi32::<1>(index, self.base.cast());
                    _mm512_storeu_si512(out.as_mut_ptr().add(part * 16).cast(), got);
                }
            }
            return out;
        }
        for lane in 0..WARP {
            // SAFETY: the caller vouches for the pointers.
            out[lane] = unsafe { self.at(lane).cast::<u32>().read_unaligned() };
        }
        out
    }

    #[inline(always)]
    unsafe fn gather64<I: Isa>(&self) -> [u64; WARP] {
        let mut out = [0; WARP];
        for lane in 0..WARP {
            // SAFETY: the caller vouches for the pointers.
            out[lane] = unsafe { self.at(lane).cast::<u64>().read_unaligned() };
        }
        out
    }
}

/// What a warp accesses, as one or several accesses of each lane have it.
#[derive(Clone, Copy)]
pub(crate) struct Reach {
    /// From the lowest byte to one past the highest one, from a lane's base on.
    pub from: i64,
    pub to: i64,
    /// The alignment: the largest access's bytes, a power of two.
    pub align: u64,
    /// What lies between two lanes, if not nothing.
    pub step: u64,
}

impl Reach {
    /// One access of `bytes` bytes.
    #[inline(always)]
    pub(crate) fn one(offset: u64, bytes: u64) -> Reach {
        let from = offset as i64;
        Reach { from, to: from.saturating_add(bytes as i64), align: bytes, step: bytes }
    }

    /// Whether both halves' accesses lie below `room`, aligned. `align` divides all offsets.
    #[inline(always)]
    fn fits(&self, bases: [u64; 2], step: u64, room: u64) -> bool {
        let fits = |base: u64| {
            let first = base.wrapping_add_signed(self.from);
            let end = base.wrapping_add_signed(self.to).wrapping_add((HALF as u64 - 1) * step);
            // Both below, and in order: nothing has wrapped around, for reaches are small.
            first < end && end <= room
        };
        fits(bases[0]) && fits(bases[1])
    }
}

/// The first lanes' bases of both halves of a warp.
pub(crate) struct Halves {
    pub first: [*mut u8; 2],
    /// Bytes from one lane's to the next one's.
    pub step: u64,
}

/// A place's address computation and check, for the handlers that are specialised by place.
pub(crate) trait Locate {
    type Out: Pointers;
    /// Only the block's own worker touches this memory, one warp at a time.
    const OF_BLOCK: bool;
    /// Where in each half of a whole warp the lanes' bases are `reach.step`, or nothing, from one
    /// to the next, and all of `reach` is good; None says nothing.
    ///
    /// # Safety
    /// `slot` is an operand of the place's bank.
    #[inline(always)]
    unsafe fn halves<I: Isa>(_: &Warp, _: &Inst, _: i32, _: Reach) -> Option<Halves> {
        None
    }
    /// Hints to the processor what the warps after this one will load, which has loaded `halves`.
    #[inline(always)]
    fn foresee(_: &Warp, _: &Inst, _: &Halves) {}
    /// Pointers for accesses of `bytes` (a power of two, and the alignment) with the base in
    /// `slot`.
    ///
    /// # Safety
    /// `slot` is an operand of the place's bank.
    unsafe fn locate<I: Isa>(
        warp: &mut Warp,
        inst: &Inst,
        slot: i32,
        mask: u32,
        bytes: u64,
    ) -> Result<Self::Out, Flow>;
}

/// Global and generic addresses.
pub(crate) struct AnyGlobal;

impl Locate for AnyGlobal {
    type Out = Wide;
    const OF_BLOCK: bool = false;

    #[inline(always)]
    unsafe fn halves<I: Isa>(warp: &Warp, inst: &Inst, slot: i32, reach: Reach) -> Option<Halves> {
        #[cfg(target_arch = "x86_64")]
        if I::LEVEL == Level::Avx512 {
            // SAFETY: the caller's contract; the cache belongs to this worker.
            let (base, span) = unsafe { (warp.row64(slot), (*warp.cache).entry(inst.cache)) };
            let step = base[1].wrapping_sub(base[0]);
            // SAFETY: the handler is compiled for this level.
            if (step != reach.step && step != 0) || !unsafe { wide::steps64(base, step) } {
                return None;
            }
            let bases = [base[0], base[HALF]];
            let aligned = (bases[0] | bases[1] | reach.from as u64) & (reach.align - 1) == 0;
            let offsets = bases.map(|base| base.wrapping_sub(span.lo));
            let good = aligned && reach.fits(offsets, step, span.hi - span.lo);
            return good.then(|| Halves { first: bases.map(|base| base as *mut u8), step });
        }
        let _ = (warp, inst, slot, reach);
        None
    }

    /// A block's warps take turns at an instruction, each with the next row of a tile: what comes
    /// some turns later is as far away as it has been from turn to turn. The processor, which sees
    /// accesses of all instructions in one handler, does not find that out by itself.
    #[inline(always)]
    fn foresee(warp: &Warp, inst: &Inst, halves: &Halves) {
        // SAFETY: the cache belongs to this worker.
        let stride = unsafe { (*warp.cache).stride(inst.cache, halves.first[0] as u64) };
        let ahead = stride.wrapping_mul(TURNS_AHEAD) as usize;
        for first in halves.first {
            prefetch(first.wrapping_add(ahead));
        }
    }

    #[inline(always)]
    unsafe fn locate<I: Isa>(
        warp: &mut Warp,
        inst: &Inst,
        slot: i32,
        mask: u32,
        bytes: u64,
    ) -> Result<Wide, Flow> {
        // SAFETY: the caller's contract.
        unsafe { AnyGlobal::at::<I>(warp, inst, slot, inst.imm, mask, bytes) }
    }
}

impl AnyGlobal {
    /// [`Locate::locate`] with another offset than the instruction's `imm`.
    ///
    /// # Safety
    /// `slot` is an operand of the 64-bit bank.
    #[inline(always)]
    pub(crate) unsafe fn at<I: Isa>(
        warp: &mut Warp,
        inst: &Inst,
        slot: i32,
        offset: u64,
        mask: u32,
        bytes: u64,
    ) -> Result<Wide, Flow> {
        // SAFETY: the caller's contract; the cache belongs to this worker.
        let (base, span) = unsafe { (warp.row64(slot), (*warp.cache).entry(inst.cache)) };
        let room = (span.hi - span.lo).wrapping_sub(bytes);
        #[cfg(target_arch = "x86_64")]
        if I::LEVEL == Level::Avx512 {
            let mut addr = [0; WARP];
            // SAFETY: the handler is compiled for this level.
            let good =
                unsafe { wide::addresses64(base, offset, mask, span.lo, room, bytes, &mut addr) };
            if !good || span.hi - span.lo < bytes {
                return warp.locate_slowly(inst, addr, mask, bytes);
            }
            return Ok(Wide(addr));
        }
        let addr = offset64(base, offset, mask);
        let mut bad = u64::from(span.hi - span.lo < bytes);
        let mut low = 0;
        for lane in 0..WARP {
            bad |= u64::from(addr[lane].wrapping_sub(span.lo) > room);
            low |= addr[lane];
        }
        if bad | (low & (bytes - 1)) != 0 {
            return warp.locate_slowly(inst, addr, mask, bytes);
        }
        Ok(Wide(addr))
    }
}

/// Shared memory with 32-bit addresses.
pub(crate) struct Shared32;

impl Locate for Shared32 {
    type Out = Near;
    const OF_BLOCK: bool = true;

    #[inline(always)]
    unsafe fn halves<I: Isa>(warp: &Warp, inst: &Inst, slot: i32, reach: Reach) -> Option<Halves> {
        #[cfg(target_arch = "x86_64")]
        if I::LEVEL == Level::Avx512 {
            // SAFETY: the caller's contract.
            let base = unsafe { warp.row32(slot) };
            let step = base[1].wrapping_sub(base[0]);
            // SAFETY: the handler is compiled for this level.
            if (u64::from(step) != reach.step && step != 0) || !unsafe { wide::steps32(base, step) }
            {
                return None;
            }
            let (bases, step) = ([base[0], base[HALF]].map(u64::from), u64::from(step));
            let aligned = (bases[0] | bases[1] | reach.from as u64) & (reach.align - 1) == 0;
            let good = aligned && reach.fits(bases, step, warp.shared_len);
            let first = || bases.map(|base| warp.shared.wrapping_add(base as usize));
            return good.then(|| Halves { first: first(), step });
        }
        let _ = (warp, inst, slot, reach);
        None
    }

    #[inline(always)]
    unsafe fn locate<I: Isa>(
        warp: &mut Warp,
        inst: &Inst,
        slot: i32,
        mask: u32,
        bytes: u64,
    ) -> Result<Near, Flow> {
        // SAFETY: the caller's contract.
        let base = unsafe { warp.row32(slot) };
        #[cfg(target_arch = "x86_64")]
        if I::LEVEL == Level::Avx512 {
            let mut offset = [0; WARP];
            let room = warp.shared_len.saturating_sub(bytes) as u32;
            let (imm, align) = (inst.imm as u32, bytes as u32);
            // SAFETY: the handler is compiled for this level.
            let good = unsafe { wide::offsets32(base, imm, mask, room, align, &mut offset) };
            if !good || warp.shared_len < bytes {
                return Err(warp.shared_fault(inst, offset.map(u64::from), mask, bytes));
            }
            return Ok(Near { base: warp.shared, offset });
        }
        let offset = offset32(base, inst.imm as u32, mask);
        let mut top = 0;
        let mut low = 0;
        for lane in 0..WARP {
            top = top.max(offset[lane]);
            low |= offset[lane];
        }
        if u64::from(top) + bytes > warp.shared_len || u64::from(low) & (bytes - 1) != 0 {
            let wide = offset.map(u64::from);
            return Err(warp.shared_fault(inst, wide, mask, bytes));
        }
        Ok(Near { base: warp.shared, offset })
    }
}

/// Shared memory with 64-bit addresses.
pub(crate) struct Shared64;

impl Locate for Shared64 {
    type Out = Near;
    const OF_BLOCK: bool = true;

    #[inline(always)]
    unsafe fn locate<I: Isa>(
        warp: &mut Warp,
        inst: &Inst,
        slot: i32,
        mask: u32,
        bytes: u64,
    ) -> Result<Near, Flow> {
        // SAFETY: the caller's contract.
        let base = unsafe { warp.row64(slot) };
        let wide = offset64(base, inst.imm, mask);
        let mut offset = [0; WARP];
        let mut all = 0;
        let mut top = 0;
        for lane in 0..WARP {
            all |= wide[lane];
            offset[lane] = wide[lane] as u32;
            top = top.max(offset[lane]);
        }
        if all >> 32 != 0 || u64::from(top) + bytes > warp.shared_len || all & (bytes - 1) != 0 {
            return Err(warp.shared_fault(inst, wide, mask, bytes));
        }
        Ok(Near { base: warp.shared, offset })
    }
}

/// Local memory with 64-bit addresses.
pub(crate) struct Local64;

impl Locate for Local64 {
    type Out = Near;
    const OF_BLOCK: bool = true;

    #[inline(always)]
    unsafe fn locate<I: Isa>(
        warp: &mut Warp,
        inst: &Inst,
        slot: i32,
        mask: u32,
        bytes: u64,
    ) -> Result<Near, Flow> {
        // SAFETY: the caller's contract.
        let base = unsafe { warp.row64(slot) };
        let wide = offset64(base, inst.imm, mask);
        let mut offset = [0; WARP];
        let mut all = 0;
        let mut top = 0;
        for lane in 0..WARP {
            all |= wide[lane];
            top = top.max(wide[lane]);
            offset[lane] = (wide[lane] as u32).wrapping_add(lane as u32 * warp.local_len as u32);
        }
        if top.saturating_add(bytes) > warp.local_len || all & (bytes - 1) != 0 {
            return Err(warp.local_fault(inst, wide, mask, bytes));
        }
        Ok(Near { base: warp.local, offset })
    }
}

/// The frame's own local memory: `imm` alone.
pub(crate) struct FrameLocal;

impl Locate for FrameLocal {
    type Out = Near;
    const OF_BLOCK: bool = true;

    #[inline(always)]
    unsafe fn locate<I: Isa>(
        warp: &mut Warp,
        inst: &Inst,
        _: i32,
        mask: u32,
        bytes: u64,
    ) -> Result<Near, Flow> {
        let at = inst.imm.wrapping_add(u64::from(warp.current.local));
        if at.saturating_add(bytes) > warp.local_len || at & (bytes - 1) != 0 {
            return Err(warp.local_fault(inst, [at; WARP], mask, bytes));
        }
        let mut offset = [0; WARP];
        for lane in 0..WARP {
            offset[lane] = at as u32 + lane as u32 * warp.local_len as u32;
        }
        Ok(Near { base: warp.local, offset })
    }
}

/// `base + offset`, with the first active lane's for inactive lanes.
#[inline(always)]
pub(crate) fn offset64(base: &[u64; WARP], offset: u64, mask: u32) -> [u64; WARP] {
    let mut out = [0; WARP];
    if mask == u32::MAX {
        for lane in 0..WARP {
            out[lane] = base[lane].wrapping_add(offset);
        }
    } else {
        let stand_in = base[mask.trailing_zeros() as usize % WARP];
        for lane in 0..WARP {
            let own = if mask >> lane & 1 != 0 { base[lane] } else { stand_in };
            out[lane] = own.wrapping_add(offset);
        }
    }
    out
}

#[inline(always)]
fn offset32(base: &[u32; WARP], offset: u32, mask: u32) -> [u32; WARP] {
    let mut out = [0; WARP];
    if mask == u32::MAX {
        for lane in 0..WARP {
            out[lane] = base[lane].wrapping_add(offset);
        }
    } else {
        let stand_in = base[mask.trailing_zeros() as usize % WARP];
        for lane in 0..WARP {
            let own = if mask >> lane & 1 != 0 { base[lane] } else { stand_in };
            out[lane] = own.wrapping_add(offset);
        }
    }
    out
}
