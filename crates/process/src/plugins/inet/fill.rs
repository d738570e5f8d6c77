//! Data that waits in TCP connections: looked at, and put into new ones.

use super::room::{Room, let_through};
use super::save::Known;
use super::tcp::{self, State};
use crate::plugins::apart::survive;
use crate::plugins::error::{Context, PluginError};
use crate::plugins::job::Capture;
use crate::plugins::sockets::options::SO_BUF_LOCK;
use crate::plugins::sys;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::{Errno, ioctl_fionread, retry_on_intr};
use rustix::net::{RecvFlags, SendFlags, recv, send, sockopt};
use std::io;
use std::time::{Duration, Instant};

/// How long data may take from one end to the other on this machine.
const ARRIVAL: Duration = Duration::from_millis(20);
/// How long a send may wait for room that is known to be there.
const ROOM: Duration = Duration::from_secs(5);
/// A fresh connection takes that much.
pub(super) const SMALL: usize = 32 << 10;
/// Most that one connection holds (`net.ipv4.tcp_rmem` and `tcp_wmem` at their largest, together).
pub(super) const MAX_WAITING: usize = 256 << 20;

/// What a socket could read now; it stays there.
pub(super) fn waiting(fd: &OwnedFd) -> io::Result<Vec<u8>> {
    let count = usize::try_from(ioctl_fionread(fd)?).unwrap_or(usize::MAX);
    if count > MAX_WAITING {
        return Err(io::Error::other("more waits than any connection holds"));
    }
    // The kernel does not count what is behind it.
    if urgent(fd)? {
        return Err(io::Error::other("urgent data waits (MSG_OOB), which cannot be saved yet"));
    }
    let mut data = vec![0; count];
    if count == 0 {
        return Ok(data);
    }
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let (got, _) = retry_on_intr(|| recv(fd, &mut data[..], flags))?;
    if got < count {
        return Err(io::Error::other("what waits cannot be read as a whole"));
    }
    Ok(data)
}

fn urgent(fd: &OwnedFd) -> io::Result<bool> {
    let mut fds = [PollFd::new(fd, PollFlags::PRI)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    retry_on_intr(|| poll(&mut fds, Some(&now)))?;
    Ok(fds[0].revents().contains(PollFlags::PRI))
}

/// Everything between two ends of the job: what waits at the receiver, once what the sender still
/// holds has arrived there. All of it stays there.
pub(super) fn in_flight(
    capture: &Capture,
    sender: &Known,
    receiver: &Known,
) -> Result<Vec<u8>, PluginError> {
    let name = capture.job.describe(capture.file(receiver.index));
    let what = || format!("read what waits in {name}");
    let begin = Instant::now();
    while held(sender).to(what)? > 0 && begin.elapsed() < ARRIVAL {
        std::thread::sleep(Duration::from_micros(100));
    }
    let left = match held(sender).to(what)? {
        0 => 0,
        held => {
            let unread = ioctl_fionread(&receiver.fd).to(what)?;
            pull(sender, receiver, held + unread as usize).to(what)?
        }
    };
    if left > 0 {
        return Err(PluginError::Refused(format!(
            "{name} has no room for {left} bytes that are on their way to it: try again when it has \
             been read from, or raise net.core.rmem_max"
        )));
    }
    waiting(&receiver.fd).to(what)
}

/// Lets what the sender holds arrive; tells how much has not. What this changes for that is put
/// back even if this process is killed.
fn pull(sender: &Known, receiver: &Known, bytes: usize) -> io::Result<usize> {
    if bytes > MAX_WAITING {
        return Err(io::Error::other("more waits than any connection holds"));
    }
    let probe = tcp::info(&sender.fd)?.probe;
    survive(|| let_through(&receiver.fd, bytes, probe, || held(sender)))?
}

/// Bytes that the sender holds; a FIN that is under way counts as one in the kernel.
pub(super) fn held(sender: &Known) -> io::Result<usize> {
    // What an ended connection holds will never leave it.
    if sender.info.is_some_and(|info| info.state == State::CLOSED) {
        return Ok(0);
    }
    let count = sys::unsent(&sender.fd)?;
    let finished = sender.info.is_some_and(|info| info.state.finished());
    Ok(if finished { count.saturating_sub(1) } else { count })
}

/// Sends all of `data`, which has room.
pub(super) fn put(sender: impl AsFd, mut data: &[u8]) -> io::Result<()> {
    let wait = Timespec { tv_sec: ROOM.as_secs() as i64, tv_nsec: 0 };
    while !data.is_empty() {
        match retry_on_intr(|| send(&sender, data, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)) {
            Ok(count) => data = &data[count.min(data.len())..],
            Err(Errno::AGAIN) => {
                let mut fds = [PollFd::new(&sender, PollFlags::OUT)];
                if retry_on_intr(|| poll(&mut fds, Some(&wait)))? == 0 {
                    return Err(io::Error::from(io::ErrorKind::TimedOut));
                }
            }
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// Fills a fresh connection. Its buffers are small and grow with use; so they are made large for
/// this, and then left to grow again.
pub(super) fn refill(
    sender: impl AsFd,
    receiver: impl AsFd,
    data: &[u8],
) -> Result<(), PluginError> {
    let what = || {
        format!(
            "put {} bytes back into a connection (see net.core.wmem_max, net.core.rmem_max)",
            data.len()
        )
    };
    if data.len() <= SMALL {
        return put(sender, data).to(what);
    }
    let room = Room::for_all(receiver.as_fd(), data.len());
    let put = send_all(sender, data).to(what);
    room.leave();
    put
}

/// Sends all of `data`, for which the receiver has room, by a sender whose buffer grows for that.
pub(super) fn send_all(sender: impl AsFd, data: &[u8]) -> io::Result<()> {
    if data.len() <= SMALL {
        return put(sender, data);
    }
    let lock = sys::socket_number(&sender, libc::SOL_SOCKET, SO_BUF_LOCK).unwrap_or(0);
    // The kernel doubles and bounds it; root may go beyond.
    let _ = sockopt::set_socket_send_buffer_size_force(&sender, data.len())
        .or_else(|_| sockopt::set_socket_send_buffer_size(&sender, data.len()));
    let put = put(&sender, data);
    // Where the kernel (before 5.14) cannot, the buffer stays as it is.
    let _ = sys::set_socket_option(&sender, libc::SOL_SOCKET, SO_BUF_LOCK, &lock.to_ne_bytes());
    put
}
