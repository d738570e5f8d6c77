//! The calls of a client that is traced, on their way to its proxy: a ring in the shared arena.
//!
//! It needs no descriptor and no file in the program, and what a program that is killed has written
//! is there for its proxy. Many threads write, one reads. A writer never waits: what finds no room
//! is counted.

use kedge_cuda_types::arena::{CALLS_BASE, CALLS_LEN};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Bytes of a function's name that are kept.
const NAME: usize = 64;
/// Words of the ring before the first slot; each of the three in use has a cache line of its own.
const FIRST: usize = 24;
const HEAD: usize = 0;
const TAIL: usize = 8;
const LOST: usize = 16;
/// Words of a slot: its turn, begin, end, thread and outcome, and the name.
const SLOT: usize = 4 + NAME / 8;

/// Nanoseconds of CLOCK_MONOTONIC, which is the same for all processes of a machine.
pub fn monotonic() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a timespec to be filled. The clock is there on every Linux, so this cannot
    // fail.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64)
}

/// Whether the shared arena is mapped in this process.
static MAPPED: AtomicBool = AtomicBool::new(false);

/// Says that the shared arena is mapped, for good.
pub(crate) fn arena_is_mapped() {
    MAPPED.store(true, Ordering::Release);
}

/// A call that has returned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TracedCall {
    /// The function's.
    pub name: String,
    /// Nanoseconds of CLOCK_MONOTONIC, as is `end`.
    pub begin: u64,
    pub end: u64,
    /// The thread's id in its own process namespace.
    pub thread: u32,
    /// CUresult.
    pub outcome: u32,
}

/// The ring. Whatever the other process writes into it, nothing but the calls that are read from it
/// depends on that.
#[derive(Debug, Clone, Copy)]
pub struct Calls<'a> {
    words: &'a [AtomicU64],
}

impl Calls<'static> {
    /// Returns the calls in the shared arena; `None` where that is not mapped.
    #[inline]
    pub fn in_arena() -> Option<Calls<'static>> {
        if !MAPPED.load(Ordering::Acquire) {
            return None;
        }
        // SAFETY: the arena is mapped at its fixed address for the life of the process, as was just
        // seen, and CALLS_BASE is page-aligned in it with CALLS_LEN bytes behind; the file cannot
        // shrink. Every word is an atomic, so any content, changing at any time, is valid.
        let words = unsafe {
            std::slice::from_raw_parts(CALLS_BASE as *const AtomicU64, CALLS_LEN as usize / 8)
        };
        Some(Calls { words })
    }
}

impl Calls<'_> {
    fn slots(&self) -> u64 {
        (self.words.len().saturating_sub(FIRST) / SLOT) as u64
    }

    fn slot(&self, turn: u64) -> &[AtomicU64] {
        let at = FIRST + (turn % self.slots().max(1)) as usize * SLOT;
        self.words.get(at..at + SLOT).unwrap_or_default()
    }

    /// Appends a call; where there is no room, it is counted.
    pub fn push(&self, name: &str, times: (u64, u64), thread: u32, outcome: u32) {
        let [head, tail, lost] = [HEAD, TAIL, LOST].map(|word| &self.words[word]);
        let mut turn = head.load(Ordering::Relaxed);
        loop {
            if turn.wrapping_sub(tail.load(Ordering::Acquire)) >= self.slots() {
                lost.fetch_add(1, Ordering::Relaxed);
                return;
            }
            let next = turn.wrapping_add(1);
            match head.compare_exchange_weak(turn, next, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => turn = now,
            }
        }
        let [taken, begin, end, who, text @ ..] = self.slot(turn) else { return };
        begin.store(times.0, Ordering::Relaxed);
        end.store(times.1, Ordering::Relaxed);
        who.store(u64::from(thread) << 32 | u64::from(outcome), Ordering::Relaxed);
        let name = &name.as_bytes()[..name.len().min(NAME)];
        for (at, word) in text.iter().enumerate() {
            let mut bytes = [0; 8];
            let part = name.get(at * 8..).unwrap_or_default();
            let len = part.len().min(8);
            bytes[..len].copy_from_slice(&part[..len]);
            word.store(u64::from_ne_bytes(bytes), Ordering::Relaxed);
        }
        taken.store(turn.wrapping_add(1), Ordering::Release);
    }

    /// Returns how many calls have found no room.
    pub fn lost(&self) -> u64 {
        self.words[LOST].load(Ordering::Relaxed)
    }
}

/// The reading end.
#[derive(Debug)]
pub struct CallsReader<'a> {
    calls: Calls<'a>,
    turn: u64,
}

impl<'a> CallsReader<'a> {
    /// Makes the reader, the only one of its ring.
    pub fn new(calls: Calls<'a>) -> CallsReader<'a> {
        CallsReader { calls, turn: 0 }
    }

    /// Takes the next call; `None` where there is none that is whole.
    pub fn take(&mut self) -> Option<TracedCall> {
        let [taken, begin, end, who, text @ ..] = self.calls.slot(self.turn) else { return None };
        if taken.load(Ordering::Acquire) != self.turn.wrapping_add(1) {
            return None;
        }
        let who = who.load(Ordering::Relaxed);
        let bytes = text.iter().flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes());
        let name: Vec<u8> = bytes.take_while(|byte| *byte != 0).collect();
        let call = TracedCall {
            name: String::from_utf8_lossy(&name).into_owned(),
            begin: begin.load(Ordering::Relaxed),
            end: end.load(Ordering::Relaxed),
            thread: (who >> 32) as u32,
            outcome: who as u32,
        };
        self.pass();
        Some(call)
    }

    /// Returns whether there are calls behind one that is not whole.
    pub fn is_held_up(&self) -> bool {
        self.calls.words[HEAD].load(Ordering::Relaxed) != self.turn
    }

    /// Leaves a call out that is not whole: its thread has ended within it.
    pub fn pass(&mut self) {
        self.turn = self.turn.wrapping_add(1);
        self.calls.words[TAIL].store(self.turn, Ordering::Release);
    }

    /// Returns how many calls have found no room.
    pub fn lost(&self) -> u64 {
        self.calls.lost()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    fn words(slots: usize) -> Vec<AtomicU64> {
        (0..FIRST + slots * SLOT).map(|_| AtomicU64::new(0)).collect()
    }

    #[test]
    fn calls_arrive_in_order_and_what_has_no_room_is_counted() {
        let words = words(3);
        let calls = Calls { words: &words };
        let mut reader = CallsReader::new(calls);
        assert_eq!(reader.take(), None);
        let long = "f".repeat(NAME + 1);
        for round in 0..5 {
            for name in ["cuCtxSynchronize", "", &long, "lost"] {
                calls.push(name, (round, round + 1), 7, 700);
            }
            let told: Vec<_> = std::iter::from_fn(|| reader.take()).collect();
            let names: Vec<_> = told.iter().map(|call| &*call.name).collect();
            assert_eq!(names, ["cuCtxSynchronize", "", &long[1..]]);
            let name = "cuCtxSynchronize".to_owned();
            let first = TracedCall { name, begin: round, end: round + 1, thread: 7, outcome: 700 };
            assert_eq!((&told[0], reader.lost()), (&first, round + 1));
        }
        assert!(!reader.is_held_up());
    }

    #[test]
    fn a_call_that_is_never_whole_is_passed() {
        let words = words(4);
        let calls = Calls { words: &words };
        let mut reader = CallsReader::new(calls);
        // A thread was killed between these two steps.
        words[HEAD].store(1, Ordering::Relaxed);
        calls.push("next", (1, 2), 1, 0);
        assert!(reader.take().is_none() && reader.is_held_up());
        reader.pass();
        assert_eq!(reader.take().map(|call| call.name), Some("next".to_owned()));
    }

    #[test]
    fn threads_do_not_mix_their_calls() {
        let words = words(64);
        let calls = Calls { words: &words };
        let mut reader = CallsReader::new(calls);
        let total = 4 * 2000;
        let mut told = 0;
        thread::scope(|scope| {
            for thread in 0..4u32 {
                scope.spawn(move || {
                    let name = format!("thread{thread}");
                    (0..2000).for_each(|n| calls.push(&name, (n, n + 1), thread, thread));
                });
            }
            let mut seen = |call: TracedCall| {
                assert_eq!(call.name, format!("thread{}", call.thread));
                assert_eq!((call.end, call.outcome), (call.begin + 1, call.thread));
                told += 1;
            };
            while words[HEAD].load(Ordering::Relaxed) + calls.lost() < total {
                reader.take().into_iter().for_each(&mut seen);
                thread::yield_now();
            }
        });
        told += std::iter::from_fn(|| reader.take()).count() as u64;
        assert_eq!(told + reader.lost(), total);
    }
}
