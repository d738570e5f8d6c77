//! Data that waits in TCP connections: read, and put back.

use super::save::Known;
use crate::plugins::error::{Context, PluginError};
use crate::plugins::job::Capture;
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
/// Most that one connection holds (`net.ipv4.tcp_rmem` and `tcp_wmem` at their largest, together).
const MAX_WAITING: usize = 256 << 20;

/// What a socket could read now; it stays there.
pub(super) fn waiting(fd: &OwnedFd) -> io::Result<Vec<u8>> {
    let count = usize::try_from(ioctl_fionread(fd)?).unwrap_or(usize::MAX);
    if count > MAX_WAITING {
        return Err(io::Error::other("more waits than any connection holds"));
    }
    let mut data = vec![0; count];
    if count == 0 {
        return Ok(data);
    }
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let (got, _) = retry_on_intr(|| recv(fd, &mut data[..], flags))?;
    if got < count {
        return Err(io::Error::other("what waits cannot be read as a whole (urgent data?)"));
    }
    Ok(data)
}

/// Everything between two ends of the job: what waits at the receiver and, if that has no room, what
/// the sender still holds. The latter needs taking out, and [`give_back`].
pub(super) fn in_flight(
    capture: &mut Capture,
    sender: &Known,
    receiver: &Known,
) -> Result<Vec<u8>, PluginError> {
    let name = capture.job.describe(capture.file(receiver.index));
    let what = || format!("read what waits in {name}");
    let begin = Instant::now();
    while held(sender).to(what)? > 0 {
        if begin.elapsed() < ARRIVAL {
            std::thread::sleep(Duration::from_micros(100));
            continue;
        }
        if sender.info.is_some_and(|info| info.state.finished()) {
            // Nothing could be given back through it.
            return Err(PluginError::Refused(format!(
                "{name} has not taken in what a sender that has finished sent: try again later"
            )));
        }
        let again = sender.fd.try_clone().to(what)?;
        let at = capture.taken.len();
        capture.taken.push((again, Vec::new()));
        // What was taken is given back whatever happens next.
        drain(sender, receiver, &mut capture.taken[at].1).to(what)?;
        return Ok(capture.taken[at].1.clone());
    }
    waiting(&receiver.fd).to(what)
}

/// Bytes that the sender holds; a FIN that is under way counts as one in the kernel.
fn held(sender: &Known) -> io::Result<usize> {
    let count = sys::unsent(&sender.fd)?;
    let finished = sender.info.is_some_and(|info| info.state.finished());
    Ok(if finished { count.saturating_sub(1) } else { count })
}

fn drain(sender: &Known, receiver: &Known, taken: &mut Vec<u8>) -> io::Result<()> {
    let mut buffer = vec![0; 1 << 20];
    let mut last = Instant::now();
    loop {
        match retry_on_intr(|| recv(&receiver.fd, &mut buffer[..], RecvFlags::DONTWAIT)) {
            Ok((0, _)) => return Ok(()),
            Ok((count, _)) => {
                taken.extend(&buffer[..count]);
                last = Instant::now();
            }
            Err(Errno::AGAIN) if held(sender)? == 0 && ioctl_fionread(&receiver.fd)? == 0 => {
                return Ok(());
            }
            Err(Errno::AGAIN) if last.elapsed() > ROOM => {
                return Err(io::Error::from(io::ErrorKind::TimedOut));
            }
            Err(Errno::AGAIN) => std::thread::sleep(Duration::from_micros(100)),
            Err(e) => return Err(e.into()),
        }
        if taken.len() > MAX_WAITING {
            return Err(io::Error::other("more waits than any connection holds"));
        }
    }
}

/// Sends what was taken out of live connections once more.
pub(super) fn give_back(capture: &mut Capture) -> Result<(), PluginError> {
    let mut first = Ok(());
    for (sender, data) in capture.taken.drain(..) {
        first =
            first.and(put(&sender, &data).to(|| "give back what was taken out of a connection"));
    }
    first
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
    /// A fresh connection takes that much.
    const SMALL: usize = 32 << 10;
    let what = || {
        format!(
            "put {} bytes back into a connection (see net.core.wmem_max, net.core.rmem_max)",
            data.len()
        )
    };
    if data.len() <= SMALL {
        return put(sender, data).to(what);
    }
    let locks = (buffer_locks(&sender), buffer_locks(&receiver));
    // The kernel doubles and bounds it; root may go beyond.
    let size = data.len();
    let _ = sockopt::set_socket_send_buffer_size_force(&sender, size)
        .or_else(|_| sockopt::set_socket_send_buffer_size(&sender, size));
    let _ = sockopt::set_socket_recv_buffer_size_force(&receiver, size)
        .or_else(|_| sockopt::set_socket_recv_buffer_size(&receiver, size));
    let put = put(&sender, data).to(what);
    set_buffer_locks(&sender, locks.0);
    set_buffer_locks(&receiver, locks.1);
    put
}

const SO_BUF_LOCK: i32 = 72;

fn buffer_locks(fd: impl AsFd) -> i32 {
    sys::socket_number(fd, libc::SOL_SOCKET, SO_BUF_LOCK).unwrap_or(0)
}

fn set_buffer_locks(fd: impl AsFd, locks: i32) {
    // Where the kernel (before 5.14) cannot, the buffers stay as they are.
    let _ = sys::set_socket_option(fd, libc::SOL_SOCKET, SO_BUF_LOCK, &locks.to_ne_bytes());
}
