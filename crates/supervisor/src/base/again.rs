//! How kedge starts kedge.

use std::process::Command;

/// Names a configuration file; empty, none is read.
pub const CONFIG: &str = "KEDGE_CONFIG";

/// A command that runs this process's own program, which the caller gives its arguments.
///
/// It reads no configuration file: the arguments say all, and what a file says by then is for the
/// next command that a person gives. A wrong line in one must not end a job that goes back.
#[must_use]
pub fn kedge_again() -> Command {
    // The file may have been replaced since by another version's.
    let own = std::env::current_exe().ok().filter(|path| path.exists());
    let mut command = Command::new(own.unwrap_or_else(|| "/proc/self/exe".into()));
    command.env(CONFIG, "");
    command
}
