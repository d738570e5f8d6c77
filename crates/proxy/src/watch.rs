//! Listens on the client's socket: ends this process when the client has gone, hears which host
//! functions have returned, and takes descriptors. The dispatcher cannot hear it: the driver may
//! hold it up until then.

use crate::ending;
use kedge_control::joblog::JobLog;
use kedge_control::note;
use kedge_transport::{Announcement, Announcements};
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

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

/// The process that `pidfd` means, as this one's namespace has it.
pub(crate) fn process_of(pidfd: &OwnedFd) -> io::Result<u32> {
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd()))?;
    let pid = text.lines().find_map(|line| line.strip_prefix("Pid:")?.trim().parse().ok());
    // 0: a process that this namespace has not; -1: one that has ended.
    pid.filter(|pid| *pid > 0).ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// Ends the process if whoever is behind `control` goes away, until `done`. Its supervisor cannot:
/// it is not among that one's processes.
pub(crate) fn end_without(control: BorrowedFd<'_>, done: Arc<AtomicBool>) -> io::Result<()> {
    const LOOK_MS: libc::c_int = 100;
    let control = control.try_clone_to_owned()?;
    let watch = move || {
        let events = libc::POLLRDHUP;
        let mut fd = libc::pollfd { fd: control.as_raw_fd(), events, revents: 0 };
        while !done.load(Ordering::SeqCst) {
            // SAFETY: one pollfd, alive for the call.
            if unsafe { libc::poll(&mut fd, 1, LOOK_MS) } > 0 && !done.load(Ordering::SeqCst) {
                // SAFETY: ends the process at once.
                unsafe { libc::_exit(0) }
            }
        }
    };
    std::thread::Builder::new().name("wanted".into()).stack_size(64 << 10).spawn(watch)?;
    Ok(())
}

/// The thread that listens to the client. It goes on when this value is gone: a client outlives its
/// supervisor.
pub(crate) struct Watcher {
    stop: io::PipeWriter,
    thread: JoinHandle<()>,
}

impl Watcher {
    /// Listens no more: what the client says from now on is another process's to hear.
    pub(crate) fn end(mut self) {
        let _ = self.stop.write_all(&[1]);
        // It ends at once, and cannot panic.
        let _ = self.thread.join();
    }
}

/// Starts the thread that ends the process once the client has, and that calls `heard` with each
/// host function that has returned and each descriptor; `false` means that it breaks the rules.
pub(crate) fn start(
    client: OwnedFd,
    socket: BorrowedFd<'_>,
    log: Arc<JobLog>,
    heard: impl Fn(Announcement) -> bool + Send + 'static,
) -> io::Result<Watcher> {
    let socket = socket.try_clone_to_owned()?;
    let (stopped, stop) = io::pipe()?;
    let stopped = OwnedFd::from(stopped);
    let watch = move || {
        let Some(reason) = wait(&client, &socket, &stopped, heard) else { return };
        note!(log, "{reason}");
        ending::end_with_client()
    };
    let thread = std::thread::Builder::new().name("watch".into()).stack_size(64 << 10);
    Ok(Watcher { stop, thread: thread.spawn(watch)? })
}

/// Hears the client until it has gone, or breaks the rules: which of them. `None` once `stopped`
/// says so.
pub(crate) fn wait(
    client: &OwnedFd,
    socket: &OwnedFd,
    stopped: &OwnedFd,
    heard: impl Fn(Announcement) -> bool,
) -> Option<&'static str> {
    let mut arriving = Announcements::default();
    let poll = |fd: &OwnedFd, events| libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 };
    let mut fds = [
        poll(client, libc::POLLIN),
        poll(socket, libc::POLLIN | libc::POLLRDHUP),
        poll(stopped, libc::POLLIN),
    ];
    loop {
        // SAFETY: three pollfds, alive for the call.
        let n = unsafe { libc::poll(fds.as_mut_ptr(), 3, -1) };
        if n <= 0 {
            continue;
        }
        if fds[2].revents & libc::POLLIN != 0 {
            return None;
        }
        if fds[2].revents != 0 {
            // Nobody is left who could say so; poll passes over it.
            fds[2].fd = -1;
            continue;
        }
        return Some(if fds[0].revents != 0 {
            "the client has ended"
        } else if fds[1].revents & (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR) != 0 {
            "the client has closed its connection"
        } else if arriving.take(socket.as_fd()).is_none_or(&heard) {
            continue;
        } else {
            "the client told of a host function that it was not asked to run, or sent a descriptor that \
             nothing needs: ending"
        });
    }
}
