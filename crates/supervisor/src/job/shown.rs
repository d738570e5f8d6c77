//! What the user is shown while a restart is under way. It is taken back just before the job's
//! processes run: from there on the terminal is theirs.

use crate::job::jobs::JobName;
use kedge_image::Manifest;
use kedge_process::plugins::{Claim, Found, Job, Plugin, PluginError};
use std::path::Path;

/// How it is shown, and taken back: where the restart has failed, or the job is about to run.
#[derive(Debug, Clone, Copy)]
pub struct Showing {
    pub show: fn(&JobName, &Path, &Manifest),
    pub take_back: fn(),
    pub came_back: fn(),
    /// In the process that supervises the job, once that has come back.
    pub restarted: fn(&JobName, &Path),
}

/// The plugin of a restart that the user is shown.
#[derive(Debug)]
pub(crate) struct Shown(Showing);

impl Shown {
    /// Shows the user that `job` is being restarted from an image.
    pub(crate) fn show(
        showing: Showing,
        job: &JobName,
        (image, manifest): (&Path, &Manifest),
    ) -> Shown {
        (showing.show)(job, image, manifest);
        Shown(showing)
    }

    /// Takes it back: the restart has failed.
    pub(crate) fn take_back(&self) {
        (self.0.take_back)();
    }

    /// Says that the job has come back, in the process that supervises it.
    pub(crate) fn restarted(&self, job: &JobName, image: &Path) {
        (self.0.restarted)(job, image);
    }
}

impl Plugin for Shown {
    fn name(&self) -> &'static str {
        "shown"
    }

    fn claim(&self, _file: &Found, _job: &Job) -> Claim {
        Claim::No
    }

    /// In the job's init, whose copy of this it is.
    fn rebuilt(&self) -> Result<(), PluginError> {
        (self.0.came_back)();
        Ok(())
    }
}
