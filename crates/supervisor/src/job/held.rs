//! What a job holds in memory of its newest image, as its folder tells.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// What is held, as `held.json` in the job's folder tells.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldImage {
    pub image: PathBuf,
    /// Bytes.
    pub on_devices: u64,
    pub in_memory: u64,
    /// Seconds since 1970.
    pub until: u64,
}
