//! The answering side.

use super::message::{Ask, FailureKind, Kill, Reply, Request, VERSION, receive, send};
use crate::checkpoint::{CheckpointError, Checkpointer};
use crate::proxies;
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

/// Questions that are answered at a time.
const MOST_CLIENTS: usize = 16;
/// How long one may take to ask, or to take an answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Answers on the socket `path`, on threads of its own, for as long as the process lives.
pub(crate) fn serve(path: &Path, checkpointer: Arc<Checkpointer>) -> io::Result<()> {
    // What a job of that name that was restarted before has left.
    let _ = fs::remove_file(path);
    let listener = proxies::listen(path)?;
    let accept = move || {
        let clients = Arc::new(AtomicUsize::new(0));
        loop {
            match listener.accept() {
                Ok((stream, _)) => admit(stream, &clients, &checkpointer),
                // Out of descriptors, most likely: does not get better by asking faster.
                Err(_) => thread::sleep(Duration::from_millis(200)),
            }
        }
    };
    thread::Builder::new().name("control".into()).spawn(accept)?;
    Ok(())
}

fn admit(stream: UnixStream, clients: &Arc<AtomicUsize>, checkpointer: &Arc<Checkpointer>) {
    // SAFETY: a plain call.
    let uid = unsafe { libc::geteuid() };
    let same = kedge_transport::peer_uid(stream.as_fd()).is_ok_and(|peer| peer == uid);
    // One that is not admitted sees the socket closed.
    if !same || clients.fetch_add(1, Ordering::SeqCst) >= MOST_CLIENTS {
        if same {
            clients.fetch_sub(1, Ordering::SeqCst);
        }
        return;
    }
    let (clients_inside, checkpointer) = (clients.clone(), checkpointer.clone());
    let answering = move || {
        // The asker may have gone: the job does not care.
        let _ = answer(&stream, &checkpointer);
        clients_inside.fetch_sub(1, Ordering::SeqCst);
    };
    if thread::Builder::new().name("answer".into()).spawn(answering).is_err() {
        clients.fetch_sub(1, Ordering::SeqCst);
    }
}

fn answer(stream: &UnixStream, checkpointer: &Checkpointer) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
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
        Ask::Kill(Kill::Signal(signal)) => {
            checkpointer.signal(signal);
            send(stream, &Reply::Settled)
        }
        Ask::Kill(Kill::End { grace_ms }) => {
            match checkpointer.end(Duration::from_millis(grace_ms)) {
                true => send(stream, &Reply::Settled),
                false => send(
                    stream,
                    &failure_of("some of its processes do not end: the kernel holds them"),
                ),
            }
        }
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

fn failure_of(message: &str) -> Reply {
    Reply::Failed { kind: FailureKind::Failed, message: message.to_owned() }
}

fn failure(error: &CheckpointError) -> Reply {
    let kind = match error {
        CheckpointError::Busy => FailureKind::Busy,
        CheckpointError::NoFolder(_) => FailureKind::Refused,
        _ => FailureKind::Failed,
    };
    // Bounded, as the message is.
    Reply::Failed { kind, message: error.to_string().chars().take(8 << 10).collect() }
}
