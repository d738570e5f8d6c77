//! Going back: a job that has lost a proxy, and with it what its devices held, or whose program was
//! killed, is ended and restarted from its newest good image. `kedge restart` does that, in the
//! place of the process that supervised the job: it has the same id, standard streams and signals,
//! so whoever waits for it notices nothing.

use crate::job::images::Images;
use crate::job::jobs::{JobDir, JobName};
use crate::job::policy::Policy;
use crate::job::postscript::Ended;
use crate::job::spec::RunError;
use crate::restart::spec::{Back, RestartSpec};
use crate::services::keeper::{Held, HeldNote, Keeper};
use crate::services::warden::Together;
use crate::services::warm::Own;
use kedge_control::gpu::GpuSpec;
use kedge_image::ImageError;
use serde::{Deserialize, Serialize};
use std::os::fd::RawFd;
use std::path::PathBuf;

/// How the supervision of a job ended.
#[derive(Debug)]
pub enum End {
    Ended(Ended),
    GoBack(GoBack),
    /// This process is to become `kedge restart IMAGE --together NOTE`.
    Together(Together),
}

/// A job that is to go back, and of which nothing runs any more. This process is to become
/// `kedge restart IMAGE --back NOTE`.
#[derive(Debug)]
pub struct GoBack {
    /// The image that is tried first.
    pub image: PathBuf,
    /// For [`RestartSpec::of_note`].
    pub note: String,
    /// Its lock is handed on.
    _dir: JobDir,
    /// And what is held.
    _held: Option<Held>,
    /// And what keeps proxies ready.
    _warm: Option<Own>,
}

/// What the process that takes this one's place is to know.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    job: String,
    paths: Vec<(PathBuf, PathBuf)>,
    policy: Policy,
    gpu: Option<String>,
    #[serde(default)]
    soft_memory: Option<u64>,
    used: u32,
    lock: RawFd,
    held: Option<HeldNote>,
    #[serde(default)]
    warm: Option<RawFd>,
}

/// Most descriptors that a note may name: it is an argument, which may be no longer than 128 KiB.
const MAX_HELD: usize = 8000;

impl GoBack {
    /// Of the job `name`, which has gone back `used` times and is restarted as `spec` says.
    pub(crate) fn new(
        name: &JobName,
        dir: JobDir,
        spec: RestartSpec,
        used: u32,
        keeper: &Keeper,
        warm: Option<Own>,
    ) -> Result<GoBack, RunError> {
        let failed = |source| RunError::System { what: "hand the job's lock on", source };
        dir.stays_open(true).map_err(failed)?;
        let newest = Images::of(&dir).newest();
        let (image, _) = newest.ok_or(ImageError::NoImage { path: dir.images() })?;
        // Where it has moved by now, if it has: its image may be from before.
        let here = dir.gpu().filter(|gpu| gpu.parse::<GpuSpec>().is_ok());
        let gpu = here.or_else(|| spec.gpu.map(|gpu| gpu.to_string()));
        let (paths, policy, lock) = (spec.paths, spec.policy, dir.lock());
        let soft_memory = spec.soft_memory;
        let ours = |held: &Held| held.image == image && held.numbers().len() <= MAX_HELD;
        let held = keeper.take().filter(ours).filter(|held| held.stays_open().is_ok());
        let (job, used, noted) = (name.to_string(), used + 1, held.as_ref().map(Held::note));
        let kept = warm.as_ref().and_then(Own::stays_open);
        let note =
            Note { job, paths, policy, gpu, soft_memory, used, lock, held: noted, warm: kept };
        let note = serde_json::to_string(&note).map_err(|error| failed(error.into()))?;
        Ok(GoBack { image, note, _dir: dir, _held: held, _warm: warm })
    }
}

impl RestartSpec {
    /// What a note says that this process was started with.
    pub fn of_note(path: PathBuf, note: &str) -> Result<RestartSpec, RunError> {
        let bad = |source: serde_json::Error| RunError::System {
            what: "read what the job's supervisor has left",
            source: source.into(),
        };
        let note: Note = serde_json::from_str(note).map_err(bad)?;
        let held = note.held.map(HeldNote::take).transpose();
        let what = "take what is held in memory";
        let held = held.map_err(|source| RunError::System { what, source })?;
        Ok(RestartSpec {
            path,
            name: Some(note.job.parse()?),
            paths: note.paths,
            policy: note.policy,
            gpu: note.gpu.map(|gpu| gpu.parse()).transpose()?,
            soft_memory: note.soft_memory,
            back: Some(Back {
                used: note.used,
                lock: note.lock,
                held: Back::holding(held),
                warm: note.warm,
            }),
            ..RestartSpec::default()
        })
    }
}
