//! Opening a session.

use crate::frame::{FrameError, read_one, write_one};
use crate::link::{Connections, Inlet, Which};
use crate::messages::{
    Accepted, Handover, MAGIC, Offer, Opening, Purpose, Refused, SessionKey, Start, Started,
    VERSION,
};
use kedge_keys::{BadName, Connection, HandshakeError, KeyError, Keys, Name, Pins, RecordError};
use kedge_protocol::{DeviceChoice, PROTOCOL_VERSION, Refusal, Welcome};
use kedge_wire::{List, Text};
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
/// For one such try.
const TRY_LIMIT: Duration = Duration::from_secs(10);
/// Longest answer before a session: a welcome with sixteen devices' attributes.
const MAX_ANSWER: usize = 256 << 10;
/// Between two looks whether the other end of an idle connection is there.
const LOOK: Duration = Duration::from_secs(5);

/// Why there is no session.
#[derive(Debug, Error)]
pub enum ConnectError {
    #[error(
        "images do not cross an encrypted line to {server} as yet: come through ssh (ssh -L \
         7531:127.0.0.1:7531 HOST, and --gpu 127.0.0.1)"
    )]
    SealedImage { server: String },
    #[error("cannot find {server}: {source}; `kedge run --help` says how --gpu names devices")]
    Name { server: String, source: io::Error },
    #[error("cannot reach {server}: {source}; is `kedge serve` running there?")]
    Connect { server: String, source: io::Error },
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
    /// What names it to the server, for more connections.
    pub key: SessionKey,
    pub line: Connection,
}

/// What is wanted of a session.
#[derive(Debug, Clone, Copy)]
pub struct Wanted<'a> {
    /// Those of the server's devices, by number; all if none are named.
    pub devices: &'a [u32],
    /// The client's program, for logs.
    pub program: &'a str,
    pub choice: &'a DeviceChoice,
    /// How long a [`Dialer`] will try to go on after a cut.
    pub reconnect: Duration,
    /// Whether the client goes on from an image.
    pub restore: bool,
}

/// Opens a session.
///
/// # Errors
/// The server is not there or refuses, or has no device for this client.
pub fn connect(server: &str, wanted: Wanted<'_>) -> Result<Connected, ConnectError> {
    let Wanted { devices, program, choice, reconnect, restore } = wanted;
    let answer = |error| bad_answer(server, error);
    let devices = List::new(devices.to_vec()).unwrap_or_default();
    let mut line = open(server, Purpose::Session { devices }, ANSWER_LIMIT)?;
    let offered = read_one::<Result<Offer, Refused>>(&mut line, MAX_ANSWER).map_err(answer)?;
    let Offer { session: key } = offered.map_err(|refused| refused.by(server))?;
    let program = Text::truncated(program.to_owned());
    let reconnect_ms = u32::try_from(reconnect.as_millis()).unwrap_or(u32::MAX);
    let start = Start { program, choice: choice.clone(), reconnect_ms, restore };
    write_one(&mut line, &start).map_err(|error| answer(error.into()))?;
    let started = read_one::<Started>(&mut line, MAX_ANSWER).map_err(answer)?;
    let welcome =
        started.map_err(|refusal| ConnectError::NoDevice { server: server.to_owned(), refusal })?;
    Ok(Connected { welcome, key, line })
}

/// Why an answer does not come: it may be in place of one.
fn bad_answer(server: &str, error: FrameError) -> ConnectError {
    let server = server.to_owned();
    let told = match &error {
        FrameError::Broken(error) => error.get_ref().and_then(|it| it.downcast_ref()),
        _ => None,
    };
    match told {
        Some(RecordError::Refused(told)) => ConnectError::Refused { server, why: told.why() },
        _ => ConnectError::Answer { server, source: error },
    }
}

impl ConnectError {
    /// Returns whether another try would end the same.
    fn is_final(&self) -> bool {
        matches!(self, Self::Refused { .. } | Self::Keys { .. } | Self::Distrust { .. })
    }
}

impl Refused {
    fn by(self, server: &str) -> ConnectError {
        ConnectError::Refused { server: server.to_owned(), why: self.why.into_inner() }
    }
}

/// Connects a session's links anew after a cut.
pub struct Dialer {
    server: String,
    key: SessionKey,
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
        reconnect: Duration,
        say: impl Fn(&str) + Send + 'static,
    ) -> Dialer {
        Dialer { server: server.to_owned(), key, generation: 0, reconnect, say: Box::new(say) }
    }

    fn dial(&self, inlet: &Inlet, limit: Duration) -> Result<(), ConnectError> {
        let answer = |error| bad_answer(&self.server, error);
        let (link, arrived) = (inlet.which().number(), inlet.received());
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
        // An aside has no connection before its first.
        let cut = self.generation > 0 || inlet.which() == Which::Line;
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

/// Opens one more connection of a session, for the bytes of an image.
///
/// # Errors
/// The server is not there.
pub fn image_connection(server: &str, session: SessionKey) -> Result<TcpStream, ConnectError> {
    let connection = open(server, Purpose::Image { session }, ANSWER_LIMIT)?;
    let ends = connection.into_ends().map_err(|error| bad_answer(server, error.into()))?;
    let sealed = || ConnectError::SealedImage { server: server.to_owned() };
    if ends.1.is_some() { Err(sealed()) } else { Ok(ends.0) }
}

/// Connects and says what for.
fn open(server: &str, purpose: Purpose, limit: Duration) -> Result<Connection, ConnectError> {
    let failed = |source| ConnectError::Connect { server: server.to_owned(), source };
    let name = |source| ConnectError::Name { server: server.to_owned(), source };
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for address in server.to_socket_addrs().map_err(name)? {
        match TcpStream::connect_timeout(&address, CONNECT_LIMIT.min(limit)) {
            Ok(stream) => {
                tune(&stream).map_err(failed)?;
                stream.set_read_timeout(Some(limit)).map_err(failed)?;
                let mut stream = secure(server, stream, KEYS_LIMIT.min(limit))?;
                let (magic, version, protocol) = (MAGIC, VERSION, PROTOCOL_VERSION);
                let opening = Opening { magic, version, protocol, purpose };
                write_one(&mut stream, &opening).map_err(failed)?;
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
    let expected = expected(server, &pins).map_err(|bad| no_keys(bad.into()))?;
    let shaken = kedge_keys::connect(&mut stream, &identity, &Arc::new(pins), &expected, limit);
    let secrets = shaken.map_err(|error| match error {
        error if error.is_of_network() => failed(io::Error::other(error)),
        source => ConnectError::Distrust { server: server.to_owned(), source },
    })?;
    Connection::new(stream, Some(secrets)).map_err(|error| failed(error.into()))
}

/// Returns whether a connection from or to there stays on this machine, and is neither encrypted
/// nor shows keys.
pub fn is_here(address: SocketAddr) -> bool {
    address.ip().to_canonical().is_loopback()
}

/// Returns as whom a server is pinned: with its port, where several are on one host, or without.
fn expected(server: &str, pins: &Pins) -> Result<Name, BadName> {
    let with_port = server.parse().ok().filter(|name| pins.has(name));
    let (host, _) = server.rsplit_once(':').unwrap_or((server, ""));
    with_port.map_or_else(|| host.trim_matches(['[', ']']).parse(), Ok)
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
