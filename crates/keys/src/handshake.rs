//! The handshake of TLS 1.3 on a connection, each end with its own key.
//!
//! Until it is over nothing but rustls looks at what the other end sends. It is given whole
//! records, one at a time, because what it had read beyond the handshake would be lost with it.

use crate::identity::Identity;
use crate::pins::{Pins, Refusal};
use crate::records::Told;
use crate::secrets::Secrets;
use crate::store::now;
use crate::verify::Verifier;
use crate::{Name, provider};
use rustls::client::Resumption;
use rustls::pki_types::{IpAddr, Ipv4Addr, ServerName};
use rustls::server::NoServerSessionStorage;
use rustls::version::TLS13;
use rustls::{
    ClientConfig, ClientConnection, ConnectionCommon, Error, ExtractedSecrets, ServerConfig,
    ServerConnection, SupportedCipherSuite,
};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};
use thiserror::Error as ThisError;

/// Bytes in front of a record's body.
const HEAD: usize = 5;
/// Bytes of one handshake at most. One of kedge's has some 3,000.
const MAX_BYTES: usize = 64 << 10;
/// For whoever is refused to read why.
const FAREWELL: Duration = Duration::from_millis(500);

/// Why no hands were shaken.
#[derive(Debug, ThisError)]
pub enum HandshakeError {
    #[error("the other end has not shown who it is within {0:?}")]
    Late(Duration),
    #[error("the other end closes the connection before it has shown who it is")]
    Closed,
    #[error("the connection is broken: {0}")]
    Broken(io::Error),
    #[error("the other end sends more than a handshake has")]
    TooLong,
    #[error("your own certificate {0}")]
    Own(String),
    #[error(
        "{0}: nobody of that name is pinned here; `kedge keys add {0} FILE` pins its certificate"
    )]
    NotPinned(Name),
    #[error(transparent)]
    Refused(Refusal),
    #[error("the other end shows no certificate: it needs a key (`kedge keys new`)")]
    NoCertificate,
    #[error("the other end shows the certificate of {0}, but has not its key")]
    NotItsKey(Name),
    #[error("{0}")]
    Told(Told),
    #[error("the other end does not speak TLS 1.3 as kedge does: {0}")]
    Tls(Error),
}

impl HandshakeError {
    /// Returns whether the network may be to blame, so that another try may succeed.
    pub fn is_of_network(&self) -> bool {
        matches!(self, Self::Late(_) | Self::Closed | Self::Broken(_))
    }
}

/// Shakes hands as a server, and returns who has connected.
///
/// The stream must block; how long it may is set to `limit`, and back when hands are shaken.
///
/// # Errors
/// The other end has no pinned certificate or not its key, does not speak TLS 1.3, or is not done
/// within `limit`.
pub fn accept(
    stream: &mut TcpStream,
    own: &Identity,
    pins: &Arc<Pins>,
    limit: Duration,
) -> Result<(Name, Secrets), HandshakeError> {
    own.check(now()).map_err(HandshakeError::Own)?;
    let verifier = Arc::new(Verifier::new(pins.clone(), None));
    let config = server_config(own, verifier.clone()).map_err(HandshakeError::Tls)?;
    let mut server = ServerConnection::new(config).map_err(HandshakeError::Tls)?;
    let suite = shake(stream, &mut server, &verifier, limit)?;
    finished(&verifier, suite, server.dangerous_extract_secrets())
}

/// Shakes hands as a client with the server that is pinned as `expected`.
///
/// The stream must block; how long it may is set to `limit`, and back when hands are shaken. That
/// the server takes this end's certificate shows only by what it sends later:
/// [`RecordError::Refused`](crate::RecordError::Refused) if it does not.
///
/// # Errors
/// As [`accept`]; or nobody is pinned as `expected`, or another one's certificate is shown.
pub fn connect(
    stream: &mut TcpStream,
    own: &Identity,
    pins: &Arc<Pins>,
    expected: &Name,
    limit: Duration,
) -> Result<Secrets, HandshakeError> {
    own.check(now()).map_err(HandshakeError::Own)?;
    if !pins.has(expected) {
        return Err(HandshakeError::NotPinned(expected.clone()));
    }
    let verifier = Arc::new(Verifier::new(pins.clone(), Some(expected.clone())));
    let config = client_config(own, verifier.clone()).map_err(HandshakeError::Tls)?;
    // An address is never sent, and the verifier does not look at it.
    let nobody = ServerName::IpAddress(IpAddr::V4(Ipv4Addr::from([0; 4])));
    let mut client = ClientConnection::new(config, nobody).map_err(HandshakeError::Tls)?;
    let suite = shake(stream, &mut client, &verifier, limit)?;
    finished(&verifier, suite, client.dangerous_extract_secrets()).map(|(_, secrets)| secrets)
}

/// Returns how a server shakes hands: no tickets, no early data, no one without a certificate.
pub(crate) fn server_config(
    own: &Identity,
    verifier: Arc<Verifier>,
) -> Result<Arc<ServerConfig>, Error> {
    let builder = ServerConfig::builder_with_provider(Arc::new(provider()));
    let builder = builder.with_protocol_versions(&[&TLS13])?;
    let mut config = builder.with_client_cert_verifier(verifier).with_cert_resolver(own.resolver());
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    config.max_early_data_size = 0;
    config.enable_secret_extraction = true;
    Ok(Arc::new(config))
}

/// Returns how a client shakes hands: it resumes nothing, and does not tell a server's name.
pub(crate) fn client_config(
    own: &Identity,
    verifier: Arc<Verifier>,
) -> Result<Arc<ClientConfig>, Error> {
    let builder = ClientConfig::builder_with_provider(Arc::new(provider()));
    let builder = builder.with_protocol_versions(&[&TLS13])?.dangerous();
    let builder = builder.with_custom_certificate_verifier(verifier);
    let mut config = builder.with_client_cert_resolver(own.resolver());
    config.resumption = Resumption::disabled();
    config.enable_sni = false;
    config.enable_early_data = false;
    config.enable_secret_extraction = true;
    Ok(Arc::new(config))
}

fn finished(
    verifier: &Verifier,
    suite: SupportedCipherSuite,
    taken: Result<ExtractedSecrets, Error>,
) -> Result<(Name, Secrets), HandshakeError> {
    let no_secrets = || HandshakeError::Tls(Error::HandshakeNotComplete);
    let secrets = Secrets::taken(suite, taken.map_err(HandshakeError::Tls)?);
    let Some(Ok(name)) = verifier.verdict() else { return Err(no_secrets()) };
    Ok((name.clone(), secrets.ok_or_else(no_secrets)?))
}

/// Passes records between the stream and rustls until hands are shaken.
fn shake<D>(
    stream: &mut TcpStream,
    tls: &mut ConnectionCommon<D>,
    verifier: &Verifier,
    limit: Duration,
) -> Result<SupportedCipherSuite, HandshakeError> {
    let before = (stream.read_timeout(), stream.write_timeout());
    let mut timed = Timed { stream, until: Instant::now() + limit, left: MAX_BYTES };
    let done = pass(&mut timed, tls, verifier).map_err(|error| match error {
        HandshakeError::Broken(error) if is_late(&error) => HandshakeError::Late(limit),
        HandshakeError::Broken(error) if is_end(&error) => HandshakeError::Closed,
        other => other,
    });
    if let Err(error) = done {
        timed.part();
        return Err(error);
    }
    let (read, write) = (before.0.unwrap_or(None), before.1.unwrap_or(None));
    let restored = stream.set_read_timeout(read).and_then(|()| stream.set_write_timeout(write));
    restored.map_err(HandshakeError::Broken)?;
    tls.negotiated_cipher_suite().ok_or(HandshakeError::Tls(Error::HandshakeNotComplete))
}

fn pass<D>(
    timed: &mut Timed<'_>,
    tls: &mut ConnectionCommon<D>,
    verifier: &Verifier,
) -> Result<(), HandshakeError> {
    let mut record = Vec::new();
    loop {
        while tls.wants_write() {
            tls.write_tls(timed).map_err(HandshakeError::Broken)?;
        }
        if !tls.is_handshaking() {
            return Ok(());
        }
        timed.read_record(&mut record)?;
        let mut rest = &record[..];
        while !rest.is_empty() {
            tls.read_tls(&mut rest).map_err(HandshakeError::Broken)?;
            if let Err(error) = tls.process_new_packets() {
                // The alert that tells the other end why. Who has gone need not be told.
                while tls.wants_write() && tls.write_tls(timed).is_ok_and(|sent| sent > 0) {}
                return Err(refused(error, verifier));
            }
        }
    }
}

fn refused(error: Error, verifier: &Verifier) -> HandshakeError {
    match (error, verifier.verdict()) {
        (Error::InvalidCertificate(_), Some(Err(refusal))) => {
            HandshakeError::Refused(refusal.clone())
        }
        (Error::InvalidCertificate(_), Some(Ok(name))) => HandshakeError::NotItsKey(name.clone()),
        (Error::NoCertificatesPresented, _) => HandshakeError::NoCertificate,
        (Error::AlertReceived(alert), _) => HandshakeError::Told(Told(alert)),
        (error, _) => HandshakeError::Tls(error),
    }
}

fn is_late(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

fn is_end(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

/// A stream of which so much may be read, until then.
struct Timed<'a> {
    stream: &'a mut TcpStream,
    until: Instant,
    left: usize,
}

impl Timed<'_> {
    /// Returns what is left of the time.
    fn remaining(&self) -> io::Result<Option<Duration>> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        Ok(Some(left))
    }

    /// Reads one record: of its head only the length counts here.
    fn read_record(&mut self, record: &mut Vec<u8>) -> Result<(), HandshakeError> {
        record.resize(HEAD, 0);
        self.read_exact(record).map_err(HandshakeError::Broken)?;
        let length = usize::from(u16::from_be_bytes([record[3], record[4]]));
        self.left = self.left.checked_sub(HEAD + length).ok_or(HandshakeError::TooLong)?;
        record.resize(HEAD + length, 0);
        self.read_exact(&mut record[HEAD..]).map_err(HandshakeError::Broken)
    }

    /// Lets the other end read the alert: a socket that is closed with bytes that nobody has read
    /// takes back what was sent before.
    fn part(&mut self) {
        self.until = self.until.min(Instant::now() + FAREWELL);
        let _ = self.stream.shutdown(Shutdown::Write);
        let mut unread = [0; 4096];
        while self.left > 0 {
            match self.read(&mut unread) {
                Ok(0) | Err(_) => return,
                Ok(n) => self.left = self.left.saturating_sub(n),
            }
        }
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.remaining()?)?;
        self.stream.read(into)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.remaining()?)?;
        self.stream.write(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
