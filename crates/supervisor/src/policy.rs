//! What a job is run on, and how it is checkpointed.

use kedge_proxy::backend::{BadGpuSpec, GpuSpec};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;
use thiserror::Error;

/// The devices that a job sees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JobGpu {
    /// None: no driver on the library path, and no proxy.
    None,
    Devices(GpuSpec),
}

impl FromStr for JobGpu {
    type Err = BadGpuSpec;
    fn from_str(text: &str) -> Result<JobGpu, BadGpuSpec> {
        match text {
            "none" => Ok(JobGpu::None),
            _ => text.parse().map(JobGpu::Devices),
        }
    }
}

impl fmt::Display for JobGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            JobGpu::None => f.write_str("none"),
            JobGpu::Devices(spec) => spec.fmt(f),
        }
    }
}

/// How a job is checkpointed, where a checkpoint does not say otherwise.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// Where its images go: absolute. `None` where there is no such folder by default.
    pub dir: Option<PathBuf>,
    /// Images that are kept; `None`: all.
    pub keep: Option<NonZeroU32>,
    /// Between two checkpoints that nobody asks for.
    pub interval: Option<Duration>,
    /// Checkpoint when this process is asked to end (SIGTERM), before the program is.
    #[serde(default)]
    pub on_term: Option<OnTerm>,
}

/// A checkpoint before the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct OnTerm {
    /// From the signal on; when it has passed, the program is asked to end and no image is waited for.
    pub deadline: Option<Duration>,
}

#[derive(Debug, Error)]
#[error(
    "there is no folder for images: set HOME or XDG_STATE_HOME to an absolute path, or name a folder"
)]
pub struct NoStateFolder;

/// Where images go by default: `$XDG_STATE_HOME/kedge/images`, else `~/.local/state/kedge/images`.
pub fn default_dir() -> Result<PathBuf, NoStateFolder> {
    let variable = |name| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let state = variable("XDG_STATE_HOME")
        .or_else(|| variable("HOME").map(|home| home.join(".local/state")));
    Ok(state.ok_or(NoStateFolder)?.join("kedge/images"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_read_as_they_print() {
        for text in ["none", "soft", "soft:2", "local:0,1"] {
            assert_eq!(text.parse::<JobGpu>().unwrap().to_string(), text);
        }
        assert!("nothing".parse::<JobGpu>().is_err());
    }
}
