//! A line of a log: written, and read.
//!
//! `2026-11-20T19:35:00.123Z WARN proxy::serve sim@node1 proxy[12]: text`, or without the three
//! words behind the time, as before there were levels; and the shim's, `[12 WARN] text` or, as
//! before, `[12] text`. What it says begins with its [`Kind`], if that is not plain.

use super::entry::{Entry, Kind};
use super::timestamp;
use serde::Serialize;
use std::fmt;
use std::str::FromStr;
use std::time::SystemTime;

/// Stands for a job that is not known.
const NOBODY: &str = "-";
/// The target of the shim's lines.
const SHIM: &str = "shim";

/// How much a line matters, the most first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

impl Level {
    const ALL: [Level; 5] = [Level::Error, Level::Warn, Level::Info, Level::Debug, Level::Trace];
    /// The names of all.
    pub const NAMES: [&str; 5] = ["error", "warn", "info", "debug", "trace"];

    fn written(self) -> &'static str {
        match self {
            Level::Error => "ERROR",
            Level::Warn => "WARN",
            Level::Info => "INFO",
            Level::Debug => "DEBUG",
            Level::Trace => "TRACE",
        }
    }

    fn read(word: &str) -> Option<Level> {
        Level::ALL.into_iter().find(|level| level.written() == word)
    }
}

impl FromStr for Level {
    type Err = String;
    fn from_str(name: &str) -> Result<Level, String> {
        let known = Level::ALL.into_iter().zip(Level::NAMES).find(|(_, known)| *known == name);
        known.map(|(level, _)| level).ok_or_else(|| format!("there is no level {name}"))
    }
}

impl From<tracing::Level> for Level {
    fn from(level: tracing::Level) -> Level {
        match level {
            tracing::Level::ERROR => Level::Error,
            tracing::Level::WARN => Level::Warn,
            tracing::Level::INFO => Level::Info,
            tracing::Level::DEBUG => Level::Debug,
            tracing::Level::TRACE => Level::Trace,
        }
    }
}

/// Returns an event as a line, with its end.
pub(super) fn written(at: SystemTime, entry: &Entry<'_>) -> String {
    let Entry { target, host, process, .. } = entry;
    let job = if entry.job.is_empty() { NOBODY } else { entry.job };
    let (time, level, text) = (timestamp(at), entry.level.written(), entry.line());
    format!("{time} {level} {target} {job}@{host} {process}: {text}\n")
}

/// Returns a name as one word that a line can have in front.
pub(super) fn word(name: &str) -> String {
    let safe = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | ':');
    name.chars().take(64).map(|c| if safe(c) { c } else { '_' }).collect()
}

/// A line of a log. Of one that kedge has not written, all is text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Line<'a> {
    pub time: Option<&'a str>,
    /// What a line of today does not tell is told by its kind; what kedge has not written, such as
    /// the last words of a process that aborts, is a warning.
    pub level: Level,
    pub target: Option<&'a str>,
    pub job: Option<&'a str>,
    pub host: Option<&'a str>,
    /// Its name and number, `proxy[12]`; of a program, its number.
    pub process: Option<&'a str>,
    pub text: &'a str,
}

impl<'a> Line<'a> {
    /// Reads a line.
    pub fn parse(line: &'a str) -> Line<'a> {
        let line = line.trim_end();
        let read = if line.starts_with('[') { shims(line) } else { timed(line) };
        read.unwrap_or(Line {
            time: None,
            level: Level::Warn,
            target: None,
            job: None,
            host: None,
            process: None,
            text: line,
        })
    }

    /// Returns whether it is from there: a target is a crate, `proxy`, or a module of one,
    /// `proxy::serve`.
    pub fn is_from(&self, target: &str) -> bool {
        let inside = |own: &str| {
            let rest = own.strip_prefix(target);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
        };
        self.target.or(self.name()).is_some_and(inside)
    }

    /// Returns the process's name: what a line without a target is from.
    fn name(&self) -> Option<&'a str> {
        let (name, _) = self.process?.split_once('[')?;
        Some(name)
    }
}

/// As people read it: the time, the process, and what it says.
impl fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.time, self.process) {
            (Some(time), Some(process)) => write!(f, "{time} {process}: {}", self.text),
            (None, Some(process)) => write!(f, "[{process}] {}", self.text),
            (_, None) => f.write_str(self.text),
        }
    }
}

/// Parses `TIME LEVEL TARGET JOB@HOST WHO: TEXT`, or `TIME WHO: TEXT`.
fn timed(line: &str) -> Option<Line<'_>> {
    let (time, rest) = line.split_once(' ')?;
    if !(time.ends_with('Z') && time.contains('T')) {
        return None;
    }
    let front = front(rest);
    let rest = front.as_ref().map_or(rest, |front| front.rest);
    let (process, text) = rest.split_once(": ").or_else(|| Some((rest.strip_suffix(':')?, "")))?;
    let level = front.as_ref().map(|front| front.level);
    let told = |word: &&str| !word.is_empty() && *word != NOBODY;
    Some(Line {
        time: Some(time),
        level: level.unwrap_or_else(|| Kind::of(text).0.level()),
        target: front.as_ref().map(|front| front.target),
        job: front.as_ref().map(|front| front.job).filter(told),
        host: front.as_ref().map(|front| front.host).filter(told),
        process: Some(process),
        text,
    })
}

/// What a line has between its time and its process.
struct Front<'a> {
    level: Level,
    target: &'a str,
    job: &'a str,
    host: &'a str,
    rest: &'a str,
}

fn front(rest: &str) -> Option<Front<'_>> {
    let (level, rest) = rest.split_once(' ')?;
    let level = Level::read(level)?;
    let (target, rest) = rest.split_once(' ')?;
    let (place, rest) = rest.split_once(' ')?;
    let (job, host) = place.split_once('@')?;
    Some(Front { level, target, job, host, rest })
}

/// Parses `[PID LEVEL] TEXT`, or `[PID] TEXT`.
fn shims(line: &str) -> Option<Line<'_>> {
    let (who, text) = line.strip_prefix('[')?.split_once("] ")?;
    let (process, level) = match who.split_once(' ') {
        Some((process, level)) => (process, Level::read(level)?),
        None if text.starts_with("trace: ") => (who, Level::Trace),
        None => (who, Kind::of(text).0.level()),
    };
    if process.is_empty() || !process.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let (target, process) = (Some(SHIM), Some(process));
    Some(Line { time: None, level, target, job: None, host: None, process, text })
}

/// Returns what a log's line says of something amiss: neither when nor who. `None` for what tells
/// of nothing amiss, and for what kedge has not written.
pub fn telling(line: &str) -> Option<&str> {
    let line = Line::parse(line);
    line.process?;
    let (kind, text) = Kind::of(line.text);
    match kind {
        Kind::Fault | Kind::Refused => Some(text.trim()),
        _ if line.level <= Level::Warn => Some(line.text.trim()),
        _ => None,
    }
}

/// What may have ended a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure<'a> {
    /// Its devices, or what has them, have failed.
    Fault(&'a str),
    /// It was refused something.
    Refused(&'a str),
}

/// Returns what a log's line says of a failure. `None` for all other lines.
pub fn failure(line: &str) -> Option<Failure<'_>> {
    let line = Line::parse(line);
    line.process?;
    match Kind::of(line.text) {
        (Kind::Fault, text) => Some(Failure::Fault(text.trim())),
        (Kind::Refused, text) => Some(Failure::Refused(text.trim())),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, UNIX_EPOCH};

    #[test]
    fn a_line_is_read_as_it_was_written() {
        let entry = Entry {
            level: Level::Error,
            target: "proxy::host",
            job: "sim.1",
            host: "node1",
            process: "kedge balance[7]",
            kind: Kind::Fault,
            text: "context 1: [x]: none",
            fields: &[],
        };
        let at = UNIX_EPOCH + Duration::from_millis(1_709_251_199_007);
        let line = written(at, &entry);
        let start = "2024-02-29T23:59:59.007Z ERROR proxy::host sim.1@node1 kedge balance[7]: ";
        assert_eq!(line, format!("{start}fault: context 1: [x]: none\n"));
        let read = Line::parse(&line);
        let expected = Line {
            time: Some("2024-02-29T23:59:59.007Z"),
            level: Level::Error,
            target: Some("proxy::host"),
            job: Some("sim.1"),
            host: Some("node1"),
            process: Some("kedge balance[7]"),
            text: "fault: context 1: [x]: none",
        };
        assert_eq!(read, expected);
        let shown = "2024-02-29T23:59:59.007Z kedge balance[7]: fault: context 1: [x]: none";
        assert_eq!(read.to_string(), shown);
        let nobodys = written(at, &Entry { job: "", ..entry });
        assert_eq!(Line::parse(&nobodys).job, None);
    }

    #[test]
    fn lines_of_before_are_read_and_shown_as_they_are() {
        for (text, level, process) in [
            ("2026-11-20T19:35:00.123Z proxy[12]: kernel f: x", Level::Warn, Some("proxy[12]")),
            ("2026-11-20T19:35:00.123Z proxy[12]: note: x", Level::Info, Some("proxy[12]")),
            ("2026-11-20T19:35:00.123Z init: fault: x", Level::Error, Some("init")),
            ("2026-11-20T19:35:00.123Z kedge migrate[3]: x", Level::Warn, Some("kedge migrate[3]")),
            ("[5275] refused: cuFoo", Level::Warn, Some("5275")),
            ("[5275] trace: 5275 cuInit() = 0", Level::Trace, Some("5275")),
            ("thread panicked: x", Level::Warn, None),
            ("[x] y", Level::Warn, None),
            ("2026-11-20T19:35:00.123Z", Level::Warn, None),
            ("", Level::Warn, None),
        ] {
            let line = Line::parse(text);
            assert_eq!((line.level, line.process), (level, process), "{text}");
            assert_eq!(line.to_string(), text);
        }
        let shims = Line::parse("[12 TRACE] trace: 12 cuInit() = 0");
        assert_eq!((shims.level, shims.target), (Level::Trace, Some("shim")));
        assert_eq!(shims.to_string(), "[12] trace: 12 cuInit() = 0");
    }

    #[test]
    fn what_looks_like_a_line_and_is_none_is_text() {
        for text in [
            "2026-11-20T19:35:00.123Z WARN",
            "2026-11-20T19:35:00.123Z WARN proxy::serve",
            "2026-11-20T19:35:00.123Z WARN proxy::serve sim@node1",
            "2026-11-20T19:35:00.123Z WARN proxy::serve sim@node1 ",
            "[12 LOUD] text",
            "[",
            "[]",
            "[] x",
            "\u{fffd}\u{fffd} \u{fffd}",
        ] {
            let line = Line::parse(text);
            assert_eq!((line.level, line.process), (Level::Warn, None), "{text}");
            assert_eq!(line.to_string(), text.trim_end());
        }
    }

    #[test]
    fn targets_are_crates_and_modules() {
        let of = |target| Line { target: Some(target), ..Line::parse("x") };
        assert!(of("proxy::serve").is_from("proxy") && of("proxy").is_from("proxy"));
        assert!(of("proxy::serve").is_from("proxy::serve"));
        assert!(!of("proxy::serve").is_from("pro") && !of("proxy").is_from("proxy::serve"));
        assert!(Line::parse("2026-11-20T19:35:00.123Z proxy[12]: x").is_from("proxy"));
        assert!(!Line::parse("x").is_from("proxy"));
    }

    #[test]
    fn levels_are_in_order() {
        assert!(Level::Error < Level::Warn && Level::Debug < Level::Trace);
        assert_eq!("warn".parse(), Ok(Level::Warn));
        assert!("WARN".parse::<Level>().is_err());
        assert!(Level::NAMES.iter().all(|name| name.parse::<Level>().is_ok()));
    }

    #[test]
    fn what_is_amiss_is_told_from_notes() {
        let line = "2026-11-21T15:50:32.941Z proxy[5276]: no device: [x]: none\n";
        assert_eq!(telling(line), Some("no device: [x]: none"));
        assert_eq!(telling("2026-11-21T15:50:32.941Z proxy[5276]: note: hello"), None);
        assert_eq!(telling("[5275] cuInit: refused"), Some("cuInit: refused"));
        assert_eq!(telling("[5275] refused: cuFoo"), Some("cuFoo"));
        assert_eq!(telling("Killed"), None);
        let now = |level: &str| format!("2026-11-21T15:50:32.941Z {level} kedge a@b kedge[1]: x");
        assert_eq!(telling(&now("WARN")), Some("x"));
        assert_eq!(telling(&now("INFO")), None);
    }

    #[test]
    fn failures_are_told_from_the_rest() {
        let proxy = "2026-11-21T15:50:32.941Z proxy[5276]: fault: context 1: [x]: none\n";
        assert_eq!(failure(proxy), Some(Failure::Fault("context 1: [x]: none")));
        let init = "2026-11-21T15:50:32.941Z init: fault: a proxy is gone";
        assert_eq!(failure(init), Some(Failure::Fault("a proxy is gone")));
        let shim = failure("[5275] refused: cuFoo is not supported");
        assert_eq!(shim, Some(Failure::Refused("cuFoo is not supported")));
        let now = "2026-11-21T15:50:32.941Z ERROR proxy::host sim@n proxy[1]: fault: gone";
        assert_eq!(failure(now), Some(Failure::Fault("gone")));
        assert_eq!(failure("[5 WARN] refused: cuFoo"), Some(Failure::Refused("cuFoo")));
        assert_eq!(failure("[5275] a module did not load"), None);
        assert_eq!(failure("fault: nobody's"), None);
    }
}
