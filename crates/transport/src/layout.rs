//! What lies where in the memory that client and proxy share.
//!
//! Everything in it is an atomic: either side may write anything at any time, and the other must
//! stay sound. Numbers that matter are re-checked by the reader each time.

use std::sync::atomic::{AtomicU32, AtomicU64};

/// "kedgring", little-endian.
pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"kedgring");

/// Bytes of the entry ring: a power of two.
pub const RING_BYTES: usize = 4 << 20;
pub(crate) const RING_WORDS: usize = RING_BYTES / 8;
/// Longest encoded message. The types of the protocol keep well below it.
pub const MAX_MESSAGE: usize = 256 << 10;
/// Longest reply, bytes.
pub const MAX_REPLY: usize = 64 << 20;
/// Calls that may wait at one time; more threads than that queue for a slot.
pub const SLOTS: usize = 256;
/// Replies up to this size travel in the slot; longer ones through the spill area of the memfd.
pub(crate) const INLINE_WORDS: usize = 126;
/// Host functions that may wait for the client's callback thread.
pub(crate) const HOST_FNS: usize = 256;
/// Contexts whose sticky error is kept (by id, modulo).
pub(crate) const STICKY: usize = 256;

/// Words before an entry's payload: sequence number; length and reply slot.
pub(crate) const ENTRY_HEAD_WORDS: usize = 2;
/// An entry without a reply.
pub(crate) const NO_SLOT: u32 = u32::MAX;

/// A cache line of its own, so that one side's writes do not slow the other's polling.
#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct Line<T>(pub(crate) T);

/// Reply slot states. The client moves FREE → PENDING → (SLEEPING), the proxy → READY.
pub(crate) mod slot_state {
    pub(crate) const PENDING: u32 = 0;
    /// The caller sleeps on the state word and must be woken.
    pub(crate) const SLEEPING: u32 = 1;
    pub(crate) const READY: u32 = 2;
}

#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) state: AtomicU32,
    /// Bytes of the reply.
    pub(crate) len: AtomicU32,
    /// Unused; keeps the words on a round size.
    pub(crate) reserved: AtomicU64,
    pub(crate) words: [AtomicU64; INLINE_WORDS],
}

/// Tokens of host functions: the proxy appends, the client's callback thread takes.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct HostFns {
    /// Tokens ever appended (modulo 2^32); the futex on which the callback thread sleeps.
    pub(crate) tail: Line<AtomicU32>,
    /// Tokens ever taken.
    pub(crate) head: Line<AtomicU32>,
    pub(crate) tokens: [AtomicU64; HOST_FNS],
}

#[repr(C)]
#[derive(Debug)]
pub(crate) struct Header {
    pub(crate) magic: AtomicU64,
    /// Bytes ever appended to the ring; written by the client.
    pub(crate) tail: Line<AtomicU64>,
    /// Bytes ever consumed; written by the proxy.
    pub(crate) head: Line<AtomicU64>,
    /// 1 while the proxy sleeps for entries; a futex.
    pub(crate) consumer_sleeps: Line<AtomicU32>,
    /// 1 while a client thread sleeps for room; a futex.
    pub(crate) producer_sleeps: Line<AtomicU32>,
    /// Non-zero once either side has given up.
    pub(crate) closed: Line<AtomicU32>,
    /// All posts up to this sequence number are complete.
    pub(crate) completed: Line<AtomicU64>,
    /// 1 while device output waits to be taken.
    pub(crate) output: AtomicU32,
    /// Entries of `sticky` that are set: 0 is the common case.
    pub(crate) faults: AtomicU32,
    /// `(context id << 32) | CUresult`, at index `context id % STICKY`.
    pub(crate) sticky: [AtomicU64; STICKY],
    pub(crate) host_fns: HostFns,
    pub(crate) slots: [Slot; SLOTS],
}

/// The header's share of the memfd; the ring begins here.
pub(crate) const HEADER_BYTES: usize = 512 << 10;
/// Long replies: slot `i` owns `MAX_REPLY` bytes at `SPILL_OFFSET + i * MAX_REPLY` of the memfd.
/// Sparse, and never mapped: written and read with pwrite and pread.
pub(crate) const SPILL_OFFSET: u64 = (HEADER_BYTES + RING_BYTES) as u64;
/// Size of the memfd.
pub(crate) const FILE_BYTES: u64 = SPILL_OFFSET + (SLOTS * MAX_REPLY) as u64;

const _: () = assert!(size_of::<Header>() <= HEADER_BYTES);
const _: () = assert!(RING_BYTES.is_power_of_two());
const _: () = assert!(2 * MAX_MESSAGE <= RING_BYTES);
const _: () = assert!(HOST_FNS.is_power_of_two());
const _: () = assert!(size_of::<Slot>() == 1024);
