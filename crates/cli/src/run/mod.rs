//! `kedge run`: the supervisor of one job.
//!
//! It makes the job's folder, listens on its socket, starts the program, gives each process of the
//! job that connects a proxy of its own, and exits as the program does.

mod parts;
mod program;
mod proxies;
mod signals;

use crate::EXIT_KEDGE_FAILED;
use crate::jobs::{self, JobDir, JobError, JobName, Jobs, Meta, State};
use crate::size::Size;
use clap::Args;
use kedge_proxy::backend::GpuSpec;
use kedge_proxy::joblog::JobLog;
use parts::{Parts, PartsError};
use program::Outcome;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use thiserror::Error;

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Devices that the program sees: soft, or soft:N for N software devices
    #[arg(long, value_name = "SPEC", default_value = "soft")]
    gpu: GpuSpec,
    /// Memory of each software device, such as 4G [default: half of this machine's, shared out]
    #[arg(long, value_name = "SIZE")]
    soft_memory: Option<Size>,
    /// The job's name, for `kedge ps` and `kedge logs` [default: made from the program's]
    #[arg(long, value_name = "NAME")]
    job: Option<JobName>,
    /// The program and its arguments
    #[arg(
        value_name = "CMD",
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    command: Vec<OsString>,
}

#[derive(Debug, Error)]
pub(crate) enum RunError {
    #[error(transparent)]
    Job(#[from] JobError),
    #[error(transparent)]
    Parts(#[from] PartsError),
    #[error("cannot listen on {path}: {source}; a shorter XDG_RUNTIME_DIR may help")]
    Listen { path: PathBuf, source: io::Error },
    #[error("cannot {what}: {source}")]
    System { what: &'static str, source: io::Error },
    #[error("{program}: {}", start_error(source))]
    Start { program: String, source: io::Error },
}

fn start_error(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "no such program".into(),
        io::ErrorKind::PermissionDenied => "not executable, or not yours to execute".into(),
        _ => error.to_string(),
    }
}

impl RunError {
    /// As shells do it: 127 where there is no such program, 126 where it cannot be executed.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            RunError::Start { source, .. } if source.kind() == io::ErrorKind::NotFound => 127,
            RunError::Start { .. } => 126,
            _ => EXIT_KEDGE_FAILED,
        }
    }
}

/// Runs the job. Does not return where a signal ended the program: that ends this process too.
pub(crate) fn run(args: &RunArgs) -> Result<ExitCode, RunError> {
    let parts = Parts::find()?;
    let jobs = Jobs::open()?;
    let program = Path::new(&args.command[0]);
    let name = args.job.clone().unwrap_or_else(|| JobName::generated(program));
    let dir = jobs.create(&name)?;
    let outcome = supervise(args, &name, &dir, &parts);
    dir.retire();
    jobs.prune();
    match outcome? {
        Outcome::Exited(code) => Ok(ExitCode::from(code)),
        Outcome::Killed(signal) => signals::die_of(signal),
    }
}

fn supervise(
    args: &RunArgs,
    name: &JobName,
    dir: &JobDir,
    parts: &Parts,
) -> Result<Outcome, RunError> {
    let log = JobLog::open(&dir.log(), format!("kedge[{}]", std::process::id()));
    let log = log.map_err(|source| JobError::Io { path: dir.log(), source })?;
    let log = Arc::new(log);
    dir.link_driver(&parts.shim)?;
    let mut meta = first_meta(args, name);
    dir.write_meta(&meta)?;

    // Blocked before any thread starts, so that only the waiting below sees them.
    let signals = signals::Signals::block();
    let proxies = proxies::Proxies::listen(dir, parts, args, log.clone())?;
    signals::become_subreaper();
    let child = program::start(args, name, dir, &signals);
    let child = match child {
        Ok(child) => child,
        Err(error) => {
            meta.state = State::Exited(i32::from(error.exit_code()));
            meta.ended = Some(jobs::now());
            let _ = dir.write_meta(&meta);
            return Err(error);
        }
    };
    meta.pid = Some(child);
    let _ = dir.write_meta(&meta);
    let outcome = program::wait(child, &signals, &proxies, &log);
    meta.state = match outcome {
        Outcome::Exited(code) => State::Exited(i32::from(code)),
        Outcome::Killed(signal) => State::Killed(signal),
    };
    meta.ended = Some(jobs::now());
    // The program has ended as it has ended; a full disk does not change that.
    if let Err(error) = dir.write_meta(&meta) {
        log.line(&error.to_string());
    }
    Ok(outcome)
}

fn first_meta(args: &RunArgs, name: &JobName) -> Meta {
    Meta {
        name: name.to_string(),
        supervisor: std::process::id(),
        pid: None,
        command: args.command.iter().map(|arg| arg.to_string_lossy().into_owned()).collect(),
        gpu: args.gpu.to_string(),
        started: jobs::now(),
        ended: None,
        state: State::Running,
    }
}
