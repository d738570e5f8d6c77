//! What a job has asked of its devices, from the files of its proxies.

use crate::job::jobs::{JobDir, JobName};
use crate::job::spec::JobSpec;
use kedge_control::joblog::JobLog;
use kedge_control::note;
use kedge_control::stats::{FORMAT, JobStats, Stats};
use std::time::Duration;

/// Returns the job's figures, and tells them in its log. A proxy that was killed has told none.
pub(crate) fn of_job(
    spec: &JobSpec,
    name: &JobName,
    dir: &JobDir,
    took: Duration,
    log: &JobLog,
) -> JobStats {
    // A job without devices has no such folder.
    let stats = Stats::sum(&dir.stats()).unwrap_or_default();
    stats.lines().iter().for_each(|line| note!(log, "{line}"));
    JobStats {
        format: FORMAT,
        job: name.to_string(),
        gpu: spec.gpu.to_string(),
        command: spec.command(),
        seconds: took.as_secs_f64(),
        stats,
    }
}
