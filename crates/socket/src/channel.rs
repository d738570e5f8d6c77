//! Framed messages with descriptors, between a supervisor and a proxy.

use crate::error::SocketError;
use crate::frame::{self, Deadline};
use kedge_wire::Wire;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// One end of a connected socket.
#[derive(Debug)]
pub struct Channel(OwnedFd);

impl Channel {
    pub fn new(socket: OwnedFd) -> Channel {
        Channel(socket)
    }

    pub fn socket(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    pub fn into_inner(self) -> OwnedFd {
        self.0
    }

    /// Both ends of a new one.
    pub fn pair() -> io::Result<(Channel, OwnedFd)> {
        let (near, far) = UnixStream::pair()?;
        Ok((Channel(near.into()), far.into()))
    }

    /// Sends `message`, with at most four descriptors, within `limit`.
    pub fn send<T: Wire>(
        &self,
        message: &T,
        fds: &[BorrowedFd<'_>],
        limit: Duration,
    ) -> Result<(), SocketError> {
        frame::send(self.0.as_fd(), message, fds, Deadline::after(limit))
    }

    /// Whether a message has begun to arrive, or the other end has gone, within `limit`. Nothing is
    /// taken: [`receive`](Channel::receive) with a short limit may leave half of a message.
    pub fn has_word(&self, limit: Duration) -> bool {
        Deadline::after(limit).poll(self.socket(), libc::POLLIN).is_ok()
    }

    /// The next message and the descriptors that came with it, if it comes within `limit`.
    pub fn receive<T: Wire>(&self, limit: Duration) -> Result<(T, Vec<OwnedFd>), SocketError> {
        frame::receive(self.0.as_fd(), Deadline::after(limit))
    }
}
