//! Memory that comes out of the image when it is first used.
//!
//! A userfaultfd watches the private anonymous memory of each process for pages that are missing.
//! One thread of the init puts them there: those that the program waits for first, all others one
//! after the other in between, and then nothing is watched any more. Pages are checked as they are
//! read, from files that stay open: an image that is removed meanwhile does no harm, and one that
//! is damaged ends the job, which its log tells. The pages are not mapped from the image's files
//! instead: a program that drops memory (MADV_DONTNEED) must find zeros there, and not what the
//! file has.

mod pager;
mod pieces;
mod uffd;

use crate::inject::Parasite;
use crate::state::{Backing, ProcessState, Saved};
use crate::{EngineError, Thread};
use kedge_image::{Layers, Source};
pub(super) use pager::Pager;
use pieces::Pieces;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use uffd::Missing;

/// A process whose memory is still to come.
#[derive(Debug)]
pub(super) struct Awaited {
    missing: Missing,
    layers: Arc<Layers>,
    pieces: Pieces,
}

impl Awaited {
    /// Watches the memory of a process for what `sources` have. Mappings are watched as a whole,
    /// and all of their kind: a call that takes one range of memory must not find it in pieces.
    pub(super) fn begin(
        state: &ProcessState,
        thread: &mut Thread,
        parasite: Parasite,
        layers: Layers,
        sources: Vec<Source>,
    ) -> Result<Awaited, EngineError> {
        let missing = Missing::of(thread, parasite)?;
        let pieces = Pieces::of(sources);
        for saved in state.mappings.iter().filter(|saved| can_wait(saved)) {
            missing.watch((saved.start, saved.end)).map_err(|source| EngineError::System {
                pid: thread.pid(),
                what: "watch its memory for pages that are missing",
                source,
            })?;
        }
        Ok(Awaited { missing, layers: Arc::new(layers), pieces })
    }
}

/// Takes what can come later out of `sources`: private anonymous memory that is not locked.
pub(super) fn later(state: &ProcessState, sources: &mut Vec<Source>) -> Vec<Source> {
    let waits = |start: u64| {
        let after = state.mappings.partition_point(|saved| saved.start <= start);
        let saved = after.checked_sub(1).map(|index| &state.mappings[index]);
        saved.is_some_and(can_wait)
    };
    let mut later = Vec::new();
    for source in sources.iter_mut() {
        let parts = std::mem::take(&mut source.parts);
        let (late, now) = parts.into_iter().partition(|(start, _)| waits(*start));
        source.parts = now;
        later.push(Source { parts: late, ..source.clone() });
    }
    sources.retain(|source| !source.parts.is_empty());
    later.retain(|source| !source.parts.is_empty());
    later
}

fn can_wait(saved: &Saved) -> bool {
    let locked = saved.flags.iter().any(|flag| flag == "lo");
    saved.backing == Backing::Anonymous && !saved.shared && !locked && saved.huge == 0
}

/// How far the memory of this process's job has come.
#[derive(Debug, Default)]
struct Progress {
    /// Processes of which some is to come.
    under_way: usize,
    failure: Option<String>,
}

static PROGRESS: Mutex<Progress> = Mutex::new(Progress { under_way: 0, failure: None });
static DONE: Condvar = Condvar::new();

fn progress() -> std::sync::MutexGuard<'static, Progress> {
    PROGRESS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns when all memory is there: nothing of the job can be captured before.
pub(crate) fn settle() {
    let mut progress = progress();
    while progress.under_way > 0 {
        progress = DONE.wait(progress).unwrap_or_else(PoisonError::into_inner);
    }
}

/// Why memory could not be had, if so: the job was ended for it.
pub(super) fn failure() -> Option<String> {
    progress().failure.clone()
}
