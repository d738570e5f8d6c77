//! The trace of a job, from the files of its proxies.

use crate::job::jobs::JobDir;
use kedge_control::joblog::JobLog;
use kedge_control::trace::{Merged, Wanted, merge};
use kedge_control::warn;

/// There in the environment of a job that is traced, for the shim.
pub(crate) const TRACED: &str = "KEDGE_TRACE_CALLS";

/// Files that cannot be read and are named; of more, their number.
const NAMED: usize = 8;

/// Writes the job's trace.
///
/// # Errors
/// It cannot be written, or not be read what the proxies have told: in words, which the job's log
/// has too.
pub(crate) fn of_job(dir: &JobDir, wanted: &Wanted, log: &JobLog) -> Result<Merged, String> {
    let merged = merge(&dir.trace(), wanted).inspect_err(|error| warn!(log, "{error}"))?;
    let unreadable = |what: &str| warn!(log, "cannot read what was traced: {what}");
    merged.unread.iter().take(NAMED).for_each(|what| unreadable(what));
    if merged.unread.len() > NAMED {
        unreadable(&format!("{} more files", merged.unread.len() - NAMED));
    }
    Ok(merged)
}
