//! What a part that is restarted is to know of the others.

use crate::job::jobs::{JobError, JobName, Jobs};
use crate::job::joint::{Joint, far};
use crate::job::rank::Seat;
use kedge_coordinator::FarError;
use kedge_pmi::Rank;
use serde::{Deserialize, Serialize};

/// What a part that is restarted is to know of the others.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Joining {
    pub(crate) job: String,
    /// Where they meet.
    pub(crate) series: String,
    pub(crate) parts: u32,
    /// Where the coordinator is, if they are on several hosts; the key is in the environment.
    #[serde(default)]
    pub(crate) at: Option<String>,
    /// The rank of a step that it is, whose session has begun.
    #[serde(default)]
    pub(crate) rank: Option<(Seat, Rank)>,
    /// How often the job has gone back by itself, and why this time.
    #[serde(default)]
    pub(crate) times: u32,
    #[serde(default)]
    pub(crate) why: Option<String>,
}

impl Joining {
    /// From the command line of whoever restarts all of them.
    pub fn parse(text: &str) -> Option<Joining> {
        serde_json::from_str(text).ok()
    }

    /// The part `part`, once it is there.
    pub(crate) fn joint(&self, jobs: &Jobs, part: &JobName) -> Result<Joint, JobError> {
        let job: JobName = self.job.parse()?;
        let far = self.at.as_ref().map(|at| far(at, None)).transpose();
        let failed = |error: FarError| JobError::Join { job: job.clone(), why: error.to_string() };
        let ranks = self.rank.as_ref().map(|_| self.parts);
        Ok(Joint::of(jobs, &job, part.clone(), far.map_err(failed)?)?.with_ranks(ranks))
    }
}
