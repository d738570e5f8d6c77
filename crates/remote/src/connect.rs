//! Opening a session.

use crate::frame::{FrameError, read_one, write_one};
use crate::messages::{
    MAGIC, Offer, Opening, Purpose, Refused, SessionKey, Start, Started, VERSION,
};
use kedge_protocol::{DeviceChoice, PROTOCOL_VERSION, Refusal, Welcome};
use kedge_wire::{List, Text};
use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;
use thiserror::Error;

/// For one address to answer.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// For the server to answer, and for a proxy to start its devices.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// Longest answer before a session: a welcome with sixteen devices' attributes.
const MAX_ANSWER: usize = 256 << 10;
/// A connection whose other end does not acknowledge for so long is broken.
const SILENCE: Duration = Duration::from_secs(20);
/// Between two looks whether the other end of an idle connection is there.
const LOOK: Duration = Duration::from_secs(5);

/// Why there is no session.
#[derive(Debug, Error)]
pub enum ConnectError {
    #[error("cannot find {server}: {source}; `kedge run --help` says how --gpu names devices")]
    Name { server: String, source: io::Error },
    #[error("cannot reach {server}: {source}; is `kedge serve` running there?")]
    Connect { server: String, source: io::Error },
    #[error("{server} does not answer as `kedge serve` does: {source}")]
    Answer { server: String, source: FrameError },
    #[error("{server} refuses: {why}")]
    Refused { server: String, why: String },
    #[error("the devices of {server} are of no use: {}", &*.refusal.reason)]
    NoDevice { server: String, refusal: Refusal },
}

/// An open session.
#[derive(Debug)]
pub struct Connected {
    pub welcome: Welcome,
    /// For what is in order.
    pub line: TcpStream,
    /// For answers.
    pub aside: TcpStream,
}

/// Opens a session on those of a server's `devices`, by number, or on all if none are named.
///
/// # Errors
/// The server is not there or refuses, or has no device for this client.
pub fn connect(
    server: &str,
    devices: &[u32],
    program: &str,
    choice: &DeviceChoice,
) -> Result<Connected, ConnectError> {
    let answer = |source| ConnectError::Answer { server: server.to_owned(), source };
    let devices = List::new(devices.to_vec()).unwrap_or_default();
    let mut line = open(server, Purpose::Session { devices })?;
    let offered = read_one::<Result<Offer, Refused>>(&mut line, MAX_ANSWER).map_err(answer)?;
    let session = offered.map_err(|Refused { why }| ConnectError::Refused {
        server: server.to_owned(),
        why: why.into_inner(),
    })?;
    let program = Text::truncated(program.to_owned());
    let start = Start { program, choice: choice.clone() };
    write_one(&mut line, &start).map_err(|error| answer(error.into()))?;
    let started = read_one::<Started>(&mut line, MAX_ANSWER).map_err(answer)?;
    let welcome =
        started.map_err(|refusal| ConnectError::NoDevice { server: server.to_owned(), refusal })?;
    let aside = open(server, Purpose::Aside { session: session_of(&session) })?;
    for stream in [&line, &aside] {
        stream.set_read_timeout(None).map_err(|error| answer(error.into()))?;
    }
    Ok(Connected { welcome, line, aside })
}

fn session_of(offer: &Offer) -> SessionKey {
    offer.session
}

/// Connects and says what for.
fn open(server: &str, purpose: Purpose) -> Result<TcpStream, ConnectError> {
    let failed = |source| ConnectError::Connect { server: server.to_owned(), source };
    let name = |source| ConnectError::Name { server: server.to_owned(), source };
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for address in server.to_socket_addrs().map_err(name)? {
        match TcpStream::connect_timeout(&address, CONNECT_LIMIT) {
            Ok(mut stream) => {
                tune(&stream).map_err(failed)?;
                stream.set_read_timeout(Some(ANSWER_LIMIT)).map_err(failed)?;
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
    sockopt::set_tcp_user_timeout(stream, SILENCE.as_millis() as u32)?;
    Ok(())
}
