//! What was found in a job that is checked, from the files of its proxies.

use crate::RunError;
use crate::jobs::{JobDir, JobError};
use kedge_control::check::Report;
use kedge_control::joblog::JobLog;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;

/// Makes the folder where proxies tell what they have found, as nobody but the user may see it.
pub(crate) fn folder(dir: &JobDir) -> Result<PathBuf, RunError> {
    let path = dir.findings();
    let made = DirBuilder::new().mode(0o700).create(&path);
    made.map_err(|source| JobError::Io { path: path.clone(), source })?;
    Ok(path)
}

/// Returns what was found, and notes it in the job's log; `None` where it cannot be read, which the
/// log tells.
pub(crate) fn of_job(dir: &JobDir, log: &JobLog) -> Option<Report> {
    let report = Report::of_folder(&dir.findings());
    let report =
        report.map_err(|error| log.line(&format!("cannot read what was found: {error}"))).ok()?;
    report.findings.iter().for_each(|found| log.note(&format!("found: {}", found.message)));
    Some(report)
}
