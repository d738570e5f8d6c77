//! One client, from handshake to end.

use crate::backend::{self, BuildError, Ready};
use crate::client_memory::ClientMemory;
use crate::control::{Inodes, Serving};
use crate::dispatch::Dispatcher;
use crate::executor::{Executor, Identity};
use crate::gate::Gate;
use crate::host::ProxyHost;
use crate::local::Local;
use crate::options::Options;
use crate::remote::open::{Client, SessionError, open_session};
use crate::restore::{self, Restored};
use crate::{ending, watch};
use kedge_control::gpu::GpuSpec;
use kedge_control::joblog::JobLog;
use kedge_control::keeper::MAX_PARTS;
use kedge_control::proxy::{Answer, Order};
use kedge_protocol::{Refusal, Welcome};
use kedge_socket::{Channel, SocketError};
use kedge_transport::{AcceptError, Accepted, ConnectError, RingError, Server};
use kedge_wire::{List, Text};
use std::convert::Infallible;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use thiserror::Error;

/// How long a client may take to say hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a restart may take, all of it.
const ORDER_TIMEOUT: Duration = Duration::from_secs(3600);

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
    /// The client has been told.
    #[error("{0}")]
    NoSession(#[from] SessionError),
    #[error("{count} devices are more than a client can be told of")]
    TooManyDevices { count: usize },
    #[error("the client's ring is broken: {0}")]
    Ring(#[from] RingError),
    #[error("its supervisor gives no orders that it knows")]
    NoControl,
    #[error("its supervisor cannot be reached: {0}")]
    Control(#[from] SocketError),
    /// The supervisor has been told.
    #[error("cannot go on from an image: {0}")]
    Restore(String),
}

/// Serves the client on `socket`; `control` is the supervisor's, and `ready` what was made ready for it.
/// Returns only on failure: when the client ends, so does the process.
pub fn serve(
    socket: OwnedFd,
    control: Option<OwnedFd>,
    options: &Options,
    log: Arc<JobLog>,
    ready: Option<Ready>,
) -> Result<Infallible, ServeError> {
    ending::end_on_panic(log.clone());
    let control = control.map(Channel::new);
    if options.restore {
        return replace(socket, control.ok_or(ServeError::NoControl)?, options, log, ready);
    }
    let accepted = Server::accept(socket, HELLO_TIMEOUT)?;
    let outbox = accepted.server.outbox().clone();
    ending::tells(outbox.clone());
    let result = serve_accepted(accepted, control, options, log, ready);
    outbox.close();
    result
}

fn serve_accepted(
    accepted: Accepted,
    control: Option<Channel>,
    options: &Options,
    log: Arc<JobLog>,
    ready: Option<Ready>,
) -> Result<Infallible, ServeError> {
    let hello = accepted.hello.clone();
    let client = watch::pidfd(hello.pid).map_err(ServeError::Watch)?;
    let warm = if ready.is_some() { " to a warm proxy" } else { "" };
    log.note(&format!("client {} ({}) has connected{warm}", hello.pid, &*hello.program));
    kedge_transport::map_shared_arena(accepted.shared.as_fd())?;
    let shared = accepted.shared.try_clone().map_err(ServeError::Watch)?;

    let memory = ClientMemory::new(hello.pid);
    let client_memory = memory.probe(hello.probe_addr, hello.probe_value);
    if !client_memory {
        log.line("the client's memory cannot be read here: copies go through the shared arena");
    }
    let outbox = accepted.server.outbox().clone();
    let keeper = options.keeper.clone();
    let host = Arc::new(ProxyHost::new(outbox, memory, log.clone(), keeper));
    if let GpuSpec::Remote { server, devices } = &options.backend.gpu {
        let (restore, reconnect) = (None, options.reconnect);
        let begins = Client { hello: &hello, host: &host, shared: &shared, reconnect, restore };
        let (session, welcome) = match open_session(server, devices, &begins) {
            Ok(session) => session,
            Err(error) => {
                let reason = Text::truncated(error.to_string());
                accepted.refuse(Refusal { code: error.code().0, reason })?;
                return Err(error.into());
            }
        };
        let executor = Box::new(session);
        let devices = welcome.devices.to_vec();
        let server = accepted.welcome(Welcome { client_memory, ..welcome })?;
        let gpu = options.backend.gpu.to_string();
        let identity = Identity { gpu, hello, client_memory, devices };
        let pid = identity.hello.pid;
        let connected = Connected { server, executor, host, identity, shared, pid };
        return connected.run(client, control, options, log);
    }
    let backend = match backend::build(&options.backend, &hello.choice, host.clone(), ready) {
        Ok(backend) => backend.start(),
        Err(error) => {
            let reason = Text::truncated(error.to_string());
            accepted.refuse(Refusal { code: error.code().0, reason })?;
            return Err(error.into());
        }
    };
    host.set_backend(&backend);

    let devices = backend.devices();
    let count = devices.len();
    let told = List::new(devices.clone()).map_err(|_| ServeError::TooManyDevices { count })?;
    let driver_version = backend.driver_version();
    let server = accepted.welcome(Welcome { driver_version, client_memory, devices: told })?;
    let gpu = options.backend.gpu.to_string();
    let identity = Identity { gpu, hello, client_memory, devices };
    let pid = identity.hello.pid;
    let socket = server.socket().try_clone_to_owned().map_err(ServeError::Watch)?;
    let dispatcher = Dispatcher::new(backend, host.clone(), socket);
    let executor = Box::new(Local::new(dispatcher, host.clone(), options.backend.cache));
    let connected = Connected { server, executor, host, identity, shared, pid };
    connected.run(client, control, options, log)
}

/// Takes the place of a proxy that is gone, as the supervisor says.
fn replace(
    socket: OwnedFd,
    control: Channel,
    options: &Options,
    log: Arc<JobLog>,
    ready: Option<Ready>,
) -> Result<Infallible, ServeError> {
    let serves = Arc::new(AtomicBool::new(false));
    if options.warm {
        watch::end_without(control.socket(), serves.clone()).map_err(ServeError::Watch)?;
    }
    let (mut order, mut fds) = control.receive(ORDER_TIMEOUT)?;
    let mut parts = Vec::new();
    while order == (Order::Parts {}) && parts.len() <= MAX_PARTS {
        parts.append(&mut fds);
        (order, fds) = control.receive(ORDER_TIMEOUT)?;
    }
    let Order::Restore { path, bytes, checksum } = order else {
        return Err(ServeError::NoControl);
    };
    let held = (fds.len() == 3).then(|| fds.pop()).flatten();
    let held = held.map(|memory| restore::Held { memory, parts });
    let way = if held.is_some() { "what was held in memory" } else { "its image" };
    let warm = if ready.is_some() { ", in a warm proxy" } else { "" };
    let Ok([ring, shared]) = <[OwnedFd; 2]>::try_from(fds) else {
        return Err(ServeError::NoControl);
    };
    let path = PathBuf::from(path.into_inner());
    let connection = restore::Connection { socket, ring, shared };
    let from = restore::Origin { path: path.clone(), bytes, checksum, held };
    let restored = restore::restore(from, connection, options, &log, ready);
    let restored = match restored {
        Ok(restored) => restored,
        Err(error) => {
            let why = Text::truncated(error.to_string());
            control.send(&Answer::Failed { why }, &[], ORDER_TIMEOUT)?;
            return Err(ServeError::Restore(error.to_string()));
        }
    };
    ending::tells(restored.server.outbox().clone());
    control.send(&Answer::Yes {}, &[], ORDER_TIMEOUT)?;
    let (Order::Begin { pid }, mut fds) = control.receive(ORDER_TIMEOUT)? else {
        return Err(ServeError::NoControl);
    };
    serves.store(true, Ordering::SeqCst);
    // Of a client in another namespace, its descriptor alone says which process that is here.
    let client = fds.pop().map_or_else(|| watch::pidfd(pid), Ok).map_err(ServeError::Watch)?;
    let here = if options.warm { watch::process_of(&client) } else { Ok(pid) };
    let Restored { server, executor, host, saved, shared } = restored;
    host.client_is(here.map_err(ServeError::Watch)?);
    let (program, path) = (&*saved.hello.program, path.display());
    log.note(&format!("client {pid} ({program}) goes on from {path}, by {way}{warm}"));
    control.send(&Answer::Yes {}, &[], ORDER_TIMEOUT)?;
    let gpu = options.backend.gpu.to_string();
    let (hello, client_memory) = (saved.hello, saved.client_memory);
    let devices = saved.devices.into_inner();
    let identity = Identity { gpu, hello, client_memory, devices };
    let outbox = server.outbox().clone();
    let connected = Connected { server, executor, host, identity, shared, pid };
    let result = connected.run(client, Some(control), options, log);
    outbox.close();
    result
}

/// A client with its devices.
struct Connected {
    server: Server,
    executor: Box<dyn Executor>,
    host: Arc<ProxyHost>,
    identity: Identity,
    shared: OwnedFd,
    /// The client's process.
    pid: u32,
}

impl Connected {
    /// Serves it until the ring is of no more use.
    fn run(
        self,
        client: OwnedFd,
        control: Option<Channel>,
        options: &Options,
        log: Arc<JobLog>,
    ) -> Result<Infallible, ServeError> {
        let Connected { server, executor, host, identity, shared, pid } = self;
        let hears = host.clone();
        watch::start(client, server.socket(), log.clone(), move |said| hears.heard(said))
            .map_err(ServeError::Watch)?;
        let gate = Arc::new(Gate::new(server.nudge()));
        if let Some(channel) = control {
            let inodes = Inodes::of(&server, &shared).map_err(ServeError::Watch)?;
            let (gate, shared) = (gate.clone(), Arc::new(shared));
            let (room, keeper) = (executor.room(), options.keeper.clone());
            let client = pid;
            let serving =
                Serving { channel, gate, room, identity, client, inodes, shared, log, keeper };
            serving.start().map_err(ServeError::Watch)?;
        }
        Err(execute_all(server, executor, &host, &gate, options.spin).into())
    }
}

/// Carries out messages until the ring is of no more use.
pub(crate) fn execute_all(
    mut server: Server,
    mut executor: Box<dyn Executor>,
    host: &ProxyHost,
    gate: &Gate,
    spin: Duration,
) -> RingError {
    loop {
        gate.pass(&mut *executor, &mut server, host);
        match server.try_next() {
            Ok(Some(incoming)) => executor.execute(incoming),
            Ok(None) => {
                executor.flush();
                if let Err(error) = server.wait(executor.spin(spin)) {
                    return error;
                }
            }
            Err(error) => return error,
        }
    }
}
