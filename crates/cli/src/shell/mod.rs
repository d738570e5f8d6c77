//! Remote shells of a job: `ssh` as its programs find it, and what it starts on the other host
//! (docs/design/0045-remote-shells.md).
//!
//! ```text
//! mpirun ─ ssh (near::run) ─ ssh of the system ─ sshd ─ kedge remote-shell (far::begin)
//!             │                                          └ kedge remote-shell --supervise (far::supervise)
//!             └────────── a connection of the job ──────────── kedge remote-shell --end (far::end) ─ command
//! ```
//!
//! The system's ssh and sshd are gone when the two ends are connected.

mod bytes;
mod far;
pub(crate) mod frame;
mod kept;
mod near;
mod options;
pub(crate) mod relay;
mod sink;

use crate::Failure;
use clap::Args;
use kedge_control::job::Launch;
use kedge_keys::PSK_BYTES;
use kedge_supervisor::jobs::SHELL;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;

/// What ssh ends with when it, and not the command, has failed.
const FAILED: u8 = 255;
/// What a shell ends with where there is no such program.
const NOT_FOUND: u8 = 127;
/// Has the two hidden stages of the other host find what they are to do.
const TOLD: &str = "KEDGE_REMOTE_SHELL";
/// Names kedge's command on other hosts, where it has another path than here.
const REMOTE: &str = "KEDGE_REMOTE";
/// `plain`: remote shells are no parts of the job.
const CHOICE: &str = "KEDGE_SSH";

/// The other end of a remote shell that a job has started.
#[derive(Debug, Args)]
pub(crate) struct RemoteShellArgs {
    /// Supervise the part
    #[arg(long, conflicts_with = "end")]
    supervise: bool,
    /// Hold the streams of the part's command
    #[arg(long)]
    end: bool,
    /// The command, as a shell is given it
    #[arg(last = true)]
    command: Option<String>,
}

/// What the other host is to start. It goes through ssh.
#[derive(Serialize, Deserialize)]
struct Request {
    launch: Launch,
    streams: Streams,
    command: String,
}

/// Where the near end waits for the other one.
#[derive(Clone, Serialize, Deserialize)]
struct Streams {
    address: SocketAddr,
    /// Its halves show each end that the other one is it.
    token: String,
    /// What seals all that they say afterwards: nobody else has it.
    secret: [u8; PSK_BYTES],
}

/// What the end that connects shows of the token, and what the other one answers.
fn halves(token: &str) -> (&[u8], &[u8]) {
    token.as_bytes().split_at(token.len() / 2)
}

/// Ends as ssh does, if this program was called so.
pub(crate) fn called() -> Option<ExitCode> {
    let mut words = std::env::args_os();
    let name = words.next()?;
    let is_shell = Path::new(&name).file_name().is_some_and(|name| name == SHELL);
    is_shell.then(|| near::run(&words.collect::<Vec<OsString>>()))
}

/// `kedge remote-shell`.
pub(crate) fn run(args: &RemoteShellArgs) -> Result<ExitCode, Failure> {
    let command = args.command.clone().unwrap_or_default();
    match (args.supervise, args.end) {
        (true, _) => far::supervise(&command),
        (_, true) => far::end(&command),
        _ => far::begin(),
    }
}
