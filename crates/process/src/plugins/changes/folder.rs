//! The folders that hold what a restart must keep: private ones, in the user's state folder.

use crate::plugins::error::{Context, PluginError};
use rustix::fs::{Access, access};
use rustix::process::geteuid;
use std::fs::{self, DirBuilder};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Returns `$XDG_STATE_HOME/kedge/NAME`, or `~/.local/state/kedge/NAME`, which need not exist;
/// where neither can be written to, `kedge-state-UID/NAME` in the folder for temporary files.
pub(crate) fn of(name: &str) -> Result<PathBuf, PluginError> {
    let told = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from);
    let home = std::env::home_dir().map(|home| home.join(".local/state"));
    let own = [told, home].into_iter().flatten().map(|state| state.join("kedge"));
    let temporary = || std::env::temp_dir().join(format!("kedge-state-{}", geteuid().as_raw()));
    let state = own.clone().find(|state| state.is_absolute() && can_be_made(state));
    let state = state.unwrap_or_else(temporary).join(name);
    match state.is_absolute() {
        true => Ok(state),
        false => Err(PluginError::Refused(
            "a restart keeps what it must in a folder of yours: set XDG_STATE_HOME to an absolute \
             path"
                .to_owned(),
        )),
    }
}

/// Whether this user may make that folder, or may write to it.
fn can_be_made(folder: &Path) -> bool {
    let there = folder.ancestors().find(|above| above.symlink_metadata().is_ok());
    there.is_some_and(|there| access(there, Access::WRITE_OK | Access::EXEC_OK).is_ok())
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
