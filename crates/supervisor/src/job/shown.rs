//! What the user is shown while a restart is under way. It is taken back just before the job's
//! processes run: from there on the terminal is theirs.

use crate::job::jobs::JobName;
use kedge_image::Manifest;
use kedge_process::plugins::{Claim, Found, Job, Plugin, PluginError};
use std::path::Path;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

/// How it is shown, and taken back: where the restart has failed, or the job is about to run.
#[derive(Debug, Clone, Copy)]
pub struct Showing {
    pub show: fn(&JobName, &Path, &Manifest),
    pub take_back: fn(),
    pub came_back: fn(),
    /// In the process that supervises the job, once that has come back.
    pub restarted: fn(&JobName, &Path),
}

/// The plugin of this process's restart.
pub(crate) static SHOWN: LazyLock<Arc<Shown>> = LazyLock::new(|| Arc::new(Shown(Mutex::new(None))));

/// What takes it back, while it is shown.
#[derive(Debug)]
pub(crate) struct Shown(Mutex<Option<Showing>>);

impl Shown {
    pub(crate) fn show(
        &self,
        showing: Showing,
        job: &JobName,
        (image, manifest): (&Path, &Manifest),
    ) {
        (showing.show)(job, image, manifest);
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(showing);
    }

    /// Does nothing where nothing is shown.
    pub(crate) fn take_back(&self) {
        if let Some(showing) = self.take() {
            (showing.take_back)();
        }
    }

    fn take(&self) -> Option<Showing> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
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
        if let Some(showing) = self.take() {
            (showing.came_back)();
        }
        Ok(())
    }
}
