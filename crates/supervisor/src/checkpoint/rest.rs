//! Bringing a job to rest, its devices and then its processes.

use crate::base::phases;
use crate::checkpoint::checkpointer::Checkpointer;
use crate::checkpoint::error::CheckpointError;
use crate::checkpoint::standing::Resting;
use crate::devices::gpu::{Captures, GpuCheckpoint};
use crate::devices::quiesce::{QuiesceError, Quiet};
use crate::devices::sharing;
use kedge_control::proxy;
use kedge_process::{Begun, EngineError, Patience, Roots};
use std::cell::Cell;
use std::thread;
use std::time::{Duration, Instant};

/// How long threads may take to stop before devices go on for them.
const PAGES: Duration = Duration::from_millis(100);
/// How long devices go on at the first try, each later one twice as long.
const FIRST_TIME: Duration = Duration::from_millis(500);
/// How long devices may then take to rest again: the program stands still by then and asks for no
/// more.
const AGAIN: Duration = Duration::from_millis(500);
/// Between two tries, so that who was waited for gets what it waits for.
const BETWEEN: Duration = Duration::from_millis(10);

impl Checkpointer {
    /// Brings devices and processes to rest within `patience`. Devices go on in between only where
    /// the job is `alone`: those of other parts rest meanwhile, and may be what they wait for.
    pub(crate) fn rest(
        &self,
        begun: &mut Begun,
        preparing: &proxy::Order,
        patience: Duration,
        alone: bool,
    ) -> Result<Resting<'_>, CheckpointError> {
        let track = matches!(preparing, proxy::Order::Prepare { track: true, .. });
        let mut quiet = self.proxies.quiesce_after(patience, preparing, || begun.catch_up())?;
        let (mut time, deadline) = (FIRST_TIME, Instant::now() + patience);
        if !alone || quiet.clients.is_empty() {
            return self.stop(begun, track, quiet, Patience::new(patience));
        }
        loop {
            match self.stop_letting_on(begun, track, quiet, time) {
                Ok(Some(resting)) => return Ok(resting),
                Ok(None) if Instant::now() < deadline => {}
                Ok(None) => return Err(QuiesceError::Waiting(patience.as_secs()).into()),
                Err(CheckpointError::Engine(EngineError::WouldNotStop { .. }))
                    if Instant::now() < deadline => {}
                Err(error) => return Err(error),
            }
            thread::sleep(BETWEEN);
            time *= 2;
            quiet = self.proxies.quiesce(patience, preparing)?;
        }
    }

    /// Stops the processes while devices rest. These go on only where it fails: a thread that waits
    /// for a page has to stop before it can be let go.
    fn stop<'a>(
        &'a self,
        begun: &mut Begun,
        track: bool,
        quiet: Quiet<'a>,
        patience: Patience<'_>,
    ) -> Result<Resting<'a>, CheckpointError> {
        let (roots, captures) = self.at_rest(&quiet, track)?;
        let patience = patience.let_on(Duration::ZERO, || quiet.let_on());
        let stopped = begun.stop(&roots, &[captures.plugin()], patience)?;
        Ok(Resting { quiet, roots, captures, stopped })
    }

    /// The same where a thread may wait in the kernel, past any signal, for a page that a device
    /// has: then devices go on for so long, until it has stopped, and rest again. `None` where they
    /// do not: what they do may need a thread that stands still.
    fn stop_letting_on<'a>(
        &'a self,
        begun: &mut Begun,
        track: bool,
        mut quiet: Quiet<'a>,
        time: Duration,
    ) -> Result<Option<Resting<'a>>, CheckpointError> {
        let (roots, captures) = self.at_rest(&quiet, track)?;
        let went_on = Cell::new(false);
        let patience = Patience::new(PAGES).let_on(time, || {
            quiet.let_on();
            went_on.set(true);
        });
        let stopped = begun.stop(&roots, &[captures.plugin()], patience)?;
        if !went_on.get() {
            return Ok(Some(Resting { quiet, roots, captures, stopped }));
        }
        // What is wrong with one is told the next time, if it is still there.
        if !quiet.rest_again(AGAIN).unwrap_or(false) {
            begun.goes_on(stopped);
            return Ok(None);
        }
        let (roots, captures) = self.at_rest(&quiet, track)?;
        Ok(Some(Resting { quiet, roots, captures, stopped }))
    }

    /// Returns the job's processes without those of the devices, which rest, and what captures
    /// these.
    fn at_rest(
        &self,
        quiet: &Quiet<'_>,
        track: bool,
    ) -> Result<(Roots, Captures), CheckpointError> {
        phases::checkpointed("resting");
        let roots = self.roots.without(&quiet.proxies);
        let lent = sharing::bind(&quiet.clients)?;
        let gpu = GpuCheckpoint::of(&quiet.clients, lent, &self.socket, track);
        Ok((roots, Captures::of(gpu.map_err(CheckpointError::Connections)?)))
    }
}
