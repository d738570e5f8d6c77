//! What of a job's folder is read by who watches it while it runs, beside what all commands read.

use super::{JobDir, JobError, JobName, Jobs, replace};
use kedge_control::usage;
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The file that tells of the next checkpoint.
const NEXT: &str = "next.json";
/// Most sockets that are looked at: a job has fewer processes that use devices.
const MAX_SOCKETS: usize = 4096;

/// The next checkpoint that nobody asks for: `next.json`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Next {
    /// When it is due, in seconds since 1970.
    pub at: u64,
    /// How often they come now.
    pub every: Duration,
}

impl Jobs {
    /// Returns the next checkpoint of job `name`, which runs, that nobody asks for; `None` where
    /// there is none to come.
    pub fn next_checkpoint(&self, name: &JobName) -> Option<Next> {
        let next = fs::read(self.job_dir(name).join(NEXT)).ok()?;
        serde_json::from_slice(&next).ok()
    }

    /// Returns the sockets at which the proxies of job `name` tell what they use, by name. Some may
    /// be those of proxies that were killed.
    pub fn usage(&self, name: &JobName) -> Vec<PathBuf> {
        let folder = fs::read_dir(self.job_dir(name).join(usage::FOLDER));
        let entries = folder.into_iter().flatten().flatten().take(MAX_SOCKETS);
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

/// Notes the next checkpoint beside the job's control socket.
///
/// # Errors
/// Where the file cannot be replaced.
pub(crate) fn note_next(control: &Path, next: &Next) -> Result<(), JobError> {
    replace(&control.with_file_name(NEXT), next)
}
