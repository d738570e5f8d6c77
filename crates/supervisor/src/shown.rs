//! What the user is shown while a restart is under way. It is taken back just before the job's processes run: from
//! there on the terminal is theirs.

use kedge_image::Manifest;
use kedge_process::plugins::{Claim, Found, Job, Plugin, PluginError};
use std::sync::{Mutex, PoisonError};

/// How it is shown, and taken back.
#[derive(Debug, Clone, Copy)]
pub struct Showing {
    pub show: fn(&Manifest),
    pub take_back: fn(),
}

/// The plugin of this process's restart.
pub(crate) static SHOWN: Shown = Shown(Mutex::new(None));

/// What takes it back, while it is shown.
#[derive(Debug)]
pub(crate) struct Shown(Mutex<Option<fn()>>);

impl Shown {
    pub(crate) fn show(&self, showing: Showing, manifest: &Manifest) {
        (showing.show)(manifest);
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(showing.take_back);
    }

    /// Does nothing where nothing is shown.
    pub(crate) fn take_back(&self) {
        let shown = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(take_back) = shown {
            take_back();
        }
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
        self.take_back();
        Ok(())
    }
}
