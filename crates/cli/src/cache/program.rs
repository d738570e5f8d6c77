//! A cache for as long as a program runs.

use crate::Failure;
use crate::output;
use kedge_cache::control::{self, Answer, Ask};
use kedge_cache::spec;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A folder that is cached while a program runs.
#[derive(Debug)]
pub(crate) struct ForProgram {
    under: PathBuf,
    /// Whether its cache was started for the program, and ends with it.
    own: bool,
}

impl ForProgram {
    /// Starts a cache of `folder`, if none runs there; close does not wait for the drain then, as
    /// the end of the program does.
    pub(crate) fn begin(folder: &Path) -> Result<ForProgram, Failure> {
        let under = spec::full_path(folder)?;
        let own = control::ask(&under, Ask::Status).is_err();
        if own {
            let mut start = Command::new(std::env::current_exe()?);
            start.args(["cache", "start", "--close", "memory", "--under"]).arg(&under);
            // What it says is none of the program's output.
            let output = start.stdin(Stdio::null()).output()?;
            if !output.status.success() {
                let said = String::from_utf8_lossy(&output.stderr);
                let said = said.trim().trim_start_matches("kedge: ").to_owned();
                return Err(Failure::new(said));
            }
        }
        Ok(ForProgram { under, own })
    }

    /// Has all that was written be below, and ends a cache that was started for the program. What
    /// fails is told: the program has ended as it has.
    pub(crate) fn end(self) {
        let what = if self.own { Ask::Stop } else { Ask::Drain };
        let why = match control::ask(&self.under, what) {
            Ok(Answer::Left(why)) => why,
            Ok(_) => return,
            Err(error) => error.to_string(),
        };
        output::complain(&output::harmless(&why));
    }
}
