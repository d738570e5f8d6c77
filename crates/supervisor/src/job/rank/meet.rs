//! How the ranks of a step become the parts of one job: by keys of the step, which all of them have
//! after one fence, before the program's own session begins.

use super::{Open, RankError};
use std::time::Duration;

/// How long ranks may need until all of them are there.
const ALL: Duration = Duration::from_secs(60);
/// What the keys are called.
const JOB: &str = "kedge.job";
const AT: &str = "kedge.at";
const KEY: &str = "kedge.key";
const DOES: &str = "kedge.does";
const FAILED: &str = "kedge.failed";
/// Longest reason that others are told, in characters.
const MAX_REASON_LEN: usize = 300;

/// Where the parts of the joint job meet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Meeting {
    /// The joint job's name.
    pub(crate) job: String,
    /// HOST:PORT.
    pub(crate) at: String,
    /// What they know each other by.
    pub(crate) key: String,
    /// What all of them do: [`STARTS`], or which image they bring back.
    pub(crate) does: String,
}

/// That the job is started.
pub(crate) const STARTS: &str = "starts";

/// Tells the other ranks: the first one of where all meet, any of them of its failure.
///
/// # Errors
/// The daemon fails, not all ranks come, or one of them has failed.
pub(crate) fn tell(open: &mut Open, told: Result<&Meeting, &str>) -> Result<(), RankError> {
    match told {
        Ok(Meeting { job, at, key, does }) => {
            for (name, value) in [(JOB, job), (AT, at), (KEY, key), (DOES, does)] {
                open.put(name, value)?;
            }
        }
        Err(why) => {
            // Slurm's PMI-2 (22.05) cuts values at semicolons, doubled or not.
            let plain = |c: char| if c == ';' || c.is_control() { ',' } else { c };
            let why: String = why.chars().map(plain).take(MAX_REASON_LEN).collect();
            open.put(FAILED, &why)?;
        }
    }
    met(open)
}

/// Waits for the first rank to tell where all meet.
///
/// # Errors
/// As of [`tell`]; or it has told nothing.
pub(crate) fn hear(open: &mut Open) -> Result<Meeting, RankError> {
    met(open)?;
    let mut get = |name| open.get(name)?.ok_or(RankError::Untold);
    Ok(Meeting { job: get(JOB)?, at: get(AT)?, key: get(KEY)?, does: get(DOES)? })
}

/// Waits until all ranks have come.
///
/// # Errors
/// As of [`tell`].
pub(crate) fn met(open: &mut Open) -> Result<(), RankError> {
    open.fence(Some(ALL))?;
    match open.get(FAILED)? {
        Some(why) => Err(RankError::Failed(why)),
        None => Ok(()),
    }
}
