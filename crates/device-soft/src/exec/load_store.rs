//! `ld` and `st`.
//!
//! The common forms have handlers of their own, by place, element and vector length; [`LoadAny`]
//! and
//! [`StoreAny`] do the rest, lane by lane, and everything that must be single-copy atomic. Places
//! that need no base have an operand for it all the same, which nothing reads.

use super::access::{PLACE_SHIFT, Place};
use super::locate::{
    AnyGlobal, FrameLocal, HALF, Halves, Local64, Locate, Pointers, Reach, Shared32, Shared64,
};
use super::strip::Loaded;
use super::strong::{LoadStrong, StoreStrong, load_pair, load_scalar, store_pair, store_scalar};
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
    /// A vector past a cache (cg, cv, wt): other threads see it whole, as a strong one.
    pub uncached: bool,
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
            | u32::from(self.uncached) << 14
    }

    pub(crate) fn decode(aux: u32) -> Access {
        Access {
            log2: aux & 15,
            signed: aux >> 4 & 1 != 0,
            count: aux >> 5 & 15,
            place: Place::of(aux >> PLACE_SHIFT & 7),
            strong: aux >> 12 & 1 != 0,
            wide_registers: aux >> 13 & 1 != 0,
            uncached: aux >> 14 & 1 != 0,
        }
    }

    /// What it is to a strip, if it may be part of one.
    pub(crate) fn in_strips(self) -> Option<Loaded> {
        let global = match self.place {
            Place::Shared32 => false,
            Place::Global => true,
            _ => return None,
        };
        let handled = matches!((self.log2, self.count), (2, 1 | 2 | 4) | (3, 1 | 2));
        let plain = !self.strong && !self.uncached && !self.wide_registers;
        (handled && plain).then(|| Loaded { element: 1 << self.log2, count: self.count, global })
    }

    /// The handler of `ld` for it.
    pub(crate) fn load(self) -> Handlers {
        if self.wide_registers {
            return self.load_wide();
        }
        if self.strong || self.uncached {
            return self.load_strong();
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

    /// The handler of an `ld` of small elements into 64-bit registers.
    fn load_wide(self) -> Handlers {
        match self.place {
            Place::Generic | Place::Global if !self.strong && !self.uncached => {
                self.load_wide_at::<AnyGlobal>()
            }
            Place::Shared32 if !self.strong => self.load_wide_at::<Shared32>(),
            _ => Handlers::scalar::<LoadAny>(),
        }
    }

    fn load_wide_at<P: Locate>(self) -> Handlers {
        match (self.log2, self.signed, self.count) {
            (0, false, 1) => Handlers::of::<LoadWide<P, u8>>(),
            (0, true, 1) => Handlers::of::<LoadWide<P, i8>>(),
            (1, false, 1) => Handlers::of::<LoadWide<P, u16>>(),
            (1, true, 1) => Handlers::of::<LoadWide<P, i16>>(),
            (2, false, 1) => Handlers::of::<LoadWide<P, u32>>(),
            (2, true, 1) => Handlers::of::<LoadWide<P, i32>>(),
            _ => Handlers::scalar::<LoadAny>(),
        }
    }

    /// The handler of an `ld` that is strong, or of a vector past a cache.
    fn load_strong(self) -> Handlers {
        match self.place {
            Place::Generic | Place::Global => self.load_strong_at::<AnyGlobal>(),
            Place::Shared32 => self.load_strong_at::<Shared32>(),
            Place::Shared64 => self.load_strong_at::<Shared64>(),
            // Memory that nobody else touches.
            Place::Local => self.load_at::<Local64>(),
            Place::Frame => self.load_at::<FrameLocal>(),
            Place::Param => Handlers::scalar::<LoadAny>(),
        }
    }

    fn load_strong_at<P: Locate>(self) -> Handlers {
        match (self.log2, self.signed, self.count) {
            (0, false, 1) => Handlers::of::<LoadStrong<P, u8>>(),
            (0, true, 1) => Handlers::of::<LoadStrong<P, i8>>(),
            (1, false, 1) => Handlers::of::<LoadStrong<P, u16>>(),
            (1, true, 1) => Handlers::of::<LoadStrong<P, i16>>(),
            (2, _, 1) => Handlers::of::<LoadStrong<P, u32>>(),
            (3, _, 1) => Handlers::of::<LoadStrong<P, u64>>(),
            _ => Handlers::scalar::<LoadAny>(),
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
        if self.wide_registers {
            return Handlers::scalar::<StoreAny>();
        }
        match self.place {
            Place::Generic | Place::Global if self.strong || self.uncached => self.store_strong(),
            Place::Generic | Place::Global => self.store_at::<AnyGlobal>(),
            Place::Shared32 => self.store_at::<Shared32>(),
            Place::Shared64 => self.store_at::<Shared64>(),
            Place::Local => self.store_at::<Local64>(),
            Place::Frame => self.store_at::<FrameLocal>(),
            Place::Param => Handlers::scalar::<StoreAny>(),
        }
    }

    /// The handler of a strong `st` to memory that other workers touch.
    fn store_strong(self) -> Handlers {
        match (self.log2, self.count) {
            (0, 1) => Handlers::of::<StoreStrong<u8>>(),
            (1, 1) => Handlers::of::<StoreStrong<u16>>(),
            (2, 1) => Handlers::of::<StoreStrong<u32>>(),
            (3, 1) => Handlers::of::<StoreStrong<u64>>(),
            _ => Handlers::scalar::<StoreAny>(),
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
    /// A single-copy atomic load with acquire order.
    ///
    /// # Safety
    /// `at` is valid and aligned for the type.
    unsafe fn load(at: *mut u8) -> Self;
    /// A single-copy atomic store with release order.
    ///
    /// # Safety
    /// `at` is valid for writing and aligned for the type.
    unsafe fn store(at: *mut u8, value: Self);
    /// The value as a 64-bit register has it.
    fn widened(self) -> u64;
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
    ($($ty:ty: $atomic:ty $(, $gather:ident)?;)*) => {
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
            #[inline(always)]
            unsafe fn load(at: *mut u8) -> $ty {
                // SAFETY: the caller's contract.
                (unsafe { &*at.cast::<$atomic>() }).load(Ordering::Acquire) as $ty
            }
            #[inline(always)]
            unsafe fn store(at: *mut u8, value: $ty) {
                // SAFETY: the caller's contract.
                (unsafe { &*at.cast::<$atomic>() }).store(value as _, Ordering::Release);
            }
            #[inline(always)]
            fn widened(self) -> u64 {
                self as u64
            }
            $(#[inline(always)]
            unsafe fn gather<I: Isa, P: Pointers>(pointers: &P) -> [$ty; WARP] {
                // SAFETY: the caller's contract.
                unsafe { pointers.$gather::<I>() }
            })?
        })*
    };
}

element! {
    u8: AtomicU8;
    i8: AtomicU8;
    u16: AtomicU16;
    i16: AtomicU16;
    u32: AtomicU32, gather32;
    i32: AtomicU32;
    u64: AtomicU64, gather64;
}

/// `ld` of `N` elements: op = [destinations…, base].
pub(crate) struct Load<P, T, const N: usize>(PhantomData<(P, T)>);

impl<P: Locate, T: Element, const N: usize> Op for Load<P, T, N> {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        let bytes = (N * size_of::<T>()) as u64;
        // SAFETY: lowering put the base after the destinations; `locate` checked the pointers.
        unsafe {
            if mask == u32::MAX
                && let Some(mut halves) =
                    P::halves::<I>(warp, inst, inst.op[N], Reach::one(inst.imm, bytes))
            {
                halves.first = halves.first.map(|base| base.wrapping_add(inst.imm as usize));
                P::foresee(warp, inst, &halves);
                let rows = rows_by_halves::<T, N>(&halves);
                for item in 0..N {
                    T::put(warp, inst.op[item], &rows[item], mask);
                }
                return Flow::Next;
            }
            let pointers = match P::locate::<I>(warp, inst, inst.op[N], mask, bytes) {
                Ok(pointers) => pointers,
                Err(flow) => return flow,
            };
            let rows = rows::<I, _, T, N>(&pointers);
            for item in 0..N {
                T::put(warp, inst.op[item], &rows[item], mask);
            }
        }
        Flow::Next
    }
}

/// `N` elements of each lane, where each half of the warp has them in a row, or all lanes the same.
///
/// # Safety
/// As [`rows`]'s.
#[inline(always)]
unsafe fn rows_by_halves<T: Element, const N: usize>(halves: &Halves) -> [[T; WARP]; N] {
    let mut rows = [[T::default(); WARP]; N];
    if halves.step == 0 && halves.first[0] == halves.first[1] {
        // One load for all: another worker may write there, and code that a warp runs as one (gcc's
        // for OpenMP) takes what its lanes have loaded for the same.
        // SAFETY: the caller's contract.
        let items = unsafe { halves.first[0].cast::<[T; N]>().read_unaligned() };
        for item in 0..N {
            rows[item].fill(items[item]);
        }
        return rows;
    }
    for (half, first) in halves.first.into_iter().enumerate() {
        let lanes = half * HALF..(half + 1) * HALF;
        if halves.step == 0 {
            // A row of a matrix, a field of a structure.
            // SAFETY: the caller's contract.
            let items = unsafe { first.cast::<[T; N]>().read_unaligned() };
            for item in 0..N {
                rows[item][lanes.clone()].fill(items[item]);
            }
        } else {
            // SAFETY: the caller's contract.
            let items = unsafe { first.cast::<[[T; N]; HALF]>().read_unaligned() };
            for lane in 0..HALF {
                for item in 0..N {
                    rows[item][half * HALF + lane] = items[lane][item];
                }
            }
        }
    }
    rows
}

/// `N` elements of each lane.
///
/// # Safety
/// Every pointer is valid for reading `N` elements.
#[inline(always)]
pub(super) unsafe fn rows<I: Isa, P: Pointers, T: Element, const N: usize>(
    pointers: &P,
) -> [[T; WARP]; N] {
    let bytes = (N * size_of::<T>()) as u64;
    let mut rows = [[T::default(); WARP]; N];
    let step = (pointers.at(1) as usize).wrapping_sub(pointers.at(0) as usize) as u64;
    // SAFETY: the caller's contract.
    unsafe {
        if (step == bytes || step == 0) && pointers.by_halves::<I>(step) {
            let first = [pointers.at(0), pointers.at(HALF)];
            return rows_by_halves(&Halves { first, step });
        } else if N == 1 {
            rows[0] = T::gather::<I, _>(pointers);
        } else {
            for lane in 0..WARP {
                let items = pointers.at(lane).cast::<[T; N]>().read_unaligned();
                for item in 0..N {
                    rows[item][lane] = items[item];
                }
            }
        }
    }
    rows
}

/// `ld` of one small element into a 64-bit register: op = [destination, base].
struct LoadWide<P, T>(PhantomData<(P, T)>);

impl<P: Locate, T: Element> Op for LoadWide<P, T> {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: lowering put the base after the destination; `locate` checked the pointers.
        unsafe {
            let pointers = match P::locate::<I>(warp, inst, inst.op[1], mask, size_of::<T>() as u64)
            {
                Ok(pointers) => pointers,
                Err(flow) => return flow,
            };
            let [row] = rows::<I, _, T, 1>(&pointers);
            let mut wide = [0; WARP];
            for lane in 0..WARP {
                wide[lane] = row[lane].widened();
            }
            warp.set64(inst.op[0], &wide, mask);
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
            if mask == u32::MAX && pointers.by_halves::<I>(bytes) {
                for half in [0, HALF] {
                    let mut block = [[T::default(); N]; HALF];
                    for lane in 0..HALF {
                        for item in 0..N {
                            block[lane][item] = rows[item][half + lane];
                        }
                    }
                    pointers.at(half).cast::<[[T; N]; HALF]>().write_unaligned(block);
                }
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

impl Access {
    /// Hardware makes one access of a vector, which other threads see whole: a value beside a flag.
    /// Returns the logarithm of its bytes, for a vector that others may answer; `None` where it is
    /// accessed by its elements.
    fn at_once(&self, at: *const u8) -> Option<u32> {
        let bytes = usize::from(self.count as u8) << self.log2;
        let is_vector = (self.strong || self.uncached) && self.count > 1 && bytes <= 16;
        (is_vector && (at as usize).is_multiple_of(bytes)).then(|| bytes.trailing_zeros())
    }

    /// Element `item` of a vector of 16 bytes, extended.
    fn item_of(&self, words: [u64; 2], item: usize) -> u64 {
        let at = item << self.log2;
        let bits = 8u32 << self.log2;
        let value = words[at / 8] >> (at % 8 * 8);
        let (left, rest) = (value << (64 - bits), 64 - bits);
        if self.signed { (left as i64 >> rest) as u64 } else { left >> rest }
    }

    /// Puts element `item` into a vector that is 0 there.
    fn put_into(&self, words: &mut [u64; 2], item: usize, value: u64) {
        let at = item << self.log2;
        let rest = 64 - (8u32 << self.log2);
        words[at / 8] |= (value << rest >> rest) << (at % 8 * 8);
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
                if let Some(log2) = access.at_once(at) {
                    let words =
                        if log2 == 4 { load_pair(at) } else { [load_scalar(at, log2, false), 0] };
                    for (item, values) in values[..count].iter_mut().enumerate() {
                        values[lane] = access.item_of(words, item);
                    }
                    continue;
                }
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
                if let Some(log2) = access.at_once(at) {
                    let mut words = [0; 2];
                    for (item, slot) in ops[1..=count].iter().enumerate() {
                        let wide = access.log2 == 3 || access.wide_registers;
                        let value = match wide {
                            true => warp.row64(*slot)[lane],
                            false => u64::from(warp.row32(*slot)[lane]),
                        };
                        access.put_into(&mut words, item, value);
                    }
                    match log2 {
                        4 => store_pair(at, words),
                        log2 => store_scalar(at, log2, words[0]),
                    }
                    continue;
                }
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
