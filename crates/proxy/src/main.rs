//! `kedge-proxy`: started by `kedge run` with a client's socket.

use kedge_proxy::ServeError;
use kedge_proxy::joblog::JobLog;
use kedge_proxy::options::Options;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::process::ExitCode;
use std::sync::Arc;

fn main() -> ExitCode {
    let options = match Options::parse(std::env::args_os().skip(1)) {
        Ok(options) => options,
        Err(error) => return fail(&error.to_string()),
    };
    let Some((socket, control)) = only_sockets(options.fd, options.control) else {
        return fail(&format!("descriptor {} or the next is not open", options.fd));
    };
    ignore_signals();
    one_heap();
    // Keeps no directory busy.
    let _ = std::env::set_current_dir("/");
    let log = match &options.log {
        None => JobLog::none(),
        Some(path) => match JobLog::open(path, format!("proxy[{}]", std::process::id())) {
            Ok(log) => log,
            Err(error) => return fail(&format!("{}: {error}", path.display())),
        },
    };
    let log = Arc::new(log);
    match kedge_proxy::serve(socket, control, &options, log.clone()) {
        Ok(never) => match never {},
        Err(error) => {
            log.line(&error.to_string());
            match error {
                ServeError::NoDevice(_) => ExitCode::SUCCESS,
                _ => ExitCode::FAILURE,
            }
        }
    }
}

/// Has all threads share the first heap. A heap of a thread's own is a reservation of 128 MiB, which would
/// move what the driver places after it: a proxy that takes this one's place has other threads by then.
fn one_heap() {
    // SAFETY: a plain call before any other thread is there.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

fn fail(message: &str) -> ExitCode {
    eprintln!("kedge-proxy: {message}");
    ExitCode::from(2)
}

/// Takes the client's socket, and the supervisor's in the next descriptor, and closes whatever else the
/// supervisor's shell left open: a pipe held here would keep its reader waiting.
fn only_sockets(fd: RawFd, control: bool) -> Option<(OwnedFd, Option<OwnedFd>)> {
    let last = if control { fd.checked_add(1)? } else { fd };
    // SAFETY: plain calls; F_GETFD tells whether the number is a descriptor at all. Called first
    // thing in main, so no other descriptor above stderr is in use.
    unsafe {
        let open = |fd| libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) >= 0;
        if fd < 3 || !open(fd) || !open(last) {
            return None;
        }
        if fd > 3 {
            libc::syscall(libc::SYS_close_range, 3, fd - 1, 0);
        }
        libc::syscall(libc::SYS_close_range, last + 1, libc::c_uint::MAX, 0);
        let control = control.then(|| OwnedFd::from_raw_fd(last));
        Some((OwnedFd::from_raw_fd(fd), control))
    }
}

/// The proxy ends when its client ends, and not before because of a key that was pressed or a
/// signal that was meant for the job.
fn ignore_signals() {
    // A limit on files must end a checkpoint (EFBIG), not its proxy.
    let limit = libc::SIGXFSZ;
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT, libc::SIGTSTP, limit] {
        // SAFETY: ignoring a signal installs no handler.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}
