//! What the proxy tells the client: replies, faults, progress, host functions.

use crate::futex;
use crate::layout::{HOST_FNS, INLINE_WORDS, MAX_REPLY, SPILL_OFFSET, STICKY, slot_state};
use crate::memory::Segment;
use crate::ring::{Consumer, ReplyTo};
use kedge_cuda_types::CuError;
use kedge_protocol::CtxId;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use thiserror::Error;

/// Bytes of a reply that fit its slot.
const INLINE_BYTES: usize = INLINE_WORDS * 8;

/// Why a reply could not be sent; its caller waits on.
#[derive(Debug, Error)]
pub enum ReplyError {
    #[error("a reply of {len} bytes exceeds the maximum {MAX_REPLY}")]
    TooLong { len: usize },
    #[error("cannot write a long reply: {0}")]
    Spill(#[from] io::Error),
}

/// The proxy's way to the client, from any thread.
#[derive(Debug, Clone)]
pub struct Outbox {
    segment: Arc<Segment>,
    /// Serialises appends to the host-function queue and changes of the sticky table.
    writers: Arc<Mutex<()>>,
    nudged: Arc<AtomicBool>,
}

impl Outbox {
    /// Makes the outbox beside the ring's reader.
    pub(crate) fn new(reader: &Consumer) -> Outbox {
        let (segment, nudged) = reader.shared();
        Outbox { segment, nudged, writers: Arc::default() }
    }

    /// Answers a call with an encoded reply.
    pub fn reply(&self, to: ReplyTo, bytes: &[u8]) -> Result<(), ReplyError> {
        if bytes.len() > MAX_REPLY {
            return Err(ReplyError::TooLong { len: bytes.len() });
        }
        let slot = &self.segment.header().slots[to.0 as usize];
        if bytes.len() <= INLINE_BYTES {
            put_words(&slot.words, bytes);
        } else {
            self.spill(to.0, bytes)?;
        }
        slot.len.store(bytes.len() as u32, Ordering::Relaxed);
        if slot.state.swap(slot_state::READY, Ordering::AcqRel) == slot_state::SLEEPING {
            futex::wake(&slot.state);
        }
        Ok(())
    }

    fn spill(&self, slot: u32, bytes: &[u8]) -> io::Result<()> {
        let start = SPILL_OFFSET + u64::from(slot) * MAX_REPLY as u64;
        let mut done = 0;
        while done < bytes.len() {
            let rest = &bytes[done..];
            let offset = (start + done as u64) as libc::off_t;
            // SAFETY: pwrite reads `rest.len()` bytes of a live slice.
            let n = unsafe {
                let fd = self.segment.fd().as_raw_fd();
                libc::pwrite(fd, rest.as_ptr().cast(), rest.len(), offset)
            };
            match n {
                1.. => done += n as usize,
                0 => return Err(io::ErrorKind::WriteZero.into()),
                _ => {
                    let error = io::Error::last_os_error();
                    if error.kind() != io::ErrorKind::Interrupted {
                        return Err(error);
                    }
                }
            }
        }
        Ok(())
    }

    /// Makes `error` the context's sticky error from now on; replies sent later find it in place.
    pub fn set_sticky(&self, ctx: CtxId, error: CuError) {
        self.change_sticky(ctx, u64::from(ctx.0) << 32 | u64::from(error.0));
    }

    /// Forgets the sticky error of a context that is no more.
    pub fn clear_sticky(&self, ctx: CtxId) {
        let entry = &self.segment.header().sticky[ctx.0 as usize % STICKY];
        let value = entry.load(Ordering::Relaxed);
        if value != 0 && (value >> 32) as u32 == ctx.0 {
            self.change_sticky(ctx, 0);
        }
    }

    fn change_sticky(&self, ctx: CtxId, value: u64) {
        let _guard = self.writers.lock().unwrap_or_else(PoisonError::into_inner);
        let header = self.segment.header();
        let old = header.sticky[ctx.0 as usize % STICKY].swap(value, Ordering::Release);
        let faults = header.faults.load(Ordering::Relaxed);
        let faults = faults + u32::from(value != 0) - u32::from(old != 0);
        header.faults.store(faults, Ordering::Release);
    }

    /// Returns whether the ring's reader has something to do: a message to take, or a
    /// [`Nudge`](crate::Nudge).
    #[inline]
    pub fn wants_reader(&self) -> bool {
        let header = self.segment.header();
        self.nudged.load(Ordering::Relaxed)
            || header.tail.0.load(Ordering::Relaxed) != header.head.0.load(Ordering::Relaxed)
    }

    /// Tells the client that all posts up to sequence number `seq` are complete.
    pub fn set_completed(&self, seq: u64) {
        self.segment.header().completed.0.fetch_max(seq, Ordering::Release);
    }

    /// Tells the client whether device output waits for `Call::TakeOutput`.
    pub fn set_output_pending(&self, pending: bool) {
        self.segment.header().output.store(u32::from(pending), Ordering::Release);
    }

    /// Queues a host function for the client's callback thread; false while the queue is full.
    #[must_use]
    pub fn try_host_fn(&self, token: u64) -> bool {
        let _guard = self.writers.lock().unwrap_or_else(PoisonError::into_inner);
        let queue = &self.segment.header().host_fns;
        let tail = queue.tail.0.load(Ordering::Relaxed);
        let used = tail.wrapping_sub(queue.head.0.load(Ordering::Acquire));
        // A head beyond the tail is the client's nonsense: it then looks full, and only to it.
        if used as usize >= HOST_FNS {
            return false;
        }
        queue.tokens[tail as usize % HOST_FNS].store(token, Ordering::Relaxed);
        queue.tail.0.store(tail.wrapping_add(1), Ordering::Release);
        futex::wake(&queue.tail.0);
        true
    }

    /// Tells every waiting thread of the client that this proxy is about to end.
    pub fn close(&self) {
        close(&self.segment);
    }
}

/// Marks the segment closed and wakes everybody who sleeps on it.
pub(crate) fn close(segment: &Segment) {
    let header = segment.header();
    header.closed.0.store(1, Ordering::SeqCst);
    crate::ring::wake_all(header);
    for slot in &header.slots {
        if slot.state.load(Ordering::SeqCst) == slot_state::SLEEPING {
            futex::wake(&slot.state);
        }
    }
    futex::wake(&header.host_fns.tail.0);
}

/// Stores `bytes` as little-endian words, the last one padded with zeros.
fn put_words(words: &[AtomicU64; INLINE_WORDS], bytes: &[u8]) {
    for (word, chunk) in words.iter().zip(bytes.chunks(8)) {
        let mut value = [0; 8];
        value[..chunk.len()].copy_from_slice(chunk);
        word.store(u64::from_le_bytes(value), Ordering::Relaxed);
    }
}
