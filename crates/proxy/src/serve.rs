//! One client, from handshake to end.

use crate::arrive;
use crate::backend::{self, BuildError, Ready};
use crate::client_memory::ClientMemory;
use crate::control::{Inodes, Serving};
use crate::dispatch::Dispatcher;
use crate::error::SessionError;
use crate::executor::{Executor, Identity};
use crate::gate::Gate;
use crate::given::Given;
use crate::host::ProxyHost;
use crate::local::Local;
use crate::options::Options;
use crate::owner::Owner;
use crate::places::hub::Hub;
use crate::places::open::{PlacesError, Wants};
use crate::rebuild::tell_host;
use crate::remote::open::{Client, open_session};
use crate::restore::{self, Restored};
use crate::{ending, findings, places, stats, trace, usage, watch};
use kedge_control::gpu::{GpuSpec, Several};
use kedge_control::joblog::JobLog;
use kedge_control::keeper::MAX_PARTS;
use kedge_control::proxy::{Answer, Order, Orders};
use kedge_control::{note, warn};
use kedge_protocol::{Refusal, Welcome};
use kedge_socket::SocketError;
use kedge_transport::{AcceptError, Accepted, ConnectError, RingError, Server};
use kedge_wire::{List, Text};
use std::convert::Infallible;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
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
    /// The client has been told.
    #[error("{0}")]
    NoPlaces(#[from] PlacesError),
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

/// Serves the client on `socket`; `control` is the supervisor's, and `ready` what was made ready
/// for it. Returns only on failure: when the client ends, so does the process.
pub fn serve(
    socket: OwnedFd,
    control: Option<Orders>,
    options: &Options,
    log: Arc<JobLog>,
    ready: Option<Ready>,
) -> Result<Infallible, ServeError> {
    ending::end_on_panic(log.clone());
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
    control: Option<Orders>,
    options: &Options,
    log: Arc<JobLog>,
    ready: Option<Ready>,
) -> Result<Infallible, ServeError> {
    let hello = accepted.hello.clone();
    let client = watch::pidfd(hello.pid).map_err(ServeError::Watch)?;
    let warm = if ready.is_some() { " to a warm proxy" } else { "" };
    note!(log, "client {} ({}) has connected{warm}", hello.pid, &*hello.program);
    kedge_transport::map_shared_arena(accepted.shared.as_fd())?;
    let shared = accepted.shared.try_clone().map_err(ServeError::Watch)?;
    if let Some(wanted) = &options.trace {
        trace::begin(wanted, hello.pid, &hello.program, &log);
    }

    let memory = ClientMemory::new(hello.pid);
    let client_memory = memory.probe(hello.probe_addr, hello.probe_value);
    if !client_memory {
        warn!(log, "the client's memory cannot be read here: copies go through the shared arena");
    }
    let outbox = accepted.server.outbox().clone();
    if let GpuSpec::Several(several) = &options.backend.gpu {
        let came = Came { accepted, client, shared, memory, client_memory };
        return serve_places(several, came, control, options, log);
    }
    let keeper = options.keeper.clone();
    let host = ProxyHost::new(outbox, memory, log.clone(), keeper);
    let host = Arc::new(host.with_findings(options.findings.clone()));
    let asked = Arc::downgrade(&host);
    findings::ask_at_end(move || {
        if let Some(host) = asked.upgrade() {
            host.conclude();
        }
    });
    if let GpuSpec::Remote { server, devices } = &options.backend.gpu {
        let (restore, reconnect) = (None, options.reconnect);
        let socket = accepted.server.socket();
        let begins = Client {
            hello: &hello,
            choice: &hello.choice,
            windows: &[],
            host: &host,
            shared: &shared,
            socket,
            reconnect,
            restore,
        };
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
        let connected = Connected { server, executor, host, hub: None, identity, shared, pid };
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
    let connected = Connected { server, executor, host, hub: None, identity, shared, pid };
    connected.run(client, control, options, log)
}

/// A client that has said hello.
struct Came {
    accepted: Accepted,
    /// Its process.
    client: OwnedFd,
    shared: OwnedFd,
    memory: ClientMemory,
    client_memory: bool,
}

/// Serves a client with devices of several places.
fn serve_places(
    several: &Several,
    came: Came,
    control: Option<Orders>,
    options: &Options,
    log: Arc<JobLog>,
) -> Result<Infallible, ServeError> {
    let Came { accepted, client, shared, memory, client_memory } = came;
    let hello = accepted.hello.clone();
    let (outbox, socket) = (accepted.server.outbox().clone(), accepted.server.socket());
    let wants = Wants { several, hello: &hello, options, log: &log, shared: &shared, socket };
    let (places, hub, welcome) = match places::open::open(&wants, outbox.clone(), memory) {
        Ok(begun) => begun,
        Err(error) => {
            let reason = Text::truncated(error.to_string());
            accepted.refuse(Refusal { code: error.code().0, reason })?;
            return Err(error.into());
        }
    };
    let pid = hello.pid;
    // The gate's: each place has a host of its own.
    let own = ClientMemory::new(pid);
    let host = Arc::new(ProxyHost::new(outbox, own, log.clone(), options.keeper.clone()));
    let devices = welcome.devices.to_vec();
    let server = accepted.welcome(Welcome { client_memory, ..welcome })?;
    let gpu = options.backend.gpu.to_string();
    let identity = Identity { gpu, hello, client_memory, devices };
    let executor = Box::new(places);
    let connected = Connected { server, executor, host, hub: Some(hub), identity, shared, pid };
    connected.run(client, control, options, log)
}

/// Takes the place of a proxy that is gone, as the supervisor says.
fn replace(
    socket: OwnedFd,
    control: Orders,
    options: &Options,
    log: Arc<JobLog>,
    ready: Option<Ready>,
) -> Result<Infallible, ServeError> {
    let serves = Arc::new(AtomicBool::new(false));
    if options.warm {
        watch::end_without(control.socket(), serves.clone()).map_err(ServeError::Watch)?;
    }
    let (mut given, mut parts) = (Given::default(), Vec::new());
    let (order, fds) = loop {
        match control.next(ORDER_TIMEOUT)? {
            (Order::Parts {}, mut fds) if parts.len() <= MAX_PARTS => parts.append(&mut fds),
            (Order::Files { files }, fds) if given.has_room() => {
                given.add(files.into_inner(), fds);
            }
            other => break other,
        }
    };
    if let Order::Arrive { client } = order {
        return take_over(Taking { socket, fds, client }, control, options, log, ready);
    }
    let Order::Restore { held } = order else {
        return Err(ServeError::NoControl);
    };
    let way = if held { "what was held in memory" } else { "its image" };
    let warm = if ready.is_some() { ", in a warm proxy" } else { "" };
    let Ok([ring, shared]) = <[OwnedFd; 2]>::try_from(fds) else {
        return Err(ServeError::NoControl);
    };
    let (path, parts) = (given.shown(), held.then_some(parts));
    let connection = restore::Connection { socket, ring, shared };
    let from = restore::Origin { given, parts };
    let restored = restore::restore(from, connection, options, &log, ready);
    let restored = match restored {
        Ok(restored) => restored,
        Err(error) => {
            let why = Text::truncated(error.to_string());
            control.answer(&Answer::Failed { why }, &[], ORDER_TIMEOUT)?;
            return Err(ServeError::Restore(error.to_string()));
        }
    };
    ending::tells(restored.server.outbox().clone());
    control.answer(&Answer::Yes {}, &[], ORDER_TIMEOUT)?;
    let (Order::Begin { pid }, mut fds) = control.next(ORDER_TIMEOUT)? else {
        return Err(ServeError::NoControl);
    };
    serves.store(true, Ordering::SeqCst);
    // Of a client in another namespace, its descriptor alone says which process that is here.
    let client = fds.pop().map_or_else(|| watch::pidfd(pid), Ok).map_err(ServeError::Watch)?;
    let here = if options.warm { watch::process_of(&client) } else { Ok(pid) };
    restored.client_is(here.map_err(ServeError::Watch)?);
    let (program, path) = (&*restored.saved.hello.program, path.display());
    note!(log, "client {pid} ({program}) goes on from {path}, by {way}{warm}");
    control.answer(&Answer::Yes {}, &[], ORDER_TIMEOUT)?;
    go_on(restored, pid, client, control, options, log)
}

/// Serves the client `pid`, whose devices are here.
fn go_on(
    restored: Restored,
    pid: u32,
    client: OwnedFd,
    control: Orders,
    options: &Options,
    log: Arc<JobLog>,
) -> Result<Infallible, ServeError> {
    let Restored { server, executor, host, hub, saved, shared } = restored;
    let gpu = options.backend.gpu.to_string();
    let (hello, client_memory) = (saved.hello, saved.client_memory);
    let devices = saved.devices.into_inner();
    let identity = Identity { gpu, hello, client_memory, devices };
    let outbox = server.outbox().clone();
    let connected = Connected { server, executor, host, hub, identity, shared, pid };
    let result = connected.run(client, Some(control), options, log);
    outbox.close();
    result
}

/// What a client is taken over with.
struct Taking {
    socket: OwnedFd,
    /// The ring, the shared arena, the way to the proxy that has it, and the file that says when
    /// that has it no more.
    fds: Vec<OwnedFd>,
    client: u32,
}

/// Takes a running client over from another proxy.
fn take_over(
    taking: Taking,
    control: Orders,
    options: &Options,
    log: Arc<JobLog>,
    ready: Option<Ready>,
) -> Result<Infallible, ServeError> {
    let Taking { socket, fds, client: pid } = taking;
    let Ok([ring, shared, line, owner]) = <[OwnedFd; 4]>::try_from(fds) else {
        return Err(ServeError::NoControl);
    };
    let owner = Owner::new(owner).ok_or(ServeError::NoControl)?;
    let connection = restore::Connection { socket, ring, shared };
    let restored = match arrive::arrive(line, connection, options, &log, ready) {
        Ok(restored) => restored,
        Err(error) => {
            let why = Text::truncated(error.to_string());
            control.answer(&Answer::Failed { why }, &[], ORDER_TIMEOUT)?;
            return Err(ServeError::Restore(error.to_string()));
        }
    };
    // From here on the supervisor's file decides, also where it is gone.
    let told = control.answer(&Answer::Yes {}, &[], ORDER_TIMEOUT);
    let begin = told.and_then(|()| control.next(ORDER_TIMEOUT));
    match begin {
        Ok((Order::Begin { .. }, _)) => {}
        _ if owner.has_moved() => {}
        _ => return Err(ServeError::NoControl),
    }
    let client = match watch::pidfd(pid) {
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {
            note!(log, "client {pid} has moved here, and has ended meanwhile");
            // Whoever asked may be gone, too.
            let _ = control.answer(&Answer::Yes {}, &[], ORDER_TIMEOUT);
            ending::end_with_client()
        }
        other => other.map_err(ServeError::Watch)?,
    };
    let Restored { server, host, saved, .. } = &restored;
    ending::tells(server.outbox().clone());
    host.client_is(pid);
    // A far end has told its own.
    if !matches!(options.backend.gpu, GpuSpec::Remote { .. }) {
        tell_host(saved, host);
    }
    note!(log, "client {pid} ({}) goes on here: it has moved", &*saved.hello.program);
    // Whoever asked may be gone: the client is served all the same.
    let _ = control.answer(&Answer::Yes {}, &[], ORDER_TIMEOUT);
    go_on(restored, pid, client, control, options, log)
}

/// A client with its devices.
struct Connected {
    server: Server,
    executor: Box<dyn Executor>,
    host: Arc<ProxyHost>,
    /// Where its devices are of several places.
    hub: Option<Arc<Hub>>,
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
        control: Option<Orders>,
        options: &Options,
        log: Arc<JobLog>,
    ) -> Result<Infallible, ServeError> {
        let Connected { server, executor, host, hub, identity, shared, pid } = self;
        let hears = host.clone();
        let heard = move |said| match &hub {
            Some(hub) => hub.heard(said),
            None => hears.heard(said),
        };
        let watcher =
            watch::start(client, server.socket(), log.clone(), heard).map_err(ServeError::Watch)?;
        let gate = Arc::new(Gate::new(server.nudge()));
        let executor = match &options.stats {
            Some(folder) => stats::counting(executor, folder, server.meter(), &identity.devices),
            None => executor,
        };
        if let Some(folder) = host.folder() {
            let told =
                usage::tell(&folder, host.clone(), executor.room(), identity.devices.clone());
            if let Err(error) = told {
                note!(log, "what it uses is not told (kedge top): {error}");
            }
        }
        if let Some(orders) = control {
            let inodes = Inodes::of(&server, &shared).map_err(ServeError::Watch)?;
            let (gate, shared) = (gate.clone(), Arc::new(shared));
            let again = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().map_err(ServeError::Watch);
            let ends = [again(server.socket())?, again(server.ring())?];
            let watcher = Mutex::new(Some(watcher));
            let (room, client) = (executor.room(), pid);
            let serving = Serving {
                orders,
                gate,
                room,
                identity,
                client,
                inodes,
                shared,
                ends,
                watcher,
                log,
            };
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
            Ok(Some(incoming)) => {
                host.counts.count(&incoming.message);
                executor.execute(incoming);
            }
            Ok(None) => {
                let pause = executor.flush();
                if !pause.is_zero() {
                    server.look(pause);
                } else if let Err(error) = server.wait(executor.spin(spin)) {
                    return error;
                }
            }
            Err(error) => return error,
        }
    }
}
