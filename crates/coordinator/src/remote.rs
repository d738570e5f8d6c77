//! Members on other hosts: TCP, and a key that each side shows to have without telling it.
//!
//! ```text
//! coordinator → member   MAGIC, 32 random bytes
//! member → coordinator   32 random bytes, HMAC-SHA-256(key, "member" ‖ both)
//! coordinator → member   HMAC-SHA-256(key, "coordinator" ‖ both)
//! ```
//!
//! A coordinator that has too many connections which have not shown the key says [`COME_AGAIN`] to
//! one of them in the place of its proof, at any time, and hangs up.
//!
//! What is said afterwards is neither encrypted nor signed: that is the network's to see to.

use hmac::{Hmac, KeyInit, Mac};
use rustix::rand::{GetRandomFlags, getrandom};
use sha2::Sha256;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;

const MAGIC: &[u8; 8] = b"kedge-c1";
const NONCE: usize = 32;
const PROOF: usize = 32;
/// What a coordinator says first.
const GREETING: usize = MAGIC.len() + NONCE;
/// What a member answers.
pub(crate) const ANSWER: usize = NONCE + PROOF;
/// What no proof is: there was no room. It tells nothing, and whoever is between the two can say it
/// as well as cut the connection.
pub(crate) const COME_AGAIN: [u8; PROOF] = [0; PROOF];
/// Bits of an IPv6 address that its holder does not choose.
const PREFIX: u32 = 64;
/// How long a connection, or either side's part of the entrance, may take.
pub(crate) const ENTRANCE: Duration = Duration::from_secs(5);
/// A host that says nothing for so long is gone: the kernel asks it in between.
const SILENCE: Duration = Duration::from_secs(5);
const ASK: Duration = Duration::from_secs(2);
/// Shortest key of a job's parts, in bytes.
const MIN_KEY_LEN: usize = 16;
/// Longest key of a job's parts, in bytes.
const MAX_KEY_LEN: usize = 4096;

/// What all parts of a job know and nobody else does.
#[derive(Clone)]
pub struct JobKey(Arc<[u8]>);

impl std::fmt::Debug for JobKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("JobKey")
    }
}

#[derive(Debug, Error)]
pub enum FarError {
    #[error(
        "the key of the job's parts has {0} bytes, and must have {MIN_KEY_LEN} to {MAX_KEY_LEN}: make one by `openssl rand -hex 32`"
    )]
    Key(usize),
    #[error("{path}: others than its owner may read the key that is in it: `chmod 600` it")]
    Open { path: String },
    #[error("{path}: {source}")]
    File { path: String, source: io::Error },
    #[error("{address}: {source}: give HOST:PORT, an address that all hosts reach")]
    Address { address: String, source: io::Error },
}

impl JobKey {
    /// Makes a key of its text; white space around it does not count.
    pub fn new(text: &[u8]) -> Result<JobKey, FarError> {
        let text = text.trim_ascii();
        let fits = (MIN_KEY_LEN..=MAX_KEY_LEN).contains(&text.len());
        if fits { Ok(JobKey(text.into())) } else { Err(FarError::Key(text.len())) }
    }

    /// Makes a new one, of letters and digits.
    ///
    /// # Errors
    /// The kernel gives no random bytes.
    pub fn generate() -> io::Result<JobKey> {
        let digits = nonce()?.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        Ok(JobKey(digits.into_bytes().into()))
    }

    pub fn text(&self) -> &[u8] {
        &self.0
    }

    /// Reads the key from a file that nobody else may read.
    pub fn read(path: &Path) -> Result<JobKey, FarError> {
        let name = || path.display().to_string();
        let failed = |source| FarError::File { path: name(), source };
        let file = File::open(path).map_err(failed)?;
        if file.metadata().map_err(failed)?.mode() & 0o077 != 0 {
            return Err(FarError::Open { path: name() });
        }
        let mut text = Vec::new();
        file.take(MAX_KEY_LEN as u64 + 64).read_to_end(&mut text).map_err(failed)?;
        JobKey::new(&text)
    }

    fn mac(&self, who: &str, nonces: [&[u8; NONCE]; 2]) -> Option<Hmac<Sha256>> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).ok()?;
        mac.update(who.as_bytes());
        nonces.iter().for_each(|nonce| mac.update(*nonce));
        Some(mac)
    }

    fn prove(&self, who: &str, nonces: [&[u8; NONCE]; 2]) -> io::Result<Vec<u8>> {
        let mac = self.mac(who, nonces).ok_or(ErrorKind::InvalidInput)?;
        Ok(mac.finalize().into_bytes().to_vec())
    }

    /// Returns whether the answer proves that its sender has the key, in a time that does not tell
    /// how much of it is right.
    fn proves(&self, who: &str, nonces: [&[u8; NONCE]; 2], proof: &[u8]) -> bool {
        self.mac(who, nonces).is_some_and(|mac| mac.verify_slice(proof).is_ok())
    }
}

/// Where the coordinator of a job on several hosts listens.
#[derive(Debug, Clone)]
pub struct Far {
    address: SocketAddr,
    key: JobKey,
}

fn nonce() -> io::Result<[u8; NONCE]> {
    let mut bytes = [0; NONCE];
    let got = getrandom(&mut bytes, GetRandomFlags::empty())?;
    if got == NONCE { Ok(bytes) } else { Err(ErrorKind::UnexpectedEof.into()) }
}

fn refused(why: &'static str) -> io::Error {
    io::Error::new(ErrorKind::PermissionDenied, why)
}

/// Returns the error of one who says nothing as what it is: the errno of a time limit is that of a
/// limit on processes as well, and nobody is to raise that.
fn silent(error: io::Error) -> io::Error {
    match error.kind() {
        ErrorKind::WouldBlock => {
            let why = format!("what listens there has said nothing for {ENTRANCE:?}");
            io::Error::new(ErrorKind::TimedOut, why)
        }
        _ => error,
    }
}

impl Far {
    /// Makes the place of a coordinator at `address`, HOST:PORT.
    pub fn new(address: &str, key: JobKey) -> Result<Far, FarError> {
        let failed = |source| FarError::Address { address: address.to_owned(), source };
        let mut found = address.to_socket_addrs().map_err(failed)?;
        let found = found.next().ok_or_else(|| failed(ErrorKind::NotFound.into()))?;
        if found.ip().is_unspecified() || found.port() == 0 {
            return Err(failed(ErrorKind::InvalidInput.into()));
        }
        Ok(Far { address: found, key })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn key(&self) -> &JobKey {
        &self.key
    }

    /// Returns whether the address is one of this host's, so that the coordinator can be here.
    pub(crate) fn is_here(&self) -> bool {
        TcpListener::bind((self.address.ip(), 0)).is_ok()
    }

    pub(crate) fn listen(&self) -> io::Result<TcpListener> {
        TcpListener::bind(self.address)
    }

    /// Connects to the coordinator, and makes sure that it is one of this job's.
    ///
    /// # Errors
    /// Nothing listens there, or one of the two does not have the key; where the coordinator has no
    /// room now, [`ErrorKind::ConnectionReset`].
    pub fn connect(&self) -> io::Result<TcpStream> {
        let stream = TcpStream::connect_timeout(&self.address, ENTRANCE)?;
        keep_asking(&stream)?;
        stream.set_read_timeout(Some(ENTRANCE))?;
        stream.set_write_timeout(Some(ENTRANCE))?;
        let mut greeting = [0; GREETING];
        (&stream).read_exact(&mut greeting).map_err(silent)?;
        let (magic, theirs) = greeting.split_at(MAGIC.len());
        let theirs: &[u8; NONCE] = theirs.try_into().map_err(|_| ErrorKind::InvalidData)?;
        if magic != MAGIC {
            return Err(refused("what listens there is no coordinator of this version of kedge"));
        }
        let own = nonce()?;
        let proof = self.key.prove("member", [theirs, &own])?;
        // One that has hung up may have said why.
        let said = (&stream).write_all(&[&own[..], &proof].concat());
        let mut proof = [0; PROOF];
        (&stream).read_exact(&mut proof).map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => refused("the coordinator there does not take this key"),
            _ => silent(error),
        })?;
        if proof == COME_AGAIN {
            return Err(io::Error::new(
                ErrorKind::ConnectionReset,
                "too many connect there at once",
            ));
        }
        said?;
        if !self.key.proves("coordinator", [theirs, &own], &proof) {
            return Err(refused("the coordinator there does not have this key"));
        }
        Ok(stream)
    }
}

/// Has the kernel find out whether the other host is there, also while nothing is said.
pub(crate) fn keep_asking(stream: &TcpStream) -> io::Result<()> {
    use rustix::net::sockopt;
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, SILENCE)?;
    sockopt::set_tcp_keepintvl(stream, ASK)?;
    sockopt::set_tcp_keepcnt(stream, 3)?;
    sockopt::set_tcp_user_timeout(stream, 10_000)?;
    Ok(())
}

/// Returns what of an address stands for whoever is behind it.
pub(crate) fn origin(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() >> PREFIX << PREFIX).into(),
        ip => ip,
    }
}

/// One that has connected and has not shown the key yet.
#[derive(Debug)]
pub(crate) struct Entrance {
    own: [u8; NONCE],
    /// Who is behind it.
    pub(crate) origin: IpAddr,
    /// In the server's milliseconds: then it is too late.
    pub(crate) until: u64,
}

impl Entrance {
    /// Greets a new connection of `origin`.
    pub(crate) fn greet(stream: &TcpStream, origin: IpAddr, now: u64) -> io::Result<Entrance> {
        let own = nonce()?;
        keep_asking(stream)?;
        stream.set_nonblocking(true)?;
        // A new connection has room for that.
        let greeting = [&MAGIC[..], &own].concat();
        let sent = (&mut &*stream).write(&greeting)?;
        if sent < greeting.len() {
            return Err(ErrorKind::WriteZero.into());
        }
        let until = now.saturating_add(ENTRANCE.as_millis() as u64);
        Ok(Entrance { own, origin, until })
    }

    /// Returns what to say to a member that has the key.
    pub(crate) fn admit(&self, key: &JobKey, answer: &[u8; ANSWER]) -> io::Result<Vec<u8>> {
        let (theirs, proof) = answer.split_at(NONCE);
        let theirs: &[u8; NONCE] = theirs.try_into().map_err(|_| ErrorKind::InvalidData)?;
        if !key.proves("member", [&self.own, theirs], proof) {
            return Err(refused("it does not have the key"));
        }
        key.prove("coordinator", [&self.own, theirs])
    }
}
