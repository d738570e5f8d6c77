//! A proxy that is made ready before it has a client: its devices are started, its memory is
//! reserved, its first context is there. It waits for a client, which it serves as any other proxy
//! would; nobody else comes after that one.

use crate::backend::{self, BackendConfig, BuildError, Ready};
use crate::options::{Options, OptionsError};
use kedge_control::joblog::JobLog;
use kedge_control::proxy::{Answer, Order, Orders};
use kedge_socket::SocketError;
use kedge_wire::Text;
use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use thiserror::Error;

/// It waits for as long as somebody may send a client.
const FOREVER: Duration = Duration::from_secs(u32::MAX as u64);
/// For an answer to be sent.
const SEND_LIMIT: Duration = Duration::from_secs(10);

#[derive(Debug, Error)]
pub enum WarmError {
    /// Whoever has started it has been told.
    #[error("no device: {0}")]
    NoDevice(#[from] BuildError),
    /// Nobody will send a client any more.
    #[error("it is not needed")]
    Unwanted,
    #[error("its supervisor cannot be reached: {0}")]
    Control(#[from] SocketError),
    #[error("its supervisor gives no orders that it knows")]
    NoControl,
    #[error("{0}")]
    Options(#[from] OptionsError),
    #[error("it was made ready for something else: {0}")]
    Other(&'static str),
    #[error("cannot open the job's log: {0}")]
    Log(io::Error),
}

/// A client has come.
pub struct Adopted {
    pub client: OwnedFd,
    pub control: Orders,
    pub options: Options,
    pub log: Arc<JobLog>,
    pub ready: Ready,
}

/// Makes everything ready that `options` ask for, and waits on `control` for a client.
pub fn wait(control: OwnedFd, options: &Options) -> Result<Adopted, WarmError> {
    let orders = Orders::on(control);
    let ready = backend::make_ready(&options.backend, &options.choice).inspect_err(|error| {
        let why = Text::truncated(error.to_string());
        // Who has gone needs no answer.
        let _ = orders.answer(&Answer::Failed { why }, &[], SEND_LIMIT);
    })?;
    orders.answer(&Answer::Yes {}, &[], SEND_LIMIT)?;
    let (order, fds) = match orders.next(FOREVER) {
        Err(SocketError::Closed) => return Err(WarmError::Unwanted),
        other => other?,
    };
    let Order::Serve { arguments } = order else { return Err(WarmError::NoControl) };
    let Ok([client, ending]) = <[OwnedFd; 2]>::try_from(fds) else {
        return Err(WarmError::NoControl);
    };
    let adopted = adopt(&options.backend, arguments.into_inner().into_iter().map(Text::into_inner));
    let (own, log) = adopted.inspect_err(|error| {
        let why = Text::truncated(error.to_string());
        let _ = orders.answer(&Answer::Failed { why }, &[], SEND_LIMIT);
    })?;
    let _ = ENDING.set(ending);
    orders.answer(&Answer::Yes {}, &[], SEND_LIMIT)?;
    Ok(Adopted { client, control: orders, options: own, log, ready })
}

/// The options of the job, which must be those that `made` was made for, and its log.
fn adopt(
    made: &BackendConfig,
    arguments: impl Iterator<Item = String>,
) -> Result<(Options, Arc<JobLog>), WarmError> {
    let mut options = Options::parse(arguments.map(OsString::from))?;
    options.warm = true;
    let wanted = &options.backend;
    let same = [
        (wanted.gpu == made.gpu, "--gpu"),
        (wanted.soft_memory == made.soft_memory, "--soft-memory"),
        (wanted.workers == made.workers, "--workers"),
    ];
    if let Some((_, option)) = same.into_iter().find(|(same, _)| !same) {
        return Err(WarmError::Other(option));
    }
    let log = match &options.log {
        None => JobLog::none(),
        Some(path) => {
            last_words_to(path).map_err(WarmError::Log)?;
            JobLog::open(path, format!("proxy[{}]", std::process::id())).map_err(WarmError::Log)?
        }
    };
    Ok((options, Arc::new(log)))
}

/// Where standard output and error go, should it abort.
fn last_words_to(log: &Path) -> io::Result<()> {
    let file = OpenOptions::new().append(true).create(true).open(log)?;
    for standard in [libc::STDOUT_FILENO, libc::STDERR_FILENO] {
        // SAFETY: a plain call on descriptors of this process.
        if unsafe { libc::dup2(file.as_raw_fd(), standard) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Where it says how it ends. Whoever it serves did not start it, and cannot learn that from the
/// kernel.
static ENDING: OnceLock<OwnedFd> = OnceLock::new();

/// This process is about to end with `status`.
pub fn farewell(status: u8) {
    if let Some(ending) = ENDING.get() {
        // SAFETY: one byte of a local. A reader that has gone does not ask (SIGPIPE is ignored in
        // Rust's processes).
        unsafe { libc::write(ending.as_raw_fd(), (&raw const status).cast(), 1) };
    }
}
