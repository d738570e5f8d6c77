//! Listens on the client's socket: ends this process when the client has gone, and hears which host
//! functions have returned. The dispatcher cannot hear it: the driver may hold it up until then.

use crate::joblog::JobLog;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

/// A descriptor that becomes readable when process `pid` ends, whoever else holds its socket: a
/// child that the client forked keeps the connection open, but it is not the client.
pub(crate) fn pidfd(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: a plain system call that makes a descriptor (close-on-exec by definition).
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid as libc::pid_t, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: pidfd_open just returned it; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Starts the thread that ends the process once the client has, and that calls `returned` with the
/// token of each host function that has returned; `false` means that it was never asked for.
pub(crate) fn start(
    client: OwnedFd,
    socket: BorrowedFd<'_>,
    log: Arc<JobLog>,
    returned: impl Fn(u64) -> bool + Send + 'static,
) -> io::Result<()> {
    let socket = socket.try_clone_to_owned()?;
    let watch = move || {
        let reason = wait(&client, &socket, returned);
        log.note(reason);
        // Not exit(): other threads run kernels, and nothing here is worth an orderly end.
        // SAFETY: ends the process at once.
        unsafe { libc::_exit(0) }
    };
    std::thread::Builder::new().name("watch".into()).stack_size(64 << 10).spawn(watch)?;
    Ok(())
}

/// Hears the client until it has gone, or breaks the rules: which of them.
pub(crate) fn wait(
    client: &OwnedFd,
    socket: &OwnedFd,
    returned: impl Fn(u64) -> bool,
) -> &'static str {
    let mut tokens = Tokens::default();
    let poll = |fd: &OwnedFd, events| libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 };
    let mut fds = [poll(client, libc::POLLIN), poll(socket, libc::POLLIN | libc::POLLRDHUP)];
    loop {
        // SAFETY: two pollfds, alive for the call.
        let n = unsafe { libc::poll(fds.as_mut_ptr(), 2, -1) };
        if n <= 0 {
            continue;
        }
        return if fds[0].revents != 0 {
            "the client has ended"
        } else if fds[1].revents & (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR) != 0 {
            "the client has closed its connection"
        } else if tokens.take(socket, &returned) {
            continue;
        } else {
            "the client told of a host function that it was not asked to run: ending"
        };
    }
}

/// What has arrived of the tokens, 8 bytes each.
#[derive(Default)]
struct Tokens {
    bytes: [u8; 8],
    have: usize,
}

impl Tokens {
    /// Takes what has arrived without waiting for more; `false` where a token means nothing.
    fn take(&mut self, socket: &OwnedFd, returned: impl Fn(u64) -> bool) -> bool {
        let rest = &mut self.bytes[self.have..];
        let (to, flags) = (rest.as_mut_ptr().cast(), libc::MSG_DONTWAIT);
        // SAFETY: a live buffer of that length.
        let n = unsafe { libc::recv(socket.as_raw_fd(), to, rest.len(), flags) };
        // An error or an end shows in the next poll.
        self.have += usize::try_from(n).unwrap_or(0);
        if self.have < self.bytes.len() {
            return true;
        }
        self.have = 0;
        returned(u64::from_le_bytes(self.bytes))
    }
}
