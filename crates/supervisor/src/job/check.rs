//! What was found in a job that is checked, from the files of its proxies.

use crate::job::jobs::JobDir;
use kedge_control::check::Found;
use kedge_control::joblog::JobLog;
use kedge_control::{note, warn};

/// Files that cannot be read and are named; of more, their number.
const NAMED: usize = 8;

/// Returns what was found, and notes it in the job's log, with what cannot be read; `None` where
/// nothing can.
pub(crate) fn of_job(dir: &JobDir, log: &JobLog) -> Option<Found> {
    let unreadable = |what: &str| warn!(log, "cannot read what was found: {what}");
    let found = Found::of_folder(&dir.findings());
    let found = found.map_err(|error| unreadable(&error.to_string())).ok()?;
    found.unread.iter().take(NAMED).for_each(|what| unreadable(what));
    if found.unread.len() > NAMED {
        unreadable(&format!("{} more files", found.unread.len() - NAMED));
    }
    found.report.findings.iter().for_each(|one| note!(log, "found: {}", one.message));
    Some(found)
}
