//! A proxy that dies is noticed within one second, whatever its client is doing.
//!
//! The proxy is this test binary again, started with a role in its environment.

use kedge_protocol::{Call, Message, Post, Status, StreamId, StreamOp, Welcome};
use kedge_transport::{Client, Dead, Server};
use kedge_wire::{Bytes, List};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

const ROLE: &str = "KEDGE_TEST_ROLE";
const LIMIT: Duration = Duration::from_secs(1);

/// Not a test by itself: what the child process does.
#[test]
fn proxy_role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    // SAFETY: the parent handed descriptor 3 over for this.
    let socket = unsafe { OwnedFd::from_raw_fd(3) };
    if role == "silent" {
        thread::sleep(Duration::from_secs(60));
    }
    let accepted = Server::accept(socket, Duration::from_secs(10)).unwrap();
    let welcome = Welcome { driver_version: 1, client_memory: false, devices: List::default() };
    let mut server = accepted.welcome(welcome).unwrap();
    if role == "deaf" {
        thread::sleep(Duration::from_secs(60));
    }
    // Answers pings, and nothing else.
    loop {
        match server.try_next() {
            Ok(Some(incoming)) => {
                if let Message::Call { call: Call::Ping {} } = incoming.message {
                    let mut reply = Vec::new();
                    kedge_wire::encode::<Status>(&Ok(()), &mut reply);
                    server.outbox().reply(incoming.reply_to.unwrap(), &reply).unwrap();
                }
            }
            Ok(None) => server.wait(Duration::from_micros(20)).unwrap(),
            Err(_) => return,
        }
    }
}

/// Ends the child also where an assertion fails first.
struct Proxy(Child);

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(role: &str) -> (Proxy, OwnedFd) {
    let (near, far) = UnixStream::pair().unwrap();
    let fd = far.as_raw_fd();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "proxy_role", "--nocapture"]).env(ROLE, role);
    command.stdout(std::process::Stdio::null());
    // SAFETY: one system call between fork and exec; where the number is 3 already, close-on-exec
    // must go.
    unsafe {
        command.pre_exec(move || {
            let status = if fd == 3 { libc::fcntl(3, libc::F_SETFD, 0) } else { libc::dup2(fd, 3) };
            if status < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
        });
    }
    (Proxy(command.spawn().unwrap()), near.into())
}

fn connect(role: &str) -> (Proxy, Client) {
    let (proxy, socket) = start(role);
    (proxy, Client::connect_bare(socket, "dead_peer").unwrap().0)
}

/// Kills the proxy while `body` is busy with it; how long `body` went on after that.
fn outlives(mut proxy: Proxy, body: impl FnOnce() + Send) -> Duration {
    thread::scope(|scope| {
        let running = scope.spawn(move || {
            body();
            Instant::now()
        });
        thread::sleep(Duration::from_millis(150));
        assert!(!running.is_finished(), "ended before its proxy did");
        let killed = Instant::now();
        proxy.0.kill().unwrap();
        running.join().unwrap().duration_since(killed)
    })
}

#[test]
fn during_the_handshake() {
    let (proxy, socket) = start("silent");
    let after = outlives(proxy, move || assert!(Client::connect_bare(socket, "x").is_err()));
    assert!(after < LIMIT, "{after:?}");
}

#[test]
fn while_many_threads_wait_for_replies() {
    let (proxy, client) = connect("pings");
    let after = outlives(proxy, || {
        thread::scope(|scope| {
            for n in 0..8 {
                let client = &client;
                let call = Call::StreamSync { stream: StreamId(n) };
                scope.spawn(move || assert_eq!(client.call::<Status>(&call), Err(Dead)));
            }
            scope.spawn(|| assert_eq!(client.next_host_fn(), Err(Dead)));
        });
    });
    assert!(after < LIMIT, "{after:?}");
    let start = Instant::now();
    assert_eq!(client.post(&Post::Unshare { addr: 1, size: 0 }), Err(Dead));
    assert_eq!(client.call::<Status>(&Call::Ping {}), Err(Dead));
    assert!(!client.alive());
    assert!(start.elapsed() < Duration::from_millis(50), "known to be dead, and slow to say so");
}

#[test]
fn while_the_ring_is_full() {
    let (proxy, client) = connect("deaf");
    let bytes = Bytes::new(vec![1; 60_000]).unwrap();
    let post = Post::Enqueue { stream: StreamId(1), op: StreamOp::CopyInline { dst: 0, bytes } };
    let after = outlives(proxy, || {
        thread::scope(|scope| {
            for _ in 0..16 {
                scope.spawn(|| while client.post(&post).is_ok() {});
            }
        });
    });
    assert!(after < LIMIT, "{after:?}");
}

#[test]
fn between_calls() {
    let (mut proxy, client) = connect("pings");
    assert_eq!(client.call::<Status>(&Call::Ping {}), Ok(Ok(())));
    proxy.0.kill().unwrap();
    proxy.0.wait().unwrap();
    let start = Instant::now();
    assert_eq!(client.call::<Status>(&Call::Ping {}), Err(Dead));
    assert!(start.elapsed() < LIMIT);
}
