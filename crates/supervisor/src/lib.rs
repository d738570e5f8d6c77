//! The supervisor of one job, and the folders of all.
//!
//! [`run`] makes the job's folder, listens on its socket, starts the program, gives each process of
//! the job that connects a proxy of its own, and ends when the program does.

pub mod jobs;
mod parts;
mod program;
mod proxies;
mod signals;

use jobs::{JobDir, JobError, JobName, Jobs, Meta, State};
use kedge_proxy::backend::GpuSpec;
use kedge_proxy::joblog::JobLog;
pub use parts::{Parts, PartsError};
pub use program::Outcome;
pub use signals::die_of;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use thiserror::Error;

/// What to run, and on what.
#[derive(Debug, Clone)]
pub struct JobSpec {
    /// Devices that the program sees.
    pub gpu: GpuSpec,
    /// Why these are the default, where nobody named any.
    pub gpu_default: Option<String>,
    /// Bytes of each software device; `None`: the proxy's own choice.
    pub soft_memory: Option<u64>,
    /// `None`: made from the program's name.
    pub name: Option<JobName>,
    pub program: OsString,
    pub arguments: Vec<OsString>,
}

/// What `kedge` itself exits with when it, and not the program, has failed.
pub const EXIT_KEDGE_FAILED: u8 = 125;

#[derive(Debug, Error)]
pub enum RunError {
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
    /// As shells do it: 127 where there is no such program, 126 where it cannot be executed; 125
    /// where it is kedge that failed.
    pub fn exit_code(&self) -> u8 {
        match self {
            RunError::Start { source, .. } if source.kind() == io::ErrorKind::NotFound => 127,
            RunError::Start { .. } => 126,
            _ => EXIT_KEDGE_FAILED,
        }
    }
}

/// Runs the job to its end. Takes this process's signals and children over.
pub fn run(spec: &JobSpec) -> Result<Outcome, RunError> {
    let parts = Parts::find()?;
    let jobs = Jobs::open()?;
    let name = spec.name.clone();
    let name = name.unwrap_or_else(|| JobName::generated(Path::new(&spec.program)));
    let dir = jobs.create(&name)?;
    let outcome = supervise(spec, &name, &dir, &parts);
    dir.retire();
    jobs.prune();
    outcome
}

fn supervise(
    spec: &JobSpec,
    name: &JobName,
    dir: &JobDir,
    parts: &Parts,
) -> Result<Outcome, RunError> {
    let log = JobLog::open(&dir.log(), format!("kedge[{}]", std::process::id()));
    let log = log.map_err(|source| JobError::Io { path: dir.log(), source })?;
    let log = Arc::new(log);
    dir.link_driver(&parts.shim)?;
    let mut meta = first_meta(spec, name);
    dir.write_meta(&meta)?;

    // Blocked before any thread starts, so that only the waiting below sees them.
    let signals = signals::Signals::block();
    let proxies = proxies::Proxies::listen(dir, parts, spec, log.clone())?;
    signals::become_subreaper();
    let child = program::start(spec, name, dir, &signals);
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

fn first_meta(spec: &JobSpec, name: &JobName) -> Meta {
    let words = std::iter::once(&spec.program).chain(&spec.arguments);
    Meta {
        name: name.to_string(),
        supervisor: std::process::id(),
        pid: None,
        command: words.map(|word| word.to_string_lossy().into_owned()).collect(),
        gpu: spec.gpu.to_string(),
        started: jobs::now(),
        ended: None,
        state: State::Running,
    }
}
