//! The folders that hold what a restart must keep: private ones, in the user's state folder.

use crate::plugins::error::{Context, PluginError};
use rustix::process::geteuid;
use std::fs::{self, DirBuilder};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Returns `$XDG_STATE_HOME/kedge/NAME`, or `~/.local/state/kedge/NAME`, which need not exist.
pub(crate) fn of(name: &str) -> Result<PathBuf, PluginError> {
    let told = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from);
    let state = told
        .filter(|state| state.is_absolute())
        .or_else(|| std::env::home_dir().map(|home| home.join(".local/state")))
        .filter(|state| state.is_absolute());
    let state = state.ok_or_else(|| {
        let what = "a restart keeps what it must in a folder of yours: set HOME or XDG_STATE_HOME \
                    to an absolute path";
        PluginError::Refused(what.to_owned())
    })?;
    Ok(state.join("kedge").join(name))
}

/// Makes such a folder where it is not there, for its owner alone.
///
/// # Errors
///
/// If it cannot be made, or is not this user's alone.
pub(crate) fn make_at(folder: &Path) -> Result<(), PluginError> {
    let what = || format!("make {}", folder.display());
    DirBuilder::new().recursive(true).mode(0o700).create(folder).to(what)?;
    match is_private(folder) {
        true => Ok(()),
        false => Err(PluginError::Refused(format!(
            "{} is not a folder of this user's alone: make it so (chmod 700)",
            folder.display()
        ))),
    }
}

/// Whether it is a folder that belongs to this user, and that nobody else may look into.
pub(crate) fn is_private(folder: &Path) -> bool {
    let own = geteuid().as_raw();
    let is = |found: fs::Metadata| found.is_dir() && found.uid() == own && found.mode() & 0o77 == 0;
    folder.symlink_metadata().is_ok_and(is)
}
