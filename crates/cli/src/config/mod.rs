//! What options are where the command line does not say: `/etc/kedge/config.toml`, then the user's
//! own file.

mod apply;
mod file;

use crate::output::{self, PLAIN, Table};
use crate::{Cli, Failure};
use apply::Given;
use clap::{Args, CommandFactory, FromArgMatches};
use file::Settings;
use kedge_supervisor::CONFIG;
use serde::Serialize;
use std::ffi::OsString;
use std::path::PathBuf;

const AFTER_HELP: &str = "\
The files are /etc/kedge/config.toml and $XDG_CONFIG_HOME/kedge/config.toml \
(~/.config/kedge/config.toml); what the second says counts, and what the command line says before \
both. KEDGE_CONFIG names another file in the place of the second; empty, neither is read.

A command's options stand below its name, as on the command line:

  [run]
  gpu = \"soft:2\"
  interval = \"10m\"
  keep = 3
  incremental = true

  [cache.start]
  drain-threads = 4";

/// List the options that configuration files set
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct ConfigArgs {
    /// Print a JSON object: files (a list of objects: path, read, whether it is there), settings (a
    /// list of objects: command, option, values, path)
    #[arg(long)]
    json: bool,
}

/// Parses the command line, and fills in what the files say. Ends the process where the command
/// line is not understood, or asks for help.
///
/// # Errors
/// Where a file cannot be read, or says something that is no option.
pub(crate) fn parse() -> Result<Cli, Failure> {
    let words: Vec<OsString> = std::env::args_os().collect();
    let command = Cli::command();
    let matches = command.clone().get_matches_from(&words);
    // What lists the files names what is wrong in them; help for it must not need them.
    let settings = load()?;
    let matches = match Given::of(&command, &matches) {
        given if settings.is_empty_for(&given.path) => matches,
        given => given.with(&command, words, &settings)?,
    };
    Cli::from_arg_matches(&matches).map_err(Failure::of_usage)
}

/// Parses `words` as a command line, and fills in what the files say.
///
/// # Errors
/// It is not understood, or a file is wrong; in few words.
pub(crate) fn check(words: Vec<OsString>) -> Result<Cli, Failure> {
    let command = Cli::command();
    let short = |error: clap::Error| {
        let said = error.to_string();
        let first = said.lines().take_while(|line| !line.is_empty()).collect::<Vec<_>>().join(" ");
        Failure::of_usage(first.trim_start_matches("error: "))
    };
    let matches = command.clone().try_get_matches_from(&words).map_err(short)?;
    let matches = Given::of(&command, &matches).with(&command, words, &load()?)?;
    Cli::from_arg_matches(&matches).map_err(short)
}

/// Reads the files; their errors say how a command runs without them.
fn load() -> Result<Settings, Failure> {
    let loaded = file::places().and_then(|places| Settings::load(&places));
    loaded.map_err(|failure| {
        let said = failure.message();
        Failure::new(format!("{said} ({CONFIG}= in the environment has no file read)"))
    })
}

#[derive(Debug, Serialize)]
struct Report {
    files: Vec<Listed>,
    settings: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Listed {
    path: PathBuf,
    read: bool,
}

#[derive(Debug, Serialize)]
struct Row {
    command: String,
    option: String,
    values: Vec<String>,
    path: PathBuf,
}

pub(crate) fn run(args: &ConfigArgs) -> Result<(), Failure> {
    let places = file::places()?;
    let settings = Settings::load(&places)?;
    let rows = settings.all().map(|setting| Row {
        command: setting.command.join(" "),
        option: setting.option.clone(),
        values: setting.values.clone(),
        path: setting.file.clone(),
    });
    let rows: Vec<Row> = rows.collect();
    if args.json {
        let listed = |path: PathBuf| Listed { read: path.exists(), path };
        let files = places.into_iter().map(listed).collect();
        return Ok(output::json(&Report { files, settings: rows })?);
    }
    let mut text = String::new();
    for path in places {
        let there = if path.exists() { "" } else { " (not there)" };
        text.push_str(&format!("{}{there}\n", path.display()));
    }
    if !rows.is_empty() {
        let mut table = Table::new(&["COMMAND", "OPTION", "FILE"], &[]);
        for row in rows {
            let option = match row.values.is_empty() {
                true => format!("--{}", row.option),
                false => format!("--{}={}", row.option, row.values.join(",")),
            };
            table.row([
                (PLAIN, output::harmless(&row.command)),
                (PLAIN, output::harmless(&option)),
                (PLAIN, row.path.display().to_string()),
            ]);
        }
        text.push('\n');
        text.push_str(&table.render());
    }
    Ok(output::print(&text)?)
}
