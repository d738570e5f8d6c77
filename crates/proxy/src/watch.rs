//! Ends this process when its client has gone.

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

/// Starts the thread that ends the process once the client has.
pub(crate) fn start(client: OwnedFd, socket: BorrowedFd<'_>, log: Arc<JobLog>) -> io::Result<()> {
    let socket = socket.try_clone_to_owned()?;
    let watch = move || {
        let reason = wait(&client, &socket);
        log.note(reason);
        // Not exit(): other threads run kernels, and nothing here is worth an orderly end.
        // SAFETY: ends the process at once.
        unsafe { libc::_exit(0) }
    };
    std::thread::Builder::new().name("watch".into()).stack_size(64 << 10).spawn(watch)?;
    Ok(())
}

fn wait(client: &OwnedFd, socket: &OwnedFd) -> &'static str {
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
        } else {
            "the client sent bytes on a socket that carries none: ending"
        };
    }
}
