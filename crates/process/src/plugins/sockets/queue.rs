//! Reads what waits in a socket's receive queue, without taking it out.

use crate::plugins::apart::survive;
use crate::plugins::sys;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::io::{Errno, ioctl_fionread, retry_on_intr};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SocketAddrAny, recvmsg,
};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::ptr;

/// Most bytes that are read of one socket: more than any buffer holds (`net.core.rmem_max` and
/// `wmem_max` are 4 MiB on large machines).
const MAX_QUEUE: usize = 64 << 20;
/// Bytes of the buffer, and so of the longest datagram: twice the limits above.
const PIECE: usize = 8 << 20;
/// Most messages that are peeked at in one pass.
const MAX_BATCH: usize = 1024;
/// Most messages of one socket: more than any buffer holds, as each takes hundreds of bytes of it.
const MAX_MESSAGES: usize = 1 << 20;
/// Most descriptors that one message passes (`SCM_MAX_FD`).
const MAX_PASSED: usize = 253;
/// Room for what else may come beside a message: the sender's pidfd, and its label (`SO_PASSSEC`).
const OTHERS: usize = 64 + 4096;
/// The sender's pidfd (linux/socket.h).
const SCM_PIDFD: i32 = 4;
/// `SO_PEEK_OFF`: where the next MSG_PEEK begins; negative: at the beginning, always.
const SO_PEEK_OFF: i32 = 42;

/// Messages lie behind an error, which whoever looks first is told, and nobody again.
const UNTOLD: &str = "its other end is gone or connected elsewhere, and has not read all that was \
                      sent to it (ECONNRESET), which the program has not been told yet: try again \
                      when it has read from it";

/// The same of datagrams from other hosts.
const UNTOLD_INET: &str = "what it has sent could not be delivered (ECONNREFUSED, say), which the \
                           program has not been told yet: try again when it has read from it";

/// A message, or a part of a stream.
pub(crate) struct Piece {
    pub data: Vec<u8>,
    /// The sender's address, if the kernel tells it.
    pub from: Option<SocketAddrAny>,
    /// Descriptors that came with the data.
    pub passed: Vec<OwnedFd>,
}

/// Bytes of the next message that [`peek_descriptors`] reads.
const PEEK_LEN: usize = 64 << 10;

/// Returns copies of the descriptors that come with the next message, or with a stream's next
/// bytes.
///
/// The program may run meanwhile, as it can notice nothing of this. For a socket whose program has
/// set SO_PEEK_OFF, the result is empty.
///
/// # Errors
/// A system call fails.
pub(crate) fn peek_descriptors(fd: impl AsFd) -> io::Result<Vec<OwnedFd>> {
    let mut passed = Vec::new();
    // An error that waits is told once, to who looks first.
    if sys::socket_number(&fd, libc::SOL_SOCKET, SO_PEEK_OFF)? < 0
        && !polls_as(&fd, PollFlags::ERR)?
    {
        peek_one(&fd, &mut vec![0; PEEK_LEN], &mut control(), &mut passed)?;
    }
    Ok(passed)
}

/// Reads all that waits: each message, or a stream in pieces, where bytes that were sent with
/// descriptors are a piece of their own.
///
/// Messages without data are kept; the kernel shows one that waits behind others once only, so a
/// second call misses it. `buffer` grows when it is first needed, and serves the next socket too.
///
/// # Errors
/// A system call fails, or more waits than [`MAX_QUEUE`] or [`MAX_MESSAGES`].
pub(crate) fn peek(fd: impl AsFd, buffer: &mut Vec<u8>) -> io::Result<Vec<Piece>> {
    let kind = sys::socket_number(&fd, libc::SOL_SOCKET, libc::SO_TYPE)?;
    let stream = kind == libc::SOCK_STREAM;
    // For datagrams, 0 bytes may be an empty one that waits.
    let waiting = ioctl_fionread(&fd)?;
    if stream && waiting == 0 {
        return Ok(Vec::new());
    }
    if !readable(&fd)? {
        return Ok(Vec::new());
    }
    let is_local = sys::socket_number(&fd, libc::SOL_SOCKET, libc::SO_DOMAIN)? == libc::AF_UNIX;
    if is_local && stream && polls_as(&fd, PollFlags::PRI)? {
        // Peeks show its byte among the others, or not at all.
        return Err(io::Error::other("urgent data waits (MSG_OOB), which cannot be saved yet"));
    }
    if !stream && !keeps_errors(&fd, is_local) && polls_as(&fd, PollFlags::ERR)? {
        return match kind {
            // The other end is gone, and so is all that it has sent.
            libc::SOCK_SEQPACKET if waiting == 0 => Ok(Vec::new()),
            _ if is_local => Err(io::Error::other(UNTOLD)),
            _ => Err(io::Error::other(UNTOLD_INET)),
        };
    }
    buffer.resize(PIECE, 0);
    let before = sys::socket_number(&fd, libc::SOL_SOCKET, SO_PEEK_OFF)?;
    let guard = GuardPage::new()?;
    // Most streams can be seen as a whole.
    if stream && before < 0 && waiting < buffer.len() as u64 {
        let (mut control, mut passed) = (control(), Vec::new());
        let seen = peek_one(&fd, buffer, &mut control, &mut passed)?;
        if seen.is_some_and(|seen| seen.length as u64 == waiting) {
            let waiting = &mut buffer[..waiting as usize];
            let front = match passed.is_empty() {
                true => 0,
                false => bytes_before_descriptors(fd.as_fd(), waiting, &guard)?,
            };
            let (front, last) = waiting.split_at(front);
            let front = Piece { data: front.to_vec(), from: None, passed: Vec::new() };
            let last = Piece { data: last.to_vec(), from: None, passed };
            return Ok([front, last].into_iter().filter(|one| !one.data.is_empty()).collect());
        }
    }
    let empty = match kind {
        // What is behind is an error, which is told once.
        libc::SOCK_STREAM if is_local => Empty::End(waiting as usize),
        libc::SOCK_STREAM => Empty::End(usize::MAX),
        // Its end may be shut down: who reads is told so by nothing, again and again.
        libc::SOCK_SEQPACKET if shut_down(&fd)? => Empty::Before(waiting as usize),
        _ => Empty::Message,
    };
    peek_all(fd.as_fd(), (empty, before), buffer, &guard)
}

/// Whether a socket may say that there is an error because its queue of errors has an entry, which
/// no peek takes.
fn keeps_errors(fd: impl AsFd, is_local: bool) -> bool {
    let queues = [
        (libc::IPPROTO_IP, libc::IP_RECVERR),
        (libc::IPPROTO_IPV6, libc::IPV6_RECVERR),
        (libc::SOL_SOCKET, libc::SO_TIMESTAMPING),
    ];
    let is_on = |(level, name)| sys::socket_number(&fd, level, name).is_ok_and(|on| on != 0);
    !is_local && queues.into_iter().any(is_on)
}

/// What a receive of 0 bytes means.
#[derive(Debug, Clone, Copy)]
enum Empty {
    /// The end of what waits, which is so many bytes at most.
    End(usize),
    /// A message without data.
    Message,
    /// A message without data until this many bytes have been seen, then the end: nobody can tell
    /// a last message without data from the end.
    Before(usize),
}

impl Empty {
    /// Returns whether it is a message, once `seen` bytes have been seen.
    fn is_message(self, seen: usize) -> bool {
        match self {
            Empty::End(_) => false,
            Empty::Message => true,
            Empty::Before(all) => seen < all,
        }
    }

    /// Whether nothing waits behind so many bytes.
    fn is_end(self, seen: usize) -> bool {
        matches!(self, Empty::End(all) if seen >= all)
    }
}

fn readable(fd: impl AsFd) -> io::Result<bool> {
    polls_as(fd, PollFlags::IN)
}

/// Returns whether nothing more can arrive.
fn shut_down(fd: impl AsFd) -> io::Result<bool> {
    polls_as(fd, PollFlags::RDHUP)
}

fn polls_as(fd: impl AsFd, state: PollFlags) -> io::Result<bool> {
    let mut fds = [PollFd::new(&fd, state)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    retry_on_intr(|| poll(&mut fds, Some(&now)))?;
    Ok(fds[0].revents().contains(state))
}

/// Peeks at all messages, or all pieces of a stream.
///
/// The socket's SO_PEEK_OFF is `before` again at the end, even if this process is killed meanwhile.
fn peek_all(
    fd: BorrowedFd<'_>,
    (empty, before): (Empty, i32),
    buffer: &mut [u8],
    guard: &GuardPage,
) -> io::Result<Vec<Piece>> {
    let (mut all, mut total) = (Vec::new(), 0);
    let mut control = control();
    loop {
        // The last message of a stream may be split in two.
        let mut some = Vec::with_capacity(MAX_BATCH + 1);
        let mut passed = Vec::with_capacity(MAX_PASSED);
        survive(|| {
            let cursor = Cursor { first: all.is_empty(), skip: total, empty };
            let mut buffers = Buffers { data: &mut *buffer, control: &mut control, guard };
            let peeked = peek_some(fd, cursor, &mut buffers, &mut some, &mut passed);
            peeked.and(set_peek_offset(fd, before))
        })??;
        if some.is_empty() {
            return Ok(all);
        }
        let (mut at, count) = (0, some.len());
        for (index, Seen { length, from, .. }) in some.into_iter().enumerate() {
            // A pass ends with the first piece that has descriptors.
            let passed = if index + 1 == count { std::mem::take(&mut passed) } else { Vec::new() };
            all.push(Piece { data: buffer[at..at + length].to_vec(), from, passed });
            at += length;
        }
        total += at;
        if total > MAX_QUEUE || all.len() > MAX_MESSAGES {
            return Err(io::Error::other("more waits than any socket holds"));
        }
    }
}

/// The position at which a pass begins.
#[derive(Debug, Clone, Copy)]
struct Cursor {
    /// Nothing has been seen yet.
    first: bool,
    /// Bytes that have been seen.
    skip: usize,
    empty: Empty,
}

/// Memory that a pass uses, allocated beforehand.
struct Buffers<'a> {
    data: &'a mut [u8],
    control: &'a mut [MaybeUninit<u8>],
    guard: &'a GuardPage,
}

/// Peeks at as many messages as fit into `some` and the buffer, up to the first with descriptors.
/// Allocates nothing.
fn peek_some(
    fd: BorrowedFd<'_>,
    cursor: Cursor,
    buffers: &mut Buffers<'_>,
    some: &mut Vec<Seen>,
    passed: &mut Vec<OwnedFd>,
) -> io::Result<()> {
    let Buffers { data: buffer, control, guard } = buffers;
    let mut at = 0;
    while some.len() < MAX_BATCH && passed.is_empty() && at < buffer.len() {
        // The first one is shown even if it is empty and has been peeked at before.
        let first = cursor.first && some.is_empty();
        let skip = cursor.skip + at;
        if cursor.empty.is_end(skip) {
            return Ok(());
        }
        set_peek_offset(fd, if first { -1 } else { i32::try_from(skip).unwrap_or(i32::MAX) })?;
        let Some(mut seen) = peek_one(fd, &mut buffer[at..], control, passed)? else {
            return Ok(());
        };
        if seen.length == 0 && passed.is_empty() && !cursor.empty.is_message(skip) {
            return Ok(());
        }
        match (seen.whole, at) {
            (true, _) => {}
            (false, 0) => return Err(Errno::MSGSIZE.into()),
            // The next pass begins with it.
            (false, _) => {
                passed.clear();
                return Ok(());
            }
        }
        if matches!(cursor.empty, Empty::End(_)) && !passed.is_empty() {
            let whole = seen.length < buffer.len() - at;
            let end = at + seen.length;
            set_peek_offset(fd, i32::try_from(skip).unwrap_or(i32::MAX))?;
            let front = bytes_before_descriptors(fd, &mut buffer[at..end], guard)?;
            if front > 0 {
                some.push(Seen { length: front, from: None, whole: true });
            }
            at += front;
            seen.length -= front;
            // The buffer may have cut it: the next pass begins with it.
            if !whole {
                passed.clear();
                return if at > 0 { Ok(()) } else { Err(Errno::MSGSIZE.into()) };
            }
        }
        at += seen.length;
        some.push(seen);
    }
    Ok(())
}

/// The address of a page without access: the kernel cannot store there.
struct GuardPage(usize);

/// Bytes of a page.
const PAGE: usize = 4096;

impl GuardPage {
    fn new() -> io::Result<GuardPage> {
        // SAFETY: the kernel chooses a free address, so nothing that exists is replaced.
        let page = unsafe {
            mmap_anonymous(ptr::null_mut(), PAGE, ProtFlags::empty(), MapFlags::PRIVATE)?
        };
        Ok(GuardPage(page.expose_provenance()))
    }
}

impl Drop for GuardPage {
    fn drop(&mut self) {
        // SAFETY: `new` made the mapping, this value alone owns it, and no reference points there.
        let _ = unsafe { munmap(ptr::with_exposed_provenance_mut(self.0), PAGE) };
    }
}

/// Returns how many bytes of `seen`, which a stream gave together with descriptors, were sent
/// before the bytes that carry the descriptors.
///
/// A peek gives descriptors together with all bytes up to the last that was sent with them. It ends
/// before a buffer of the sender's that it cannot store as a whole; so this peeks once more, with
/// no place for the last byte of `seen`. The next peek begins where `seen` began. No descriptors
/// are received, and nothing is allocated.
fn bytes_before_descriptors(
    fd: BorrowedFd<'_>,
    seen: &mut [u8],
    guard: &GuardPage,
) -> io::Result<usize> {
    let front = seen.len().saturating_sub(1);
    let mut into = [
        libc::iovec { iov_base: seen.as_mut_ptr().cast(), iov_len: front },
        libc::iovec { iov_base: ptr::with_exposed_provenance_mut(guard.0), iov_len: 1 },
    ];
    // SAFETY: `msghdr` is plain data, for which zeros are a value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (into.as_mut_ptr(), into.len());
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    loop {
        // SAFETY: `into` gives the kernel `front` bytes of `seen`, which is longer, and a page
        // where it cannot store; both live until the call returns.
        let count = unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut message, flags) };
        let error = io::Error::last_os_error();
        match (usize::try_from(count), error.raw_os_error()) {
            (Ok(count), _) if count <= front => return Ok(count),
            (Ok(_), _) => return Err(Errno::MSGSIZE.into()),
            (Err(_), Some(libc::EFAULT)) => return Ok(0),
            (Err(_), Some(libc::EINTR)) => {}
            (Err(_), _) => return Err(error),
        }
    }
}

/// Sets the offset at which the next peek begins (SO_PEEK_OFF).
fn set_peek_offset(fd: impl AsFd, offset: i32) -> io::Result<()> {
    sys::set_socket_option(fd, libc::SOL_SOCKET, SO_PEEK_OFF, &offset.to_ne_bytes())
}

/// Returns a buffer for the control messages that can come with one message.
fn control() -> Vec<MaybeUninit<u8>> {
    let known = rustix::cmsg_space!(ScmRights(MAX_PASSED), ScmCredentials(1));
    vec![MaybeUninit::uninit(); known + OTHERS]
}

/// Closes the senders' pidfds that have come with a message (`SO_PASSPIDFD`): a peek makes some
/// each time. `control` was all zero before, and what was received begins at its first place for a
/// header.
fn close_pidfds(control: &[u8]) {
    let begin = control.as_ptr().align_offset(align_of::<libc::cmsghdr>());
    let mut rest = control.get(begin..).unwrap_or_default();
    // Length, level and kind, then what it is (cmsg(3)).
    while let Some((header, _)) = rest.split_first_chunk::<{ size_of::<libc::cmsghdr>() }>() {
        let [a, b, c, d, e, f, g, h, level @ .., i, j, k, l] = *header;
        let length = usize::from_ne_bytes([a, b, c, d, e, f, g, h]);
        let Some(within) = rest.get(header.len()..length) else { return };
        let what = (i32::from_ne_bytes(level), i32::from_ne_bytes([i, j, k, l]));
        if let ((libc::SOL_SOCKET, SCM_PIDFD), Ok(number)) = (what, within.try_into()) {
            let number = i32::from_ne_bytes(number);
            if number >= 0 {
                // SAFETY: the kernel has just made this descriptor for this process, and nobody
                // else has been told of it.
                drop(unsafe { OwnedFd::from_raw_fd(number) });
            }
        }
        rest = rest.get(length.next_multiple_of(size_of::<usize>())..).unwrap_or_default();
    }
}

/// A message that was peeked at, or a piece of a stream; its bytes are in the buffer.
struct Seen {
    length: usize,
    from: Option<SocketAddrAny>,
    /// It fitted into the buffer as a whole.
    whole: bool,
}

/// Peeks at the next message, and adds the descriptors that came with it to `passed`; returns
/// `None` if nothing waits.
fn peek_one(
    fd: impl AsFd,
    buffer: &mut [u8],
    control: &mut [MaybeUninit<u8>],
    passed: &mut Vec<OwnedFd>,
) -> io::Result<Option<Seen>> {
    control.fill(MaybeUninit::new(0));
    let mut received_control = RecvAncillaryBuffer::new(&mut *control);
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = retry_on_intr(|| {
        let mut into = [IoSliceMut::new(buffer)];
        recvmsg(&fd, &mut into, &mut received_control, flags)
    });
    let received = match received {
        Ok(received) => received,
        Err(Errno::AGAIN) => return Ok(None),
        // Nothing waits, and there is no peer (any more).
        Err(Errno::CONNRESET | Errno::NOTCONN | Errno::INVAL) => return Ok(None),
        Err(e) => return Err(e.into()),
    };
    for message in received_control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            passed.extend(descriptors);
        }
    }
    drop(received_control);
    // SAFETY: all of it was filled above, and the kernel writes whole bytes.
    close_pidfds(unsafe { &*(ptr::from_ref(control) as *const [u8]) });
    // There is room for all descriptors of a message, but this process may have no more of them.
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(Errno::MFILE.into());
    }
    let whole = !received.flags.contains(ReturnFlags::TRUNC);
    Ok(Some(Seen { length: received.bytes, from: received.address, whole }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::sockets::options;
    use rustix::net::{
        AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags,
        SocketType, sendmsg, socketpair,
    };
    use std::io::IoSlice;

    fn pair(kind: SocketType) -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap()
    }

    fn send(by: &OwnedFd, data: &[u8], passed: &[&OwnedFd]) {
        let passed: Vec<BorrowedFd> = passed.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !passed.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(&passed)));
        }
        let sent = sendmsg(by, &[IoSlice::new(data)], &mut control, SendFlags::empty()).unwrap();
        assert_eq!(sent, data.len());
    }

    fn seen(fd: &OwnedFd) -> Vec<(Vec<u8>, usize)> {
        let pieces = peek(fd, &mut Vec::new()).unwrap();
        pieces.into_iter().map(|piece| (piece.data, piece.passed.len())).collect()
    }

    /// Peeks three times, and checks that each sees the same and SO_PEEK_OFF stays as set.
    fn seen_again(fd: &OwnedFd) -> Vec<(Vec<u8>, usize)> {
        let first = seen(fd);
        sys::set_socket_option(fd, libc::SOL_SOCKET, SO_PEEK_OFF, &3i32.to_ne_bytes()).unwrap();
        assert_eq!(seen(fd), first);
        assert_eq!(sys::socket_number(fd, libc::SOL_SOCKET, SO_PEEK_OFF).unwrap(), 3);
        set_peek_offset(fd, -1).unwrap();
        assert_eq!(seen(fd), first);
        first
    }

    #[test]
    fn descriptors_of_a_stream_come_with_what_they_were_sent_with() {
        let (one, other) = pair(SocketType::STREAM);
        let (a, b) = pair(SocketType::DGRAM);
        send(&one, b"first", &[]);
        send(&one, b"second", &[]);
        send(&one, b"third", &[&a, &b]);
        let mut expected = vec![(b"firstsecond".to_vec(), 0), (b"third".to_vec(), 2)];
        assert_eq!(seen_again(&other), expected);
        // Behind it, others; and one that a large part lies in front of.
        send(&one, b"x", &[&a]);
        send(&one, &[7; 50_000], &[]);
        send(&one, b"last", &[&b]);
        send(&one, b"end", &[]);
        expected.extend([(b"x".to_vec(), 1), (vec![7; 50_000], 0), (b"last".to_vec(), 1)]);
        expected.push((b"end".to_vec(), 0));
        assert_eq!(seen_again(&other), expected);
        // What has been read in part has handed its descriptors over.
        let mut buffer = [0; 12];
        assert_eq!(rustix::io::read(&other, &mut buffer).unwrap(), 12);
        expected[0] = (b"hird".to_vec(), 0);
        expected.remove(1);
        assert_eq!(seen_again(&other), expected);
    }

    #[test]
    fn descriptors_of_messages_stay_with_them() {
        for kind in [SocketType::DGRAM, SocketType::SEQPACKET] {
            let (one, other) = pair(kind);
            let (a, b) = pair(SocketType::STREAM);
            send(&one, b"", &[&a]);
            send(&one, b"first", &[]);
            send(&one, b"second", &[&a, &b]);
            let expected = [(b"".to_vec(), 1), (b"first".to_vec(), 0), (b"second".to_vec(), 2)];
            assert_eq!(seen_again(&other), expected);
        }
    }

    /// Takes what waits, for as long as something does; "!" stands for an error.
    fn received(fd: &OwnedFd) -> String {
        let mut all = String::new();
        let mut buffer = [0; 16];
        loop {
            match rustix::net::recv(fd, &mut buffer[..], RecvFlags::DONTWAIT) {
                Ok((0, _)) | Err(Errno::AGAIN) => return all,
                Ok((length, _)) => all.push_str(str::from_utf8(&buffer[..length]).unwrap()),
                Err(error) => {
                    assert_eq!(error, Errno::CONNRESET);
                    all.push('!');
                }
            }
        }
    }

    #[test]
    fn an_error_is_left_to_the_program() {
        // The other end has gone, and not read all.
        let gone = |kind, passed: &[&OwnedFd]| {
            let (one, other) = pair(kind);
            send(&one, b"a", passed);
            send(&one, b"b", passed);
            send(&other, b"unread", &[]);
            other
        };
        let (a, _b) = pair(SocketType::STREAM);
        for passed in [&[][..], &[&a]] {
            let other = gone(SocketType::SEQPACKET, passed);
            let error = peek(&other, &mut Vec::new()).err().expect("messages behind an error");
            assert!(error.to_string().contains("ECONNRESET"), "{error}");
            assert!(peek_descriptors(&other).unwrap().is_empty());
            assert_eq!(received(&other), "!ab");
            let other = gone(SocketType::STREAM, passed);
            let seen: Vec<u8> = seen_again(&other).into_iter().flat_map(|piece| piece.0).collect();
            assert_eq!(seen, b"ab");
            assert_eq!(received(&other), "ab!");
        }
        // Nothing waits but the error.
        let (one, other) = pair(SocketType::SEQPACKET);
        send(&other, b"unread", &[]);
        drop(one);
        assert_eq!(seen(&other), []);
        assert_eq!(received(&other), "!");
    }

    #[test]
    fn urgent_data_is_not_taken_for_other_data() {
        for inline in [0i32, 1] {
            let (one, other) = pair(SocketType::STREAM);
            let option = (libc::SOL_SOCKET, libc::SO_OOBINLINE);
            sys::set_socket_option(&other, option.0, option.1, &inline.to_ne_bytes()).unwrap();
            send(&one, b"abc", &[]);
            match rustix::net::send(&one, b"!", SendFlags::OOB) {
                Ok(_) => {}
                // Before Linux 5.15, and where it is left out.
                Err(Errno::OPNOTSUPP) => return,
                Err(error) => panic!("{error}"),
            }
            send(&one, b"def", &[]);
            let error = peek(&other, &mut Vec::new()).err().expect("urgent data");
            assert!(error.to_string().contains("MSG_OOB"), "{error}");
            if inline == 0 {
                let mut byte = [0];
                let urgent = rustix::net::recv(&other, &mut byte[..], RecvFlags::OOB);
                assert_eq!((urgent.map(|(length, _)| length), &byte), (Ok(1), b"!"));
                assert_eq!(seen_again(&other), [(b"abc".to_vec(), 0), (b"def".to_vec(), 0)]);
            }
        }
    }

    #[test]
    fn senders_are_not_held_open() {
        for kind in [SocketType::STREAM, SocketType::DGRAM, SocketType::SEQPACKET] {
            let (one, other) = pair(kind);
            let on = 1i32.to_ne_bytes();
            sys::set_socket_option(&other, libc::SOL_SOCKET, libc::SO_PASSCRED, &on).unwrap();
            // Linux has it since 6.5.
            let _ = sys::set_socket_option(&other, libc::SOL_SOCKET, options::SO_PASSPIDFD, &on);
            let (a, _b) = pair(SocketType::STREAM);
            send(&one, b"first", &[&a; 253]);
            send(&one, b"second", &[&a]);
            // Numbers of descriptors are given out from below, but other tests may have some.
            let pidfds = || {
                let all = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
                let links = all.filter_map(|one| std::fs::read_link(one.path()).ok());
                links.filter(|link| link.to_string_lossy().contains("pidfd")).count()
            };
            let before = pidfds();
            for _ in 0..20 {
                assert_eq!(peek_descriptors(&other).unwrap().len(), 253);
                assert_eq!(seen(&other), [(b"first".to_vec(), 253), (b"second".to_vec(), 1)]);
            }
            assert!(pidfds() < before + 20, "{} and {before}", pidfds());
        }
    }

    #[test]
    fn a_glance_sees_the_next_descriptors_alone() {
        for kind in [SocketType::STREAM, SocketType::DGRAM, SocketType::SEQPACKET] {
            let (one, other) = pair(kind);
            let (a, b) = pair(SocketType::STREAM);
            assert_eq!(peek_descriptors(&other).unwrap().len(), 0);
            send(&one, b"first", &[&a, &b]);
            send(&one, b"second", &[&a]);
            assert_eq!(peek_descriptors(&other).unwrap().len(), 2);
            set_peek_offset(&other, 2).unwrap();
            assert_eq!(peek_descriptors(&other).unwrap().len(), 0);
            assert_eq!(sys::socket_number(&other, libc::SOL_SOCKET, SO_PEEK_OFF).unwrap(), 2);
        }
    }
}
