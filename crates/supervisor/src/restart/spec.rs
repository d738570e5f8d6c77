//! What to restart, and what follows from it for the job that comes back.

use crate::checkpoint::recovery::{Loss, Recovery};
use crate::job::jobs::{JobDir, JobName};
use crate::job::joint::{Joint, far};
use crate::job::noted::open_log;
use crate::job::parts::Parts;
use crate::job::policy::Policy;
use crate::job::rank::{RankError, Seat};
use crate::job::shown::Showing;
use crate::job::spec::RunError;
use crate::restart::candidates::{Candidates, candidates};
use crate::restart::joining::Joining;
use crate::restart::resume;
use crate::services::beside::{management_of, warm_of};
use crate::services::keeper::Held;
use crate::services::management::Management;
use crate::services::warden::{self, As, Before, Return};
use crate::services::warm::{Kind, Own};
use kedge_control::gpu::GpuSpec;
use kedge_coordinator::Far;
use kedge_image::{Devices, ImageError, Manifest};
use kedge_pmi::Rank;
use std::io;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// What to restart.
#[derive(Debug, Clone, Default)]
pub struct RestartSpec {
    /// An image, or a folder of images: then its newest good one.
    pub path: PathBuf,
    /// `None`: the name that the job had.
    pub name: Option<JobName>,
    /// Memory comes when it is first used.
    pub lazy: bool,
    /// Where files are that were elsewhere: old and new.
    pub paths: Vec<(PathBuf, PathBuf)>,
    /// What it does not say is as it was when the image was made.
    pub policy: Policy,
    /// New images go where these are, whatever `policy` says.
    pub beside: bool,
    /// `None`: the devices that the job had.
    pub gpu: Option<GpuSpec>,
    /// `None`: as much as software devices had.
    pub soft_memory: Option<u64>,
    /// That this process goes on with a job, in the place of another.
    pub back: Option<Back>,
    /// That it is one part of several that are restarted.
    pub joining: Option<Joining>,
    /// That the parts come back with those that other wardens bring back.
    pub together: Option<Return>,
    /// Where its parts on all hosts meet, if they are restarted on several.
    pub far: Option<Far>,
    /// The numbers of the parts that are restarted here; none: all.
    pub parts: Vec<u32>,
    /// What the user is shown until the job runs.
    pub showing: Option<Showing>,
    /// Nothing is said when it has ended.
    pub quiet: bool,
    /// Of the images in `path`, only this job's that it has not outlived are meant.
    pub resume: Option<JobName>,
    /// A socket on which it is said when the job may run, once all else of it is there.
    pub gate: Option<RawFd>,
    /// Begins before the job's last image is there: images that build on this one are told of at
    /// the gate ([`bring_image`](crate::bring_image)), and the job is that of the last one.
    pub standby: bool,
}

impl RestartSpec {
    /// What the warden of a part, or the supervisor that it has told, has left.
    ///
    /// # Errors
    /// It is none of theirs.
    pub fn of_return(path: PathBuf, note: &str) -> Result<RestartSpec, RunError> {
        let bad =
            |source: io::Error| RunError::System { what: "read which parts come back", source };
        let note: Return = serde_json::from_str(note).map_err(|error| bad(error.into()))?;
        // It may have been another's since the warden has read it.
        note.check(&path).map_err(|why| bad(io::Error::other(why)))?;
        let at = note.at.as_ref().map(|at| far(at, None)).transpose();
        let far = at.map_err(|error| bad(io::Error::other(error)))?;
        let policy = Policy { dir: note.dir.clone(), ..Policy::default() };
        let (name, parts) = (Some(note.job.parse()?), note.parts.clone());
        let As { paths, gpu, soft_memory } = note.again.clone();
        let gpu = gpu.map(|gpu| gpu.parse()).transpose()?;
        let together = Some(note);
        let none = RestartSpec::default();
        let spec = RestartSpec { path, name, policy, far, parts, together, ..none };
        Ok(RestartSpec { paths, gpu, soft_memory, ..spec })
    }
}

/// A job that goes back, as the process before this one has left it.
#[derive(Debug, Clone)]
pub struct Back {
    /// How many times the job has gone back, this time counted.
    pub(crate) used: u32,
    /// The lock of its folder: a descriptor.
    pub(crate) lock: RawFd,
    /// What is held of its newest image, for the first who takes it.
    pub(crate) held: Arc<Mutex<Option<Held>>>,
    /// What tells the job's own keeper of warm proxies that the job goes on: a descriptor.
    pub(crate) warm: Option<RawFd>,
}

impl Back {
    pub(crate) fn holding(held: Option<Held>) -> Arc<Mutex<Option<Held>>> {
        Arc::new(Mutex::new(held))
    }
}

impl RestartSpec {
    /// The images that it may be restarted from, the newest first.
    pub(crate) fn images(&self) -> Result<Candidates, ImageError> {
        match &self.resume {
            Some(job) => resume::images(&self.path, job),
            None => candidates(&self.path),
        }
    }

    /// The same, with the folder of `images` as the one of new images where they go beside them.
    pub(crate) fn beside_images(&self, images: &[(PathBuf, Manifest)]) -> RestartSpec {
        let mut spec = self.clone();
        if let (true, Some((image, _))) = (self.beside, images.first()) {
            spec.policy.dir = image.parent().map(Path::to_owned).or(spec.policy.dir);
        }
        spec
    }

    /// Whether the job goes back after such a loss, which its init cannot tell of; the log tells,
    /// also why not.
    pub(crate) fn goes_back(
        &self,
        dir: &JobDir,
        images: &[(PathBuf, Manifest)],
        loss: Loss,
    ) -> bool {
        let (Some((_, first)), Ok(log)) = (images.first(), open_log(dir)) else { return false };
        let policy = self.policy.or(Policy::of_image(first));
        let recovery = Recovery::new(&policy, self.used(), dir, &log);
        recovery.lose(loss);
        recovery.is_due()
    }

    /// The rank of a step that the job in `image` is to be, and as whom another process has begun.
    pub(crate) fn seat(&self, image: &Path) -> Result<Option<(Seat, Option<Rank>)>, RankError> {
        match &self.joining {
            Some(joining) => Ok(joining.rank.clone().map(|(seat, rank)| (seat, Some(rank)))),
            None => Ok(Seat::of_image(image, &self.policy)?.map(|seat| (seat, None))),
        }
    }

    /// What kedge ends with where the job is to be requeued (`--requeue-exit`).
    pub(crate) fn requeue_exit(&self, images: &[(PathBuf, Manifest)]) -> Option<u8> {
        let (_, first) = images.first()?;
        self.policy.or(Policy::of_image(first)).on_term?.requeue_exit
    }

    /// How often the job has gone back.
    pub(crate) fn used(&self) -> u32 {
        self.back.as_ref().map_or(0, |back| back.used)
    }

    /// What is held in memory of the job's newest image: asked once.
    pub(crate) fn held(&self) -> Option<Held> {
        let back = self.back.as_ref()?;
        back.held.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// What keeps proxies ready for the job: the former process's, or a new one where its policy
    /// wants some.
    pub(crate) fn warm(&self, dir: &JobDir, images: &[(PathBuf, Manifest)]) -> Option<Own> {
        if let Some(back) = &self.back {
            return Own::take_over(dir, back.warm?);
        }
        let (_, first) = images.first()?;
        let policy = self.policy.or(Policy::of_image(first));
        let devices = self.devices(first)?;
        let kind = Kind::here(&Parts::find().ok()?, &devices.gpu.parse().ok()?, &devices.limits);
        warm_of(dir, &kind, &policy)
    }

    /// Starts the part's warden, where the job goes back by itself.
    pub(crate) fn start_warden(
        &self,
        joint: Option<&Joint>,
        dir: &Path,
        images: &[(PathBuf, Manifest)],
    ) -> Result<(), RunError> {
        let (Some(joint), Some(joining)) = (joint, &self.joining) else { return Ok(()) };
        let Some((image, first)) = images.first() else { return Ok(()) };
        // Ranks have their session from whoever has started the step.
        if joining.rank.is_some() {
            return Ok(());
        }
        let policy = self.policy.or(Policy::of_image(first));
        let (times, parts, image) = (joining.times, Some(joining.parts), Some(image.clone()));
        let gpu = self.gpu.as_ref().map(ToString::to_string);
        let again = As { paths: self.paths.clone(), gpu, soft_memory: self.soft_memory };
        let before = Before { times, parts, image, again };
        let started = warden::start(joint, dir, &policy, before, self.quiet);
        started.map_err(|source| RunError::System { what: "start the part's warden", source })
    }

    /// What answers the job's questions to NVML.
    pub(crate) fn management(
        &self,
        dir: &JobDir,
        images: &[(PathBuf, Manifest)],
    ) -> Option<Management> {
        let devices = self.devices(&images.first()?.1)?;
        management_of(dir, &Parts::find().ok()?, &devices.gpu.parse().ok()?, &devices.limits)
    }

    /// What is asked for that devices of several places cannot have, if the job is to have such.
    pub(crate) fn refuse_several(&self, manifest: &Manifest) -> Option<String> {
        let gpu = self.devices(manifest)?.gpu.parse::<GpuSpec>().ok()?;
        let policy = self.policy.or(Policy::of_image(manifest));
        let mut asked = policy.needs_one_place().into_iter().filter(|(_, given)| *given);
        asked.find_map(|(option, _)| gpu.refuse_several(option))
    }

    /// The devices that the job is to have: those that it had, or others; none if it had none.
    pub(crate) fn devices(&self, manifest: &Manifest) -> Option<Devices> {
        let mut devices = manifest.devices.clone()?;
        if let Some(gpu) = &self.gpu {
            devices.gpu = gpu.to_string();
        }
        devices.limits.soft_memory = self.soft_memory.or(devices.limits.soft_memory);
        Some(devices)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_images_go_beside_those_that_are_restarted() {
        let images = [(PathBuf::from("/images/j-0002"), Manifest::new("j".into(), vec![], 2))];
        let policy = Policy { dir: Some("/default".into()), ..Policy::default() };
        let named = RestartSpec { policy, ..RestartSpec::default() };
        let beside = RestartSpec { beside: true, ..named.clone() };
        let dir = |spec: &RestartSpec, images| spec.beside_images(images).policy.dir.unwrap();
        assert_eq!(dir(&named, &images), Path::new("/default"));
        assert_eq!(dir(&beside, &images), Path::new("/images"));
        assert_eq!(dir(&beside, &[]), Path::new("/default"));
    }
}
