//! What of a job's folder is read by who watches it while it runs, beside what all commands read.

use super::{JobDir, JobError, JobName, Jobs, replace};
use kedge_control::usage;
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};

/// The file that tells of the next checkpoint.
const NEXT: &str = "next.json";
/// Sockets that are looked at: a job has fewer processes that use devices.
const MOST_SOCKETS: usize = 4096;

/// When the next checkpoint is due that nobody asks for: `next.json`.
#[derive(Debug, Serialize, Deserialize)]
struct Next {
    /// Seconds since 1970.
    at: u64,
}

impl Jobs {
    /// Returns when the next checkpoint of job `name`, which runs, is due that nobody asks for, in
    /// seconds since 1970; `None` where there is none to come.
    pub fn next_checkpoint(&self, name: &JobName) -> Option<u64> {
        let next = fs::read(self.job_dir(name).join(NEXT)).ok()?;
        serde_json::from_slice::<Next>(&next).ok().map(|next| next.at)
    }

    /// Returns the sockets at which the proxies of job `name` tell what they use, by name. Some may
    /// be those of proxies that were killed.
    pub fn usage(&self, name: &JobName) -> Vec<PathBuf> {
        let folder = fs::read_dir(self.job_dir(name).join(usage::FOLDER));
        let entries = folder.into_iter().flatten().flatten().take(MOST_SOCKETS);
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
        paths.sort();
        paths
    }
}

impl JobDir {
    /// Where proxies tell what they use: they make it.
    pub(crate) fn usage(&self) -> PathBuf {
        self.dir.join(usage::FOLDER)
    }

    /// Where the time of the next checkpoint is noted.
    pub(crate) fn next(&self) -> PathBuf {
        self.dir.join(NEXT)
    }
}

/// Notes beside the job's control socket when the next checkpoint is due, in seconds since 1970.
///
/// # Errors
/// Where the file cannot be replaced.
pub(crate) fn note_next(control: &Path, at: u64) -> Result<(), JobError> {
    replace(&control.with_file_name(NEXT), &Next { at })
}
