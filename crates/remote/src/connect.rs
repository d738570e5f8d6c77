//! Opening a session.

use crate::frame::{FrameError, read_one, write_one};
use crate::inlet::{Connections, Inlet};
use crate::link::Which;
use crate::messages::{
    Accepted, Handover, JobKey, MAGIC, Offer, Opening, Purpose, Refused, SessionKey, Start,
    Started, VERSION,
};
use kedge_keys::{Connection, HandshakeError, KeyError, Keys, RecordError};
use kedge_protocol::management::{Answer, Question};
use kedge_protocol::{DeviceChoice, PROTOCOL_VERSION, Refusal, Welcome};
use kedge_wire::{List, Text};
use rustix::rand::{GetRandomFlags, getrandom};
use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use thiserror::Error;

/// For one address to answer.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// For the server to show who it is.
const KEYS_LIMIT: Duration = Duration::from_secs(10);
/// For the server to answer, and for a proxy to start its devices.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// Between two tries to connect anew, at first and at last.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LAST_PAUSE: Duration = Duration::from_millis(500);
/// How often a session is opened whose connection breaks meanwhile.
const OPENINGS: u32 = 16;
/// For one such try.
const TRY_LIMIT: Duration = Duration::from_secs(10);
/// Longest answer before a session: a welcome with sixteen devices' attributes.
const MAX_ANSWER: usize = 256 << 10;
/// Longest question to NVML, and its answer.
pub const MAX_MANAGEMENT: usize = 4 << 20;
/// Between two looks whether the other end of an idle connection is there.
const LOOK: Duration = Duration::from_secs(5);

/// Why there is no session.
#[derive(Debug, Error)]
pub enum ConnectError {
    #[error("cannot find {server}: {source}; `kedge run --help` says how --gpu names devices")]
    Name { server: String, source: io::Error },
    #[error("cannot reach {server}: {source}; is `kedge serve` running there?")]
    Connect { server: String, source: io::Error },
    #[error("the connection to {server} broke while it was opened, again and again: {source}")]
    Cut { server: String, source: io::Error },
    #[error("{server} does not answer as `kedge serve` does: {source}")]
    Answer { server: String, source: FrameError },
    #[error("{server} is not on this machine, so a connection needs keys: {source}")]
    Keys { server: String, source: KeyError },
    #[error("no connection to {server} that can be trusted: {source}")]
    Distrust { server: String, source: HandshakeError },
    #[error("{server} refuses: {why}")]
    Refused { server: String, why: String },
    #[error("the devices of {server} are of no use: {}", &*.refusal.reason)]
    NoDevice { server: String, refusal: Refusal },
}

/// An open session, with its line's first connection.
#[derive(Debug)]
pub struct Connected {
    pub welcome: Welcome,
    pub line: Connection,
}

/// What is wanted of a session.
#[derive(Debug, Clone, Copy)]
pub struct Wanted<'a> {
    /// The same for all of the job's processes.
    pub job: JobKey,
    /// Those of the server's devices, by number; all if none are named.
    pub devices: &'a [u32],
    /// The client's program, for logs.
    pub program: &'a str,
    pub choice: &'a DeviceChoice,
    /// As which of the job's devices the client counts those that it gets; empty: as all of them.
    pub windows: &'a [u32],
    /// How long a [`Dialer`] will try to go on after a cut.
    pub reconnect: Duration,
    /// Whether the client goes on from an image.
    pub restore: bool,
}

/// Draws what names a new session.
///
/// # Errors
/// The kernel has no random bytes.
pub fn draw_session_key() -> io::Result<SessionKey> {
    let mut key = SessionKey::default();
    match getrandom(&mut key, GetRandomFlags::empty())? {
        count if count == key.len() => Ok(key),
        _ => Err(io::Error::other("the kernel has no random bytes")),
    }
}

/// Opens a session, again where the connection breaks meanwhile.
///
/// # Errors
/// The server is not there or refuses, or has no device for this client.
pub fn connect(
    server: &str,
    key: SessionKey,
    wanted: Wanted<'_>,
) -> Result<Connected, ConnectError> {
    let begin = Instant::now();
    let mut pause = FIRST_PAUSE;
    let mut broke = false;
    for attempt in 1..OPENINGS {
        match try_to_connect(server, key, attempt, wanted) {
            Err(error) if error.is_cut() || broke && error.is_away() => broke = true,
            other => return other,
        }
        if begin.elapsed() >= wanted.reconnect {
            break;
        }
        thread::sleep(pause);
        pause = (2 * pause).min(LAST_PAUSE);
    }
    try_to_connect(server, key, OPENINGS, wanted)
}

fn try_to_connect(
    server: &str,
    session: SessionKey,
    attempt: u32,
    wanted: Wanted<'_>,
) -> Result<Connected, ConnectError> {
    let Wanted { job, devices, program, choice, windows, reconnect, restore } = wanted;
    let program = Text::truncated(program.to_owned());
    let reconnect_ms = u32::try_from(reconnect.as_millis()).unwrap_or(u32::MAX);
    let choice = choice.clone();
    let windows = List::new(windows.to_vec()).unwrap_or_default();
    let start = Start { program, choice, windows, reconnect_ms, restore };
    let devices = List::new(devices.to_vec()).unwrap_or_default();
    let purpose = Purpose::Session { session, attempt, job, devices };
    begin(server, purpose, Some(&start))
}

/// Has a server start a proxy, by its near end's first words if it has some.
fn begin(server: &str, purpose: Purpose, start: Option<&Start>) -> Result<Connected, ConnectError> {
    let answer = |error| bad_answer(server, error);
    let mut line = open(server, purpose, ANSWER_LIMIT)?;
    // Its proxy reads it once there is one: to wait for the offer first would take a round trip.
    let sent = start.map_or(Ok(()), |start| write_one(&mut line, start));
    // Whoever refuses has said why, and may have closed already.
    let offered = read_one::<Result<Offer, Refused>>(&mut line, MAX_ANSWER).map_err(answer)?;
    let Offer {} = offered.map_err(|refused| refused.by(server))?;
    sent.map_err(|error| answer(error.into()))?;
    let started = read_one::<Started>(&mut line, MAX_ANSWER).map_err(answer)?;
    let welcome =
        started.map_err(|refusal| ConnectError::NoDevice { server: server.to_owned(), refusal })?;
    Ok(Connected { welcome, line })
}

/// A connection by which a server's devices are asked what NVIDIA's management library tells.
#[derive(Debug)]
pub struct Management(Connection);

impl Management {
    /// Connects, for those of the server's devices, by number; all if none are named.
    ///
    /// # Errors
    /// The server is not there or refuses.
    pub fn connect(server: &str, devices: &[u32]) -> Result<Management, ConnectError> {
        let devices = List::new(devices.to_vec()).unwrap_or_default();
        let connected = begin(server, Purpose::Management { devices }, None)?;
        Ok(Management(connected.line))
    }

    /// Asks, and waits for the answer.
    ///
    /// # Errors
    /// The connection is of no more use.
    pub fn ask(&mut self, question: &Question) -> Result<Answer, FrameError> {
        write_one(&mut self.0, question)?;
        read_one(&mut self.0, MAX_MANAGEMENT)
    }
}

/// Ends a session whose near end is gone: its devices' memory is free once this returns.
///
/// # Errors
/// The server is not there, or does not answer within `limit`.
pub fn end_session(server: &str, session: SessionKey, limit: Duration) -> Result<(), ConnectError> {
    let mut stream = open(server, Purpose::End { session }, limit)?;
    let ended = read_one::<Result<Offer, Refused>>(&mut stream, MAX_ANSWER);
    let ended = ended.map_err(|error| bad_answer(server, error))?;
    ended.map(|Offer {}| ()).map_err(|refused| refused.by(server))
}

/// Returns why an answer does not come: it may be in place of one.
pub(crate) fn bad_answer(server: &str, error: FrameError) -> ConnectError {
    let server = server.to_owned();
    let told = match &error {
        FrameError::Broken(error) => error.get_ref().and_then(|it| it.downcast_ref()),
        _ => None,
    };
    if let Some(RecordError::Refused(told)) = told {
        return ConnectError::Refused { server, why: told.why() };
    }
    match error {
        FrameError::Closed => {
            ConnectError::Cut { server, source: io::ErrorKind::UnexpectedEof.into() }
        }
        FrameError::Broken(source) if !is_silence(&source) => ConnectError::Cut { server, source },
        source => ConnectError::Answer { server, source },
    }
}

/// Returns whether a time limit has passed.
fn is_silence(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

impl ConnectError {
    /// Returns whether the connection broke, and the server may be there as before.
    fn is_cut(&self) -> bool {
        matches!(self, Self::Cut { .. })
    }

    /// Returns whether the server cannot be reached.
    fn is_away(&self) -> bool {
        matches!(self, Self::Connect { .. })
    }

    /// Returns whether another try would end the same.
    fn is_final(&self) -> bool {
        matches!(self, Self::Refused { .. } | Self::Keys { .. } | Self::Distrust { .. })
    }
}

impl Refused {
    pub(crate) fn by(self, server: &str) -> ConnectError {
        ConnectError::Refused { server: server.to_owned(), why: self.why.into_inner() }
    }
}

/// Connects a session's links anew after a cut.
pub struct Dialer {
    server: String,
    key: SessionKey,
    /// The link's number.
    link: u32,
    /// Of the newest connection.
    generation: u32,
    reconnect: Duration,
    /// Told of a cut and of its end.
    say: Box<dyn Fn(&str) + Send>,
}

impl Dialer {
    /// Makes one for one link of a session, which `say` is told about.
    pub fn new(
        server: &str,
        key: SessionKey,
        link: u32,
        reconnect: Duration,
        say: impl Fn(&str) + Send + 'static,
    ) -> Dialer {
        let (server, say) = (server.to_owned(), Box::new(say));
        Dialer { server, key, link, generation: 0, reconnect, say }
    }

    fn dial(&self, inlet: &Inlet, limit: Duration) -> Result<(), ConnectError> {
        let answer = |error| bad_answer(&self.server, error);
        let (link, arrived) = (self.link, inlet.received());
        let hand = Handover { link, generation: self.generation, arrived };
        let mut stream = open(&self.server, Purpose::Join { session: self.key, hand }, limit)?;
        let accepted = read_one::<Result<Accepted, Refused>>(&mut stream, MAX_ANSWER);
        let accepted = accepted.map_err(answer)?.map_err(|refused| refused.by(&self.server))?;
        let joined = inlet.go_on(stream, |_, _| Ok(accepted.arrived));
        joined.map_err(|error| answer(error.into()))
    }
}

impl Connections for Dialer {
    fn next(&mut self, inlet: &Inlet) -> Result<(), String> {
        let begin = Instant::now();
        // Only the line has a connection before its first.
        let cut = self.generation > 0 || self.link == Which::Line.number();
        if cut {
            (self.say)(&format!("the line to {} is cut: trying to go on", self.server));
        }
        let mut pause = FIRST_PAUSE;
        loop {
            self.generation += 1;
            let left = self.reconnect.saturating_sub(begin.elapsed());
            let error = match self.dial(inlet, left.clamp(FIRST_PAUSE, TRY_LIMIT)) {
                Ok(()) => {
                    if cut {
                        let after = begin.elapsed().as_secs_f32();
                        let server = &self.server;
                        (self.say)(&format!("the line to {server} goes on after {after:.1} s"));
                    }
                    return Ok(());
                }
                Err(error) => error,
            };
            if error.is_final() || begin.elapsed() >= self.reconnect {
                return Err(error.to_string());
            }
            thread::sleep(pause);
            pause = (2 * pause).min(LAST_PAUSE);
        }
    }
}

/// Connects and says what for.
pub(crate) fn open(
    server: &str,
    purpose: Purpose,
    limit: Duration,
) -> Result<Connection, ConnectError> {
    let failed = |source| ConnectError::Connect { server: server.to_owned(), source };
    let name = |source| ConnectError::Name { server: server.to_owned(), source };
    let cut = |source| ConnectError::Cut { server: server.to_owned(), source };
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for address in server.to_socket_addrs().map_err(name)? {
        match TcpStream::connect_timeout(&address, CONNECT_LIMIT.min(limit)) {
            Ok(stream) => {
                tune(&stream).map_err(failed)?;
                stream.set_read_timeout(Some(limit)).map_err(failed)?;
                let mut stream = secure(server, stream, KEYS_LIMIT.min(limit))?;
                let (magic, version, protocol) = (MAGIC, VERSION, PROTOCOL_VERSION);
                let opening = Opening { magic, version, protocol, purpose };
                write_one(&mut stream, &opening).map_err(cut)?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(failed(last))
}

/// Shakes hands with a server, unless it is on this machine.
fn secure(
    server: &str,
    mut stream: TcpStream,
    limit: Duration,
) -> Result<Connection, ConnectError> {
    let failed = |source| ConnectError::Connect { server: server.to_owned(), source };
    if is_here(stream.peer_addr().map_err(failed)?) {
        return Ok(stream.into());
    }
    let no_keys = |source| ConnectError::Keys { server: server.to_owned(), source };
    let keys = Keys::of_user().map_err(no_keys)?;
    // Read for each connection: what is revoked meanwhile counts.
    let (identity, pins) = (keys.identity().map_err(no_keys)?, keys.pins().map_err(no_keys)?);
    let expected = pins.name_of(server).map_err(|bad| no_keys(bad.into()))?;
    let shaken = kedge_keys::connect(&mut stream, &identity, &Arc::new(pins), &expected, limit);
    let secrets = shaken.map_err(|error| match error {
        error @ HandshakeError::Late(_) => failed(io::Error::other(error)),
        error if error.is_of_network() => {
            ConnectError::Cut { server: server.to_owned(), source: io::Error::other(error) }
        }
        source => ConnectError::Distrust { server: server.to_owned(), source },
    })?;
    Connection::new(stream, Some(secrets)).map_err(|error| failed(error.into()))
}

/// Returns whether a connection from or to there stays on this machine, and is neither encrypted
/// nor shows keys.
pub fn is_here(address: SocketAddr) -> bool {
    address.ip().to_canonical().is_loopback()
}

/// Sets a connection up: nothing waits to be sent, and an end that is gone is found out.
///
/// # Errors
/// It is no connection of TCP.
pub fn tune(stream: &TcpStream) -> io::Result<()> {
    use rustix::net::sockopt;
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, LOOK)?;
    sockopt::set_tcp_keepintvl(stream, LOOK)?;
    sockopt::set_tcp_keepcnt(stream, 3)?;
    Ok(())
}
