//! `kedge-proxy`: started by `kedge run` with a client's socket.

use kedge_control::joblog::JobLog;
use kedge_control::machine::{DESCRIBE, Machine};
use kedge_control::proxy::Orders;
use kedge_control::{error, refused};
use kedge_device_nvidia::{driver_path, gpu_nodes, obstacle};
use kedge_proxy::backend::Ready;
use kedge_proxy::holder::{self, Words};
use kedge_proxy::management;
use kedge_proxy::options::{Hold, Options};
use kedge_proxy::remote::{self, far::FarError};
use kedge_proxy::warm::{self, Adopted, WarmError};
use kedge_proxy::{ServeError, end_orderly};
use kedge_socket::{Channel, SocketError};
use std::fs::File;
use std::io::Write;
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::process::ExitCode;
use std::sync::Arc;

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.len() == 1 && arguments.any(|argument| argument == DESCRIBE) {
        return describe();
    }
    let options = match Options::parse(std::env::args_os().skip(1)) {
        Ok(options) => options,
        Err(error) => return fail(&error.to_string()),
    };
    if options.far {
        return serve_far(&options);
    }
    if options.detach {
        return serve_detached(options);
    }
    if let Some(hold) = &options.hold {
        return hold_memory(hold, &options);
    }
    let Some((socket, control)) = only_sockets(options.fd, options.control || options.management)
    else {
        return fail(&format!("descriptor {} or the next is not open", options.fd));
    };
    ignore_signals();
    one_heap();
    // Keeps no directory busy.
    let _ = std::env::set_current_dir("/");
    match run(socket, control, options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error),
    }
}

/// Serves a session whose near end is on another machine: standard input is its line, standard
/// output a server's channel.
fn serve_far(options: &Options) -> ExitCode {
    out_of_the_server();
    let taken = std::io::stdin().as_fd().try_clone_to_owned().and_then(|line| {
        let control = std::io::stdout().as_fd().try_clone_to_owned()?;
        Ok((line, control))
    });
    let (line, control) = match taken {
        Ok(taken) => taken,
        Err(error) => return fail(&error.to_string()),
    };
    no_new_rights();
    ignore_signals();
    // Whoever wants the devices back ends it so: its server is not its master for ever.
    // SAFETY: a default disposition installs no handler.
    unsafe { libc::signal(libc::SIGTERM, libc::SIG_DFL) };
    one_heap();
    let _ = std::env::set_current_dir("/");
    match remote::far::serve(TcpStream::from(line), Channel::new(control), options) {
        Ok(()) | Err(FarError::NoDevice(_)) => ExitCode::SUCCESS,
        Err(error) => fail(&error.to_string()),
    }
}

/// Serves the program that has started it, whose socket is standard input. The process that the
/// program knows of ends at once; another serves, which is no child of the program's: a program may
/// wait for all of its children.
fn serve_detached(mut options: Options) -> ExitCode {
    // SAFETY: this process has one thread as yet, so that the child may call anything.
    match unsafe { libc::fork() } {
        -1 => return fail(&std::io::Error::last_os_error().to_string()),
        0 => {}
        _ => return ExitCode::SUCCESS,
    }
    out_of_the_server();
    let taken = File::open("/dev/null").and_then(|null| {
        let client = std::io::stdin().as_fd().try_clone_to_owned()?;
        // SAFETY: both numbers are open descriptors; standard input has no other owner.
        if unsafe { libc::dup2(null.as_raw_fd(), 0) } < 0 {
            return Err(std::io::Error::last_os_error());
        }
        Ok(client)
    });
    let client = match taken {
        Ok(client) => client,
        Err(error) => return fail(&error.to_string()),
    };
    no_new_rights();
    ignore_signals();
    one_heap();
    let _ = std::env::set_current_dir("/");
    // The program's log may be in a folder that is not there, or read-only: no reason to be gone.
    if open_log(&options).is_err() {
        options.log = None;
    }
    match run(client, None, options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error),
    }
}

/// Holds device memory for a cache. How that begins is told by one line on standard output.
fn hold_memory(hold: &Hold, options: &Options) -> ExitCode {
    out_of_the_server();
    // A driver's device takes these two over, as kernels print there.
    let (told, words) = match (own_copy(std::io::stdout()), own_copy(std::io::stderr())) {
        (Ok(told), Ok(words)) => (told, Words::new(words)),
        (Err(error), _) | (_, Err(error)) => return fail(&error.to_string()),
    };
    no_new_rights();
    ignore_signals();
    // Not to be taken for a proxy.
    // SAFETY: names this thread, the process's first, by a string that ends with NUL.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"kedge-holder".as_ptr()) };
    let _ = std::env::set_current_dir("/");
    match holder::serve(hold, &options.backend, words, || writeln!(&told, "ready")) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Whoever started it tells that where it is looked for.
            let _ = writeln!(&told, "{error}");
            ExitCode::FAILURE
        }
    }
}

/// Returns a copy of a descriptor, which stays what it is when that one leads elsewhere.
fn own_copy(of: impl AsFd) -> std::io::Result<File> {
    Ok(of.as_fd().try_clone_to_owned()?.into())
}

/// Tells what devices this machine has to whoever reads standard output, a socket.
fn describe() -> ExitCode {
    let machine = Machine { driver: driver_path(), gpus: gpu_nodes().len(), obstacle: obstacle() };
    let told = std::io::stdout().as_fd().try_clone_to_owned().map_err(SocketError::from);
    match told.and_then(|socket| machine.tell(socket)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error.to_string()),
    }
}

/// Serves a client, which may be still to come. An error: there is no log to say it in.
fn run(socket: OwnedFd, control: Option<OwnedFd>, options: Options) -> Result<(), String> {
    if options.management {
        // Not to be taken for a proxy.
        // SAFETY: names this thread, the process's first, by a string that ends with NUL.
        unsafe { libc::prctl(libc::PR_SET_NAME, c"kedge-nvml".as_ptr()) };
        let (log, listener) = (open_log(&options)?, control.ok_or("nothing to listen on")?);
        return management::serve(&socket, listener, options.backend, log)
            .map_err(|e| e.to_string());
    }
    if !options.warm {
        let log = open_log(&options)?;
        end_orderly(serve(socket, control.map(Orders::on), &options, &log, None));
    }
    let adopted = match warm::wait(socket, &options) {
        // What it says is nobody's business any more.
        Err(WarmError::Unwanted | WarmError::NoDevice(_)) => return Ok(()),
        other => other.map_err(|error| error.to_string())?,
    };
    let Adopted { client, control, options, log, ready } = adopted;
    end_orderly(serve(client, Some(control), &options, &log, Some(ready)))
}

fn open_log(options: &Options) -> Result<Arc<JobLog>, String> {
    let Some(path) = &options.log else { return Ok(Arc::new(JobLog::none())) };
    let log = JobLog::open(path, format!("proxy[{}]", std::process::id()));
    log.map(Arc::new).map_err(|error| format!("{}: {error}", path.display()))
}

/// Serves a client to its end: the status to end with.
fn serve(
    client: OwnedFd,
    control: Option<Orders>,
    options: &Options,
    log: &Arc<JobLog>,
    ready: Option<Ready>,
) -> u8 {
    let Err(error) = kedge_proxy::serve(client, control, options, log.clone(), ready);
    match error {
        ServeError::NoDevice(_) | ServeError::NoSession(_) | ServeError::NoPlaces(_) => {
            refused!(log, "{error}");
            0
        }
        _ => {
            error!(log, "{error}");
            1
        }
    }
}

/// Leaves what else this process has of its server: the terminal, by a session of its own, and
/// descriptors that the server has inherited open.
fn out_of_the_server() {
    // SAFETY: plain calls that read and write no memory. What is closed is nobody's: this process
    // has one thread as yet, which has read its options and opened nothing.
    // `setsid` fails for a group's leader; a server starts no proxy as one.
    unsafe {
        libc::setsid();
        if libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0) != 0 {
            let limit = libc::sysconf(libc::_SC_OPEN_MAX).clamp(3, 1 << 16) as RawFd;
            (3..limit).for_each(|fd| {
                libc::close(fd);
            });
        }
    }
}

/// Has no program that this process may come to start give it rights.
fn no_new_rights() {
    // SAFETY: a plain call that changes a bit of this process's.
    unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
}

/// Has all threads share the first heap. A heap of a thread's own is a reservation of 128 MiB,
/// which would move what the driver places after it: a proxy that takes this one's place has other
/// threads by then.
fn one_heap() {
    // SAFETY: a plain call before any other thread is there.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

fn fail(message: &str) -> ExitCode {
    // A far proxy's may be a socket that takes nothing more.
    let _ = writeln!(std::io::stderr(), "kedge-proxy: {message}");
    ExitCode::from(2)
}

/// Takes the client's socket, and the supervisor's in the next descriptor, and closes whatever else
/// the supervisor's shell left open: a pipe held here would keep its reader waiting.
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
