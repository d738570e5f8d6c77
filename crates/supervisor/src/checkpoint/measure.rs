//! How fast what a job's devices hold leaves them, with all that a checkpoint does to it but the
//! disk. `kedge bench checkpoint` asks for it. There is no folder, file or manifest: nothing that
//! could be taken for an image.

use crate::checkpoint::checkpointer::Checkpointer;
use crate::checkpoint::error::CheckpointError;
use crate::devices::quiesce::{QuiesceError, Resting, ask_all};
use kedge_control::proxy::{Answer, Control, ControlError, Order};
use kedge_image::Choice;
use kedge_wire::Text;
use std::thread;
use std::time::{Duration, Instant};

/// How long devices may take to come to rest.
const QUIESCE_TIMEOUT: Duration = Duration::from_secs(10);
/// As for an image that builds on none.
const PREPARE: Order = Order::Prepare { track: false, full: true };
/// Nothing is followed: the job's next image builds on its last one as if this had not been.
const CAPTURE: Order = Order::Capture { track: false, parent: None };
/// Longer than any device takes.
const LIMIT: Duration = Duration::from_secs(3600);

/// What was measured.
pub(crate) struct Measured {
    /// Bytes that a checkpoint would have written.
    pub(crate) bytes: u64,
    /// From the moment that the devices went on.
    pub(crate) seconds: f64,
}

impl Checkpointer {
    /// Captures what the devices hold, has it read, encoded by `codec` and summed while the job
    /// goes on, and forgets it. The processes are not stopped: what they share with their devices
    /// may change as it is copied, and nobody will read it.
    pub(crate) fn measure(&self, codec: &str) -> Result<Measured, CheckpointError> {
        codec.parse::<Choice>().map_err(|_| CheckpointError::Codec(codec.to_owned()))?;
        let _one = self.turn.take().ok_or(CheckpointError::Busy)?;
        let quiet = self.proxies.quiesce(QUIESCE_TIMEOUT, &PREPARE)?;
        let clients = quiet.clients.clone();
        let captured = capture_all(&clients);
        drop(quiet);
        let begin = Instant::now();
        let bytes = captured.and_then(|()| measure_all(&clients, codec));
        if bytes.is_err() {
            // One that does not hear it has ended, and what it held with it.
            let _ = ask_all(&controls(&clients), &Order::Forget {});
        }
        Ok(Measured { bytes: bytes?, seconds: begin.elapsed().as_secs_f64() })
    }
}

fn controls(clients: &[Resting]) -> Vec<(u32, &Control)> {
    clients.iter().map(|client| (client.pid, &client.proxy.control)).collect()
}

/// Has all of them capture, at once.
fn capture_all(clients: &[Resting]) -> Result<(), QuiesceError> {
    let answers = ask_all(&controls(clients), &CAPTURE).into_iter().zip(clients);
    let all = answers.map(|(answer, client)| match answer {
        Ok(Answer::Captured { .. }) => Ok(()),
        Ok(_) => Err(failed(client, ControlError::Nonsense)),
        Err(error) => Err(failed(client, error)),
    });
    all.fold(Ok(()), Result::and)
}

/// Has all of them measure, at once: how many bytes that would have been.
fn measure_all(clients: &[Resting], codec: &str) -> Result<u64, QuiesceError> {
    let order = &Order::Measure { codec: Text::truncated(codec.to_owned()) };
    let measure = |client: &Resting| match client.proxy.control.ask(order, &[], LIMIT) {
        Ok(Answer::Measured { bytes, .. }) => Ok(bytes),
        Ok(_) => Err(failed(client, ControlError::Nonsense)),
        Err(error) => Err(failed(client, error)),
    };
    let measured: Vec<_> = thread::scope(|scope| {
        let asked: Vec<_> =
            clients.iter().map(|client| (client, scope.spawn(move || measure(client)))).collect();
        let nonsense = |client| Err(failed(client, ControlError::Nonsense));
        asked.into_iter().map(|(of, one)| one.join().unwrap_or_else(|_| nonsense(of))).collect()
    });
    measured.into_iter().sum()
}

fn failed(client: &Resting, source: ControlError) -> QuiesceError {
    QuiesceError::Proxy { pid: client.pid, source }
}
