//! Hellos that a proxy must refuse, and welcomes that a client must.

use crate::error::{AcceptError, ConnectError, SegmentError};
use crate::greeting::{GREETING_MAGIC, Greeting};
use crate::layout::FILE_BYTES;
use crate::memory::{Segment, create_shared_arena, sealed_memfd};
use crate::server::Server;
use crate::{Accepted, Client};
use kedge_cuda_types::CuError;
use kedge_protocol::{DeviceChoice, Hello, PROTOCOL_VERSION, Refusal, Welcome};
use kedge_socket::SocketError;
use kedge_socket::frame::{self, Deadline};
use kedge_wire::{List, Text};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

fn hello() -> Hello {
    Hello {
        version: PROTOCOL_VERSION,
        pid: std::process::id(),
        probe_addr: 0,
        probe_value: 0,
        program: Text::default(),
        choice: DeviceChoice::default(),
    }
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(5))
}

/// Returns what a proxy makes of this hello.
fn accept(hello: &Hello, fds: &[BorrowedFd<'_>]) -> Result<Accepted, AcceptError> {
    let (near, far) = UnixStream::pair().unwrap();
    frame::send(near.as_fd(), hello, fds, soon()).unwrap();
    Server::accept(far.into(), Duration::from_secs(5))
}

#[test]
fn proxies_refuse_descriptors_that_can_hurt() {
    let ring = Segment::create().unwrap();
    let shared = create_shared_arena().unwrap();
    let null = File::open("/dev/null").unwrap();
    let small = sealed_memfd(c"small", 4096).unwrap();
    let blank = sealed_memfd(c"blank", FILE_BYTES).unwrap();
    let unsealed: OwnedFd = {
        let path = std::env::temp_dir().join(format!("kedge-unsealed-{}", std::process::id()));
        let file = File::create(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file.set_len(FILE_BYTES).unwrap();
        file.into()
    };
    let pair = |ring, shared| accept(&hello(), &[ring, shared]);
    assert!(pair(ring.fd(), shared.as_fd()).is_ok());
    for (what, result) in [
        ("no memfd as ring", pair(null.as_fd(), shared.as_fd())),
        ("no memfd as arena", pair(ring.fd(), null.as_fd())),
        ("a file that can shrink", pair(unsealed.as_fd(), shared.as_fd())),
        ("a short ring", pair(small.as_fd(), shared.as_fd())),
        ("a short arena", pair(ring.fd(), small.as_fd())),
        ("swapped", pair(shared.as_fd(), ring.fd())),
        ("a ring without magic", pair(blank.as_fd(), shared.as_fd())),
    ] {
        assert!(matches!(result, Err(AcceptError::Segment { .. })), "{what}: {result:?}");
    }
    let not_sealed = pair(unsealed.as_fd(), shared.as_fd());
    let source = SegmentError::NotSealed;
    assert_eq!(
        not_sealed.unwrap_err().to_string(),
        AcceptError::Segment { what: "ring", source }.to_string()
    );
    for fds in [&[][..], &[ring.fd()][..], &[ring.fd(), shared.as_fd(), null.as_fd()][..]] {
        let count = fds.len();
        let result = accept(&hello(), fds);
        assert!(matches!(result, Err(AcceptError::Descriptors { .. })), "{count}: {result:?}");
    }
}

#[test]
fn proxies_refuse_strangers() {
    let ring = Segment::create().unwrap();
    let shared = create_shared_arena().unwrap();
    let fds = [ring.fd(), shared.as_fd()];
    let old = Hello { version: PROTOCOL_VERSION + 1, ..hello() };
    assert!(matches!(accept(&old, &fds), Err(AcceptError::Version { .. })));
    let liar = Hello { pid: 1, ..hello() };
    assert!(matches!(accept(&liar, &fds), Err(AcceptError::WrongPid { said: 1, .. })));
}

#[test]
fn a_silent_client_is_given_up() {
    let (_near, far) = UnixStream::pair().unwrap();
    let result = Server::accept(far.into(), Duration::from_millis(50));
    let silent = AcceptError::Handshake(SocketError::TimedOut { seconds: 0 });
    assert_eq!(result.unwrap_err().to_string(), silent.to_string());
}

#[test]
fn clients_refuse_what_is_no_proxy_of_theirs() {
    let greet = |magic, version| {
        let (near, far) = UnixStream::pair().unwrap();
        let greeting = Greeting { magic, version, pid: std::process::id() };
        frame::send(far.as_fd(), &greeting, &[], soon()).unwrap();
        let welcome = Welcome { driver_version: 0, client_memory: false, devices: List::default() };
        frame::send(far.as_fd(), &Ok::<_, Refusal>(welcome), &[], soon()).unwrap();
        Client::connect_bare(near.into(), "test").map(|_| far)
    };
    assert!(greet(GREETING_MAGIC, PROTOCOL_VERSION).is_ok());
    let stranger = greet(1, PROTOCOL_VERSION);
    assert!(matches!(stranger, Err(ConnectError::Handshake(SocketError::NotKedge))));
    let newer = greet(GREETING_MAGIC, PROTOCOL_VERSION + 1);
    assert!(matches!(newer, Err(ConnectError::Version { .. })));
}

#[test]
fn a_refused_client_learns_why() {
    let (near, far) = UnixStream::pair().unwrap();
    let greeting =
        Greeting { magic: GREETING_MAGIC, version: PROTOCOL_VERSION, pid: std::process::id() };
    frame::send(far.as_fd(), &greeting, &[], soon()).unwrap();
    let refusal = Refusal { code: 100, reason: Text::truncated("no GPU: buy one".to_owned()) };
    frame::send(far.as_fd(), &Err::<Welcome, _>(refusal), &[], soon()).unwrap();
    let refused = Client::connect_bare(near.into(), "test").unwrap_err();
    assert_eq!(refused.to_string(), "no GPU: buy one");
    assert!(matches!(refused, ConnectError::Refused { code: CuError::NO_DEVICE, .. }));
}
