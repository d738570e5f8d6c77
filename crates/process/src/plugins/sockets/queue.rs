//! What waits in a socket to be received: read without taking it out.

use crate::plugins::apart::survive;
use crate::plugins::sys;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
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
/// Most messages that are peeked together.
const TOGETHER: usize = 1024;
/// Most messages of one socket: more than any buffer holds, as each takes some hundred bytes of it.
const MAX_MESSAGES: usize = 1 << 20;
/// Most descriptors with one message (`SCM_MAX_FD`).
const MAX_PASSED: usize = 253;
/// `SO_PEEK_OFF`: where the next MSG_PEEK begins; negative: at the beginning, always.
const SO_PEEK_OFF: i32 = 42;

pub(crate) struct Piece {
    pub data: Vec<u8>,
    pub from: Option<SocketAddrAny>,
    pub passed: Vec<OwnedFd>,
}

/// Reads all that waits, message by message, or a stream in pieces.
/// `buffer` is grown when it is first needed, and can be used for the next socket.
///
/// Messages without data are kept. The kernel shows one that waits behind others once only, so
/// that the next call misses it.
pub(crate) fn peek(fd: impl AsFd, buffer: &mut Vec<u8>) -> io::Result<Vec<Piece>> {
    let kind = sys::socket_number(&fd, libc::SOL_SOCKET, libc::SO_TYPE)?;
    let stream = kind == libc::SOCK_STREAM;
    // A datagram may be empty, and wait all the same.
    let waiting = ioctl_fionread(&fd)?;
    if stream && waiting == 0 {
        return Ok(Vec::new());
    }
    if !readable(&fd)? {
        return Ok(Vec::new());
    }
    buffer.resize(PIECE, 0);
    let before = sys::socket_number(&fd, libc::SOL_SOCKET, SO_PEEK_OFF)?;
    // Most streams can be seen as a whole.
    if stream && before < 0 {
        let (mut control, mut passed) = (control(), Vec::new());
        let seen = peek_one(&fd, buffer, &mut control, &mut passed)?;
        if seen.is_some_and(|seen| seen.length as u64 == waiting) {
            return Ok(pieces(stream, &buffer[..waiting as usize], None, passed).collect());
        }
    }
    let empty = match kind {
        libc::SOCK_STREAM => Empty::End,
        // Its end may be shut down: who reads is told so by nothing, again and again.
        libc::SOCK_SEQPACKET if shut_down(&fd)? => Empty::Before(waiting as usize),
        _ => Empty::Message,
    };
    peek_all(fd.as_fd(), empty, before, buffer)
}

/// What it means that nothing has been received.
#[derive(Debug, Clone, Copy)]
enum Empty {
    /// The end of what waits.
    End,
    /// A message without data.
    Message,
    /// A message without data while less than so many bytes have been seen, then the end: readers
    /// cannot tell the last messages without data from the end.
    Before(usize),
}

impl Empty {
    fn is_message(self, seen: usize) -> bool {
        match self {
            Empty::End => false,
            Empty::Message => true,
            Empty::Before(all) => seen < all,
        }
    }
}

fn readable(fd: impl AsFd) -> io::Result<bool> {
    is(fd, PollFlags::IN)
}

/// Whether nothing more can arrive.
fn shut_down(fd: impl AsFd) -> io::Result<bool> {
    is(fd, PollFlags::RDHUP)
}

fn is(fd: impl AsFd, state: PollFlags) -> io::Result<bool> {
    let mut fds = [PollFd::new(&fd, state)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    retry_on_intr(|| poll(&mut fds, Some(&now)))?;
    Ok(fds[0].revents().contains(state))
}

/// Peeks one after the other. The program's own peeks begin where they began, whatever happens to
/// this process.
fn peek_all(
    fd: BorrowedFd<'_>,
    empty: Empty,
    before: i32,
    buffer: &mut [u8],
) -> io::Result<Vec<Piece>> {
    let stream = matches!(empty, Empty::End);
    let (mut all, mut total) = (Vec::new(), 0);
    let mut control = control();
    loop {
        let mut some = Vec::with_capacity(TOGETHER);
        let mut passed = Vec::with_capacity(MAX_PASSED);
        survive(|| {
            let from = From { first: all.is_empty(), skip: total, empty };
            let peeked = peek_some(fd, from, buffer, &mut control, &mut some, &mut passed);
            peeked.and(begin_at(fd, before))
        })??;
        if some.is_empty() {
            return Ok(all);
        }
        let (mut at, count) = (0, some.len());
        for (index, Seen { length, from, .. }) in some.into_iter().enumerate() {
            // What has descriptors ends what was peeked together.
            let passed = if index + 1 == count { std::mem::take(&mut passed) } else { Vec::new() };
            all.extend(pieces(stream, &buffer[at..at + length], from, passed));
            at += length;
        }
        total += at;
        if total > MAX_QUEUE || all.len() > MAX_MESSAGES {
            return Err(io::Error::other("more waits than any socket holds"));
        }
    }
}

/// Where peeking goes on.
#[derive(Debug, Clone, Copy)]
struct From {
    /// Nothing has been seen yet.
    first: bool,
    /// So many bytes have been seen.
    skip: usize,
    empty: Empty,
}

/// Peeks what follows, as many as fit into `some` and `buffer`, up to one with descriptors.
/// Allocates nothing.
fn peek_some(
    fd: BorrowedFd<'_>,
    from: From,
    buffer: &mut [u8],
    control: &mut [MaybeUninit<u8>],
    some: &mut Vec<Seen>,
    passed: &mut Vec<OwnedFd>,
) -> io::Result<()> {
    let mut at = 0;
    while some.len() < TOGETHER && passed.is_empty() && at < buffer.len() {
        // The first one is shown even if it is empty and has been peeked at before.
        let first = from.first && some.is_empty();
        let skip = from.skip + at;
        begin_at(fd, if first { -1 } else { i32::try_from(skip).unwrap_or(i32::MAX) })?;
        let Some(seen) = peek_one(fd, &mut buffer[at..], control, passed)? else { return Ok(()) };
        if seen.length == 0 && passed.is_empty() && !from.empty.is_message(skip) {
            return Ok(());
        }
        match (seen.whole, at) {
            (true, _) => {}
            (false, 0) => return Err(Errno::MSGSIZE.into()),
            // It is the first of the next ones.
            (false, _) => {
                passed.clear();
                return Ok(());
            }
        }
        at += seen.length;
        some.push(seen);
    }
    Ok(())
}

/// Peeking shows descriptors together with all bytes in front of those that they were sent with.
/// Whoever reads whole messages has them in time with the last of these bytes.
fn pieces(
    stream: bool,
    data: &[u8],
    from: Option<SocketAddrAny>,
    passed: Vec<OwnedFd>,
) -> impl Iterator<Item = Piece> {
    let last = if stream && !passed.is_empty() { data.len().saturating_sub(1) } else { 0 };
    let (before, data) = data.split_at(last);
    let before = Piece { data: before.to_vec(), from: None, passed: Vec::new() };
    let last = Piece { data: data.to_vec(), from, passed };
    Some(before).filter(|piece| !piece.data.is_empty()).into_iter().chain([last])
}

/// Where the next peek begins.
fn begin_at(fd: impl AsFd, offset: i32) -> io::Result<()> {
    sys::set_socket_option(fd, libc::SOL_SOCKET, SO_PEEK_OFF, &offset.to_ne_bytes())
}

/// Room for what comes beside the bytes.
fn control() -> Vec<MaybeUninit<u8>> {
    vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_PASSED), ScmCredentials(1))]
}

/// A message, whose bytes are in the buffer, or a piece of a stream.
struct Seen {
    length: usize,
    from: Option<SocketAddrAny>,
    /// It fitted into the buffer, with all that came beside it.
    whole: bool,
}

/// Peeks the next one; adds the descriptors that came with it to `passed`.
fn peek_one(
    fd: impl AsFd,
    buffer: &mut [u8],
    control: &mut [MaybeUninit<u8>],
    passed: &mut Vec<OwnedFd>,
) -> io::Result<Option<Seen>> {
    let mut control = RecvAncillaryBuffer::new(control);
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
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            passed.extend(descriptors);
        }
    }
    let whole = !received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
    Ok(Some(Seen { length: received.bytes, from: received.address, whole }))
}
