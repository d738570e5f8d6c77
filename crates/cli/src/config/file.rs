//! The files: where they are, whose they may be, what they say.

use crate::mistyped::nearest;
use crate::{Cli, Failure, output};
use clap::CommandFactory;
use kedge_supervisor::CONFIG;
use rustix::fs::OFlags;
use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use toml::{Table, Value};

const SYSTEM: &str = "/etc/kedge/config.toml";
/// Longest file that is read, in bytes: a longer one is none of kedge's.
const MAX_FILE_LEN: u64 = 1 << 20;

/// One option of one command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Setting {
    /// Such as `cache`, `start`.
    pub(super) command: Vec<String>,
    pub(super) option: String,
    /// None: the option stands alone, as `--incremental`.
    pub(super) values: Vec<String>,
    pub(super) file: PathBuf,
}

/// What all files say together.
#[derive(Debug, Default)]
pub(super) struct Settings(BTreeMap<(Vec<String>, String), Setting>);

/// Where the files are looked for, the one that counts more last.
///
/// # Errors
/// Where KEDGE_CONFIG names a file that is not there.
pub(super) fn places() -> Result<Vec<PathBuf>, Failure> {
    let system = PathBuf::from(SYSTEM);
    if let Some(named) = std::env::var_os(CONFIG) {
        if named.is_empty() {
            return Ok(Vec::new());
        }
        let named = PathBuf::from(named);
        if !named.exists() {
            let path = named.display();
            return Err(Failure::new(format!("KEDGE_CONFIG names {path}, which is not there")));
        }
        return Ok(vec![system, named]);
    }
    let variable =
        |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let home = || Some(variable("HOME")?.join(".config"));
    let own = variable("XDG_CONFIG_HOME").or_else(home).map(|dir| dir.join("kedge/config.toml"));
    Ok([system].into_iter().chain(own).collect())
}

impl Settings {
    /// Reads the files that are there.
    ///
    /// # Errors
    /// Where one cannot be read, is open to others' changes, or says something that is no option.
    pub(super) fn load(places: &[PathBuf]) -> Result<Settings, Failure> {
        let mut settings = Settings::default();
        for path in places {
            if let Some(text) = read(path)? {
                settings.add(path, &text)?;
            }
        }
        Ok(settings)
    }

    /// Takes over what `text` says; it counts more than what there is.
    pub(super) fn add(&mut self, path: &Path, text: &str) -> Result<(), Failure> {
        let wrong = |what: String| Failure::new(format!("{}: {what}", path.display()));
        let table: Table =
            text.parse().map_err(|error: toml::de::Error| wrong(error.to_string()))?;
        let mut found = Vec::new();
        walk(&Cli::command(), &[], table, &mut found).map_err(wrong)?;
        for (command, option, values) in found {
            let file = path.to_owned();
            let setting =
                Setting { command: command.clone(), option: option.clone(), values, file };
            self.0.insert((command, option), setting);
        }
        Ok(())
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Setting> {
        self.0.values()
    }

    pub(super) fn of<'a>(&'a self, command: &'a [String]) -> impl Iterator<Item = &'a Setting> {
        self.all().filter(move |setting| setting.command == command)
    }

    pub(super) fn is_empty_for(&self, command: &[String]) -> bool {
        self.of(command).next().is_none()
    }
}

/// A file's text; None where there is no such file, or where it is told that the file is somebody
/// else's, or that this user may not look at it.
fn read(path: &Path) -> Result<Option<String>, Failure> {
    let failed = |what: &str| Failure::new(format!("{}: {what}", path.display()));
    let mut options = OpenOptions::new();
    // Opening a FIFO does not wait for its writer.
    options.read(true).custom_flags(OFlags::NONBLOCK.bits() as i32);
    let file = match options.open(path) {
        Ok(file) => file,
        Err(error) if [ErrorKind::NotFound, ErrorKind::NotADirectory].contains(&error.kind()) => {
            return Ok(None);
        }
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            not_read(path, "permission denied");
            return Ok(None);
        }
        Err(error) => return Err(failed(&error.to_string())),
    };
    let meta = file.metadata().map_err(|error| failed(&error.to_string()))?;
    if !meta.is_file() {
        return Err(failed("not a file"));
    }
    let own = rustix::process::geteuid().as_raw();
    if ![0, own].contains(&meta.uid()) {
        // As for root whose HOME is another user's still.
        not_read(path, "it is neither yours nor root's");
        return Ok(None);
    }
    if meta.mode() & 0o022 != 0 {
        return Err(failed("others can change it: `chmod go-w` it"));
    }
    let mut text = String::new();
    let read = file.take(MAX_FILE_LEN + 1).read_to_string(&mut text);
    read.map_err(|error| failed(&error.to_string()))?;
    if text.len() as u64 > MAX_FILE_LEN {
        return Err(failed("longer than 1 MiB"));
    }
    Ok(Some(text))
}

fn not_read(path: &Path, why: &str) {
    output::complain(&format!("{}: not read: {why}", path.display()));
}

type FoundSetting = (Vec<String>, String, Vec<String>);

/// Collects the options in a command's table, and in those of its own commands.
fn walk(
    command: &clap::Command,
    path: &[String],
    table: Table,
    found: &mut Vec<FoundSetting>,
) -> Result<(), String> {
    for (key, value) in table {
        let below = [path, std::slice::from_ref(&key)].concat();
        let sub = command.get_subcommands().find(|sub| sub.get_name() == key && !sub.is_hide_set());
        match (sub, value) {
            (Some(sub), Value::Table(table)) => walk(sub, &below, table, found)?,
            (_, value) => {
                check(command, path, &key)?;
                if let Some(values) =
                    values(&value).map_err(|what| format!("{}: {what}", below.join(".")))?
                {
                    found.push((path.to_vec(), key, values));
                }
            }
        }
    }
    Ok(())
}

/// Refuses what is no option of the command.
fn check(command: &clap::Command, path: &[String], key: &str) -> Result<(), String> {
    let options = command.get_arguments().filter_map(|arg| arg.get_long());
    let names: Vec<String> = match path {
        [] => command.get_subcommands().map(|sub| sub.get_name().to_owned()).collect(),
        _ => options.filter(|name| *name != "help").map(str::to_owned).collect(),
    };
    if !path.is_empty() && names.iter().any(|name| name == key) {
        return Ok(());
    }
    let meant =
        nearest(key, &names).map_or_else(String::new, |name| format!(": did you mean {name}?"));
    Err(match path {
        [] => format!("`{key}` is no command with a table of its own{meant}"),
        _ => format!("`{key}` is no option of `kedge {}`{meant}", path.join(" ")),
    })
}

/// What stands behind an option; None: it is not given at all.
fn values(value: &Value) -> Result<Option<Vec<String>>, &'static str> {
    let one = |value: &Value| match value {
        Value::String(text) => Ok(text.clone()),
        Value::Integer(number) => Ok(number.to_string()),
        Value::Float(number) => Ok(number.to_string()),
        _ => Err("give text, a number, true or false, or a list of texts and numbers"),
    };
    Ok(match value {
        Value::Boolean(false) => None,
        Value::Boolean(true) => Some(Vec::new()),
        Value::Array(list) if list.is_empty() => None,
        Value::Array(list) => Some(list.iter().map(one).collect::<Result<_, _>>()?),
        other => Some(vec![one(other)?]),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(texts: &[&str]) -> Result<Vec<(String, Vec<String>)>, String> {
        let mut settings = Settings::default();
        for text in texts {
            let added = settings.add(Path::new("f"), text);
            added.map_err(|failure| failure.message().to_owned())?;
        }
        let told = |one: &Setting| {
            (format!("{} {}", one.command.join("."), one.option), one.values.clone())
        };
        Ok(settings.all().map(told).collect())
    }

    #[test]
    fn the_later_file_counts() {
        let all =
            settings(&["[run]\nkeep = 3\ngpu = \"soft\"", "[run]\nkeep = 4\nincremental = true"]);
        let want =
            [("run gpu", vec!["soft"]), ("run incremental", vec![]), ("run keep", vec!["4"])];
        let want = want.map(|(name, values)| {
            (name.to_owned(), values.into_iter().map(str::to_owned).collect::<Vec<_>>())
        });
        assert_eq!(all, Ok(want.to_vec()));
    }

    #[test]
    fn commands_within_commands_have_tables_too() {
        let all =
            settings(&["[cache.start]\ntier = [\"ram:1G\", \"nvme:/l:2G\"]"]).expect("settings");
        assert_eq!(all, [("cache.start tier".into(), vec!["ram:1G".into(), "nvme:/l:2G".into()])]);
    }

    #[test]
    fn what_is_no_option_is_named() {
        for (text, said) in [
            ("[run]\ngup = \"soft\"", "f: `gup` is no option of `kedge run`: did you mean gpu?"),
            (
                "[chekpoint]\ngpu = \"soft\"",
                "f: `chekpoint` is no command with a table of its own: did you mean checkpoint?",
            ),
            ("gpu = \"soft\"", "f: `gpu` is no command"),
            ("[probe]\nx = 1", "f: `probe` is no command"),
            ("[run]\ngpu = {}", "f: run.gpu: give text"),
            ("[run]\nhelp = true", "f: `help` is no option"),
            ("[run", "f: TOML parse error"),
        ] {
            let error = settings(&[text]).expect_err(text);
            assert!(error.starts_with(said), "{error}");
        }
    }
}
