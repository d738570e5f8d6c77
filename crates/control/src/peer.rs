//! From proxy to proxy: what a client shares with the other clients of its user on this node.
//!
//! A proxy that shares something listens at an abstract address of 128 random bits and answers
//! whoever shows the key of what was shared, 128 random bits as well. Both are in the IPC handle
//! that its program passes on, and nowhere else. Either side makes sure that the other belongs to
//! its own user, for an address outlives its listener and anybody may take it then.

use kedge_protocol::PROTOCOL_VERSION;
use kedge_socket::SocketError;
use kedge_socket::frame::{self, Deadline};
use kedge_wire::{Bytes, wire};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

/// How long a request and its reply may take together.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes that go with what is shared.
const MAX_NOTE: usize = 64;

/// 128 random bits.
pub type PeerKey = [u8; 16];

wire! {
    #[derive(Debug, Clone, PartialEq)]
    pub struct Question { pub version: u32, pub key: [u8; 16] }

    #[derive(Debug, Clone, PartialEq)]
    pub struct Answer { pub note: Bytes<MAX_NOTE> }
}

/// What one key stands for: a descriptor, a few bytes, or both.
#[derive(Debug)]
pub struct Shared {
    pub fd: Option<OwnedFd>,
    pub note: Vec<u8>,
}

/// Where this proxy can be asked.
#[derive(Debug)]
pub struct PeerListener {
    listener: UnixListener,
    name: PeerKey,
}

impl PeerListener {
    /// Listens at a new address.
    pub fn bind() -> io::Result<PeerListener> {
        let name = random()?;
        Ok(PeerListener { listener: UnixListener::bind_addr(&address(&name)?)?, name })
    }

    /// Returns what [`ask_peer`] finds it by.
    pub fn name(&self) -> PeerKey {
        self.name
    }

    /// Answers one question with what `find` has under its key. An error concerns that peer alone.
    pub fn answer(
        &self,
        find: impl FnOnce(&PeerKey) -> io::Result<Option<Shared>>,
    ) -> Result<(), SocketError> {
        let (peer, _) = self.listener.accept()?;
        let deadline = Deadline::after(REQUEST_TIMEOUT);
        same_user(peer.as_fd())?;
        let (question, _) = frame::receive::<Question>(peer.as_fd(), deadline)?;
        let found = if question.version == PROTOCOL_VERSION { find(&question.key)? } else { None };
        let (fd, answer) = match found {
            Some(Shared { fd, note }) => {
                let too_long = |_| io::Error::from(io::ErrorKind::InvalidData);
                (fd, Ok(Answer { note: Bytes::new(note).map_err(too_long)? }))
            }
            None => (None, Err(())),
        };
        let fds: Vec<_> = fd.iter().map(AsFd::as_fd).collect();
        frame::send::<Result<Answer, ()>>(peer.as_fd(), &answer, &fds, deadline)
    }
}

/// Asks the proxy at `name` for what it shares under `key`. `None`: it shares nothing under that
/// key.
pub fn ask_peer(name: &PeerKey, key: &PeerKey) -> Result<Option<Shared>, SocketError> {
    let peer = UnixStream::connect_addr(&address(name)?)?;
    let deadline = Deadline::after(REQUEST_TIMEOUT);
    same_user(peer.as_fd())?;
    let question = Question { version: PROTOCOL_VERSION, key: *key };
    frame::send(peer.as_fd(), &question, &[], deadline)?;
    let (answer, mut fds) = frame::receive::<Result<Answer, ()>>(peer.as_fd(), deadline)?;
    Ok(answer.ok().map(|Answer { note }| Shared { fd: fds.pop(), note: note.into_inner() }))
}

/// Draws a new key.
pub fn random() -> io::Result<PeerKey> {
    let mut key = PeerKey::default();
    File::open("/dev/urandom")?.read_exact(&mut key)?;
    Ok(key)
}

fn address(name: &PeerKey) -> io::Result<SocketAddr> {
    let hex: String = name.iter().map(|byte| format!("{byte:02x}")).collect();
    SocketAddr::from_abstract_name(format!("kedge-peer-{hex}"))
}

fn same_user(peer: BorrowedFd<'_>) -> io::Result<()> {
    match frame::is_own_user(peer)? {
        true => Ok(()),
        false => Err(io::ErrorKind::PermissionDenied.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// Answers one question with a pipe that holds `x`, if the key is right.
    fn serve(key: PeerKey) -> (PeerKey, std::thread::JoinHandle<()>) {
        let listener = PeerListener::bind().unwrap();
        let name = listener.name();
        let serve = move || {
            let (reader, mut writer) = std::io::pipe().unwrap();
            writer.write_all(b"x").unwrap();
            let shared = Shared { fd: Some(reader.into()), note: b"note".to_vec() };
            listener.answer(|asked| Ok((*asked == key).then_some(shared))).unwrap();
        };
        (name, std::thread::spawn(serve))
    }

    #[test]
    fn a_key_brings_what_it_stands_for() {
        let key = random().unwrap();
        let (name, served) = serve(key);
        let shared = ask_peer(&name, &key).unwrap().expect("it is shared");
        assert_eq!(shared.note, b"note");
        let mut byte = [0];
        File::from(shared.fd.unwrap()).read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"x");
        served.join().unwrap();
        assert!(ask_peer(&name, &key).is_err(), "nobody listens there any more");
    }

    #[test]
    fn a_wrong_key_brings_nothing() {
        let (name, served) = serve(random().unwrap());
        assert!(ask_peer(&name, &random().unwrap()).unwrap().is_none());
        served.join().unwrap();
        assert_ne!(random().unwrap(), random().unwrap());
    }
}
