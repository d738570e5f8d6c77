//! The proxy's side of a connection.

use crate::error::{AcceptError, RingError, SegmentError};
use crate::greeting::{GREETING_MAGIC, Greeting};
use crate::memory::{Segment, check_shared_arena};
use crate::outbox::Outbox;
use crate::ring::{Consumer, Incoming, Meter, Nudge};
use kedge_protocol::{Hello, PROTOCOL_VERSION, Refusal, Welcome};
use kedge_socket::SocketError;
use kedge_socket::frame::{self, Deadline};
use kedge_socket::peer_pid;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// A client that has said hello and waits for its welcome.
#[derive(Debug)]
pub struct Accepted {
    pub hello: Hello,
    /// The shared arena: sealed, of the right size, not yet mapped.
    pub shared: OwnedFd,
    pub server: Server,
    deadline: Deadline,
}

/// The consuming end of a client's ring.
#[derive(Debug)]
pub struct Server {
    socket: OwnedFd,
    consumer: Consumer,
    outbox: Outbox,
}

impl Server {
    /// Greets the client on `socket` and takes its hello. `timeout` covers the whole handshake.
    pub fn accept(socket: OwnedFd, timeout: Duration) -> Result<Accepted, AcceptError> {
        let deadline = Deadline::after(timeout);
        let greeting =
            Greeting { magic: GREETING_MAGIC, version: PROTOCOL_VERSION, pid: std::process::id() };
        frame::send(socket.as_fd(), &greeting, &[], deadline)?;
        let (hello, fds) = frame::receive::<Hello>(socket.as_fd(), deadline)?;
        if hello.version != PROTOCOL_VERSION {
            return Err(AcceptError::Version { client: hello.version, proxy: PROTOCOL_VERSION });
        }
        let is = peer_pid(socket.as_fd()).map_err(SocketError::from)?;
        if hello.pid != is {
            return Err(AcceptError::WrongPid { said: hello.pid, is });
        }
        let count = fds.len();
        let Ok([ring, shared]) = <[OwnedFd; 2]>::try_from(fds) else {
            return Err(AcceptError::Descriptors { count });
        };
        let bad = |what| move |source| AcceptError::Segment { what, source };
        check_shared_arena(shared.as_fd()).map_err(bad("shared arena"))?;
        let segment = Segment::open(ring).map_err(bad("ring"))?;
        Ok(Accepted { hello, shared, server: Server::new(socket, Arc::new(segment)), deadline })
    }

    pub(crate) fn new(socket: OwnedFd, segment: Arc<Segment>) -> Server {
        Server::of(socket, Consumer::new(segment))
    }

    /// Goes on in the place of another, whose last message was `seq`: with a socket whose other end
    /// the client holds, and with the ring that it shared with the other.
    pub fn resume(socket: OwnedFd, ring: OwnedFd, seq: u64) -> Result<Server, SegmentError> {
        let segment = Arc::new(Segment::open(ring)?);
        Ok(Server::of(socket, Consumer::after(segment, seq)))
    }

    fn of(socket: OwnedFd, consumer: Consumer) -> Server {
        Server { socket, outbox: Outbox::new(&consumer), consumer }
    }

    /// Goes on where the other one, which has just stopped, has come to by now: as
    /// [`Server::resume`], with what others have been told of this end.
    pub fn catch_up(&mut self, seq: u64) {
        self.consumer.catch_up(seq);
    }

    /// Returns the sequence number of the newest message that was taken.
    pub fn position(&self) -> u64 {
        self.consumer.seq()
    }

    /// Returns what ends a wait from another thread.
    pub fn nudge(&self) -> Nudge {
        self.consumer.nudge()
    }

    /// Returns what counts the bytes that messages take from now on.
    pub fn meter(&self) -> Meter {
        self.consumer.meter()
    }

    /// Takes the next message, if the client has sent one. An error means that the client is broken
    /// or hostile, and no later message can be trusted.
    pub fn try_next(&mut self) -> Result<Option<Incoming>, RingError> {
        self.consumer.try_next()
    }

    /// Looks for a message for `limit` at most, giving way to other threads.
    pub fn look(&self, limit: Duration) {
        self.consumer.look(limit);
    }

    /// Returns when there is a message: spins for `spin`, giving way to other threads, then sleeps.
    pub fn wait(&self, spin: Duration) -> Result<(), RingError> {
        self.consumer.wait(spin)
    }

    pub fn outbox(&self) -> &Outbox {
        &self.outbox
    }

    /// Returns the ring's memfd.
    pub fn ring(&self) -> BorrowedFd<'_> {
        self.consumer.segment().fd()
    }

    /// Returns the socket, which reports hang-up once the client has ended.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Accepted {
    /// Ends the handshake.
    pub fn welcome(self, welcome: Welcome) -> Result<Server, AcceptError> {
        self.answer(&Ok(welcome))?;
        Ok(self.server)
    }

    /// Ends the handshake, and with it the connection.
    pub fn refuse(self, refusal: Refusal) -> Result<(), AcceptError> {
        self.answer(&Err(refusal))
    }

    fn answer(&self, answer: &Result<Welcome, Refusal>) -> Result<(), AcceptError> {
        Ok(frame::send(self.server.socket.as_fd(), answer, &[], self.deadline)?)
    }
}
