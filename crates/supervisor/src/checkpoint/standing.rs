//! A job that stands still; and where that is for its last image, whom it waits for, and what must
//! stay as it is.

use crate::checkpoint::error::{CheckpointError, DepartError};
use crate::devices::gpu::Captures;
use crate::devices::quiesce::Quiet;
use kedge_process::{Roots, Stopped, running, waiting};
use std::collections::BTreeMap;
use std::path::Path;

/// A job all of which rests.
pub(crate) struct Resting<'a> {
    /// Before what opens the gates: it may still take an answer.
    pub(crate) captures: Captures,
    pub(crate) quiet: Quiet<'a>,
    pub(crate) roots: Roots,
    pub(crate) stopped: Stopped,
}

/// Whom a job that stands still for its last image waits for.
pub(crate) trait Leaves: Sync {
    /// Returns once the job is to go, which is durable then.
    ///
    /// # Errors
    /// It goes on here.
    fn decide(&self, image: &Path, rest: &Rest<'_>) -> Result<(), CheckpointError>;

    /// Is told that nothing of the job runs here any more.
    fn gone(&self);
}

/// What must stay as it is while a job stands still: what happens to it meanwhile is in no image.
pub(crate) struct Rest<'a> {
    roots: &'a Roots,
    /// The program's first process.
    first: Option<i32>,
    /// Signals that waited in its processes before they stood still.
    before: BTreeMap<i32, u64>,
    /// Its processes since.
    processes: Vec<i32>,
}

impl<'a> Rest<'a> {
    /// Signals that wait in a job that runs.
    pub(crate) fn before(roots: &Roots) -> BTreeMap<i32, u64> {
        waiting(roots)
    }

    /// Begins with the program's `first` process, and the signals that waited `before` it stood
    /// still.
    pub(crate) fn begin(
        roots: &'a Roots,
        first: Option<i32>,
        before: BTreeMap<i32, u64>,
    ) -> Rest<'a> {
        Rest { roots, first, before, processes: Vec::new() }
    }

    /// Is told that it stands still.
    pub(crate) fn stands(&mut self) {
        self.processes = running(self.roots);
    }

    /// Looks whether what stands still is what was captured.
    ///
    /// # Errors
    /// A process was ended, or sent a signal that it would not see elsewhere; or the program's
    /// first one had ended before, so that its end is told here and another would be taken for it
    /// there.
    pub(crate) fn is_undisturbed(&self) -> Result<(), DepartError> {
        /// Those that people and batch systems send: timers, which go on, send others.
        const SENT: [i32; 7] = [
            libc::SIGHUP,
            libc::SIGINT,
            libc::SIGQUIT,
            libc::SIGKILL,
            libc::SIGUSR1,
            libc::SIGUSR2,
            libc::SIGTERM,
        ];
        let sent = SENT.iter().fold(0, |all, signal| all | 1u64 << (signal - 1));
        if self.first.is_some_and(|first| !self.processes.contains(&first)) {
            return Err(DepartError::Over);
        }
        let now = waiting(self.roots);
        if let Some(dead) = self.processes.iter().find(|pid| !now.contains_key(pid)) {
            return Err(DepartError::Dead(*dead));
        }
        let new = now.iter().map(|(pid, now)| now & !self.before.get(pid).unwrap_or(&0) & sent);
        match new.fold(0, |all, new| all | new) {
            0 => Ok(()),
            new => Err(DepartError::Signalled(new.trailing_zeros() + 1)),
        }
    }
}
