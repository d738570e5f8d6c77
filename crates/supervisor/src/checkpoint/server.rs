//! The answering side of a job's control socket.

use crate::base::sockets::listen;
use crate::checkpoint::checkpointer::Checkpointer;
use crate::checkpoint::error::CheckpointError;
use crate::checkpoint::joint::LaunchError;
use crate::checkpoint::launches::Launching;
use crate::checkpoint::measure::Measured;
use kedge_control::job::{Ask, FailureKind, Kill, Reply, Request, VERSION, receive, send};
use kedge_control::service::{Asker, Limits, Service};
use std::fs;
use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// How long a client may take to send a request, or to take its reply.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a remote shell may take to be there: people type passwords meanwhile.
const LAUNCHING: Duration = Duration::from_secs(600);
/// Remote shells that are being started take some, and leave some to others.
const LIMITS: Limits = Limits { connections: 64, request: REQUEST_TIMEOUT, reply: REQUEST_TIMEOUT };

/// Answers on the socket `path`, on threads of its own, for as long as the process lives.
pub(crate) fn serve(path: &Path, checkpointer: Arc<Checkpointer>) -> io::Result<()> {
    // What a job of that name that was restarted before has left.
    let _ = fs::remove_file(path);
    let listener = listen(path)?;
    let accept = move || {
        Service::new("answer", LIMITS).serve(&listener, move |asker| {
            // The asker may have gone: the job does not care.
            let _ = answer(asker, &checkpointer);
        })
    };
    thread::Builder::new().name("control".into()).spawn(accept)?;
    Ok(())
}

fn answer(asker: &Asker, checkpointer: &Arc<Checkpointer>) -> io::Result<()> {
    let stream = asker.stream();
    stream.set_read_timeout(Some(LIMITS.request))?;
    stream.set_write_timeout(Some(LIMITS.reply))?;
    let request: Request = receive(stream)?;
    if request.version != VERSION {
        let message = "the job was started by another version of kedge: use that one".to_owned();
        return send(stream, &Reply::Failed { kind: FailureKind::Version, message });
    }
    match request.ask {
        Ask::Settle => {
            checkpointer.settle(None);
            send(stream, &Reply::Settled)
        }
        Ask::Life => send(stream, &Reply::Life(checkpointer.life.clone())),
        Ask::Kill(kill) => send(stream, &killed(checkpointer, kill)),
        Ask::Swap { out } => {
            let swapped = match out {
                true => checkpointer.swap_out(),
                false => checkpointer.swap_in().map(|()| 0),
            };
            match swapped {
                Ok(bytes) => send(stream, &Reply::Swapped { bytes }),
                Err(error) => send(stream, &failure(&error)),
            }
        }
        Ask::Measure { codec } => match checkpointer.measure(&codec) {
            Ok(Measured { bytes, seconds }) => send(stream, &Reply::Measured { bytes, seconds }),
            Err(error) => send(stream, &failure(&error)),
        },
        Ask::Migrate(order) => {
            let moved = checkpointer.migrate(&order, |moving| {
                // The move goes on without anybody who listens.
                let _ = send(stream, &Reply::Moving(moving));
            });
            moved.or_else(|error| send(stream, &failure(&error)))
        }
        Ask::Depart(order) => {
            checkpointer.depart(&order, stream).or_else(|error| send(stream, &failure(&error)))
        }
        Ask::Launch { toward } => match checkpointer.launch(toward.as_deref()) {
            Ok((launching, launch)) => {
                send(stream, &Reply::Launch(Box::new(launch)))?;
                launched(stream, &launching)
            }
            Err(error) => {
                let kind = match error {
                    LaunchError::Many => FailureKind::Busy,
                    _ => FailureKind::Refused,
                };
                send(stream, &Reply::Failed { kind, message: error.to_string() })
            }
        },
        Ask::Checkpoint(order) => {
            let tell = |progress| {
                // The checkpoint goes on without anybody who listens.
                let _ = send(stream, &Reply::Progress(progress));
            };
            match checkpointer.checkpoint(&order, tell) {
                Ok(()) => Ok(()),
                Err(error) => send(stream, &failure(&error)),
            }
        }
    }
}

fn killed(checkpointer: &Checkpointer, kill: Kill) -> Reply {
    let ended = match kill {
        Kill::Signal(signal) => {
            checkpointer.signal(signal);
            true
        }
        Kill::End { grace_ms } => checkpointer.end(Duration::from_millis(grace_ms)),
    };
    match checkpointer.moved() {
        // What was killed here is only what has stood still since.
        Some(moved) => failure_of(&format!(
            "the job leaves for {}, or has: end it there (kedge kill)",
            moved.server
        )),
        None if ended => Reply::Settled,
        None => failure_of("some of its processes do not end: the kernel holds them"),
    }
}

/// Returns when the asker has closed the connection, or has had it for too long.
fn launched(stream: &UnixStream, _launching: &Launching) -> io::Result<()> {
    stream.set_read_timeout(Some(LAUNCHING))?;
    (&*stream).read(&mut [0]).map(drop)
}

fn failure_of(message: &str) -> Reply {
    Reply::Failed { kind: FailureKind::Failed, message: message.to_owned() }
}

fn failure(error: &CheckpointError) -> Reply {
    let kind = match error {
        CheckpointError::Busy => FailureKind::Busy,
        CheckpointError::NoFolder(_) | CheckpointError::Several(_) => FailureKind::Refused,
        CheckpointError::Move(error) => error.kind(),
        _ => FailureKind::Failed,
    };
    // Bounded, as the message is.
    Reply::Failed { kind, message: error.to_string().chars().take(8 << 10).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whoever tries again until it can be would try for ever.
    #[test]
    fn what_devices_of_several_places_cannot_is_refused() {
        let told = failure(&CheckpointError::Several("why".to_owned()));
        let Reply::Failed { kind, message } = told else { panic!("{told:?}") };
        assert_eq!((kind, &*message), (FailureKind::Refused, "why"));
    }
}
