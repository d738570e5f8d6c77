//! The partner: keeps what the caches of other nodes send, for `kedge cache recover` there.
//!
//! Each cache has a home of the form of a local disk's tier, in a folder of its key and node:
//! `DIR/KEY/NODE`. A home is one session's at a time.

use super::account::{Account, Limits};
use super::home as place;
use super::session::Session;
use super::wire::{Hello, Said};
use crate::CacheError;
use crate::home;
use crate::tier::lock;
use kedge_keys::{Connection, Fingerprint, Keys, Name, Whose};
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Most connections at a time.
const MAX_CONNECTIONS: usize = 256;
/// How long a connection may take to say whose it is.
const OPENING: Duration = Duration::from_secs(10);
/// A cache says that it is there each second; after so long it is not.
pub(super) const SILENCE: Duration = Duration::from_secs(30);
/// How often a key is looked at again.
const RECHECK: Duration = Duration::from_secs(1);
/// How long a home's session before may take to end.
const CHANGE: Duration = Duration::from_millis(if cfg!(test) { 500 } else { 5000 });
/// The same where it is the cache's own session before, which may wait for a disk: less than the
/// cache waits for the answer.
const OWN_CHANGE: Duration = Duration::from_secs(20);
/// How long to wait where descriptors are used up.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// The folder of caches on this machine, which show no key. No key has such a name.
const HERE: &str = "_here";

/// What a partner is asked to be.
#[derive(Debug)]
pub struct PartnerSpec {
    /// Where it listens.
    pub listen: SocketAddr,
    /// Where it keeps what it is sent.
    pub folder: PathBuf,
    /// Bytes that it keeps for each key.
    pub quota: Option<u64>,
    /// Who may connect; needed unless it listens on this machine alone.
    pub keys: Option<Keys>,
}

/// A partner that listens.
#[derive(Debug)]
pub struct Partner {
    pub(super) spec: PartnerSpec,
    pub(super) limits: Limits,
    listener: TcpListener,
    open: AtomicUsize,
    pub(super) accounts: Mutex<HashMap<String, Account>>,
    /// The session of each home: whose cache it is, and its connection.
    pub(super) homes: Mutex<HashMap<PathBuf, (String, TcpStream)>>,
}

pub(super) fn other(why: impl Into<String>) -> io::Error {
    io::Error::other(why.into())
}

impl Partner {
    /// Begins to listen.
    ///
    /// # Errors
    /// If that address or the folder cannot be had, or others can connect and there are no keys.
    pub fn bind(spec: PartnerSpec) -> Result<Arc<Partner>, CacheError> {
        Partner::bind_with(spec, Limits::new())
    }

    pub(super) fn bind_with(spec: PartnerSpec, limits: Limits) -> Result<Arc<Partner>, CacheError> {
        if !spec.listen.ip().is_loopback() {
            let no_keys = |error: kedge_keys::KeyError| {
                CacheError::Tier(format!(
                    "{} is reached from other machines, so connections need keys: {error}",
                    spec.listen
                ))
            };
            let keys = spec.keys.as_ref().ok_or(kedge_keys::KeyError::NoIdentity);
            keys.and_then(Keys::identity).map_err(no_keys)?;
        }
        place::check(&spec.folder)?;
        let at = spec.listen.to_string();
        let listener = TcpListener::bind(spec.listen)
            .map_err(|error| CacheError::io("cannot listen at", Path::new(&at), error))?;
        let (open, accounts, homes) = Default::default();
        Ok(Arc::new(Partner { spec, limits, listener, open, accounts, homes }))
    }

    /// Returns where it listens.
    ///
    /// # Errors
    /// The kernel does not tell.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Keeps what it is sent, until the process ends; `say` is told what happens.
    pub fn serve(self: &Arc<Partner>, say: fn(&str)) {
        for stream in self.listener.incoming() {
            // Where descriptors are used up, some come back.
            let Ok(stream) = stream else {
                thread::sleep(RETRY_INTERVAL);
                continue;
            };
            if self.open.fetch_add(1, Ordering::SeqCst) >= MAX_CONNECTIONS {
                self.open.fetch_sub(1, Ordering::SeqCst);
                continue;
            }
            let own = self.clone();
            let serve = move || {
                let from = stream.peer_addr().map_or_else(|_| "?".into(), |from| from.to_string());
                let ended = own.session(stream, say);
                own.open.fetch_sub(1, Ordering::SeqCst);
                if let Err(error) = ended {
                    let why: String =
                        error.to_string().chars().filter(|it| !it.is_control()).collect();
                    say(&format!("{from}: {why}"));
                }
            };
            if thread::Builder::new().name("session".into()).spawn(serve).is_err() {
                self.open.fetch_sub(1, Ordering::SeqCst);
            }
        }
    }

    /// Finds out whose a connection is: a pinned key's, or this user's own from this machine.
    fn identify(&self, mut stream: TcpStream) -> io::Result<(SessionOwner, Connection)> {
        stream.set_nodelay(true)?;
        if stream.peer_addr()?.ip().to_canonical().is_loopback() {
            return match kedge_keys::whose(&stream)? {
                Whose::Own => Ok((SessionOwner::here(), stream.into())),
                _ => Err(other("a connection of another user: refused")),
            };
        }
        let keys = self.spec.keys.as_ref().ok_or_else(|| other("there are no keys"))?;
        // Read for each connection: what is revoked meanwhile counts.
        let (own, pins) = (keys.identity().map_err(io::Error::other)?, keys.pins());
        let pins = Arc::new(pins.map_err(io::Error::other)?);
        let (name, secrets) =
            kedge_keys::accept(&mut stream, &own, &pins, OPENING).map_err(io::Error::other)?;
        let certificate = pins.fingerprint(&name).ok_or_else(|| other("its key is revoked"))?;
        let shown = Some((name.clone(), certificate));
        let vouched = SessionOwner { key: name.to_string(), shown, checked: Instant::now() };
        Ok((vouched, Connection::new(stream, Some(secrets))?))
    }

    fn session(self: &Arc<Partner>, stream: TcpStream, say: fn(&str)) -> io::Result<()> {
        stream.set_read_timeout(Some(OPENING))?;
        stream.set_write_timeout(Some(OPENING))?;
        let (vouched, mut connection) = self.identify(stream)?;
        let key = vouched.key.clone();
        connection.read_until(Instant::now() + OPENING);
        let Said::Hello(hello) = Said::read(&mut connection)? else {
            return Err(other("it does not say whose cache it is"));
        };
        match Session::open(self, &key, &hello, connection.stream()) {
            Ok(mut session) => {
                say(&format!("{key}: the cache of {:?} of {}", hello.under, hello.node));
                session.serve(connection, vouched)
            }
            Err(error) => {
                Said::Failed(error.to_string()).write(&mut connection)?;
                Err(error)
            }
        }
    }
}

/// Whose a session is.
#[derive(Debug)]
pub(super) struct SessionOwner {
    key: String,
    /// What was shown for it, unless the session is of this machine.
    shown: Option<(Name, Fingerprint)>,
    checked: Instant,
}

impl SessionOwner {
    fn here() -> SessionOwner {
        SessionOwner { key: HERE.into(), shown: None, checked: Instant::now() }
    }

    /// Checks once a second that what was shown is still pinned, and not revoked.
    pub(super) fn check(&mut self, keys: Option<&Keys>) -> io::Result<()> {
        let Some((name, certificate)) = &self.shown else { return Ok(()) };
        let since = self.checked.elapsed();
        if since < RECHECK {
            return Ok(());
        }
        match keys.map(Keys::pins) {
            Some(Ok(pins)) if pins.counts(name, *certificate) => self.checked = Instant::now(),
            // For a moment they may not be readable.
            Some(Err(_)) if since < SILENCE => {}
            _ => return Err(other("its key is pinned no more: refused")),
        }
        Ok(())
    }
}

pub(super) fn lock_homes(
    partner: &Partner,
) -> std::sync::MutexGuard<'_, HashMap<PathBuf, (String, TcpStream)>> {
    lock(&partner.homes)
}

impl Partner {
    /// Takes a home for a session, of which `stream` is the connection. That of the same cache
    /// before, whose connection may hang, ends.
    pub(super) fn take_seat(
        self: &Arc<Partner>,
        home: &Path,
        hello: &Hello,
        stream: &TcpStream,
    ) -> io::Result<Listed> {
        let stream = stream.try_clone()?;
        let lock = self.take(home, hello)?;
        let (home, token) = (home.to_owned(), hello.token.clone());
        lock_homes(self).insert(home.clone(), (token.clone(), stream));
        Ok(Listed { partner: self.clone(), home, token, _lock: lock })
    }

    fn take(&self, home: &Path, hello: &Hello) -> io::Result<File> {
        let begin = Instant::now();
        loop {
            match home::take(home, &hello.under) {
                Ok(lock) => return Ok(lock),
                Err(CacheError::Busy(_)) => {}
                Err(error) => return Err(other(error.to_string())),
            }
            let homes = lock_homes(self);
            let own = homes.get(home).filter(|(token, _)| *token == hello.token);
            if let Some((_, stream)) = own {
                // It may have ended.
                let _ = stream.shutdown(Shutdown::Both);
            }
            let (most, why) = match own {
                Some(_) => (OWN_CHANGE, "its connection before has not ended there as yet"),
                None => (CHANGE, "another cache, or a recovery, has its folder there"),
            };
            drop(homes);
            if begin.elapsed() >= most {
                return Err(other(why));
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}

/// A home that a session has, from before anything of it is read.
#[derive(Debug)]
pub(super) struct Listed {
    partner: Arc<Partner>,
    home: PathBuf,
    token: String,
    // Goes last: whoever has it is listed.
    _lock: File,
}

impl Drop for Listed {
    fn drop(&mut self) {
        let mut homes = lock_homes(&self.partner);
        if homes.get(&self.home).is_some_and(|(token, _)| *token == self.token) {
            homes.remove(&self.home);
        }
    }
}

/// Says that something happened, on standard error.
pub fn say(text: &str) {
    let _ = writeln!(io::stderr(), "kedge: {text}");
}

/// Returns the bytes of a file's blocks.
pub(super) fn blocks(meta: &fs::Metadata) -> u64 {
    meta.blocks().saturating_mul(512)
}
