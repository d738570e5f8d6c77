//! A connection between a member and the coordinator: on one host by a Unix socket, between hosts
//! by TCP.

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

#[derive(Debug)]
pub enum Link {
    /// Descriptors can be handed over.
    Local(UnixStream),
    Remote(TcpStream),
}

impl From<UnixStream> for Link {
    fn from(stream: UnixStream) -> Link {
        Link::Local(stream)
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Link::Local(stream) => stream.as_fd(),
            Link::Remote(stream) => stream.as_fd(),
        }
    }
}

impl Read for &Link {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Link::Local(stream) => (&*stream).read(bytes),
            Link::Remote(stream) => (&*stream).read(bytes),
        }
    }
}

impl Write for &Link {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Link::Local(stream) => (&*stream).write(bytes),
            Link::Remote(stream) => (&*stream).write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Link {
    pub(crate) fn set_read_timeout(&self, limit: Duration) -> io::Result<()> {
        match self {
            Link::Local(stream) => stream.set_read_timeout(Some(limit)),
            Link::Remote(stream) => stream.set_read_timeout(Some(limit)),
        }
    }

    pub(crate) fn set_write_timeout(&self, limit: Duration) -> io::Result<()> {
        match self {
            Link::Local(stream) => stream.set_write_timeout(Some(limit)),
            Link::Remote(stream) => stream.set_write_timeout(Some(limit)),
        }
    }

    /// Returns whether the other side has hung up; it has nothing to say meanwhile.
    pub(crate) fn is_lost(&self) -> bool {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        match rustix::net::recv(self, &mut [0; 1], flags) {
            Ok((_, length)) => length == 0,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => false,
            Err(_) => true,
        }
    }

    /// Sends all of `bytes` with a descriptor.
    pub(crate) fn hand(&self, bytes: &[u8], file: BorrowedFd<'_>) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let files = [file];
        control.push(SendAncillaryMessage::ScmRights(&files));
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let sent = rustix::net::sendmsg(self, &[IoSlice::new(bytes)], &mut control, flags)?;
        if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    /// Reads, and keeps the one descriptor that may come along.
    pub(crate) fn take(&self, bytes: &mut [u8], file: &mut Option<OwnedFd>) -> io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut pieces = [IoSliceMut::new(bytes)];
        let got = rustix::net::recvmsg(self, &mut pieces, &mut control, RecvFlags::CMSG_CLOEXEC)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                *file = files.last();
            }
        }
        Ok(got.bytes)
    }
}
