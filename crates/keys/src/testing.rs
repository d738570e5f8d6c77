//! What the tests of this crate share.

use crate::store::now;
use crate::{Certificate, Identity, Keys, Name, Pins, Secrets, accept, connect};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

pub(crate) const DAY: Duration = Duration::from_secs(86_400);
/// For a handshake of a test that is to succeed, or to fail at once.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

/// A folder that goes with its value.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) path: PathBuf,
}

impl Place {
    pub(crate) fn new(name: &str) -> Place {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let unique = format!("kedge-keys-{name}-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(unique);
        std::fs::create_dir(&path).expect("a folder for temporary files");
        Place { path }
    }

    pub(crate) fn keys(&self) -> Keys {
        Keys::at(self.path.join("keys"))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// Makes a new key pair, valid from and until these seconds since 1970.
pub(crate) fn identity(label: &str, from: u64, until: u64) -> Identity {
    let text = Identity::make(label, from, until).expect("a key");
    Identity::from_pem(text.as_bytes()).expect("what was made")
}

/// Returns its certificate.
pub(crate) fn certificate(label: &str, from: u64, until: u64) -> Certificate {
    identity(label, from, until).certificate().clone()
}

/// Returns a name that is one.
pub(crate) fn name(text: &str) -> Name {
    text.parse().expect("a name")
}

/// Makes a connection of two sockets of this machine.
pub(crate) fn connection() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let near = TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
    let (far, _) = listener.accept().expect("a connection");
    (near, far)
}

/// A client and a server that have pinned each other, as `client` and `server`.
pub(crate) struct Pair {
    pub(crate) client: Identity,
    pub(crate) server: Identity,
    pub(crate) pins: Arc<Pins>,
}

impl Pair {
    pub(crate) fn new() -> Pair {
        let (client, server) = (identity("c", 0, now() + 1000), identity("s", 0, now() + 1000));
        let pinned = [("client", &client), ("server", &server)];
        let pinned = pinned.map(|(of, it)| (name(of), it.certificate().clone()));
        let pins = Pins { pinned: pinned.into(), revoked: Vec::new() };
        Pair { client, server, pins: Arc::new(pins) }
    }

    /// Shakes hands over a new connection: what each end gets.
    pub(crate) fn shake(&self) -> (TcpStream, Secrets, TcpStream, Secrets) {
        let (mut near, mut far) = connection();
        thread::scope(|scope| {
            let server = scope.spawn(move || {
                let accepted = accept(&mut far, &self.server, &self.pins, LIMIT);
                (accepted, far)
            });
            let connected = connect(&mut near, &self.client, &self.pins, &name("server"), LIMIT);
            let connected = connected.expect("hands are shaken");
            let (accepted, far) = server.join().expect("no panic");
            let (who, accepted) = accepted.expect("hands are shaken");
            assert_eq!(who, name("client"));
            (near, connected, far, accepted)
        })
    }
}

/// Numbers that are the same in each run (xorshift64).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new() -> Random {
        Random(0x9e37_79b9_7f4a_7c15)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Returns fewer bytes than `end`.
    pub(crate) fn bytes(&mut self, end: u64) -> Vec<u8> {
        (0..self.next() % end).map(|_| self.next() as u8).collect()
    }
}
