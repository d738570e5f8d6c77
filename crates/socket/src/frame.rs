//! Frames and descriptors over the unix socket: a `u32` length, then the message.

use crate::error::SocketError;
use kedge_wire::Wire;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

/// Longest frame, bytes: a welcome with sixteen devices' attributes is the largest.
const MAX_FRAME: u32 = 256 << 10;
/// Descriptors that one frame may carry.
pub const MAX_FDS: usize = 4;
/// Room for the control message of `MAX_FDS` descriptors, aligned for its header.
type Control = [u64; 8];

/// A moment until which an exchange may take.
#[derive(Debug, Clone, Copy)]
pub struct Deadline {
    start: Instant,
    limit: Duration,
}

impl Deadline {
    pub fn after(limit: Duration) -> Deadline {
        Deadline { start: Instant::now(), limit }
    }

    /// Waits until the socket is ready for `events`, or the deadline.
    pub fn poll(&self, fd: BorrowedFd<'_>, events: libc::c_short) -> Result<(), SocketError> {
        loop {
            let Some(left) = self.limit.checked_sub(self.start.elapsed()) else {
                return Err(SocketError::TimedOut { seconds: self.limit.as_secs() });
            };
            let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 };
            // SAFETY: one pollfd, alive for the call.
            let n = unsafe { libc::poll(&mut poll, 1, left.as_millis() as libc::c_int + 1) };
            match n {
                1.. => return Ok(()),
                0 => {}
                _ => match io::Error::last_os_error() {
                    e if e.kind() == io::ErrorKind::Interrupted => {}
                    e => return Err(e.into()),
                },
            }
        }
    }
}

/// Sends `message`; `fds` go with its first byte.
pub fn send<T: Wire>(
    socket: BorrowedFd<'_>,
    message: &T,
    fds: &[BorrowedFd<'_>],
    deadline: Deadline,
) -> Result<(), SocketError> {
    let mut frame = vec![0; 4];
    kedge_wire::encode(message, &mut frame);
    let len = (frame.len() - 4) as u32;
    if len > MAX_FRAME {
        return Err(SocketError::TooLong { len, max: MAX_FRAME });
    }
    frame[..4].copy_from_slice(&len.to_le_bytes());
    let mut sent = 0;
    while sent < frame.len() {
        deadline.poll(socket, libc::POLLOUT)?;
        let fds = if sent == 0 { fds } else { &[] };
        match send_some(socket, &frame[sent..], fds) {
            Ok(n) => sent += n,
            Err(e) if would_block(&e) => {}
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => return Err(SocketError::Closed),
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// Receives one frame and the descriptors that came with it.
pub fn receive<T: Wire>(
    socket: BorrowedFd<'_>,
    deadline: Deadline,
) -> Result<(T, Vec<OwnedFd>), SocketError> {
    let mut fds = Vec::new();
    let mut len = [0; 4];
    receive_exact(socket, &mut len, &mut fds, deadline)?;
    let len = u32::from_le_bytes(len);
    if len > MAX_FRAME {
        return Err(SocketError::TooLong { len, max: MAX_FRAME });
    }
    let mut frame = vec![0; len as usize];
    receive_exact(socket, &mut frame, &mut fds, deadline)?;
    Ok((kedge_wire::decode(&frame)?, fds))
}

fn receive_exact(
    socket: BorrowedFd<'_>,
    out: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    deadline: Deadline,
) -> Result<(), SocketError> {
    let mut done = 0;
    while done < out.len() {
        deadline.poll(socket, libc::POLLIN)?;
        match receive_some(socket, &mut out[done..], fds) {
            Ok(0) => return Err(SocketError::Closed),
            Ok(n) => done += n,
            Err(e) if would_block(&e) => {}
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset => {
                return Err(SocketError::Closed);
            }
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// Sends `bytes`, waiting for as long as it takes.
pub fn send_all(socket: BorrowedFd<'_>, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let (from, flags) = (bytes.as_ptr().cast(), libc::MSG_NOSIGNAL);
        // SAFETY: a live buffer of that length.
        match unsafe { libc::send(socket.as_raw_fd(), from, bytes.len(), flags) } {
            n if n >= 0 => bytes = &bytes[n as usize..],
            _ => match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::Interrupted => {}
                e => return Err(e),
            },
        }
    }
    Ok(())
}

fn would_block(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Sends as many of `bytes` as fit without waiting, and `fds` with the first of them.
///
/// Returns how many bytes went. More than [`MAX_FDS`] descriptors are not sent.
pub fn send_some(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> io::Result<usize> {
    let mut control: Control = Default::default();
    let payload = std::mem::size_of_val(fds);
    debug_assert!(fds.len() <= MAX_FDS);
    let mut iov = libc::iovec { iov_base: bytes.as_ptr() as *mut _, iov_len: bytes.len() };
    // SAFETY: `msghdr` is plain data. All pointers are to locals alive for the call; the control
    // buffer is aligned for cmsghdr and holds MAX_FDS descriptors; sendmsg only reads.
    let n = unsafe {
        let mut msg: libc::msghdr = std::mem::zeroed();
        msg.msg_iov = &mut iov;
        msg.msg_iovlen = 1;
        if !fds.is_empty() && fds.len() <= MAX_FDS {
            msg.msg_control = control.as_mut_ptr().cast();
            msg.msg_controllen = libc::CMSG_SPACE(payload as u32) as usize;
            let cmsg = libc::CMSG_FIRSTHDR(&msg);
            (*cmsg).cmsg_level = libc::SOL_SOCKET;
            (*cmsg).cmsg_type = libc::SCM_RIGHTS;
            (*cmsg).cmsg_len = libc::CMSG_LEN(payload as u32) as usize;
            let raw = fds.iter().map(AsRawFd::as_raw_fd).collect::<Vec<RawFd>>();
            std::ptr::copy_nonoverlapping(raw.as_ptr().cast(), libc::CMSG_DATA(cmsg), payload);
        }
        libc::sendmsg(socket.as_raw_fd(), &msg, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT)
    };
    if n < 0 { Err(io::Error::last_os_error()) } else { Ok(n as usize) }
}

/// Receives what is there, without waiting; appends the descriptors that came with it to `fds`.
///
/// Returns how many bytes came; 0: the peer has closed its end.
pub fn receive_some(
    socket: BorrowedFd<'_>,
    out: &mut [u8],
    fds: &mut Vec<OwnedFd>,
) -> io::Result<usize> {
    let mut control: Control = Default::default();
    let mut iov = libc::iovec { iov_base: out.as_mut_ptr().cast(), iov_len: out.len() };
    // SAFETY: `msghdr` is plain data. recvmsg writes within `out` and `control`, which the header
    // describes; the kernel fills in well-formed control messages, walked with its own macros.
    // Every descriptor in them is new and ours alone.
    unsafe {
        let mut msg: libc::msghdr = std::mem::zeroed();
        msg.msg_iov = &mut iov;
        msg.msg_iovlen = 1;
        msg.msg_control = control.as_mut_ptr().cast();
        msg.msg_controllen = size_of::<Control>();
        let flags = libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT;
        let n = libc::recvmsg(socket.as_raw_fd(), &mut msg, flags);
        if n < 0 {
            return Err(io::Error::last_os_error());
        }
        let mut cmsg = libc::CMSG_FIRSTHDR(&msg);
        while !cmsg.is_null() {
            if (*cmsg).cmsg_level == libc::SOL_SOCKET && (*cmsg).cmsg_type == libc::SCM_RIGHTS {
                let bytes = (*cmsg).cmsg_len - libc::CMSG_LEN(0) as usize;
                let data = libc::CMSG_DATA(cmsg).cast::<RawFd>();
                for i in 0..bytes / size_of::<RawFd>() {
                    let fd = OwnedFd::from_raw_fd(data.add(i).read_unaligned());
                    // More than a handshake needs: closed at once.
                    if fds.len() < MAX_FDS {
                        fds.push(fd);
                    }
                }
            }
            cmsg = libc::CMSG_NXTHDR(&msg, cmsg);
        }
        Ok(n as usize)
    }
}

/// The process at the other end, as the kernel saw it when it connected.
pub fn peer_pid(socket: BorrowedFd<'_>) -> io::Result<u32> {
    Ok(peer_credentials(socket)?.pid as u32)
}

/// The user at the other end.
fn peer_uid(socket: BorrowedFd<'_>) -> io::Result<u32> {
    Ok(peer_credentials(socket)?.uid)
}

/// Whether the user at the other end is this process's.
pub fn is_own_user(socket: BorrowedFd<'_>) -> io::Result<bool> {
    // SAFETY: geteuid takes no arguments, touches no memory of ours and cannot fail.
    let own = unsafe { libc::geteuid() };
    Ok(peer_uid(socket)? == own)
}

fn peer_credentials(socket: BorrowedFd<'_>) -> io::Result<libc::ucred> {
    let mut cred = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: getsockopt writes at most `len` bytes into `cred`.
    let status = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            std::ptr::from_mut(&mut cred).cast(),
            &mut len,
        )
    };
    if status != 0 { Err(io::Error::last_os_error()) } else { Ok(cred) }
}

/// Whether the peer has closed its end (or died). One system call, never blocks.
pub fn hung_up(socket: BorrowedFd<'_>) -> bool {
    let mut poll = libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLRDHUP, revents: 0 };
    // SAFETY: one pollfd, alive for the call.
    let n = unsafe { libc::poll(&mut poll, 1, 0) };
    n > 0 && poll.revents != 0
}
