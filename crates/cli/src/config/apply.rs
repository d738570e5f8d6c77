//! A command line, filled in.

use super::file::{Setting, Settings};
use crate::Failure;
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{ArgMatches, Command};
use std::ffi::OsString;

/// What a command line says of options.
pub(super) struct Given {
    /// The command, such as `cache`, `start`.
    pub(super) path: Vec<String>,
    /// The long names of the options that it has.
    options: Vec<String>,
}

impl Given {
    pub(super) fn of(command: &Command, matches: &ArgMatches) -> Given {
        let (mut command, mut matches, mut path) = (command, matches, Vec::new());
        while let Some((name, below)) = matches.subcommand() {
            let Some(sub) = command.find_subcommand(name) else { break };
            path.push(name.to_owned());
            (command, matches) = (sub, below);
        }
        let is_given = |id: &str| {
            let known = matches.ids().any(|known| known.as_str() == id);
            known && matches.value_source(id) != Some(ValueSource::DefaultValue)
        };
        let given = command.get_arguments().filter(|arg| is_given(arg.get_id().as_str()));
        let options = given.filter_map(|arg| arg.get_long().map(str::to_owned)).collect();
        Given { path, options }
    }

    /// The command line with those of the settings for its command that it leaves open, and that do
    /// not contradict it.
    ///
    /// # Errors
    /// Where a setting has a value that its option does not take.
    pub(super) fn with(
        self,
        command: &Command,
        mut words: Vec<OsString>,
        settings: &Settings,
    ) -> Result<ArgMatches, Failure> {
        let at = self.end_of_command(&words);
        let open = settings.of(&self.path).filter(|one| !self.options.contains(&one.option));
        let mut waiting: Vec<&Setting> = open.collect();
        // An option may need another one, whichever is tried first.
        loop {
            let before = waiting.len();
            let mut left = Vec::new();
            for setting in waiting {
                let mut longer = words.clone();
                longer.splice(at..at, spelled(setting));
                match command.clone().try_get_matches_from(&longer) {
                    Ok(_) => words = longer,
                    Err(error) if gives_way(error.kind()) => left.push(setting),
                    Err(error) => return Err(wrong(setting, &error)),
                }
            }
            waiting = left;
            if waiting.len() == before || waiting.is_empty() {
                break;
            }
        }
        command
            .clone()
            .try_get_matches_from(&words)
            .map_err(|error| Failure::of_usage(error.to_string()))
    }

    /// The place behind the words that name the command.
    fn end_of_command(&self, words: &[OsString]) -> usize {
        let mut at = 1;
        for name in &self.path {
            let found = words[at.min(words.len())..].iter().position(|word| word == name.as_str());
            at += found.map_or(0, |place| place + 1);
        }
        at
    }
}

/// Whether an option that meets this is left out: the command line says something else, or lacks
/// what it is for.
fn gives_way(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::ArgumentConflict | ErrorKind::MissingRequiredArgument)
}

fn spelled(setting: &Setting) -> Vec<OsString> {
    let option = &setting.option;
    match &setting.values[..] {
        [] => vec![format!("--{option}").into()],
        values => values.iter().map(|value| format!("--{option}={value}").into()).collect(),
    }
}

fn wrong(setting: &Setting, error: &clap::Error) -> Failure {
    let said = error.to_string();
    let said = said.lines().next().unwrap_or_default().trim_start_matches("error: ");
    let (file, command) = (setting.file.display(), setting.command.join("."));
    Failure::of_usage(format!("{file}: {command}.{}: {said}", setting.option))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cli;
    use clap::CommandFactory;
    use std::path::Path;

    /// Options of `kedge run` after the settings have been filled in.
    fn filled(words: &[&str], text: &str) -> Result<Vec<(String, String)>, String> {
        let words: Vec<OsString> = ["kedge"].iter().chain(words).map(OsString::from).collect();
        let command = Cli::command();
        let matches = command.clone().try_get_matches_from(&words).expect("a command line");
        let mut settings = Settings::default();
        settings.add(Path::new("f"), text).expect("settings");
        let filled = Given::of(&command, &matches).with(&command, words, &settings);
        let filled = filled.map_err(|failure| failure.message().to_owned())?;
        let (_, run) = filled.subcommand().expect("a command");
        let given =
            run.ids().filter(|id| run.value_source(id.as_str()) == Some(ValueSource::CommandLine));
        let raw = |id: &clap::Id| {
            let values = run.get_raw(id.as_str()).into_iter().flatten();
            values.map(|value| value.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
        };
        let options = given.filter(|id| !id.as_str().ends_with("Args"));
        let mut options: Vec<_> = options.map(|id| (id.to_string(), raw(id))).collect();
        options.sort();
        Ok(options)
    }

    fn pairs(all: &[(&str, &str)]) -> Result<Vec<(String, String)>, String> {
        Ok(all.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect())
    }

    #[test]
    fn the_command_line_counts_more() {
        let text = "[run]\ngpu = \"soft:2\"\nkeep = 3";
        let want = pairs(&[("command", "a --gpu x"), ("gpu", "none"), ("keep", "3")]);
        assert_eq!(filled(&["run", "--gpu", "none", "a", "--gpu", "x"], text), want);
    }

    #[test]
    fn an_option_brings_what_it_needs_whatever_their_order() {
        // `full-every` needs `incremental`, and comes before it.
        let text = "[run]\nfull-every = 4\nincremental = true";
        let want = pairs(&[("command", "a"), ("full_every", "4"), ("incremental", "true")]);
        assert_eq!(filled(&["run", "a"], text), want);
        let alone = "[run]\nfull-every = 4";
        assert_eq!(filled(&["run", "a"], alone), pairs(&[("command", "a")]));
    }

    #[test]
    fn a_setting_gives_way_to_an_option_that_it_contradicts() {
        let text = "[run]\non-term = \"checkpoint,30s\"";
        let want = pairs(&[("command", "a"), ("join", "b")]);
        assert_eq!(filled(&["run", "--join", "b", "a"], text), want);
    }

    #[test]
    fn a_value_that_an_option_does_not_take_is_named() {
        let error = filled(&["run", "a"], "[run]\nkeep = \"x\"").expect_err("no number");
        assert!(error.starts_with("f: run.keep: ") && error.contains("'x'"), "{error}");
    }
}
