//! Descriptors that follow after the handshake, on the same socket, 8 bytes each.
//!
//! What the client sends there otherwise are tokens of host functions that have returned; a ticket,
//! of the client's choice, has its highest bit set and brings one descriptor. The call that uses it
//! names the ticket and is posted after it. The proxy sends nothing but descriptors, each before
//! the reply that announces it.

use kedge_socket::SocketError;
use kedge_socket::frame::{self, Deadline};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

/// What tells a ticket from a host function's token.
pub const TICKET: u64 = 1 << 63;
/// Bytes of one announcement.
const FRAME: usize = 8;
/// How long the other side may take to make room.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);

/// Sends `fd`, announced as `number`; waits for room for as long as the proxy may take.
pub(crate) fn send(socket: BorrowedFd<'_>, number: u64, fd: BorrowedFd<'_>) -> io::Result<()> {
    let deadline = Deadline::after(SEND_TIMEOUT);
    loop {
        match offer(socket, number, fd) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                deadline.poll(socket, libc::POLLOUT).map_err(|error| match error {
                    SocketError::System(error) => error,
                    other => io::Error::other(other),
                })?;
            }
            outcome => return outcome,
        }
    }
}

/// Sends `fd`, announced as `number`, if there is room: the proxy never waits for its client.
pub fn offer(socket: BorrowedFd<'_>, number: u64, fd: BorrowedFd<'_>) -> io::Result<()> {
    // So few bytes go into one buffer of the kernel's, all or none.
    match frame::send_some(socket, &number.to_le_bytes(), &[fd])? {
        FRAME => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

/// Takes the descriptor that the proxy has sent. `None`: it came, but this process has no room for
/// another.
pub(crate) fn take(socket: BorrowedFd<'_>) -> io::Result<Option<OwnedFd>> {
    let (mut frame, mut fds) = ([0; FRAME], Vec::new());
    match frame::receive_some(socket, &mut frame, &mut fds)? {
        FRAME if fds.len() <= 1 => Ok(fds.pop()),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// The client's announcements, as they arrive.
#[derive(Debug, Default)]
pub struct Announcements {
    bytes: [u8; FRAME],
    have: usize,
    fds: Vec<OwnedFd>,
}

/// A whole announcement.
#[derive(Debug)]
pub enum Announcement {
    /// A host function has returned.
    Returned(u64),
    /// A descriptor; `None` where this process had no room for it.
    Descriptor(u64, Option<OwnedFd>),
    /// It means nothing: more than one descriptor, or one without a ticket.
    Nonsense,
}

impl Announcements {
    /// Takes what has arrived without waiting for more; an announcement, once it is whole. What the
    /// kernel says otherwise shows in the next poll.
    pub fn take(&mut self, socket: BorrowedFd<'_>) -> Option<Announcement> {
        let rest = &mut self.bytes[self.have..];
        self.have += frame::receive_some(socket, rest, &mut self.fds).unwrap_or(0);
        if self.have < FRAME {
            return None;
        }
        self.have = 0;
        let number = u64::from_le_bytes(self.bytes);
        let fd = self.fds.pop();
        let more = !std::mem::take(&mut self.fds).is_empty();
        Some(match (number & TICKET != 0, fd) {
            (true, fd) if !more => Announcement::Descriptor(number, fd),
            (false, None) => Announcement::Returned(number),
            _ => Announcement::Nonsense,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    fn pipe() -> (OwnedFd, std::io::PipeWriter) {
        let (reader, writer) = std::io::pipe().unwrap();
        (reader.into(), writer)
    }

    #[test]
    fn tokens_and_descriptors_keep_apart() {
        let (client, proxy) = UnixStream::pair().unwrap();
        let (reader, mut writer) = pipe();
        (&client).write_all(&7u64.to_le_bytes()).unwrap();
        send(client.as_fd(), TICKET | 1, reader.as_fd()).unwrap();
        (&client).write_all(&8u64.to_le_bytes()[..3]).unwrap();
        let mut heard = Announcements::default();
        assert!(matches!(heard.take(proxy.as_fd()), Some(Announcement::Returned(7))));
        let Some(Announcement::Descriptor(ticket, Some(fd))) = heard.take(proxy.as_fd()) else {
            panic!("no descriptor");
        };
        assert_eq!(ticket, TICKET | 1);
        writer.write_all(b"x").unwrap();
        let mut byte = [0];
        std::fs::File::from(fd).read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"x");
        assert!(heard.take(proxy.as_fd()).is_none());
        (&client).write_all(&8u64.to_le_bytes()[3..]).unwrap();
        assert!(matches!(heard.take(proxy.as_fd()), Some(Announcement::Returned(8))));
    }

    #[test]
    fn a_descriptor_without_a_ticket_is_refused() {
        let (client, proxy) = UnixStream::pair().unwrap();
        send(client.as_fd(), 5, pipe().0.as_fd()).unwrap();
        let nonsense = || {
            let heard = Announcements::default().take(proxy.as_fd());
            matches!(heard, Some(Announcement::Nonsense))
        };
        assert!(nonsense());
        let (first, second) = (pipe().0, pipe().0);
        let both = [first.as_fd(), second.as_fd()];
        frame::send_some(client.as_fd(), &(TICKET | 2).to_le_bytes(), &both).unwrap();
        assert!(nonsense());
    }

    #[test]
    fn the_proxy_does_not_wait_for_a_client_that_takes_nothing() {
        let (client, proxy) = UnixStream::pair().unwrap();
        let fd = pipe().0;
        let full = (0..100_000).find_map(|_| offer(proxy.as_fd(), 0, fd.as_fd()).err());
        assert_eq!(full.map(|error| error.kind()), Some(io::ErrorKind::WouldBlock));
        assert!(take(client.as_fd()).unwrap().is_some());
    }
}
