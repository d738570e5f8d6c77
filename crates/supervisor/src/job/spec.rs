//! What to run, and why it could not be.

use crate::base::limits;
use crate::job::mover::MoveTo;
use crate::job::name::{JobError, JobName};
use crate::job::parts::PartsError;
use crate::job::policy::{JobGpu, Policy};
use crate::job::rank::RankError;
use kedge_control::check::Check;
use kedge_control::trace::Wanted;
use kedge_coordinator::Far;
use kedge_image::DeviceLimits;
use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// What to run, and on what.
#[derive(Debug, Clone)]
pub struct JobSpec {
    /// Devices that the program sees.
    pub gpu: JobGpu,
    /// Why these are the default, where nobody named any.
    pub gpu_default: Option<String>,
    /// What is not said is the proxies' own choice.
    pub limits: DeviceLimits,
    /// `None`: made from the program's name.
    pub name: Option<JobName>,
    /// The job that this one is a part of; it has its name from that.
    pub join: Option<JobName>,
    /// Where its parts on all hosts meet, if there are several.
    pub far: Option<Far>,
    pub program: OsString,
    pub arguments: Vec<OsString>,
    /// Whether the remote shells that it starts are parts of the job.
    pub shells: bool,
    pub policy: Policy,
    /// What the job asks of its devices is counted.
    pub stats: bool,
    /// What its devices, software devices, look for in the program.
    pub check: Option<Check>,
    /// What it does and when is written down.
    pub trace: Option<Wanted>,
    /// Where its devices move once it runs.
    pub move_to: Option<MoveTo>,
    /// A library by which its programs write into a cache's memory by themselves.
    pub preload: Option<PathBuf>,
    /// Nothing is said when it has ended.
    pub quiet: bool,
}

/// What `kedge` itself exits with when it, and not the program, has failed.
pub const EXIT_KEDGE_FAILED: u8 = 125;

impl JobSpec {
    /// The program and its arguments, for people.
    pub(crate) fn command(&self) -> Vec<String> {
        let words = std::iter::once(&self.program).chain(&self.arguments);
        words.map(|word| word.to_string_lossy().into_owned()).collect()
    }
}

#[derive(Debug, Error)]
pub enum RunError {
    #[error(transparent)]
    Job(#[from] JobError),
    #[error(transparent)]
    Parts(#[from] PartsError),
    #[error("cannot listen on {path}: {source}{}", listen_remedy(source))]
    Listen { path: PathBuf, source: io::Error },
    #[error("cannot {what}: {source}{}", limits::hint(source))]
    System { what: &'static str, source: io::Error },
    #[error(transparent)]
    Image(#[from] kedge_image::ImageError),
    #[error("the image's devices: {0}")]
    Devices(#[from] kedge_control::gpu::BadGpuSpec),
    /// What devices of several places cannot have.
    #[error("{0}")]
    Several(String),
    #[error(transparent)]
    Restart(#[from] kedge_process::EngineError),
    #[error("the image has no part {part}: it has {all}, from 0")]
    NoPart { part: u32, all: u32 },
    #[error(
        "{part} is being restarted already, by {by}: a part can be restarted on one host only (`--parts`)"
    )]
    PartTaken { part: JobName, by: String },
    #[error(transparent)]
    Rank(#[from] RankError),
    #[error("{program}: {}", start_error(source))]
    Start { program: String, source: io::Error },
}

fn listen_remedy(error: &io::Error) -> &'static str {
    match limits::hint(error) {
        "" => "; XDG_STATE_HOME may name a folder where there can be sockets",
        limit => limit,
    }
}

fn start_error(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "no such program".into(),
        io::ErrorKind::PermissionDenied => "not executable, or not yours to execute".into(),
        _ => format!("{error}{}", limits::hint(error)),
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
