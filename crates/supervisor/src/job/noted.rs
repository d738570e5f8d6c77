//! What is noted of a job when it begins and when it ends.

use crate::job::jobs::{self, JobDir, JobError, JobName, Meta, State};
use crate::job::left::Marks;
use crate::job::outcome::Outcome;
use crate::job::postscript::Ended;
use crate::job::spec::JobSpec;
use kedge_control::job::Moved;
use kedge_control::joblog::JobLog;
use kedge_control::{info, warn};
use std::sync::Arc;

/// Notes how the job ended.
pub(crate) fn finish(dir: &JobDir, mut meta: Meta, outcome: Outcome, log: &JobLog) {
    meta.state = match outcome {
        Outcome::Exited(code) => State::Exited(i32::from(code)),
        Outcome::Killed(signal) => State::Killed(signal),
    };
    meta.ended = Some(jobs::now());
    // It may have moved.
    meta.gpu = dir.gpu().unwrap_or(meta.gpu);
    // The program has ended as it has ended; a full disk does not change that.
    if let Err(error) = dir.write_meta(&meta) {
        warn!(log, "{error}");
    }
}

/// Notes that the job has left for another host, where this process's streams are to be its.
pub(crate) fn left_for(dir: &JobDir, mut meta: Meta, moved: Moved, log: &JobLog) -> Ended {
    info!(log, "the job has moved to {}", moved.server);
    (meta.state, meta.ended) = (State::Moved(moved.server.clone()), Some(jobs::now()));
    if let Err(error) = dir.write_meta(&meta) {
        warn!(log, "{error}");
    }
    Ended { moved: Some(moved), ..Ended::from(Outcome::Killed(libc::SIGKILL)) }
}

/// Opens the job's log, for this process.
pub(crate) fn open_log(dir: &JobDir) -> Result<Arc<JobLog>, JobError> {
    let log = JobLog::open(&dir.log(), format!("kedge[{}]", std::process::id()));
    log.map(Arc::new).map_err(|source| JobError::Io { path: dir.log(), source })
}

/// Returns what is noted of a job before its program runs.
pub(crate) fn first_meta(spec: &JobSpec, name: &JobName) -> Meta {
    Meta {
        name: name.to_string(),
        supervisor: std::process::id(),
        pid: None,
        command: spec.command(),
        gpu: spec.gpu.to_string(),
        started: jobs::now(),
        ended: None,
        state: State::Running,
        policy: Some(spec.policy.clone()),
        joint: spec.join.as_ref().map(JobName::to_string),
        marks: Some(Marks::here(None)),
    }
}
