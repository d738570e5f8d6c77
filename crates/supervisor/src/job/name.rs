//! A job's name, and what can be wrong with jobs on disk.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use thiserror::Error;

/// A name that is safe as a folder's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobName(pub(super) String);

impl FromStr for JobName {
    type Err = JobError;
    fn from_str(text: &str) -> Result<JobName, JobError> {
        let proper = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        if text.len() > 64
            || !text.starts_with(|c: char| c.is_ascii_alphanumeric())
            || !text.chars().all(proper)
        {
            return Err(JobError::BadName(text.to_owned()));
        }
        Ok(JobName(text.to_owned()))
    }
}

impl fmt::Display for JobName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl JobName {
    /// A name for a job that was given none: the program's, and the supervisor's process id.
    pub(crate) fn generated(program: &Path) -> JobName {
        let base = program.file_name().unwrap_or_default().to_string_lossy();
        let base: String = base.chars().filter(char::is_ascii_alphanumeric).take(40).collect();
        let base = if base.is_empty() { "job" } else { &base };
        JobName(format!("{base}-{}", std::process::id()))
    }
}

#[derive(Debug, Error)]
pub enum JobError {
    #[error("{path}: {source}; {}", remedy(source))]
    Io { path: PathBuf, source: io::Error },
    #[error(
        "{path} is not a folder of yours that others cannot enter: remove it, or set XDG_STATE_HOME"
    )]
    NotPrivate { path: PathBuf },
    #[error(
        "XDG_STATE_HOME is {path}, where others than root can make changes: root keeps nothing \
         there; unset it, or name a folder of root's"
    )]
    NotRoots { path: PathBuf },
    #[error("a job named {name} is running: choose another name, or end it first")]
    InUse { name: JobName },
    #[error(
        "processes of the job {name}, whose supervisor was killed, still run: end them first \
         (kedge kill {name}), or choose another name"
    )]
    LeftRunning { name: JobName },
    #[error(
        "`{0}` is no job name: use up to 64 letters, digits, '.', '_', '-', the first one a letter or digit"
    )]
    BadName(String),
    #[error(
        "a kedge balance of yours runs on this host already{}: end it first", by_process(*pid)
    )]
    Balances { pid: Option<u32> },
    #[error("{job}: cannot join it: {why}")]
    Join { job: JobName, why: String },
}

fn by_process(pid: Option<u32>) -> String {
    pid.map(|pid| format!(" (process {pid})")).unwrap_or_default()
}

fn remedy(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EMFILE) => "raise the limit on open files (`ulimit -n`)",
        Some(libc::EFBIG) => "raise the limit on the size of files (`ulimit -f`)",
        _ => "set XDG_STATE_HOME to a folder that you can write to",
    }
}
