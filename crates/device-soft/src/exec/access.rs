//! From the addresses of a memory instruction to pointers of this process, checked.

use super::Flow;
use super::locate::Wide;
use super::warp::Warp;
use crate::code::Inst;
use crate::fault::{FaultKind, Near};
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
    /// Where each instruction's last access by a whole warp began.
    last: Box<[u64; CACHE_LEN]>,
    version: u64,
    spans: *const Spans,
}

impl SpanCache {
    pub(crate) fn new() -> SpanCache {
        SpanCache {
            entries: Box::new([Span::default(); CACHE_LEN]),
            last: Box::new([0; CACHE_LEN]),
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
    pub(super) fn entry(&self, cache: u32) -> Span {
        self.entries[cache as usize % CACHE_LEN]
    }

    /// How far the instruction's access at `first` lies from its last one.
    #[inline(always)]
    pub(super) fn stride(&mut self, cache: u32, first: u64) -> u64 {
        let last = &mut self.last[cache as usize % CACHE_LEN];
        first.wrapping_sub(std::mem::replace(last, first))
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

impl From<Space> for Place {
    fn from(space: Space) -> Place {
        match space {
            Space::Generic | Space::Param => Place::Generic,
            Space::Global | Space::Const => Place::Global,
            Space::Shared => Place::Shared64,
            Space::Local => Place::Local,
        }
    }
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

    /// One lane's pointer for an access of `bytes` bytes at `addr` of `place`; the fault is
    /// recorded.
    pub(crate) fn pointer(
        &mut self,
        inst: &Inst,
        lane: usize,
        place: Place,
        addr: u64,
        bytes: u64,
        align: u64,
    ) -> Result<*mut u8, Flow> {
        let kind = match addr & (align - 1) {
            0 => FaultKind::IllegalAddress,
            _ => FaultKind::Misaligned,
        };
        let is_aligned = kind != FaultKind::Misaligned;
        let found = is_aligned.then(|| self.find(inst, lane, place, addr, bytes)).flatten();
        // SAFETY: the block outlives the warp's run.
        if found.is_some() && unsafe { (*self.block).watch.is_some() } {
            self.unprobed(inst, place, addr, bytes);
        }
        found.ok_or_else(|| {
            let generic = self.generic_address(place, addr);
            let flow = self.fault(inst, lane, kind, Some(generic), "");
            if let Some(record) = &mut self.fault {
                record.bytes = Some(bytes);
            }
            flow
        })
    }

    /// [`Self::pointer`] where nothing need be said of what is not there.
    pub(crate) fn find(
        &mut self,
        inst: &Inst,
        lane: usize,
        place: Place,
        addr: u64,
        bytes: u64,
    ) -> Option<*mut u8> {
        match place {
            Place::Generic => self.generic_pointer(inst, lane, addr, bytes),
            Place::Global => self.global_pointer(inst, addr, bytes),
            Place::Shared32 | Place::Shared64 => window(self.shared, self.shared_len, addr, bytes),
            Place::Local | Place::Frame => window(self.local_of(lane), self.local_len, addr, bytes),
            Place::Param => self.param_pointer(addr, bytes),
        }
    }

    /// The memory behind one lane's access of `size` bytes at `addr` of `space`. Where there is
    /// none, or `addr` is not a multiple of `align`, records the fault: the handler returns
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
        self.pointer(inst, lane, space.into(), addr, size, align).ok()
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

    /// Returns what memory a generic address is next to, or in.
    pub(crate) fn near(&self, addr: u64) -> Option<Near> {
        let window = |name, start: u64, bytes| Near::Window { name, bytes, offset: addr - start };
        let within = |start: u64, len: u64| (start..start + len).contains(&addr);
        if within(SHARED_WINDOW, SHARED_STRIDE * SHARED_WINDOWS) {
            let start = addr - (addr - SHARED_WINDOW) % SHARED_STRIDE;
            return Some(window("shared", start, self.shared_len));
        }
        if within(LOCAL_WINDOW, LOCAL_WINDOW_LEN) {
            return Some(window("local", LOCAL_WINDOW, self.local_len));
        }
        if within(PARAM_WINDOW, PARAM_WINDOW_LEN) {
            let bytes = self.grid().params.len() as u64;
            return Some(window("parameter", PARAM_WINDOW, bytes));
        }
        let spans = &self.grid().spec.spans;
        let span = spans.find(addr).or_else(|| spans.nearest(addr))?;
        // A checked program is told of what it has allocated, to the byte.
        let checker = self.grid().spec.program.checker.as_ref();
        let exact = checker.and_then(|checker| checker.memory.allocation(span.lo));
        let hi = exact.filter(|(lo, _)| *lo == span.lo).map_or(span.hi, |(_, hi)| hi);
        Some(Near::Allocation(Span { lo: span.lo, hi }))
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
    pub(super) fn locate_slowly(
        &mut self,
        inst: &Inst,
        mut addr: [u64; WARP],
        mask: u32,
        bytes: u64,
    ) -> Result<Wide, Flow> {
        let place = Place::of(inst.aux >> PLACE_SHIFT & 7);
        let place = if place == Place::Global { place } else { Place::Generic };
        if place == Place::Generic && self.generic_rows(&mut addr, mask, bytes) {
            return Ok(Wide(addr));
        }
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

    /// Makes pointers of a warp's generic addresses that all name local memory, or all the block's
    /// shared memory. False: they do not, or are not all good, and nothing was done.
    fn generic_rows(&self, addr: &mut [u64; WARP], mask: u32, bytes: u64) -> bool {
        let first = addr[mask.trailing_zeros() as usize % WARP];
        let near = |window: u64, len: u64| first.wrapping_sub(window) < len;
        let (window, base, len, stride) = if near(LOCAL_WINDOW, LOCAL_WINDOW_LEN) {
            (LOCAL_WINDOW, self.local, self.local_len, self.local_len)
        } else if near(SHARED_WINDOW, SHARED_STRIDE) {
            (SHARED_WINDOW, self.shared, self.shared_len, 0)
        } else {
            return false;
        };
        let Some(room) = len.checked_sub(bytes) else { return false };
        let mut bad = 0;
        let mut pointers = [0; WARP];
        for lane in 0..WARP {
            let own = if mask >> lane & 1 != 0 { addr[lane] } else { first };
            let offset = own.wrapping_sub(window);
            bad |= u64::from(offset > room) | (offset & (bytes - 1));
            pointers[lane] = base as u64 + stride * lane as u64 + offset;
        }
        if bad == 0 {
            *addr = pointers;
        }
        bad == 0
    }

    #[cold]
    #[inline(never)]
    pub(super) fn shared_fault(
        &mut self,
        inst: &Inst,
        addr: [u64; WARP],
        mask: u32,
        bytes: u64,
    ) -> Flow {
        self.first_fault(inst, Place::Shared64, addr, mask, bytes)
    }

    #[cold]
    #[inline(never)]
    pub(super) fn local_fault(
        &mut self,
        inst: &Inst,
        addr: [u64; WARP],
        mask: u32,
        bytes: u64,
    ) -> Flow {
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
