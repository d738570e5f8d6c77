//! Streams and events, and how far each stream has come.
//!
//! The driver is asked as little as possible: a stream counts what is submitted to it, and every
//! wait that ends tells how far it has come. A stream without unfinished work answers by itself.

use crate::bells::Bell;
use crate::context::Context;
use kedge_cuda_types::handle::{CUevent, CUstream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

/// Streams with unfinished work, of all contexts.
#[derive(Debug, Default)]
pub(crate) struct Busy {
    now: AtomicUsize,
    begun: AtomicU64,
}

impl Busy {
    pub(crate) fn none(&self) -> bool {
        self.now.load(Ordering::Acquire) == 0
    }

    /// Whether one stream alone has unfinished work.
    pub(crate) fn one(&self) -> bool {
        self.now.load(Ordering::Acquire) == 1
    }

    /// How often a stream without work was given some: the program's rounds of submitting and
    /// waiting.
    pub(crate) fn begun(&self) -> u64 {
        self.begun.load(Ordering::Relaxed)
    }
}

pub(crate) struct Stream {
    pub(crate) raw: CUstream,
    pub(crate) ctx: Arc<Context>,
    busy: Arc<Busy>,
    progress: Mutex<Progress>,
    copied: Condvar,
    bell: OnceLock<Option<Bell>>,
    /// The client has destroyed it: the driver's ends with its last work.
    gone: AtomicBool,
}

#[derive(Debug, Default)]
struct Progress {
    /// Operations submitted, and how many of them are known to be over.
    submitted: u64,
    completed: u64,
    /// Copies of the client's private memory under way, which the driver does not know whole.
    copies: u32,
}

impl Progress {
    /// Everything up to operation `number` is over, as the driver sees it. True if nothing is
    /// unfinished from now on. While private memory is being copied the driver's word does not
    /// count: it knows of the pieces that it was given so far, and the copy's own waiter will ask
    /// again.
    fn complete(&mut self, number: u64) -> bool {
        let number = number.min(self.submitted);
        if self.copies > 0 || number <= self.completed {
            return false;
        }
        self.completed = number;
        self.submitted == number
    }
}

impl Stream {
    pub(crate) fn new(raw: CUstream, ctx: &Arc<Context>, busy: &Arc<Busy>) -> Arc<Stream> {
        let stream = Arc::new(Stream {
            raw,
            ctx: Arc::clone(ctx),
            busy: Arc::clone(busy),
            progress: Mutex::default(),
            copied: Condvar::new(),
            bell: OnceLock::new(),
            gone: AtomicBool::new(false),
        });
        ctx.adopt(&stream);
        stream
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more operation; its number.
    pub(crate) fn submitted(&self) -> u64 {
        let mut progress = self.progress();
        if progress.submitted == progress.completed {
            self.busy.now.fetch_add(1, Ordering::AcqRel);
            self.busy.begun.fetch_add(1, Ordering::Relaxed);
        }
        progress.submitted += 1;
        progress.submitted
    }

    /// The number that the next operation will have.
    pub(crate) fn next_number(&self) -> u64 {
        self.progress().submitted + 1
    }

    /// The newest operation's number, or `None` where all are over.
    pub(crate) fn pending(&self) -> Option<u64> {
        let progress = self.progress();
        (progress.submitted > progress.completed).then_some(progress.submitted)
    }

    /// Everything up to operation `number` is over. True if no stream has unfinished work now.
    pub(crate) fn completed(&self, number: u64) -> bool {
        self.progress().complete(number) && self.busy.now.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Its word, if there is one left for it and the client still has the stream. Its context is
    /// current.
    pub(crate) fn bell(&self) -> Option<&Bell> {
        let there = !self.gone.load(Ordering::Relaxed);
        there.then(|| self.bell.get_or_init(|| self.ctx.bells.take()).as_ref()).flatten()
    }

    /// The client has destroyed it. On the dispatcher's thread, as whoever asks for its word.
    pub(crate) fn goes(&self) {
        self.gone.store(true, Ordering::Relaxed);
    }

    /// A copy of private memory begins.
    pub(crate) fn copy_begins(&self) {
        self.progress().copies += 1;
    }

    pub(crate) fn copy_ends(&self) {
        self.progress().copies -= 1;
        self.copied.notify_all();
    }

    /// Whether private memory is being copied.
    pub(crate) fn copies_under_way(&self) -> bool {
        self.progress().copies > 0
    }

    /// Waits for the copies of private memory under way.
    pub(crate) fn wait_for_copies(&self) {
        let mut progress = self.progress();
        while progress.copies > 0 {
            progress = self.copied.wait(progress).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A stream that goes takes its unfinished work out of the count: its context went with it, or the
/// driver finishes it unseen.
impl Drop for Stream {
    fn drop(&mut self) {
        if self.pending().is_some() {
            self.busy.now.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

pub(crate) struct Event {
    pub(crate) raw: CUevent,
    pub(crate) ctx: Arc<Context>,
    /// It measures time.
    pub(crate) timing: bool,
    /// Other processes may record it as well.
    pub(crate) interprocess: bool,
    last: Mutex<Recorded>,
}

/// When an event was last recorded.
#[derive(Default)]
struct Recorded {
    /// Where, and after which operation.
    here: Option<(Arc<Stream>, u64)>,
    /// In the process that this one took over from: milliseconds before the checkpoint, negative.
    before: Option<f64>,
}

impl Event {
    pub(crate) fn new(
        raw: CUevent,
        ctx: &Arc<Context>,
        timing: bool,
        interprocess: bool,
    ) -> Arc<Event> {
        let ctx = Arc::clone(ctx);
        Arc::new(Event { raw, ctx, timing, interprocess, last: Mutex::default() })
    }

    fn last(&self) -> MutexGuard<'_, Recorded> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn record(&self, stream: &Arc<Stream>, number: u64) {
        *self.last() = Recorded { here: Some((Arc::clone(stream), number)), before: None };
    }

    pub(crate) fn recorded(&self) -> Option<(Arc<Stream>, u64)> {
        self.last().here.clone()
    }

    /// Whether its newest record is `number` of `stream`.
    pub(crate) fn is_of(&self, stream: &Arc<Stream>, number: u64) -> bool {
        let recorded = self.recorded();
        recorded.is_some_and(|(at, newest)| newest == number && Arc::ptr_eq(&at, stream))
    }

    pub(crate) fn was_recorded(&self, before: f64) {
        *self.last() = Recorded { here: None, before: Some(before) };
    }

    pub(crate) fn before(&self) -> Option<f64> {
        self.last().before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_finished_once() {
        let mut progress = Progress { submitted: 3, ..Default::default() };
        assert!(!progress.complete(2), "one is left");
        assert!(progress.complete(7), "no more than was submitted");
        assert!(!progress.complete(3), "it was finished before");
    }

    /// Another thread's event behind the copy may pass before the copy's last piece is submitted.
    #[test]
    fn a_copy_of_private_memory_is_not_over_before_its_last_piece() {
        let mut progress = Progress { submitted: 2, copies: 1, ..Default::default() };
        assert!(!progress.complete(2));
        assert_eq!(progress.completed, 0);
        progress.copies = 0;
        assert!(progress.complete(2));
    }
}
