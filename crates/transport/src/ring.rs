//! The ring's two ends. Entries are whole words, so nothing is ever torn at the end of the ring.
//!
//! Sleeping follows Dekker's pattern on both sides: "publish my flag, full fence, look again,
//! sleep" against "publish my progress, full fence, look at the flag, wake". Of the two looks at
//! least one sees the other's write, so no wake-up is lost.

use crate::error::RingError;
use crate::futex;
use crate::layout::{
    ENTRY_HEAD_WORDS, Header, MAX_MESSAGE, NO_SLOT, RING_BYTES, RING_WORDS, SLOTS,
};
use crate::memory::Segment;
use crate::slots::LIVENESS_SLICE;
use crate::spin::Spin;
use kedge_protocol::Message;
use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::time::Duration;

/// Cache lines of the next entry that are asked for: a launch takes three.
const LINES_AHEAD: u64 = 4;

/// Returns how many ring bytes an entry with `len` payload bytes takes.
const fn entry_bytes(len: usize) -> u64 {
    (ENTRY_HEAD_WORDS * 8 + len.next_multiple_of(8)) as u64
}

fn word(ring: &[AtomicU64; RING_WORDS], position: u64) -> &AtomicU64 {
    &ring[(position / 8) as usize % RING_WORDS]
}

/// The client's end; its threads share it under a lock.
#[derive(Debug)]
pub(crate) struct Producer {
    tail: u64,
    /// The consumer's position when last looked at; it has only moved on since.
    head_seen: u64,
    seq: u64,
    /// Where messages are encoded, kept for its allocation.
    pub(crate) buffer: Vec<u8>,
}

impl Producer {
    pub(crate) fn new() -> Producer {
        Producer { tail: 0, head_seen: 0, seq: 0, buffer: Vec::with_capacity(4096) }
    }

    /// Appends the message in `buffer` and returns its sequence number. `alive` is asked now and
    /// then while the ring is full; `None` once it says no, or when the message is too long.
    #[inline]
    pub(crate) fn push(
        &mut self,
        segment: &Segment,
        slot: Option<u32>,
        alive: impl Fn() -> bool,
    ) -> Option<u64> {
        let len = self.buffer.len();
        if len > MAX_MESSAGE {
            return None;
        }
        let bytes = entry_bytes(len);
        if self.tail + bytes - self.head_seen > RING_BYTES as u64 {
            self.wait_for_room(segment.header(), bytes, alive)?;
        }
        self.seq += 1;
        let ring = segment.ring();
        let slot = slot.unwrap_or(NO_SLOT);
        word(ring, self.tail).store(self.seq, Ordering::Relaxed);
        word(ring, self.tail + 8).store(len as u64 | u64::from(slot) << 32, Ordering::Relaxed);
        let mut position = self.tail + 16;
        let mut chunks = self.buffer.chunks_exact(8);
        for chunk in &mut chunks {
            let value = u64::from_le_bytes(chunk.try_into().unwrap_or_default());
            word(ring, position).store(value, Ordering::Relaxed);
            position += 8;
        }
        let rest = chunks.remainder();
        if !rest.is_empty() {
            let mut last = [0; 8];
            last[..rest.len()].copy_from_slice(rest);
            word(ring, position).store(u64::from_le_bytes(last), Ordering::Relaxed);
        }
        self.tail += bytes;
        let header = segment.header();
        header.tail.0.store(self.tail, Ordering::Release);
        fence(Ordering::SeqCst);
        if header.consumer_sleeps.0.load(Ordering::Relaxed) != 0 {
            wake_consumer(header);
        }
        Some(self.seq)
    }

    #[cold]
    fn wait_for_room(
        &mut self,
        header: &Header,
        bytes: u64,
        alive: impl Fn() -> bool,
    ) -> Option<()> {
        let tail = self.tail;
        let mut room = || {
            // A position beyond our own tail is nonsense and counts as no progress.
            let head = header.head.0.load(Ordering::Acquire);
            self.head_seen = if head <= tail { head.max(self.head_seen) } else { self.head_seen };
            tail + bytes - self.head_seen <= RING_BYTES as u64
        };
        let mut spin = Spin::new(Duration::from_micros(50));
        loop {
            if room() {
                return Some(());
            }
            if spin.again() {
                continue;
            }
            // Asked before each sleep, so that of many threads that queue for the ring of a dead
            // proxy each finds out at once.
            if !alive() {
                return None;
            }
            header.producer_sleeps.0.store(1, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            if room() {
                return Some(());
            }
            futex::wait(&header.producer_sleeps.0, 1, Some(LIVENESS_SLICE));
        }
    }
}

#[cold]
fn wake_consumer(header: &Header) {
    if header.consumer_sleeps.0.swap(0, Ordering::SeqCst) != 0 {
        futex::wake(&header.consumer_sleeps.0);
    }
}

/// Wakes whoever sleeps at either end, after `closed` was set.
pub(crate) fn wake_all(header: &Header) {
    fence(Ordering::SeqCst);
    wake_consumer(header);
    header.producer_sleeps.0.store(0, Ordering::SeqCst);
    futex::wake(&header.producer_sleeps.0);
}

/// A message taken from the ring.
#[derive(Debug, Clone, PartialEq)]
pub struct Incoming {
    pub seq: u64,
    pub message: Message,
    /// Where the reply goes; present exactly for calls.
    pub reply_to: Option<ReplyTo>,
    /// `None`: it is not the client's own.
    pub place: Option<RingPlace>,
}

/// Where in the ring a message was, in bytes from the ring's beginning on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingPlace {
    /// Where it ended.
    pub end: u64,
    /// Up to where the client had posted messages when this one was taken.
    pub posted: u64,
}

/// A reply slot whose caller waits. Consumed by [`Outbox::reply`](crate::Outbox::reply).
#[derive(Debug, PartialEq, Eq, Clone)]
#[must_use = "the caller waits for a reply"]
pub struct ReplyTo(pub(crate) u32);

impl ReplyTo {
    /// Returns the slot's number, for a reply that comes from another host.
    pub fn number(&self) -> u32 {
        self.0
    }

    /// Returns the slot of that number, if there is one.
    pub fn of_number(number: u32) -> Option<ReplyTo> {
        ((number as usize) < SLOTS).then_some(ReplyTo(number))
    }
}

/// Ends the wait of a ring's reader.
#[derive(Debug, Clone)]
pub struct Nudge {
    segment: Arc<Segment>,
    nudged: Arc<AtomicBool>,
}

impl Nudge {
    /// Makes whoever waits for messages return; whoever does not, returns from the next wait at
    /// once.
    pub fn now(&self) {
        self.nudged.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        wake_consumer(self.segment.header());
    }
}

/// Tells how much has been taken from a ring.
#[derive(Debug, Clone)]
pub struct Meter {
    segment: Arc<Segment>,
    from: u64,
}

impl Meter {
    /// Returns the bytes of the ring that messages have taken since the meter was made.
    pub fn bytes(&self) -> u64 {
        let head = self.segment.header().head.0.load(Ordering::Relaxed);
        head.saturating_sub(self.from)
    }
}

/// The proxy's end.
#[derive(Debug)]
pub(crate) struct Consumer {
    segment: Arc<Segment>,
    head: u64,
    seq: u64,
    buffer: Vec<u8>,
    /// Somebody wants the reader to look at something else than the ring.
    nudged: Arc<AtomicBool>,
}

impl Consumer {
    pub(crate) fn new(segment: Arc<Segment>) -> Consumer {
        Consumer::after(segment, 0)
    }

    /// Goes on where another stopped, whose last message was `seq`.
    pub(crate) fn after(segment: Arc<Segment>, seq: u64) -> Consumer {
        let head = segment.header().head.0.load(Ordering::Acquire);
        let nudged = Arc::new(AtomicBool::new(false));
        Consumer { segment, head, seq, buffer: Vec::with_capacity(4096), nudged }
    }

    /// Goes on where another has stopped meanwhile, whose last message was `seq`.
    pub(crate) fn catch_up(&mut self, seq: u64) {
        self.head = self.segment.header().head.0.load(Ordering::Acquire);
        self.seq = seq;
    }

    /// Returns what others tell it through.
    pub(crate) fn shared(&self) -> (Arc<Segment>, Arc<AtomicBool>) {
        (self.segment.clone(), self.nudged.clone())
    }

    pub(crate) fn segment(&self) -> &Segment {
        &self.segment
    }

    /// Returns the sequence number of the newest message that was taken.
    pub(crate) fn seq(&self) -> u64 {
        self.seq
    }

    pub(crate) fn nudge(&self) -> Nudge {
        Nudge { segment: self.segment.clone(), nudged: self.nudged.clone() }
    }

    pub(crate) fn meter(&self) -> Meter {
        Meter { segment: self.segment.clone(), from: self.head }
    }

    /// Takes the next message if there is one. It is copied out before anything of it is believed.
    pub(crate) fn try_next(&mut self) -> Result<Option<Incoming>, RingError> {
        let header = self.segment.header();
        let tail = header.tail.0.load(Ordering::Acquire);
        if tail == self.head {
            return Ok(None);
        }
        let available = tail.wrapping_sub(self.head);
        if tail < self.head || available > RING_BYTES as u64 || !available.is_multiple_of(8) {
            return Err(RingError::Positions { head: self.head, tail });
        }
        let (seq, slot) = self.copy_out(available)?;
        self.head += entry_bytes(self.buffer.len());
        self.seq = seq;
        self.publish_head(available);
        if tail != self.head {
            self.fetch_ahead();
        }
        let place = RingPlace { end: self.head, posted: tail };
        self.check(seq, slot, place).map(Some)
    }

    /// Has the next entry come from the writer's cache while this one is worked on.
    fn fetch_ahead(&self) {
        let ring = self.segment.ring();
        for line in 0..LINES_AHEAD {
            let at = std::ptr::from_ref(word(ring, self.head + 64 * line)).cast();
            // SAFETY: only a hint, of memory that is mapped; it changes nothing.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(at) };
        }
    }

    /// Copies the entry at `head` into `buffer`: its sequence number and reply slot.
    fn copy_out(&mut self, available: u64) -> Result<(u64, u32), RingError> {
        let ring = self.segment.ring();
        let max = MAX_MESSAGE as u64;
        if available < entry_bytes(0) {
            return Err(RingError::Length { head: self.head, len: 0, available, max });
        }
        let seq = word(ring, self.head).load(Ordering::Relaxed);
        let second = word(ring, self.head + 8).load(Ordering::Relaxed);
        let (len, slot) = (second as u32 as u64, (second >> 32) as u32);
        if len > max || entry_bytes(len as usize) > available {
            return Err(RingError::Length { head: self.head, len, available, max });
        }
        if seq != self.seq + 1 {
            return Err(RingError::Sequence { last: self.seq, got: seq });
        }
        let len = len as usize;
        self.buffer.resize(len.next_multiple_of(8), 0);
        let mut position = self.head + 16;
        for chunk in self.buffer.chunks_exact_mut(8) {
            chunk.copy_from_slice(&word(ring, position).load(Ordering::Relaxed).to_le_bytes());
            position += 8;
        }
        self.buffer.truncate(len);
        Ok((seq, slot))
    }

    /// Tells the client of the room, where so many bytes were used before. A sleeping client is
    /// woken when a quarter of the ring is free, so that a full ring does not cost a wake-up an
    /// entry. Nor does an emptier one cost a fence: whoever sleeps found it full, and then so did
    /// this end, after the client's last entry and until a half was free.
    fn publish_head(&self, available: u64) {
        let header = self.segment.header();
        header.head.0.store(self.head, Ordering::Release);
        if available <= (RING_BYTES / 2) as u64 {
            return;
        }
        fence(Ordering::SeqCst);
        if header.producer_sleeps.0.load(Ordering::Relaxed) != 0 {
            let used = header.tail.0.load(Ordering::Relaxed).wrapping_sub(self.head);
            if used <= (RING_BYTES - RING_BYTES / 4) as u64
                && header.producer_sleeps.0.swap(0, Ordering::SeqCst) != 0
            {
                futex::wake(&header.producer_sleeps.0);
            }
        }
    }

    fn check(&self, seq: u64, slot: u32, place: RingPlace) -> Result<Incoming, RingError> {
        let message = kedge_wire::decode::<Message>(&self.buffer)
            .map_err(|source| RingError::Message { seq, source })?;
        let reply_to = match slot {
            NO_SLOT => None,
            slot if (slot as usize) < SLOTS => Some(ReplyTo(slot)),
            slot => return Err(RingError::NoSuchSlot { slot }),
        };
        match (&message, &reply_to) {
            (Message::Post { .. }, None) | (Message::Call { .. }, Some(_)) => {
                Ok(Incoming { seq, message, reply_to, place: Some(place) })
            }
            _ => Err(RingError::WrongSlot { seq, kind: message.name() }),
        }
    }

    /// Returns when there is something to take, or it was nudged, or `limit` is over. Never sleeps.
    pub(crate) fn look(&self, limit: Duration) {
        let header = self.segment.header();
        let mut spin = Spin::new(limit);
        let ready = || {
            header.tail.0.load(Ordering::Acquire) != self.head
                || self.nudged.load(Ordering::SeqCst)
                || header.closed.0.load(Ordering::Relaxed) != 0
        };
        while !ready() && spin.again() {}
    }

    /// Returns when there is something to take, or it was nudged: spins for `spin`, then sleeps.
    pub(crate) fn wait(&self, spin: Duration) -> Result<(), RingError> {
        let header = self.segment.header();
        let ready = || {
            header.tail.0.load(Ordering::Acquire) != self.head || self.nudged.load(Ordering::SeqCst)
        };
        let mut spin = Spin::new(spin);
        while !ready() {
            if header.closed.0.load(Ordering::Relaxed) != 0 {
                return Err(RingError::Closed);
            }
            if spin.again() {
                continue;
            }
            header.consumer_sleeps.0.store(1, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            if !ready() && header.closed.0.load(Ordering::SeqCst) == 0 {
                futex::wait(&header.consumer_sleeps.0, 1, None);
            }
            header.consumer_sleeps.0.store(0, Ordering::Relaxed);
        }
        self.nudged.store(false, Ordering::SeqCst);
        Ok(())
    }
}
