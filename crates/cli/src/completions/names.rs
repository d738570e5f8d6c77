//! `kedge names`: what completions offer where a job or an image is asked for.

use crate::{Failure, output};
use clap::{Args, ValueEnum};
use kedge_image::{Found, State as ImageState, catalogue};
use kedge_supervisor::jobs::{Jobs, State};
use kedge_supervisor::policy;
use std::collections::BTreeSet;
use std::path::Path;

#[derive(Debug, Args)]
pub(crate) struct NamesArgs {
    /// Of what
    #[arg(value_enum)]
    of: Of,
}

/// What a word of the command line names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Of {
    /// Jobs that run.
    Jobs,
    /// Those, and the ended ones whose log is kept.
    Kept,
    /// Images in the folder where they go by default.
    Images,
    /// Finished ones of those, and the jobs that have one.
    Restartable,
}

impl Of {
    /// Returns what the argument of `command` with this value's name is. The names that help and
    /// manual show decide, so that a new command is completed as it is documented.
    pub(super) fn argument(command: &str, value: &str) -> Option<Of> {
        match value {
            "JOB" if command == "logs" => Some(Of::Kept),
            "JOB" => Some(Of::Jobs),
            "IMAGE" | "IMAGE|DIR" => Some(Of::Images),
            "IMAGE|DIR|JOB" => Some(Of::Restartable),
            _ => None,
        }
    }

    /// Returns what `kedge names` calls it.
    pub(super) fn word(self) -> &'static str {
        match self {
            Of::Jobs => "jobs",
            Of::Kept => "kept",
            Of::Images => "images",
            Of::Restartable => "restartable",
        }
    }

    /// Whether a path is good there, too.
    pub(super) fn is_path(self) -> bool {
        matches!(self, Of::Images | Of::Restartable)
    }
}

/// Prints a name a line.
pub(crate) fn names(args: &NamesArgs) -> Result<(), Failure> {
    let mut names = BTreeSet::new();
    if let Of::Jobs | Of::Kept = args.of {
        let is_meant = |state: &State| args.of == Of::Kept || *state == State::Running;
        let jobs = Jobs::open()?.list()?.into_iter().filter(|meta| is_meant(&meta.state));
        names.extend(jobs.map(|meta| meta.name));
    } else {
        let dir = policy::default_dir()?;
        let found = if dir.exists() { catalogue(&dir)? } else { Vec::new() };
        names.extend(found.iter().flat_map(|found| of_image(found, args.of)));
    }
    let mut text = String::new();
    for name in names.iter().filter(|name| is_plain(name)) {
        text.push_str(name);
        text.push('\n');
    }
    Ok(output::print(&text)?)
}

fn of_image(found: &Found, of: Of) -> Vec<String> {
    let image = name(&found.folder);
    match &found.state {
        ImageState::Finished(manifest) if of == Of::Restartable => {
            vec![image, manifest.job.clone()]
        }
        _ if of == Of::Restartable => Vec::new(),
        _ => vec![image],
    }
}

fn name(folder: &Path) -> String {
    folder.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Whether no shell sees more in `name` than a word: a folder of images may be others' to write to.
fn is_plain(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    !name.is_empty() && !name.starts_with('-') && name.chars().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_words_and_nothing_else() {
        assert!(is_plain("sim-0001") && is_plain("a.b_c"));
        for bad in ["", "-f", "a b", "$(id)", "a;b", "`id`", "a\nb", "é"] {
            assert!(!is_plain(bad), "{bad}");
        }
    }

    #[test]
    fn values_are_called_what_the_command_takes() {
        for of in Of::value_variants() {
            assert_eq!(of.to_possible_value().expect("a value").get_name(), of.word());
        }
    }
}
