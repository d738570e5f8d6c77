//! `ld` and `st` that other threads may answer: volatile, relaxed, acquire, release.
//!
//! Shared memory is touched by one worker, so that plain accesses do; elsewhere each lane's access
//! is single-copy atomic by itself.

use super::load_store::{Element, rows};
use super::locate::{AnyGlobal, Locate, Pointers};
use super::warp::Warp;
use super::{Flow, Isa, Op};
use crate::code::Inst;
use crate::spec::WARP;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

/// `ld` of what other threads may change meanwhile (volatile, relaxed, acquire): op = [destination,
/// base].
pub(super) struct LoadStrong<P, T>(PhantomData<(P, T)>);

impl<P: Locate, T: Element> Op for LoadStrong<P, T> {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: lowering put the base after the destination; `locate` checked the pointers.
        unsafe {
            let bytes = size_of::<T>() as u64;
            let pointers = match P::locate::<I>(warp, inst, inst.op[1], mask, bytes) {
                Ok(pointers) => pointers,
                Err(flow) => return flow,
            };
            let row = if P::OF_BLOCK {
                rows::<I, _, T, 1>(&pointers)[0]
            } else {
                std::array::from_fn(|lane| T::load(pointers.at(lane)))
            };
            T::put(warp, inst.op[0], &row, mask);
            warp.poll(inst, row[mask.trailing_zeros() as usize % WARP].widened());
        }
        Flow::Next
    }
}

/// `st` of what other workers may read meanwhile: op = [base, source].
pub(super) struct StoreStrong<T>(PhantomData<T>);

impl<T: Element> Op for StoreStrong<T> {
    #[inline(always)]
    unsafe fn run<I: Isa>(warp: &mut Warp, inst: &Inst, mask: u32) -> Flow {
        // SAFETY: lowering put the source after the base; `locate` checked the pointers.
        unsafe {
            let bytes = size_of::<T>() as u64;
            let pointers = match AnyGlobal::locate::<I>(warp, inst, inst.op[0], mask, bytes) {
                Ok(pointers) => pointers,
                Err(flow) => return flow,
            };
            let row = T::get(warp, inst.op[1]);
            let mut left = mask;
            while left != 0 {
                let lane = left.trailing_zeros() as usize;
                left &= left - 1;
                T::store(pointers.at(lane), row[lane]);
            }
        }
        Flow::Next
    }
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
pub(super) unsafe fn load_pair(at: *const u8) -> [u64; 2] {
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
pub(super) unsafe fn store_pair(at: *mut u8, value: [u64; 2]) {
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
