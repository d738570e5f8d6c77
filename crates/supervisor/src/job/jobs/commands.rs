//! What a job's programs find first on their PATH: kedge, under the names of remote shells.

use super::dir::{COMMANDS, JobDir};
use super::{JobError, io_error};
use std::ffi::OsString;
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

/// The remote shell that launchers and users start; `kedge` so called brings what it starts into
/// the job.
pub const SHELL: &str = "ssh";

impl JobDir {
    /// Where they are.
    pub(crate) fn commands(&self) -> PathBuf {
        self.dir.join(COMMANDS)
    }

    /// Makes them.
    ///
    /// # Errors
    /// The folder or the link cannot be made.
    pub(crate) fn link_commands(&self) -> Result<(), JobError> {
        let commands = self.commands();
        let own = std::env::current_exe().map_err(io_error(&commands))?;
        DirBuilder::new().recursive(true).create(&commands).map_err(io_error(&commands))?;
        let link = commands.join(SHELL);
        match symlink(own, &link) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                Err(io_error(&link)(error))
            }
            _ => Ok(()),
        }
    }

    /// The PATH of the job's programs: these first, then what this process has; where that is
    /// nothing, what execvp(3) looks through.
    pub(crate) fn search_path(&self) -> OsString {
        let mut path = self.commands().into_os_string();
        path.push(":");
        path.push(std::env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into()));
        path
    }
}
