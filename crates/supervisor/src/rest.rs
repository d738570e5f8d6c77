//! Bringing a job to rest, its devices and then its processes.

use crate::checkpoint::{CheckpointError, Checkpointer};
use crate::gpu::{Captures, GPU};
use crate::phases;
use crate::quiesce::{QuiesceError, Quiet};
use crate::sharing;
use kedge_control::proxy;
use kedge_process::{Begun, EngineError, Patience, Roots, Stopped};
use kedge_transport::managed;
use std::cell::Cell;
use std::thread;
use std::time::{Duration, Instant};

/// How long threads may take to stop, before devices go on for them and after it: at the first try,
/// each later one twice as long, up to the longest.
const FIRST_STOP: Duration = Duration::from_millis(100);
const LONGEST_STOP: Duration = Duration::from_secs(2);
/// Between two of them, so that who was waited for gets what it waits for.
const BETWEEN_STOPS: Duration = Duration::from_millis(10);

/// A job all of which rests.
pub(crate) struct Resting<'a> {
    pub(crate) quiet: Quiet<'a>,
    pub(crate) roots: Roots,
    pub(crate) captures: Captures,
    pub(crate) stopped: Stopped,
}

impl Checkpointer {
    /// Brings devices and processes to rest within `patience`.
    pub(crate) fn rest(
        &self,
        begun: &mut Begun,
        preparing: &proxy::Order,
        patience: Duration,
    ) -> Result<Resting<'_>, CheckpointError> {
        let mut quiet = self.proxies.quiesce_after(patience, preparing, || begun.catch_up())?;
        let (mut wait, deadline) = (FIRST_STOP, Instant::now() + patience);
        let track = matches!(preparing, proxy::Order::Prepare { track: true, .. });
        loop {
            match self.stop(begun, track, quiet, wait) {
                Ok(Some(resting)) => return Ok(resting),
                Ok(None) if Instant::now() < deadline => {}
                Ok(None) => return Err(QuiesceError::Waiting(patience.as_secs()).into()),
                Err(CheckpointError::Engine(EngineError::WouldNotStop { .. }))
                    if Instant::now() < deadline => {}
                Err(error) => return Err(error),
            }
            thread::sleep(BETWEEN_STOPS);
            wait = LONGEST_STOP.min(wait * 2);
            quiet = self.proxies.quiesce(patience, preparing)?;
        }
    }

    /// Stops the processes while devices rest. A thread may wait in the kernel, past any signal,
    /// for a page that a device has: then devices go on until it has stopped, and rest again.
    /// `None` where they do not: what they do may need a thread that stands still.
    fn stop<'a>(
        &'a self,
        begun: &mut Begun,
        track: bool,
        mut quiet: Quiet<'a>,
        wait: Duration,
    ) -> Result<Option<Resting<'a>>, CheckpointError> {
        let (roots, captures) = self.at_rest(&quiet, track)?;
        let went_on = Cell::new(false);
        let patience = Patience::new(wait).servants(managed::SERVANT);
        let stopped = begun.stop(
            &roots,
            patience.let_on(wait, || {
                quiet.let_on();
                went_on.set(true);
            }),
        );
        let stopped = stopped.inspect_err(|_| GPU.idle())?;
        if !went_on.get() {
            return Ok(Some(Resting { quiet, roots, captures, stopped }));
        }
        GPU.idle();
        // What is wrong with one is told the next time, if it is still there.
        if !quiet.rest_again(wait).unwrap_or(false) {
            return Ok(None);
        }
        let (roots, captures) = self.at_rest(&quiet, track)?;
        Ok(Some(Resting { quiet, roots, captures, stopped }))
    }

    /// Has plugins know the devices that rest. Returns the job's processes without theirs.
    fn at_rest(
        &self,
        quiet: &Quiet<'_>,
        track: bool,
    ) -> Result<(Roots, Captures), CheckpointError> {
        phases::checkpointed("resting");
        let roots = self.roots.without(&quiet.proxies);
        let lent = sharing::bind(&quiet.clients)?;
        let captures = GPU.checkpoint_of(&quiet.clients, lent, &self.socket, track);
        Ok((roots, captures.map_err(CheckpointError::Connections)?))
    }
}
