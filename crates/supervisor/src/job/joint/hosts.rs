//! Jobs whose parts are on several hosts: where their coordinator is, and the key that they share.

use kedge_coordinator::{Far, FarError, JobKey};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The variable that has the key, where no file is named.
pub const KEY: &str = "KEDGE_JOIN_KEY";

/// The coordinator at `address`, HOST:PORT, with the key in `file` or in the environment.
pub fn far(address: &str, file: Option<&Path>) -> Result<Far, FarError> {
    let key = match file {
        Some(path) => JobKey::read(path)?,
        None => JobKey::new(std::env::var_os(KEY).unwrap_or_default().as_bytes())?,
    };
    Far::new(address, key)
}
