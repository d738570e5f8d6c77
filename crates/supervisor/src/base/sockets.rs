//! Sockets in a job's folder, and those that a process is started with.

use kedge_socket::address;
use std::fs;
use std::io;
use std::os::fd::RawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

/// The descriptor under which a process that kedge starts finds the first of the sockets that it is
/// handed; the others follow. A proxy's first is its client's, the next the supervisor's.
pub(crate) const FIRST_FD: RawFd = 3;

/// Listens on a socket in the job's folder.
pub(crate) fn listen(socket: &Path) -> io::Result<UnixListener> {
    let listener = address::listen(socket)?;
    // The folder is private already.
    fs::set_permissions(socket, PermissionsExt::from_mode(0o600))?;
    Ok(listener)
}

/// Whether it is connected to whoever listens at `socket`.
pub(crate) fn leads_to(end: &UnixStream, socket: &Path) -> bool {
    end.peer_addr()
        .is_ok_and(|peer| peer.as_pathname().is_some_and(|at| address::is_of(at, socket)))
}

/// In the child: gives the sockets their agreed numbers, open across exec.
pub(crate) fn hand_over<const N: usize>(fds: [RawFd; N]) -> io::Result<()> {
    // SAFETY: plain system calls on descriptors of the child. All are moved out of the way first:
    // one may have another's number.
    let failed = unsafe {
        let mut none = std::mem::MaybeUninit::uninit();
        libc::sigemptyset(none.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut());
        let away = fds.map(|fd| libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, FIRST_FD + N as RawFd));
        let placed = |(number, fd)| fd >= 0 && libc::dup2(fd, number) >= 0;
        !(FIRST_FD..).zip(away).all(placed)
    };
    if failed { Err(io::Error::last_os_error()) } else { Ok(()) }
}
