//! Who a rank is.

use serde::{Deserialize, Serialize};

/// A rank of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// The job's name.
    pub namespace: String,
    pub rank: u32,
    /// The number of ranks in the job.
    pub size: u32,
    pub host: String,
}
