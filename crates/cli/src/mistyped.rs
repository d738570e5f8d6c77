//! Options that nobody has: what was probably meant.

use crate::Failure;
use clap::{Args, Command};
use std::ffi::{OsStr, OsString};

/// Whether a word reads as an option: no program is meant by it.
fn is_option(word: &OsStr) -> bool {
    word.as_encoded_bytes().starts_with(b"-")
}

/// Whether `--` stands before the program's words, which are the last of all.
fn follows_the_options(command: &[OsString]) -> bool {
    let words: Vec<OsString> = std::env::args_os().collect();
    let before = words.len().checked_sub(command.len() + 1).and_then(|at| words.get(at));
    before.is_some_and(|word| word == "--")
}

/// Refuses a program whose first word is meant for an option of `kedge NAME`, which takes `A`.
///
/// # Errors
/// Names the option that was probably meant.
pub(crate) fn refuse<A: Args>(name: &'static str, program: &[OsString]) -> Result<(), Failure> {
    let first = program.first().filter(|word| is_option(word) && !follows_the_options(program));
    let Some(word) = first else { return Ok(()) };
    let command = A::augment_args(Command::new(name));
    let options = command.get_arguments().filter_map(|arg| arg.get_long().map(str::to_owned));
    Err(Failure::of_usage(complaint(name, word, &options.collect::<Vec<_>>())))
}

/// Says that `word` is no option of `kedge NAME`, and which of `options` it resembles.
fn complaint(name: &str, word: &OsStr, options: &[String]) -> String {
    let word = crate::output::harmless(&word.to_string_lossy());
    let meant = match nearest(&word, options) {
        Some(option) => format!("did you mean --{option}?"),
        None => format!("`kedge {name} --help` lists the options"),
    };
    format!(
        "`{word}` is no option, and no program: {meant} (A program of that name runs behind --.)"
    )
}

/// The option that `word` differs from in the fewest letters, if in few.
pub(crate) fn nearest<'a>(word: &str, options: &'a [String]) -> Option<&'a str> {
    let name = word.trim_start_matches('-').split('=').next().unwrap_or_default();
    let near = options.iter().map(|option| (distance(name, option), option.as_str()));
    let (letters, option) = near.min()?;
    let few = option.len().max(name.len()) / 3;
    (letters <= few.max(1)).then_some(option)
}

/// How many letters are to be put in, left out, replaced or swapped with their neighbour to make
/// `b` of `a` (optimal string alignment).
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    for i in 0..=a.len() {
        for j in 0..=b.len() {
            rows[i][j] = if i == 0 || j == 0 {
                i + j
            } else {
                let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
                let swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
                let swapped = if swapped { rows[i - 2][j - 2] + 1 } else { usize::MAX };
                replaced.min(swapped).min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1)
            };
        }
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_option_that_was_meant_is_named() {
        let options = ["gpu", "job", "join", "soft-memory", "interval"].map(str::to_owned);
        for (word, meant) in [
            ("--gup", Some("gpu")),
            ("--gpus", Some("gpu")),
            ("-gpu", Some("gpu")),
            ("--gup=soft:2", Some("gpu")),
            ("--soft-mem", Some("soft-memory")),
            ("--softmemory=4G", Some("soft-memory")),
            ("--intervall", Some("interval")),
            ("--verbose", None),
            ("-x", None),
            ("--", None),
        ] {
            assert_eq!(nearest(word, &options), meant, "{word}");
        }
    }

    #[test]
    fn swapped_neighbours_count_once() {
        assert_eq!(distance("gup", "gpu"), 1);
        assert_eq!(distance("", "gpu"), 3);
        assert_eq!(distance("soft", "soft"), 0);
    }
}
