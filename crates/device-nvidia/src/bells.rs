//! Tells the dispatcher's thread of a short wait's end without another thread: behind the stream's
//! work the device writes a word of host memory, at which the thread looks.
//!
//! A thread that waits in the driver costs a hand-over, and hears of the end later: natively a
//! kernel that does nothing and a wait take 8.4 µs by cuStreamSynchronize and 7.6 µs by such a word
//! (docs/benchmarks.md, "How a host can learn that a kernel has ended").

use crate::driver::{Driver, check};
use crate::pinned::Pinned;
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::CUstream;
use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::yield_now;
use std::time::{Duration, Instant};

/// Streams that have a word at a time; others' waits go to threads.
const WORDS: usize = 64;
/// From one word to the next, bytes: each has a line of its own.
const APART: usize = 64;
/// How long the thread looks: as long as it would otherwise look for messages.
const SPIN_TIMEOUT: Duration = Duration::from_millis(2);
/// How long it looks without giving way to other threads: as long as a small kernel takes.
const ALONE: Duration = Duration::from_micros(20);
/// Looks at the word from one look at the clock to the next.
const LOOKS: usize = 64;

/// The words of a context's streams.
pub(crate) struct Bells {
    driver: Arc<Driver>,
    /// Made with the first context; `None` where the device cannot write there.
    memory: OnceLock<Option<Pinned>>,
    free: Mutex<Vec<usize>>,
    /// The newest value. Values only grow, so that what is written late into a word that has a new
    /// owner says nothing to it.
    newest: AtomicU64,
    /// The device has refused to write there.
    refused: AtomicBool,
}

/// A stream's word.
pub(crate) struct Bell {
    bells: Arc<Bells>,
    index: usize,
    /// The newest value that the stream was given to write.
    last: AtomicU64,
}

/// Looks whether something is over, for a while and as long as `may_spin`.
pub(crate) fn look(over: impl Fn() -> bool, may_spin: impl Fn() -> bool) -> bool {
    let begin = Instant::now();
    loop {
        for _ in 0..LOOKS {
            if over() {
                return true;
            }
            if !may_spin() {
                return false;
            }
            spin_loop();
        }
        match begin.elapsed() {
            past if past > SPIN_TIMEOUT => return false,
            past if past > ALONE => yield_now(),
            _ => {}
        }
    }
}

impl Bells {
    pub(crate) fn new(driver: &Arc<Driver>) -> Arc<Bells> {
        Arc::new(Bells {
            driver: Arc::clone(driver),
            memory: OnceLock::new(),
            free: Mutex::new((0..WORDS).rev().collect()),
            newest: AtomicU64::new(0),
            refused: AtomicBool::new(false),
        })
    }

    fn memory(&self) -> Option<&Pinned> {
        if self.refused.load(Ordering::Relaxed) {
            return None;
        }
        let make = || {
            let memory = Pinned::new(&self.driver, (WORDS + 1) * APART, 1).ok()?;
            let (host, mut device) = (memory.addr(), 0);
            // SAFETY: a live out pointer, and memory that was just registered.
            let found =
                unsafe { (self.driver.cuMemHostGetDevicePointer_v2)(&mut device, host.cast(), 0) };
            (check(found).is_ok() && device == host as u64).then_some(memory)
        };
        self.memory.get_or_init(make).as_ref()
    }

    /// A context was made, and is current: has its device write once. What the driver makes for
    /// that is then made before all that the program loads, in every context and on every machine,
    /// for where the driver places what comes later may depend on it and must be the same in a
    /// restarted job.
    pub(crate) fn made(&self) {
        let _ = self.write(CUstream::LEGACY, WORDS);
    }

    fn word(&self, index: usize) -> Option<&AtomicU64> {
        // SAFETY: inside the memory, which lives as long as this, and aligned. Only devices write
        // it.
        Some(unsafe { &*self.memory()?.addr().add(index * APART).cast::<AtomicU64>() })
    }

    /// Has the device write into word `index` behind all that `stream` was given: the word, and the
    /// value.
    fn write(&self, stream: CUstream, index: usize) -> Option<(&AtomicU64, u64)> {
        let word = self.word(index)?;
        let value = self.newest.fetch_add(1, Ordering::Relaxed) + 1;
        let at = std::ptr::from_ref(word) as u64;
        // SAFETY: a stream of the driver's, and a word of memory that it knows.
        let sent = check(unsafe { (self.driver.cuStreamWriteValue64_v2)(stream, at, value, 0) });
        // Any other error is of work before, and who waits in the driver is told it, too.
        if sent == Err(CuError::NOT_SUPPORTED) {
            self.refused.store(true, Ordering::Relaxed);
        }
        sent.ok().map(|()| (word, value))
    }

    /// A word that no stream has. Some context is current.
    pub(crate) fn take(self: &Arc<Bells>) -> Option<Bell> {
        self.memory()?;
        let index = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
        Some(Bell { bells: Arc::clone(self), index, last: AtomicU64::new(0) })
    }
}

impl Bell {
    /// Looks for the end of all that `stream` was given, as [`look`] does. The stream's context is
    /// current. False if the end was not seen: it has not come, the work has failed, the device
    /// does not write here, or has not written yet what it was given before: more than one value
    /// would only be in the way.
    pub(crate) fn hears(&self, stream: CUstream, may_spin: impl Fn() -> bool) -> bool {
        let last = self.last.load(Ordering::Relaxed);
        let written = |word: &AtomicU64| word.load(Ordering::Acquire) >= last;
        if !may_spin() || !self.bells.word(self.index).is_some_and(written) {
            return false;
        }
        let Some((word, value)) = self.bells.write(stream, self.index) else { return false };
        self.last.store(value, Ordering::Relaxed);
        look(|| word.load(Ordering::Acquire) >= value, may_spin)
    }
}

impl Drop for Bell {
    fn drop(&mut self) {
        self.bells.free.lock().unwrap_or_else(PoisonError::into_inner).push(self.index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::Turn;
    use std::cell::Cell;

    const STREAM: CUstream = CUstream(9);

    #[test]
    fn what_the_device_writes_is_heard() {
        let (_turn, driver) = Turn::begin(0);
        let bell = Bells::new(&driver).take().unwrap();
        assert!((0..3).all(|_| bell.hears(STREAM, || true)));
    }

    #[test]
    fn nobody_listens_for_long() {
        let (turn, driver) = Turn::begin(0);
        turn.set(|fake| fake.pending = true);
        let bell = Bells::new(&driver).take().unwrap();
        assert!(!bell.hears(STREAM, || false), "the thread is wanted");
        assert!(!turn.set(|fake| fake.write_first()), "and nothing was asked for");
        assert!(!bell.hears(STREAM, || true), "the work is not over");
        assert!(!bell.hears(STREAM, || true), "nor is it asked for twice");
        turn.set(|fake| fake.pending = false);
        assert!(turn.set(|fake| fake.write_first() && !fake.write_first()), "one value is due");
        assert!(bell.hears(STREAM, || true));
    }

    #[test]
    fn a_word_written_late_says_nothing_to_its_next_owner() {
        let (turn, driver) = Turn::begin(0);
        let bells = Bells::new(&driver);
        let bell = bells.take().unwrap();
        turn.set(|fake| fake.pending = true);
        assert!(!bell.hears(STREAM, || true));
        let index = bell.index;
        drop(bell);
        let next = bells.take().unwrap();
        assert_eq!(next.index, index);
        let looks = Cell::new(0);
        let late = || {
            looks.set(looks.get() + 1);
            looks.get() != 2 || turn.set(|fake| fake.write_first())
        };
        assert!(!next.hears(STREAM, || late() && looks.get() < 4));
    }

    #[test]
    fn a_device_that_cannot_write_is_asked_once() {
        let (turn, driver) = Turn::begin(0);
        let bells = Bells::new(&driver);
        let bell = bells.take().unwrap();
        turn.set(|fake| fake.refuses_values = Some(CuError::ILLEGAL_ADDRESS.0));
        assert!(!bell.hears(STREAM, || true));
        turn.set(|fake| fake.refuses_values = None);
        assert!(bell.hears(STREAM, || true), "that was of work before");
        turn.set(|fake| fake.refuses_values = Some(CuError::NOT_SUPPORTED.0));
        assert!(!bell.hears(STREAM, || true));
        turn.set(|fake| fake.refuses_values = None);
        assert!(!bell.hears(STREAM, || true) && bells.take().is_none());
    }

    #[test]
    fn every_context_writes_once() {
        let (turn, driver) = Turn::begin(0);
        turn.set(|fake| fake.pending = true);
        let bells = Bells::new(&driver);
        bells.made();
        assert!(turn.set(|fake| fake.write_first()));
    }

    #[test]
    fn there_are_so_many_words() {
        let (_turn, driver) = Turn::begin(0);
        let bells = Bells::new(&driver);
        let all: Vec<_> = (0..WORDS).map(|_| bells.take().unwrap()).collect();
        assert!(bells.take().is_none());
        drop(all);
        assert!(bells.take().is_some());
    }
}
