//! Files and folders of jobs, as all that note something there make them.

use crate::job::name::JobError;
use serde::Serialize;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// What the folder of all jobs is called.
pub(crate) const JOBS: &str = "jobs";
/// What the folder of all hosts is called.
pub(crate) const HOSTS: &str = "hosts";

pub(crate) fn io_error(path: &Path) -> impl FnOnce(io::Error) -> JobError {
    move |source| JobError::Io { path: path.to_owned(), source }
}

/// The path that an environment variable holds, if it is an absolute one.
pub(crate) fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute())
}

/// Replaces the file `path` as a whole.
pub(crate) fn replace(path: &Path, value: &impl Serialize) -> Result<(), JobError> {
    let new = path.with_extension("json.new");
    let text = serde_json::to_vec_pretty(value).map_err(|e| io_error(path)(e.into()))?;
    let written = fs::write(&new, text).and_then(|()| fs::rename(&new, path));
    written.map_err(|error| {
        let _ = fs::remove_file(&new);
        io_error(path)(error)
    })
}

/// Makes `path` if need be, and refuses it unless it is a folder of `uid` that only it can enter.
pub(crate) fn private_dir(path: &Path, uid: u32) -> Result<(), JobError> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(io_error(path)(e)),
        _ => {}
    }
    let meta = fs::symlink_metadata(path).map_err(io_error(path))?;
    if !meta.is_dir() || meta.uid() != uid || meta.permissions().mode() & 0o077 != 0 {
        return Err(JobError::NotPrivate { path: path.to_owned() });
    }
    Ok(())
}

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
