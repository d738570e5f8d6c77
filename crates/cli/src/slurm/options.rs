//! What follows `--kedge=`.

use crate::mistyped;
use clap::Args;
use std::fmt::Write;
use std::str::FromStr;
use thiserror::Error;

/// What the job is started with that says nothing else.
const ON_TERM: &str = "--on-term=checkpoint";
const REQUEUE_EXIT: &str = "--requeue-exit=85";
/// And where SIGTERM reaches all of its processes.
const WITHHOLD: &str = "--withhold-term";

/// The options of `kedge run` that `--kedge` takes. Not among them is what has no sense for a job
/// that goes on by itself, and what the launcher says.
const TAKEN: [&str; 21] = [
    "cache-gpu",
    "cache-host",
    "ckpt-dir",
    "drain-rate",
    "full-every",
    "gpu",
    "gpu-memory",
    "hold",
    "incremental",
    "interval",
    "job",
    "keep",
    "on-term",
    "quiet",
    "reconnect",
    "recover",
    "requeue-exit",
    "soft-memory",
    "stats",
    "warm",
    "withhold-term",
];
/// The words that are `--kedge`'s own.
const WORDS: [&str; 6] = ["off", "on", "script", "steps", "no-requeue", "no-withhold"];

/// Those of which one alone can be given.
const CONTRADICTIONS: [[&str; 2]; 3] =
    [["script", "steps"], ["no-requeue", "requeue-exit"], ["no-withhold", "withhold-term"]];

/// What becomes one job of kedge's in a batch job.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Unit {
    /// As the script tells.
    #[default]
    Told,
    Script,
    Steps,
}

/// What a task has of Slurm that matters to its options.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Given {
    pub(super) has_gpus: bool,
    /// Slurm signals all of a task's processes, and not the first one alone.
    pub(super) tells_all: bool,
}

/// The value of `--kedge`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Options {
    pub(super) off: bool,
    pub(super) unit: Unit,
    no_requeue: bool,
    no_withhold: bool,
    /// Options of `kedge run`, and their values.
    run: Vec<(String, Option<String>)>,
}

/// Why a value of `--kedge` means nothing.
#[derive(Debug, Error, PartialEq, Eq)]
pub(super) enum BadOptions {
    #[error("nothing is said: give on, or interval=10m (kedge slurm check --help)")]
    Empty,
    #[error("`{0}` is nothing that --kedge takes{1} (kedge slurm check --help)")]
    Unknown(String, String),
    #[error("`{0}` takes no value")]
    Value(&'static str),
    #[error("`{0}` is given twice")]
    Twice(String),
    #[error("`{0}` goes with nothing else")]
    Alone(&'static str),
    #[error("`{0}` and `{1}` contradict each other")]
    Both(&'static str, &'static str),
}

impl FromStr for Options {
    type Err = BadOptions;

    fn from_str(text: &str) -> Result<Options, BadOptions> {
        let mut options = Options::default();
        let items = items(text)?;
        let is_given = |word: &str| items.iter().any(|(name, _)| name == word);
        for [one, other] in CONTRADICTIONS {
            if let (Some(one), Some(other)) = (given(&items, one), given(&items, other)) {
                return Err(BadOptions::Both(one, other));
            }
        }
        if is_given("off") && items.len() > 1 {
            return Err(BadOptions::Alone("off"));
        }
        for (name, value) in items {
            if let (Some(word), Some(_)) = (WORDS.iter().find(|word| **word == name), &value) {
                return Err(BadOptions::Value(word));
            }
            if options.run.iter().any(|(known, _)| *known == name) {
                return Err(BadOptions::Twice(name));
            }
            match name.as_str() {
                "on" => {}
                "off" => options.off = true,
                "script" => options.unit = Unit::Script,
                "steps" => options.unit = Unit::Steps,
                "no-requeue" => options.no_requeue = true,
                "no-withhold" => options.no_withhold = true,
                _ => options.run.push((name, value)),
            }
        }
        Ok(options)
    }
}

/// The known name that is `word`, if it is among the items.
fn given(items: &[(String, Option<String>)], word: &'static str) -> Option<&'static str> {
    items.iter().any(|(name, _)| name == word).then_some(word)
}

/// The names between the commas, and their values. A value may have commas: what has no `=` and is
/// no name goes with the value before it (`interval=auto,6h`).
fn items(text: &str) -> Result<Vec<(String, Option<String>)>, BadOptions> {
    let mut items: Vec<(String, Option<String>)> = Vec::new();
    for piece in text.split(',') {
        let (name, value) = match piece.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (piece, None),
        };
        if TAKEN.contains(&name) || WORDS.contains(&name) {
            items.push((name.to_owned(), value));
            continue;
        }
        match items.last_mut() {
            Some((_, Some(before))) if value.is_none() => {
                // Memory.
                let _ = write!(before, ",{piece}");
            }
            _ if text.is_empty() => return Err(BadOptions::Empty),
            _ => return Err(BadOptions::Unknown(piece.to_owned(), meant(name))),
        }
    }
    Ok(items)
}

/// What was probably meant by a name, as a part of the complaint.
fn meant(name: &str) -> String {
    let all: Vec<String> = TAKEN.iter().chain(&WORDS).map(|name| (*name).to_owned()).collect();
    if let Some(near) = mistyped::nearest(name, &all) {
        return format!(": did you mean {near}?");
    }
    let run = crate::run::RunArgs::augment_args(clap::Command::new("run"));
    let of_run = run.get_arguments().any(|arg| arg.get_long() == Some(name));
    let of_run = of_run.then(|| format!(": --{name} of `kedge run` is not for jobs of Slurm's"));
    of_run.unwrap_or_default()
}

impl Options {
    /// The value of an option of `kedge run`, if it is given with one.
    pub(super) fn value(&self, option: &str) -> Option<&str> {
        self.run.iter().find(|(name, _)| name == option)?.1.as_deref()
    }

    fn is_given(&self, option: &str) -> bool {
        self.run.iter().any(|(name, _)| name == option)
    }

    /// The options of `kedge run` that start the job `name`, or go on with it, where Slurm has
    /// given it so much.
    pub(super) fn words(&self, name: &str, given: Given) -> Vec<String> {
        let mut words = vec!["--resume".to_owned(), format!("--job={name}")];
        if !given.has_gpus && !self.is_given("gpu") {
            words.push("--gpu=none".to_owned());
        }
        if !self.is_given("on-term") {
            words.push(ON_TERM.to_owned());
        }
        if !self.no_requeue && !self.is_given("requeue-exit") {
            words.push(REQUEUE_EXIT.to_owned());
        }
        if given.tells_all && !self.no_withhold && !self.is_given("withhold-term") {
            words.push(WITHHOLD.to_owned());
        }
        for (name, value) in self.run.iter().filter(|(name, _)| name != "job") {
            words.push(match value {
                Some(value) => format!("--{name}={value}"),
                None => format!("--{name}"),
            });
        }
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Result<Vec<String>, BadOptions> {
        text.parse().map(|options: Options| options.words("c-7", Given::default()))
    }

    #[test]
    fn each_option_becomes_one_of_run() {
        let usual = ["--resume", "--job=c-7", "--gpu=none", ON_TERM, REQUEUE_EXIT];
        let and = |more: &[&str]| {
            Ok(usual.iter().chain(more).map(|word| (*word).to_owned()).collect::<Vec<_>>())
        };
        assert_eq!(words("on"), and(&[]));
        assert_eq!(words("interval=10m"), and(&["--interval=10m"]));
        assert_eq!(words("steps,recover,recover=2"), Err(BadOptions::Twice("recover".into())));
        let several = "interval=auto,6h,incremental,ckpt-dir=/a/b=c,d";
        let expected = ["--interval=auto,6h", "--incremental", "--ckpt-dir=/a/b=c,d"];
        assert_eq!(words(several), and(&expected));
    }

    #[test]
    fn what_is_given_takes_the_place_of_what_is_usual() {
        let devices: Options = "gpu=a/0,b/0,on-term=checkpoint,30s,no-requeue".parse().unwrap();
        let given = ["--gpu=a/0,b/0", "--on-term=checkpoint,30s"];
        let all = [&["--resume", "--job=n"][..], &given].concat();
        assert_eq!(devices.words("n", Given { has_gpus: true, tells_all: false }), all);
        let status: Options = "requeue-exit=99,job=x".parse().unwrap();
        assert_eq!(status.value("job"), Some("x"));
        let expected = ["--resume", "--job=x-7", ON_TERM, WITHHOLD, "--requeue-exit=99"];
        assert_eq!(status.words("x-7", Given { has_gpus: true, tells_all: true }), expected);
    }

    #[test]
    fn the_signal_is_withheld_where_all_processes_are_told() {
        let told = Given { has_gpus: true, tells_all: true };
        let has = |text: &str| {
            let options: Options = text.parse().unwrap();
            options.words("n", told).iter().filter(|word| *word == WITHHOLD).count()
        };
        assert_eq!(["on", "withhold-term", "no-withhold"].map(has), [1, 1, 0]);
    }

    #[test]
    fn what_means_nothing_is_named() {
        let error = |text: &str| words(text).expect_err("nothing").to_string();
        assert!(error("intervall=10m").contains("`intervall=10m` is nothing that --kedge takes"));
        assert!(error("intervall=10m").contains("did you mean interval?"));
        assert!(error("keep=2,steps=1").contains("`steps` takes no value"));
        assert!(error("join=x").contains("--join of `kedge run` is not for jobs"));
        assert!(error("off,keep=1").contains("`off` goes with nothing else"));
        assert!(error("script,steps").contains("`script` and `steps` contradict"));
        assert!(error("no-withhold,withhold-term").contains("contradict"));
        assert!(error("no-requeue,requeue-exit=3").contains("contradict"));
        assert!(error("").contains("nothing is said") && error("on,,").contains("``"));
    }
}
