//! `ld` and `st`.
//!
//! The common forms have handlers of their own, by place, element and vector length; [`LoadAny`] and
//! [`StoreAny`] do the rest, lane by lane, and everything that must be single-copy atomic. Places that
//! need no base have an operand for it all the same, which nothing reads.

use super::access::{PLACE_SHIFT, Place};
use super::locate::{AnyGlobal, FrameLocal, Local64, Locate, Pointers, Shared32, Shared64};
use super::warp::Warp;
use super::{Flow, Handlers, Isa, Op};
use crate::code::Inst;
use crate::spec::WARP;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

/// A memory access as `Inst::aux` holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Access {
    /// log2 of an element's bytes, 0 to 4.
    pub log2: u32,
    /// Sign-extend on load.
    pub signed: bool,
    /// Elements: 1, 2, 4, 8.
    pub count: u32,
    pub place: Place,
    /// volatile, relaxed, acquire, release, mmio.
    pub strong: bool,
    /// Elements of 4 bytes or fewer live in 64-bit registers.
    pub wide_registers: bool,
}

impl Access {
    pub(crate) fn encode(self) -> u32 {
        self.log2
            | u32::from(self.signed) << 4
            | self.count << 5
            | (self.place as u32) << PLACE_SHIFT
            | u32::from(self.strong) << 12
            | u32::from(self.wide_registers) << 13
    }

    pub(crate) fn decode(aux: u32) -> Access {
        Access {
            log2: aux & 15,
            signed: aux >> 4 & 1 != 0,
            count: aux >> 5 & 15,
            place: Place::of(aux >> PLACE_SHIFT & 7),
            strong: aux >> 12 & 1 != 0,
            wide_registers: aux >> 13 & 1 != 0,
        }
    }

    /// The handler of `ld` for it.
    pub(crate) fn load(self) -> Handlers {
        if self.strong || self.wide_registers {
            return Handlers::scalar::<LoadAny>();
        }
        match self.place {
            Place::Generic | Place::Global => self.load_at::<AnyGlobal>(),
            Place::Shared32 => self.load_at::<Shared32>(),
            Place::Shared64 => self.load_at::<Shared64>(),
            Place::Local => self.load_at::<Local64>(),
            Place::Frame => self.load_at::<FrameLocal>(),
            Place::Param if self.count == 1 && self.log2 == 2 => Handlers::of::<LoadParam32>(),
            Place::Param if self.count == 1 && self.log2 == 3 => Handlers::of::<LoadParam64>(),
            Place::Param => Handlers::scalar::<LoadAny>(),
        }
    }

    fn load_at<P: Locate>(self) -> Handlers {
        match (self.log2, self.signed, self.count) {
            (0, false, 1) => Handlers::of::<Load<P, u8, 1>>(),
            (0, true, 1) => Handlers::of::<Load<P, i8, 1>>(),
            (1, false, 1) => Handlers::of::<Load<P, u16, 1>>(),
            (1, true, 1) => Handlers::of::<Load<P, i16, 1>>(),
            (2, _, 1) => Handlers::of::<Load<P, u32, 1>>(),
            (2, _, 2) => Handlers::of::<Load<P, u32, 2>>(),
            (2, _, 4) => Handlers::of::<Load<P, u32, 4>>(),
            (3, _, 1) => Handlers::of::<Load<P, u64, 1>>(),
            (3, _, 2) => Handlers::of::<Load<P, u64, 2>>(),
            _ => Handlers::scalar::<LoadAny>(),
        }
    }

    /// The handler of `st` for it.
    pub(crate) fn store(self) -> Handlers {
        if self.strong || self.wide_registers {
            return Handlers::scalar::<StoreAny>();
        }
        match self.place {
            Place::Generic | Place::Global => self.store_at::<AnyGlobal>(),
            Place::Shared32 => self.store_at::<Shared32>(),
            Place::Shared64 => self.store_at::<Shared64>(),
            Place::Local => self.store_at::<Local64>(),
            Place::Frame => self.store_at::<FrameLocal>(),
            Place::Param => Handlers::scalar::<StoreAny>(),
        }
    }

    fn store_at<P: Locate>(self) -> Handlers {
        match (self.log2, self.count) {
            (0, 1) => Handlers::of::<Store<P, u8, 1>>(),
            (1, 1) => Handlers::of::<Store<P, u16, 1>>(),
            (2, 1) => Handlers::of::<Store<P, u32, 1>>(),
            (2, 2) => Handlers::of::<Store<P, u32, 2>>(),
            (2, 4) => Handlers::of::<Store<P, u32, 4>>(),
            (3, 1) => Handlers::of::<Store<P, u64, 1>>(),
            (3, 2) => Handlers::of::<Store<P, u64, 2>>(),
            _ => Handlers::scalar::<StoreAny>(),
        }
    }
}

/// A type in memory, and how registers hold it.
pub(crate) trait Element: Copy + Default {
    /// # Safety
    /// As [`super::Lane::write`].
    unsafe fn put(warp: &mut Warp, slot: i32, value: &[Self; WARP], mask: u32);
    /// # Safety
    /// As [`super::Lane::read`].
    unsafe fn get(warp: &Warp, slot: i32) -> [Self; WARP];
    /// # Safety
    /// Every pointer is valid for reading.
    #[inline(always)]
    unsafe fn gather<I: Isa, P: Pointers>(pointers: &P) -> [Self; WARP] {
        let mut out = [Self::default(); WARP];
        for lane in 0..WARP {
            // SAFETY: the caller's contract.
            out[lane] = unsafe { pointers.at(lane).cast::<Self>().read_unaligned() };
        }
        out
    }
}

macro_rules! element {
    ($($ty:ty $(, $gather:ident)?;)*) => {
        $(impl Element for $ty {
            #[inline(always)]
            unsafe fn put(warp: &mut Warp, slot: i32, value: &[$ty; WARP], mask: u32) {
                // SAFETY: the caller's contract.
                unsafe { <$ty as super::Lane>::write(warp, slot, value, mask) }
            }
            #[inline(always)]
            unsafe fn get(warp: &Warp, slot: i32) -> [$ty; WARP] {
                // SAFETY: the caller's contract.
                unsafe { <$ty as super::Lane>::read(warp, slot) }
            }
            $(#[inline(always)]
            unsafe fn gather<I: Isa, P: Pointers>(pointers: &P) -> [$ty; WARP] {
                // SAFETY: the caller's contract.
                unsafe { pointers.$gather::<I>() }
            })?
        })*
    };
}

element! { u8; i8; u16; i16; u32, gather32; u64, gather64; }

/// `ld` of `N` elements: op = [destinations…, base].
pub(crate) struct Load<P, T, const N: usize>(PhantomData<(P, T)>);

impl<P: Locate, T: Element, const N: usize> Op for Load<P, T, N> {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let bytes = (N * size_of::<T>()) as u64;
        // SAFETY: lowering put the base after the destinations; `locate` checked the pointers.
        unsafe {
            let pointers = match P::locate::<I>(warp, inst, inst.op[N], mask, bytes) {
                Ok(pointers) => pointers,
                Err(flow) => return flow,
            };
            let mut rows = [[T::default(); WARP]; N];
            if let Some(first) = pointers.contiguous::<I>(bytes) {
                let first = first.cast::<[[T; N]; WARP]>().read_unaligned();
                for lane in 0..WARP {
                    for item in 0..N {
                        rows[item][lane] = first[lane][item];
                    }
                }
            } else if let Some(common) = pointers.contiguous::<I>(0) {
                // All lanes read one place: a row of a matrix, a field of a structure.
                let items = common.cast::<[T; N]>().read_unaligned();
                for item in 0..N {
                    rows[item] = [items[item]; WARP];
                }
            } else if N == 1 {
                rows[0] = T::gather::<I, _>(&pointers);
            } else {
                for lane in 0..WARP {
                    let items = pointers.at(lane).cast::<[T; N]>().read_unaligned();
                    for item in 0..N {
                        rows[item][lane] = items[item];
                    }
                }
            }
            for item in 0..N {
                T::put(warp, inst.op[item], &rows[item], mask);
            }
        }
        Flow::Next
    }
}

/// `st` of `N` elements: op = [base, sources…].
pub(crate) struct Store<P, T, const N: usize>(PhantomData<(P, T)>);

impl<P: Locate, T: Element, const N: usize> Op for Store<P, T, N> {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let bytes = (N * size_of::<T>()) as u64;
        // SAFETY: lowering put the sources after the base; `locate` checked the pointers.
        unsafe {
            let pointers = match P::locate::<I>(warp, inst, inst.op[0], mask, bytes) {
                Ok(pointers) => pointers,
                Err(flow) => return flow,
            };
            let mut rows = [[T::default(); WARP]; N];
            for item in 0..N {
                rows[item] = T::get(warp, inst.op[1 + item]);
            }
            if mask == u32::MAX
                && let Some(first) = pointers.contiguous::<I>(bytes)
            {
                let mut block = [[T::default(); N]; WARP];
                for lane in 0..WARP {
                    for item in 0..N {
                        block[lane][item] = rows[item][lane];
                    }
                }
                first.cast::<[[T; N]; WARP]>().write_unaligned(block);
                return Flow::Next;
            }
            let mut left = mask;
            while left != 0 {
                let lane = left.trailing_zeros() as usize;
                left &= left - 1;
                let mut items = [T::default(); N];
                for item in 0..N {
                    items[item] = rows[item][lane];
                }
                pointers.at(lane).cast::<[T; N]>().write_unaligned(items);
            }
        }
        Flow::Next
    }
}

/// `ld.param.b32` of a kernel parameter at a constant offset: op = [destination].
struct LoadParam32;

impl Op for LoadParam32 {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let at = inst.imm as usize;
        let Some(bytes) = warp.grid().params.get(at..).and_then(|rest| rest.first_chunk()) else {
            // SAFETY: the general handler reads the same operands.
            return unsafe { LoadAny::run::<I>(warp, inst, mask) };
        };
        let value = u32::from_le_bytes(*bytes);
        // SAFETY: op[0] is the destination.
        unsafe { warp.set32(inst.op[0], &[value; WARP], mask) };
        Flow::Next
    }
}

/// `ld.param.b64` of a kernel parameter at a constant offset: op = [destination].
struct LoadParam64;

impl Op for LoadParam64 {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let at = inst.imm as usize;
        let Some(bytes) = warp.grid().params.get(at..).and_then(|rest| rest.first_chunk()) else {
            // SAFETY: the general handler reads the same operands.
            return unsafe { LoadAny::run::<I>(warp, inst, mask) };
        };
        let value = u64::from_le_bytes(*bytes);
        // SAFETY: op[0] is the destination.
        unsafe { warp.set64(inst.op[0], &[value; WARP], mask) };
        Flow::Next
    }
}

/// Any `ld`: op = [destinations…, base], in a list where they are more than six.
struct LoadAny;

impl Op for LoadAny {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let access = Access::decode(inst.aux);
        let count = access.count as usize;
        // SAFETY: lowering wrote the operands in this order, in these banks; `pointer` checks.
        unsafe {
            let ops = operand_list(warp, inst, count + 1);
            let addr = warp.addresses(inst, access.place, ops[count]);
            let bytes = u64::from(access.count) << access.log2;
            // All lanes are read before any register is written: the base may be a destination.
            let mut values = [[0u64; WARP]; 16];
            for lane in 0..WARP {
                if mask >> lane & 1 == 0 {
                    continue;
                }
                let at = match warp.pointer(inst, lane, access.place, addr[lane], bytes, bytes) {
                    Ok(at) => at,
                    Err(flow) => return flow,
                };
                for item in 0..count {
                    let from = at.add(item << access.log2);
                    if access.log2 == 4 {
                        let words = load_pair(from);
                        values[item * 2][lane] = words[0];
                        values[item * 2 + 1][lane] = words[1];
                    } else {
                        values[item][lane] = load_scalar(from, access.log2, access.signed);
                    }
                }
            }
            for item in 0..count {
                put_item(warp, access, ops[item], &values, item, mask);
            }
            if access.strong {
                warp.poll(inst, values[0][mask.trailing_zeros() as usize % WARP]);
            }
        }
        Flow::Next
    }
}

/// Writes element `item` to its register.
///
/// # Safety
/// `slot` is a destination in the bank that `access` says.
unsafe fn put_item(
    warp: &mut Warp,
    access: Access,
    slot: i32,
    values: &[[u64; WARP]; 16],
    item: usize,
    mask: u32,
) {
    // SAFETY: the caller's contract; a 128-bit register is two slots.
    unsafe {
        match access.log2 {
            4 => {
                warp.set64(slot, &values[item * 2], mask);
                warp.set64(slot + 1, &values[item * 2 + 1], mask);
            }
            3 => warp.set64(slot, &values[item], mask),
            _ if access.wide_registers => warp.set64(slot, &values[item], mask),
            _ => warp.set32(slot, &values[item].map(|value| value as u32), mask),
        }
    }
}

/// Any `st`: op = [base, sources…], in a list where they are more than six.
struct StoreAny;

impl Op for StoreAny {
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let access = Access::decode(inst.aux);
        let count = access.count as usize;
        // SAFETY: lowering wrote the operands in this order, in these banks; `pointer` checks.
        unsafe {
            let ops = operand_list(warp, inst, count + 1);
            let addr = warp.addresses(inst, access.place, ops[0]);
            let bytes = u64::from(access.count) << access.log2;
            for lane in 0..WARP {
                if mask >> lane & 1 == 0 {
                    continue;
                }
                let at = match warp.pointer(inst, lane, access.place, addr[lane], bytes, bytes) {
                    Ok(at) => at,
                    Err(flow) => return flow,
                };
                for item in 0..count {
                    let to = at.add(item << access.log2);
                    let slot = ops[1 + item];
                    match access.log2 {
                        4 => {
                            let words = [warp.row64(slot)[lane], warp.row64(slot + 1)[lane]];
                            store_pair(to, words);
                        }
                        3 => store_scalar(to, 3, warp.row64(slot)[lane]),
                        log2 if access.wide_registers => {
                            store_scalar(to, log2, warp.row64(slot)[lane]);
                        }
                        log2 => store_scalar(to, log2, u64::from(warp.row32(slot)[lane])),
                    }
                }
            }
        }
        Flow::Next
    }
}

/// The operands of an instruction that may have more than six.
///
/// # Safety
/// `inst` was lowered with `count` operands.
pub(crate) unsafe fn operand_list(warp: &Warp, inst: &Inst, count: usize) -> [i32; 20] {
    let mut out = [0; 20];
    if count > inst.op.len() {
        // SAFETY: more than six operands are in the list.
        out[..count].copy_from_slice(unsafe { warp.operands(inst) });
    } else {
        out[..count].copy_from_slice(&inst.op[..count]);
    }
    out
}

/// A single-copy atomic load with acquire order, extended to 64 bits.
///
/// # Safety
/// `at` is valid and aligned for 2^`log2` bytes, 8 at most.
pub(crate) unsafe fn load_scalar(at: *const u8, log2: u32, signed: bool) -> u64 {
    // SAFETY: the caller's contract.
    unsafe {
        match (log2, signed) {
            (0, false) => u64::from((*at.cast::<AtomicU8>()).load(Ordering::Acquire)),
            (0, true) => (*at.cast::<AtomicU8>()).load(Ordering::Acquire) as i8 as i64 as u64,
            (1, false) => u64::from((*at.cast::<AtomicU16>()).load(Ordering::Acquire)),
            (1, true) => (*at.cast::<AtomicU16>()).load(Ordering::Acquire) as i16 as i64 as u64,
            (2, false) => u64::from((*at.cast::<AtomicU32>()).load(Ordering::Acquire)),
            (2, true) => (*at.cast::<AtomicU32>()).load(Ordering::Acquire) as i32 as i64 as u64,
            _ => (*at.cast::<AtomicU64>()).load(Ordering::Acquire),
        }
    }
}

/// A single-copy atomic store with release order.
///
/// # Safety
/// As [`load_scalar`]'s, for writing.
pub(crate) unsafe fn store_scalar(at: *mut u8, log2: u32, value: u64) {
    // SAFETY: the caller's contract.
    unsafe {
        match log2 {
            0 => (*at.cast::<AtomicU8>()).store(value as u8, Ordering::Release),
            1 => (*at.cast::<AtomicU16>()).store(value as u16, Ordering::Release),
            2 => (*at.cast::<AtomicU32>()).store(value as u32, Ordering::Release),
            _ => (*at.cast::<AtomicU64>()).store(value, Ordering::Release),
        }
    }
}

/// A 16-byte load; 16-byte aligned vector moves are single-copy atomic on every CPU with AVX.
///
/// # Safety
/// `at` is valid and 16-byte aligned.
unsafe fn load_pair(at: *const u8) -> [u64; 2] {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE2 is x86_64's baseline; the caller's contract.
    unsafe {
        use std::arch::x86_64::*;
        let value = _mm_load_si128(at.cast());
        std::mem::transmute::<__m128i, [u64; 2]>(value)
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: the caller's contract.
    unsafe {
        at.cast::<[u64; 2]>().read()
    }
}

/// A 16-byte store; see [`load_pair`].
///
/// # Safety
/// `at` is valid for writing and 16-byte aligned.
unsafe fn store_pair(at: *mut u8, value: [u64; 2]) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE2 is x86_64's baseline; the caller's contract.
    unsafe {
        use std::arch::x86_64::*;
        _mm_store_si128(at.cast(), std::mem::transmute::<[u64; 2], __m128i>(value));
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: the caller's contract.
    unsafe {
        at.cast::<[u64; 2]>().write(value);
    }
}
