//! Turns a new ring to where another one was: the kernel counts what was submitted and completed by
//! itself, so as many requests that do nothing are submitted.

use super::Saved;
use super::kernel::{CQE, Made, SQE, Shared, set_up, submit};
use rustix::fd::{AsFd, OwnedFd};
use std::io;

/// Opcode and flag of requests: IORING_OP_NOP, IOSQE_CQE_SKIP_SUCCESS.
const NOTHING: [u8; SQE as usize] = [0; SQE as usize];
const SILENT: u8 = 1 << 6;

/// What a ring has in memory besides its counters.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Contents {
    pub(super) array: Vec<u8>,
    pub(super) completions: Vec<u8>,
    pub(super) requests: Vec<u8>,
}

/// A ring that is being turned.
struct Turning {
    made: Made,
    queues: Shared,
    requests: Shared,
    entries: u32,
}

/// Makes a ring that is as `saved` and `contents` say.
pub(super) fn make(saved: &Saved, contents: &Contents) -> io::Result<OwnedFd> {
    let made = set_up(saved.entries, saved.completions)?;
    if made.layout != saved.layout {
        return Err(io::Error::other("this kernel lays rings out otherwise"));
    }
    let ring = made.fd.as_fd();
    let queues = Shared::queues(ring, made.array + u64::from(saved.entries) * 4)?;
    let requests = Shared::requests(ring, u64::from(saved.entries) * SQE)?;
    let turning = Turning { queues, requests, entries: saved.entries, made };
    turning.turn(saved)?;
    turning.fill(saved, contents)?;
    Ok(turning.made.fd)
}

impl Turning {
    fn turn(&self, saved: &Saved) -> io::Result<()> {
        for entry in 0..self.entries {
            let at = self.made.array + u64::from(entry) * 4;
            self.queues.write(at, &entry.to_le_bytes())?;
        }
        let (silent, read, unread) = saved.steps();
        self.advance(silent, SILENT, true)?;
        self.advance(read, 0, true)?;
        // What waits is never taken, so that the kernel knows what room is left.
        self.advance(unread, 0, false)
    }

    /// Submits `count` requests with those flags; takes their completions if `take`.
    fn advance(&self, count: u64, flags: u8, take: bool) -> io::Result<()> {
        let layout = &self.made.layout;
        let mut request = NOTHING;
        request[1] = flags;
        (0..u64::from(self.entries))
            .try_for_each(|entry| self.requests.write(entry * SQE, &request))?;
        let mut left = count;
        while left > 0 {
            let some = left.min(self.entries.into()) as u32;
            let tail = self.queues.get(layout.sq_tail)?;
            self.queues.set(layout.sq_tail, tail.wrapping_add(some))?;
            if submit(self.made.fd.as_fd(), some)? != some {
                return Err(io::Error::other("the kernel does not take all requests"));
            }
            if take {
                self.queues.set(layout.cq_head, self.queues.get(layout.cq_tail)?)?;
            }
            left -= u64::from(some);
        }
        Ok(())
    }

    fn fill(&self, saved: &Saved, contents: &Contents) -> io::Result<()> {
        let layout = &self.made.layout;
        let counters = [
            (layout.sq_head, saved.sq_head),
            (layout.sq_tail, saved.sq_head),
            (layout.cq_head, saved.cq_head),
            (layout.cq_tail, saved.cq_tail),
        ];
        for (at, value) in counters {
            if self.queues.get(at)? != value {
                return Err(io::Error::other("it does not turn as it should"));
            }
        }
        self.queues.set(layout.sq_tail, saved.sq_tail)?;
        self.queues.set(layout.sq_dropped, saved.dropped)?;
        self.queues.set(layout.cq_overflow, saved.overflow)?;
        self.queues.set(layout.cq_flags, saved.cq_flags)?;
        // Who has no array needs each request in its own place, which is where they are.
        if contents.array.iter().any(|byte| *byte != 0) {
            self.queues.write(self.made.array, &contents.array)?;
        }
        self.queues.write(layout.cqes.into(), &contents.completions)?;
        self.requests.write(0, &contents.requests)
    }
}

impl Contents {
    /// Bytes of each part.
    pub(super) fn lengths(saved: &Saved) -> (u64, u64, u64) {
        let entries = u64::from(saved.entries);
        (entries * 4, u64::from(saved.completions) * CQE, entries * SQE)
    }

    /// Whether a request, or one that was submitted, is to have other credentials: some kernels
    /// do not tell of them otherwise.
    pub(super) fn name_credentials(&self) -> bool {
        /// Offset of `io_uring_sqe.personality`, 16 bits.
        const PERSONALITY: usize = 42;
        let named = |request: &[u8]| request[PERSONALITY] != 0 || request[PERSONALITY + 1] != 0;
        self.requests.chunks_exact(SQE as usize).any(named)
    }

    /// Whether a completion, read or not, says that its request has more of them than one, or takes
    /// two places: then the counters do not tell what is under way.
    pub(super) fn have_several(&self) -> bool {
        /// Offset of `io_uring_cqe.flags`.
        const FLAGS: usize = 12;
        /// IORING_CQE_F_MORE, IORING_CQE_F_SKIP and IORING_CQE_F_32 (IORING_SETUP_CQE_MIXED).
        const SEVERAL: u32 = 1 << 1 | 1 << 5 | 1 << 15;
        let completions = self.completions.as_chunks::<{ CQE as usize }>().0;
        completions.iter().any(|completion| {
            let flags =
                completion[FLAGS..].first_chunk().map_or(0, |word| u32::from_le_bytes(*word));
            flags & SEVERAL != 0
        })
    }

    pub(super) fn joined(&self) -> Vec<u8> {
        [&self.array[..], &self.completions, &self.requests].concat()
    }

    /// Divides what [`Contents::joined`] returned; `None` if it is not as long as it should be.
    pub(super) fn of(saved: &Saved, mut bytes: Vec<u8>) -> Option<Contents> {
        let (array, completions, requests) = Contents::lengths(saved);
        if bytes.len() as u64 != array + completions + requests {
            return None;
        }
        let requests = bytes.split_off((array + completions) as usize);
        let completions = bytes.split_off(array as usize);
        Some(Contents { array: bytes, completions, requests })
    }
}
