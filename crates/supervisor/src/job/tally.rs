//! How a job's checkpoints went, counted: `checkpoints.json` in its folder, for `kedge metrics`.

use crate::job::files::{now, replace};
use crate::job::name::JobError;
use serde::{Deserialize, Serialize};
use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// A job's checkpoints since its start or restart.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkpoints {
    /// Those whose image is durable.
    pub durable: u64,
    pub failed: u64,
    pub last_failure: Option<LastFailure>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastFailure {
    /// Seconds since 1970.
    pub at: u64,
    pub why: String,
}

impl Checkpoints {
    /// What a file says; none where there is no such file.
    pub(crate) fn read(path: &Path) -> Checkpoints {
        let counts = fs::read(path).ok().and_then(|text| serde_json::from_slice(&text).ok());
        counts.unwrap_or_default()
    }
}

/// Most characters that are kept of why a checkpoint failed.
const MAX_REASON_LEN: usize = 1000;

/// The counts of a running job, and their file.
#[derive(Debug)]
pub(crate) struct Tally {
    path: PathBuf,
    counts: Mutex<Checkpoints>,
}

impl Tally {
    /// Goes on with what `path` says, if it says something.
    pub(crate) fn new(path: PathBuf) -> Tally {
        let counts = Mutex::new(Checkpoints::read(&path));
        Tally { path, counts }
    }

    /// Counts one.
    ///
    /// # Errors
    /// Where the file cannot be replaced; it is counted all the same.
    pub(crate) fn took<E: Display>(&self, result: &Result<(), E>) -> Result<(), JobError> {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        match result {
            Ok(()) => counts.durable += 1,
            Err(error) => {
                counts.failed += 1;
                let why = error.to_string().chars().take(MAX_REASON_LEN).collect();
                counts.last_failure = Some(LastFailure { at: now(), why });
            }
        }
        replace(&self.path, &*counts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_outcomes_are_counted() {
        let path = std::env::temp_dir().join(format!("kedge-tally-{}.json", std::process::id()));
        let tally = Tally::new(path.clone());
        tally.took(&Ok::<(), &str>(())).expect("a file");
        tally.took(&Err("x".repeat(2000))).expect("a file");
        let again = Tally::new(path.clone());
        again.took(&Ok::<(), &str>(())).expect("a file");
        let read = Checkpoints::read(&path);
        fs::remove_file(&path).expect("its end");
        assert_eq!((read.durable, read.failed), (2, 1));
        assert_eq!(read.last_failure.expect("one").why.len(), MAX_REASON_LEN);
    }
}
