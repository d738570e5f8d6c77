//! From the addresses of a memory instruction to pointers of this process, checked.

use super::warp::Warp;
#[cfg(target_arch = "x86_64")]
use super::wide;
use super::{Flow, Isa, Level};
use crate::code::Inst;
use crate::fault::FaultKind;
use crate::memory::{
    LOCAL_WINDOW, LOCAL_WINDOW_LEN, PARAM_WINDOW, PARAM_WINDOW_LEN, SHARED_STRIDE, SHARED_WINDOW,
    SHARED_WINDOWS, Space, Span, Spans,
};
use crate::spec::WARP;

const CACHE_LEN: usize = 1024;

/// A worker's memory of which span each instruction last touched. A hint only: every entry is a
/// valid span, whichever instruction uses it.
pub(crate) struct SpanCache {
    entries: Box<[Span; CACHE_LEN]>,
    version: u64,
    spans: *const Spans,
}

impl SpanCache {
    pub(crate) fn new() -> SpanCache {
        SpanCache {
            entries: Box::new([Span::default(); CACHE_LEN]),
            version: 0,
            spans: std::ptr::null(),
        }
    }

    /// Forgets everything if `spans` has changed. Called before a warp runs; memory that becomes
    /// invalid while it runs was freed under a running kernel.
    pub(crate) fn refresh(&mut self, spans: &Spans) {
        let version = spans.version();
        if self.version != version || !std::ptr::eq(self.spans, spans) {
            self.entries.fill(Span::default());
            self.version = version;
            self.spans = spans;
        }
    }

    #[inline(always)]
    fn entry(&self, cache: u32) -> Span {
        self.entries[cache as usize % CACHE_LEN]
    }

    fn set(&mut self, cache: u32, span: Span) {
        self.entries[cache as usize % CACHE_LEN] = span;
    }
}

/// Where a memory instruction's addresses come from, and which space they name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Place {
    /// Generic: 64-bit base.
    Generic = 0,
    /// Global, constant: 64-bit base.
    Global = 1,
    /// Shared: 32-bit base.
    Shared32 = 2,
    /// Shared: 64-bit base.
    Shared64 = 3,
    /// Local: 64-bit base, absolute in the thread's local memory.
    Local = 4,
    /// Local or param, relative to the frame: no base.
    Frame = 5,
    /// The kernel's parameters: no base.
    Param = 6,
}

impl Place {
    pub(crate) fn of(bits: u32) -> Place {
        match bits {
            0 => Place::Generic,
            1 => Place::Global,
            2 => Place::Shared32,
            3 => Place::Shared64,
            4 => Place::Local,
            5 => Place::Frame,
            _ => Place::Param,
        }
    }
}

/// Pointers of all lanes; a lane that does not take part has another lane's.
pub(crate) trait Pointers {
    fn at(&self, lane: usize) -> *mut u8;
    /// The first pointer, if lane `i`'s is `i * bytes` further; with 0, if all are the same.
    fn contiguous<I: Isa>(&self, bytes: u64) -> Option<*mut u8>;
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
    fn contiguous<I: Isa>(&self, bytes: u64) -> Option<*mut u8> {
        #[cfg(target_arch = "x86_64")]
        if I::LEVEL == Level::Avx512 {
            // SAFETY: the handler is compiled for this level.
            return unsafe { wide::steps64(&self.0, bytes) }.then_some(self.0[0] as *mut u8);
        }
        let mut difference = 0;
        for lane in 0..WARP {
            difference |= self.0[lane] ^ self.0[0].wrapping_add(lane as u64 * bytes);
        }
        (difference == 0).then_some(self.0[0] as *mut u8)
    }

    #[inline(always)]
    unsafe fn gather32<I: Isa>(&self) -> [u32; WARP] {
        let mut out = [0; WARP];
        #[cfg(target_arch = "x86_64")]
        if I::LEVEL == Level::Avx512 {
            use std::arch::x86_64::*;
            for part in 0..4 {
                // SAFETY: the handler is compiled for this level; the caller vouches for the pointers.
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
                // SAFETY: as in `gather32`.
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
    fn contiguous<I: Isa>(&self, bytes: u64) -> Option<*mut u8> {
        #[cfg(target_arch = "x86_64")]
        if I::LEVEL == Level::Avx512 {
            // SAFETY: the handler is compiled for this level.
            return unsafe { wide::steps32(&self.offset, bytes as u32) }.then(|| self.at(0));
        }
        let mut difference = 0;
        for lane in 0..WARP {
            difference |=
                self.offset[lane] ^ self.offset[0].wrapping_add(lane as u32 * bytes as u32);
        }
        (difference == 0).then(|| self.at(0))
    }

    #[inline(always)]
    unsafe fn gather32<I: Isa>(&self) -> [u32; WARP] {
        let mut out = [0; WARP];
        #[cfg(target_arch = "x86_64")]
        if I::LEVEL == Level::Avx512 {
            use std::arch::x86_64::*;
            for part in 0..2 {
                // SAFETY: the handler is compiled for this level; offsets are below 2^31 (shared and
                // local memory of a warp are smaller), and the caller vouches for the pointers.
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

/// A place's address computation and check, for the handlers that are specialised by place.
pub(crate) trait Locate {
    type Out: Pointers;
    /// Pointers for accesses of `bytes` (a power of two, and the alignment) with the base in `slot`.
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

    #[inline(always)]
    unsafe fn locate<I: Isa>(
        warp: &mut Warp,
        inst: &Inst,
        slot: i32,
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
                unsafe { wide::addresses64(base, inst.imm, mask, span.lo, room, bytes, &mut addr) };
            if !good || span.hi - span.lo < bytes {
                return warp.locate_slowly(inst, addr, mask, bytes);
            }
            return Ok(Wide(addr));
        }
        let addr = offset64(base, inst.imm, mask);
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

impl Warp {
    /// The addresses of a place's operand, absolute in the place's own space.
    ///
    /// # Safety
    /// `slot` is an operand of the place's bank.
    pub(crate) unsafe fn addresses(&self, inst: &Inst, place: Place, slot: i32) -> [u64; WARP] {
        match place {
            Place::Frame => [inst.imm.wrapping_add(u64::from(self.current.local)); WARP],
            Place::Param => [inst.imm; WARP],
            // SAFETY: the caller's contract.
            Place::Shared32 => unsafe {
                self.row32(slot).map(|base| u64::from(base.wrapping_add(inst.imm as u32)))
            },
            // SAFETY: the caller's contract.
            _ => unsafe { self.row64(slot).map(|base| base.wrapping_add(inst.imm)) },
        }
    }

    /// One lane's pointer for an access of `bytes` bytes at `addr` of `place`; the fault is recorded.
    pub(crate) fn pointer(
        &mut self,
        inst: &Inst,
        lane: usize,
        place: Place,
        addr: u64,
        bytes: u64,
        align: u64,
    ) -> Result<*mut u8, Flow> {
        if addr & (align - 1) != 0 {
            let generic = self.generic_address(place, addr);
            return Err(self.fault(inst, lane, FaultKind::Misaligned, Some(generic), ""));
        }
        let found = match place {
            Place::Generic => self.generic_pointer(inst, lane, addr, bytes),
            Place::Global => self.global_pointer(inst, addr, bytes),
            Place::Shared32 | Place::Shared64 => window(self.shared, self.shared_len, addr, bytes),
            Place::Local | Place::Frame => window(self.local_of(lane), self.local_len, addr, bytes),
            Place::Param => self.param_pointer(addr, bytes),
        };
        found.ok_or_else(|| {
            let generic = self.generic_address(place, addr);
            self.fault(inst, lane, FaultKind::IllegalAddress, Some(generic), "")
        })
    }

    /// The memory behind one lane's access of `size` bytes at `addr` of `space`. Where there is none,
    /// or `addr` is not a multiple of `align`, records the fault: the handler returns
    /// [`Flow::Fault`]. Slow path: for handlers whose work dwarfs it.
    pub fn resolve(
        &mut self,
        inst: &Inst,
        lane: usize,
        space: Space,
        addr: u64,
        size: u64,
        align: u64,
    ) -> Option<*mut u8> {
        let place = match space {
            Space::Generic | Space::Param => Place::Generic,
            Space::Global | Space::Const => Place::Global,
            Space::Shared => Place::Shared64,
            Space::Local => Place::Local,
        };
        self.pointer(inst, lane, place, addr, size, align).ok()
    }

    fn local_of(&self, lane: usize) -> *mut u8 {
        self.local.wrapping_add(lane * self.local_len as usize)
    }

    fn generic_address(&self, place: Place, addr: u64) -> u64 {
        match place {
            Place::Generic | Place::Global => addr,
            Place::Shared32 | Place::Shared64 => SHARED_WINDOW.wrapping_add(addr),
            Place::Local | Place::Frame => LOCAL_WINDOW.wrapping_add(addr),
            Place::Param => PARAM_WINDOW.wrapping_add(addr),
        }
    }

    fn param_pointer(&self, addr: u64, bytes: u64) -> Option<*mut u8> {
        let params = &self.grid().params;
        window(params.as_ptr().cast_mut(), params.len() as u64, addr, bytes)
    }

    fn global_pointer(&mut self, inst: &Inst, addr: u64, bytes: u64) -> Option<*mut u8> {
        // SAFETY: the cache belongs to this worker.
        let cache = unsafe { &mut *self.cache };
        let held = cache.entry(inst.cache);
        if addr >= held.lo && addr < held.hi && bytes <= held.hi - addr {
            return Some(addr as *mut u8);
        }
        let spans = &self.grid().spec.spans;
        let span = spans.find(addr)?;
        if bytes > span.hi - addr && !spans.covers(addr, bytes) {
            return None;
        }
        cache.set(inst.cache, span);
        Some(addr as *mut u8)
    }

    fn generic_pointer(
        &mut self,
        inst: &Inst,
        lane: usize,
        addr: u64,
        bytes: u64,
    ) -> Option<*mut u8> {
        let shared = addr.wrapping_sub(SHARED_WINDOW);
        if shared < SHARED_STRIDE * SHARED_WINDOWS {
            // SAFETY: the block outlives the warp's run.
            let base = unsafe { (*self.block).shared_of_window(shared / SHARED_STRIDE) }?;
            return window(base, self.shared_len, shared % SHARED_STRIDE, bytes);
        }
        let local = addr.wrapping_sub(LOCAL_WINDOW);
        if local < LOCAL_WINDOW_LEN {
            return window(self.local_of(lane), self.local_len, local, bytes);
        }
        let param = addr.wrapping_sub(PARAM_WINDOW);
        if param < PARAM_WINDOW_LEN {
            return self.param_pointer(param, bytes);
        }
        self.global_pointer(inst, addr, bytes)
    }

    /// Global or generic addresses that are not all in the instruction's cached span.
    #[cold]
    #[inline(never)]
    fn locate_slowly(
        &mut self,
        inst: &Inst,
        mut addr: [u64; WARP],
        mask: u32,
        bytes: u64,
    ) -> Result<Wide, Flow> {
        let place = Place::of(inst.aux >> PLACE_SHIFT & 7);
        let place = if place == Place::Global { place } else { Place::Generic };
        for lane in 0..WARP {
            if mask >> lane & 1 != 0 {
                let pointer = self.pointer(inst, lane, place, addr[lane], bytes, bytes)?;
                addr[lane] = pointer as u64;
            }
        }
        let stand_in = addr[mask.trailing_zeros() as usize % WARP];
        for lane in 0..WARP {
            if mask >> lane & 1 == 0 {
                addr[lane] = stand_in;
            }
        }
        Ok(Wide(addr))
    }

    #[cold]
    #[inline(never)]
    fn shared_fault(&mut self, inst: &Inst, addr: [u64; WARP], mask: u32, bytes: u64) -> Flow {
        self.first_fault(inst, Place::Shared64, addr, mask, bytes)
    }

    #[cold]
    #[inline(never)]
    fn local_fault(&mut self, inst: &Inst, addr: [u64; WARP], mask: u32, bytes: u64) -> Flow {
        self.first_fault(inst, Place::Local, addr, mask, bytes)
    }

    fn first_fault(
        &mut self,
        inst: &Inst,
        place: Place,
        addr: [u64; WARP],
        mask: u32,
        bytes: u64,
    ) -> Flow {
        for lane in 0..WARP {
            if mask >> lane & 1 != 0
                && let Err(flow) = self.pointer(inst, lane, place, addr[lane], bytes, bytes)
            {
                return flow;
            }
        }
        Flow::Fault
    }
}

/// Bits of `Inst::aux` that hold a memory instruction's [`Place`].
pub(crate) const PLACE_SHIFT: u32 = 9;

/// The pointer to `bytes` bytes at `addr` of a memory of `len` bytes.
fn window(base: *mut u8, len: u64, addr: u64, bytes: u64) -> Option<*mut u8> {
    (addr <= len && bytes <= len - addr).then(|| base.wrapping_add(addr as usize))
}
