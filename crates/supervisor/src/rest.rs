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
        let mut devices = self.proxies.quiesce_after(patience, preparing, || begun.catch_up())?;
        let (mut wait, deadline) = (FIRST_STOP, Instant::now() + patience);
        loop {
            match self.stop(begun, preparing, devices, wait) {
                Ok(Some(resting)) => return Ok(resting),
                Ok(None) if Instant::now() < deadline => {}
                Ok(None) => return Err(QuiesceError::Waiting(patience.as_secs()).into()),
                Err(CheckpointError::Engine(EngineError::WouldNotStop { .. }))
                    if Instant::now() < deadline => {}
                Err(error) => return Err(error),
            }
            thread::sleep(BETWEEN_STOPS);
            wait = LONGEST_STOP.min(wait * 2);
            devices = self.proxies.quiesce(patience, preparing)?;
        }
    }

    /// Stops the processes while devices rest. A thread may wait in the kernel, past any signal,
    /// for a page that a device has: then devices go on until it has stopped, and rest again.
    /// `None` where they do not: what they do may need a thread that stands still.
    fn stop<'a>(
        &'a self,
        begun: &mut Begun,
        preparing: &proxy::Order,
        devices: Quiet<'a>,
        wait: Duration,
    ) -> Result<Option<Resting<'a>>, CheckpointError> {
        let track = matches!(preparing, proxy::Order::Prepare { track: true, .. });
        let (roots, captures) = self.at_rest(&devices, track)?;
        let quiet = Cell::new(Some(devices));
        let patience = Patience::new(wait).servants(managed::SERVANT);
        let stopped = begun.stop(&roots, patience.let_on(wait, || drop(quiet.take())));
        let stopped = stopped.inspect_err(|_| GPU.idle())?;
        if let Some(quiet) = quiet.take() {
            return Ok(Some(Resting { quiet, roots, captures, stopped }));
        }
        GPU.idle();
        let quiet = match self.proxies.quiesce(wait, preparing) {
            Ok(quiet) => quiet,
            Err(QuiesceError::Busy { .. }) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
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
