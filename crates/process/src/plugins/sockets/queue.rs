//! What waits in a socket to be received: read without taking it out.

use crate::plugins::sys;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::{Errno, ioctl_fionread, retry_on_intr};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SocketAddrAny, recvmsg,
};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;

/// Most that is read of one socket: more than any buffer holds (`net.core.rmem_max` and `wmem_max`
/// are 4 MiB on large machines).
const MAX_QUEUE: usize = 64 << 20;
/// Longest datagram: the largest of the defaults above.
const PIECE: usize = 8 << 20;
/// Most descriptors with one message (`SCM_MAX_FD`).
const MAX_PASSED: usize = 253;
/// `SO_PEEK_OFF`: where the next MSG_PEEK begins; negative: at the beginning, always.
const SO_PEEK_OFF: i32 = 42;

pub(crate) struct Piece {
    pub data: Vec<u8>,
    pub from: Option<SocketAddrAny>,
    pub passed: Vec<OwnedFd>,
}

/// All that waits, datagram by datagram, or a stream in pieces.
/// `buffer` is grown when it is first needed, and can be used for the next socket.
pub(crate) fn peek(fd: impl AsFd, buffer: &mut Vec<u8>) -> io::Result<Vec<Piece>> {
    let stream = sys::socket_number(&fd, libc::SOL_SOCKET, libc::SO_TYPE)? == libc::SOCK_STREAM;
    // A datagram may be empty, and wait all the same.
    if stream && ioctl_fionread(&fd)? == 0 {
        return Ok(Vec::new());
    }
    buffer.resize(PIECE, 0);
    let before = sys::socket_number(&fd, libc::SOL_SOCKET, SO_PEEK_OFF)?;
    let all = peek_all(&fd, stream, buffer);
    begin_at(&fd, before)?;
    all
}

/// Where the next peek begins.
fn begin_at(fd: impl AsFd, offset: i32) -> io::Result<()> {
    sys::set_socket_option(fd, libc::SOL_SOCKET, SO_PEEK_OFF, &offset.to_ne_bytes())
}

fn peek_all(fd: impl AsFd, stream: bool, buffer: &mut [u8]) -> io::Result<Vec<Piece>> {
    let (mut all, mut total) = (Vec::new(), 0);
    begin_at(&fd, 0)?;
    while let Some(mut piece) = peek_one(&fd, buffer)? {
        let length = piece.data.len();
        // Peeking shows descriptors together with all bytes in front of those that they were sent
        // with. Whoever reads whole messages has them in time with the last of these bytes.
        if stream && !piece.passed.is_empty() && length > 1 {
            let last = piece.data.split_off(length - 1);
            let data = std::mem::replace(&mut piece.data, last);
            all.push(Piece { data, from: None, passed: Vec::new() });
        }
        total += length;
        begin_at(&fd, i32::try_from(total).unwrap_or(i32::MAX))?;
        if total > MAX_QUEUE {
            return Err(io::Error::other("more waits than any socket holds"));
        }
        all.push(piece);
    }
    Ok(all)
}

fn peek_one(fd: impl AsFd, buffer: &mut [u8]) -> io::Result<Option<Piece>> {
    let space = rustix::cmsg_space!(ScmRights(MAX_PASSED), ScmCredentials(1));
    let mut space = vec![MaybeUninit::uninit(); space];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = retry_on_intr(|| {
        let mut into = [IoSliceMut::new(buffer)];
        recvmsg(&fd, &mut into, &mut control, flags)
    });
    let received = match received {
        Ok(received) => received,
        Err(Errno::AGAIN) => return Ok(None),
        // Nothing waits, and a peer is gone or was never there.
        Err(Errno::CONNRESET | Errno::NOTCONN | Errno::INVAL) => return Ok(None),
        Err(e) => return Err(e.into()),
    };
    if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(io::Error::other("a message is longer than any should be"));
    }
    let mut passed = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            passed.extend(descriptors);
        }
    }
    // A stream's end. Datagrams without data have a sender or are lost.
    if received.bytes == 0 && passed.is_empty() && received.address.is_none() {
        return Ok(None);
    }
    let data = buffer[..received.bytes].to_vec();
    Ok(Some(Piece { data, from: received.address, passed }))
}
