//! Taking a job's device memory off the devices, and bringing it back. Whatever the job asks of its
//! devices while it is away brings it back as well.

use crate::checkpoint::checkpointer::Checkpointer;
use crate::checkpoint::error::CheckpointError;
use crate::devices::quiesce::{QuiesceError, Resting};
use kedge_control::note;
use kedge_control::proxy::{Answer, ControlError, Order};
use std::thread;
use std::time::Duration;

/// How long devices may take to come to rest.
const QUIESCE_TIMEOUT: Duration = Duration::from_secs(10);
/// As for a whole capture.
const PREPARE: Order = Order::Prepare { track: false, full: true };
/// For memory to be packed.
const LIMIT: Duration = Duration::from_secs(1200);

impl Checkpointer {
    /// Takes the memory off the devices: how many bytes. Where one process's cannot be, all of it
    /// stays.
    pub(crate) fn swap_out(&self) -> Result<u64, CheckpointError> {
        let _one = self.turn.take().ok_or(CheckpointError::Busy)?;
        let quiet = self.proxies.quiesce(QUIESCE_TIMEOUT, &PREPARE)?;
        let outcome = leave_all(&quiet.clients);
        drop(quiet);
        if outcome.is_err() {
            // At rest is only what is there.
            drop(self.proxies.quiesce(QUIESCE_TIMEOUT, &PREPARE)?);
        }
        let bytes = outcome?;
        note!(self.log, "{} MiB of the job are off its devices", bytes >> 20);
        Ok(bytes)
    }

    /// Brings it back.
    pub(crate) fn swap_in(&self) -> Result<(), CheckpointError> {
        let _one = self.turn.take().ok_or(CheckpointError::Busy)?;
        drop(self.proxies.quiesce(QUIESCE_TIMEOUT, &PREPARE)?);
        Ok(())
    }
}

fn leave_all(clients: &[Resting]) -> Result<u64, QuiesceError> {
    let leave = |client: &Resting| {
        let answer = client.proxy.control.ask(&Order::Leave {}, &[], LIMIT);
        match answer {
            Ok(Answer::Captured { bytes }) => Ok(bytes),
            Ok(_) => Err((client.pid, ControlError::Nonsense)),
            Err(error) => Err((client.pid, error)),
        }
    };
    let outcomes: Vec<_> = thread::scope(|scope| {
        let asked: Vec<_> = clients.iter().map(|c| scope.spawn(move || leave(c))).collect();
        asked
            .into_iter()
            .map(|one| one.join().unwrap_or(Err((0, ControlError::Nonsense))))
            .collect()
    });
    let mut sum = 0;
    for outcome in outcomes {
        sum += outcome.map_err(|(pid, source)| QuiesceError::Proxy { pid, source })?;
    }
    Ok(sum)
}
