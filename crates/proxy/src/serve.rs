//! One client, from handshake to end.

use crate::backend::{self, BuildError};
use crate::client_memory::ClientMemory;
use crate::dispatch::Dispatcher;
use crate::host::ProxyHost;
use crate::joblog::JobLog;
use crate::options::Options;
use crate::watch;
use kedge_protocol::{Refusal, Welcome};
use kedge_transport::{AcceptError, Accepted, ConnectError, Outbox, RingError, Server};
use kedge_wire::{List, Text};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use thiserror::Error;

/// How long a client may take to say hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a proxy ended before its client.
#[derive(Debug, Error)]
pub enum ServeError {
    #[error("refused a client: {0}")]
    Accept(#[from] AcceptError),
    #[error("cannot watch the client: {0}")]
    Watch(io::Error),
    #[error("{0}")]
    Arena(#[from] ConnectError),
    /// The client has been told.
    #[error("no device: {0}")]
    NoDevice(#[from] BuildError),
    #[error("{count} devices are more than a client can be told of")]
    TooManyDevices { count: usize },
    #[error("the client's ring is broken: {0}")]
    Ring(#[from] RingError),
}

/// The client's way to hear of a panic.
static OUTBOX: OnceLock<Outbox> = OnceLock::new();

/// Serves the client on `socket`. Returns only on failure: when the client ends, so does the
/// process.
pub fn serve(
    socket: OwnedFd,
    options: &Options,
    log: Arc<JobLog>,
) -> Result<std::convert::Infallible, ServeError> {
    end_on_panic(log.clone());
    let accepted = Server::accept(socket, HELLO_TIMEOUT)?;
    let outbox = accepted.server.outbox().clone();
    let _ = OUTBOX.set(outbox.clone());
    let result = serve_accepted(accepted, options, log);
    outbox.close();
    result
}

fn serve_accepted(
    accepted: Accepted,
    options: &Options,
    log: Arc<JobLog>,
) -> Result<std::convert::Infallible, ServeError> {
    let hello = &accepted.hello;
    let client = watch::pidfd(hello.pid).map_err(ServeError::Watch)?;
    log.note(&format!("client {} ({}) has connected", hello.pid, &*hello.program));
    kedge_transport::map_shared_arena(accepted.shared.as_fd())?;

    let memory = ClientMemory::new(hello.pid);
    let client_memory = memory.probe(hello.probe_addr, hello.probe_value);
    if !client_memory {
        log.line("the client's memory cannot be read here: copies go through the shared arena");
    }
    let outbox = accepted.server.outbox().clone();
    let host = Arc::new(ProxyHost::new(outbox, memory, log.clone()));
    let backend = match backend::build(&options.backend, &hello.choice, host.clone()) {
        Ok(backend) => backend,
        Err(error) => {
            let reason = Text::truncated(error.to_string());
            accepted.refuse(Refusal { code: error.code().0, reason })?;
            return Err(error.into());
        }
    };
    host.set_backend(&backend);

    let devices = backend.devices();
    let count = devices.len();
    let devices = List::new(devices).map_err(|_| ServeError::TooManyDevices { count })?;
    let driver_version = backend.driver_version();
    let server = accepted.welcome(Welcome { driver_version, client_memory, devices })?;
    let hears = host.clone();
    watch::start(client, server.socket(), log, move |said| hears.heard(said))
        .map_err(ServeError::Watch)?;
    let socket = server.socket().try_clone_to_owned().map_err(ServeError::Watch)?;
    let dispatcher = Dispatcher::new(backend, host.clone(), socket);
    Err(dispatch_all(server, dispatcher, &host, options.spin).into())
}

/// Dispatches messages until the ring is of no more use.
pub(crate) fn dispatch_all(
    mut server: Server,
    mut dispatcher: Dispatcher,
    host: &ProxyHost,
    spin: Duration,
) -> RingError {
    loop {
        match server.try_next() {
            Ok(Some(incoming)) => dispatcher.dispatch(incoming),
            Ok(None) => {
                host.publish_progress();
                if let Err(error) = server.wait(spin) {
                    return error;
                }
            }
            Err(error) => return error,
        }
    }
}

/// A panic on any thread ends the process: with a line in the log, and an error for the client.
fn end_on_panic(log: Arc<JobLog>) {
    std::panic::set_hook(Box::new(move |panic| {
        log.line(&format!("this is a bug in kedge: {panic}"));
        if let Some(outbox) = OUTBOX.get() {
            outbox.close();
        }
        // SAFETY: ends the process at once, whatever locks the panicking thread holds.
        unsafe { libc::_exit(70) }
    }));
}
