//! `kedge logs`: what kedge had to say about a job.

use crate::Failure;
use crate::output;
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use kedge_control::joblog::{self, Level, Line};
use kedge_control::logfile::Log;
use kedge_supervisor::jobs::{JobName, Jobs, State};
use std::collections::VecDeque;
use std::io::{self, Write};
use std::time::Duration;
use thiserror::Error;

#[derive(Debug, Args)]
pub(crate) struct LogsArgs {
    /// The job [default: the one that started last]
    #[arg(value_name = "JOB")]
    job: Option<JobName>,
    /// Go on until the job ends
    #[arg(long, short, conflicts_with = "json")]
    follow: bool,
    /// Only the last LINES lines, of those that are wanted
    #[arg(short = 'n', long = "lines", value_name = "LINES")]
    lines: Option<usize>,
    #[command(flatten)]
    wanted: Wanted,
    /// Print a JSON list of objects: time, level, target, job, host, process, text
    #[arg(long)]
    json: bool,
}

/// Which lines are wanted.
#[derive(Debug, Default, Args)]
struct Wanted {
    /// Only lines of this level or a graver one
    #[arg(long, value_name = "LEVEL", value_parser = levels())]
    level: Option<Level>,
    /// Only lines from there: kedge (its commands), a crate, such as proxy or supervisor, or a
    /// module of one (proxy::serve); device, far (a session's server), coordinator (the parts of a
    /// job) or shim (the program's own process)
    #[arg(long, value_name = "TARGET")]
    target: Option<String>,
    /// Only lines about this host
    #[arg(long, value_name = "HOST")]
    host: Option<String>,
}

fn levels() -> impl TypedValueParser<Value = Level> {
    PossibleValuesParser::new(Level::NAMES).try_map(|name| name.parse())
}

impl Wanted {
    /// Returns whether a line is wanted. One that names no host is about `here`.
    fn has(&self, line: &Line<'_>, here: &str) -> bool {
        self.level.is_none_or(|most| line.level <= most)
            && self.target.as_ref().is_none_or(|target| line.is_from(target))
            && self.host.as_ref().is_none_or(|host| line.host.unwrap_or(here) == host)
    }
}

#[derive(Debug, Error)]
enum LogsError {
    #[error("there is no job named {0}: `kedge ps --all` lists those that are kept")]
    Unknown(JobName),
    #[error("there are no jobs yet: `kedge run -- PROGRAM` starts one")]
    None,
    #[error("{path}: {source}")]
    Read { path: std::path::PathBuf, source: io::Error },
}

pub(crate) fn run(args: &LogsArgs) -> Result<(), Failure> {
    let jobs = Jobs::open()?;
    let name = match &args.job {
        Some(name) if jobs.find(name).is_none() => {
            return Err(LogsError::Unknown(name.clone()).into());
        }
        Some(name) => name.clone(),
        None => latest(&jobs)?,
    };
    let path = jobs.log_path(&name);
    let bad = |source| LogsError::Read { path: path.clone(), source };
    let (log, here) = (Log::open(&path).map_err(bad)?, joblog::here());
    let mut lines = Lines { log, wanted: &args.wanted, here };
    let found = lines.read(args.lines).map_err(bad)?;
    if args.json {
        return Ok(output::json(&found.iter().map(|line| Line::parse(line)).collect::<Vec<_>>())?);
    }
    print(&found)?;
    if args.follow {
        follow(&jobs, &name, &mut lines).map_err(bad)?;
    }
    Ok(())
}

fn latest(jobs: &Jobs) -> Result<JobName, Failure> {
    let newest = jobs.list()?.into_iter().next().ok_or(LogsError::None)?;
    Ok(newest.name.parse()?)
}

/// Those of a log that are wanted.
struct Lines<'a> {
    log: Log,
    wanted: &'a Wanted,
    /// This host's name.
    here: String,
}

impl Lines<'_> {
    /// Returns what is there, or its last `limit` lines.
    fn read(&mut self, limit: Option<usize>) -> io::Result<VecDeque<String>> {
        let mut lines = VecDeque::new();
        let mut line = Vec::new();
        while self.log.read_line(&mut line)? > 0 {
            let text = output::harmless(String::from_utf8_lossy(&line).trim_end());
            line.clear();
            if self.wanted.has(&Line::parse(&text), &self.here) {
                lines.push_back(text);
            }
            if limit.is_some_and(|limit| lines.len() > limit) {
                lines.pop_front();
            }
        }
        Ok(lines)
    }
}

/// Prints lines as people read them.
fn print(lines: &VecDeque<String>) -> io::Result<()> {
    let text: String = lines.iter().map(|line| format!("{}\n", Line::parse(line))).collect();
    output::print(&text)
}

/// Prints what is added until the job has ended and all of it is printed.
fn follow(jobs: &Jobs, name: &JobName, lines: &mut Lines<'_>) -> io::Result<()> {
    loop {
        // Asked before reading, so that the last lines are not missed.
        let running = jobs.find(name).is_some_and(|meta| meta.state == State::Running);
        print(&lines.read(None)?)?;
        if !running || io::stdout().flush().is_err() {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &[u8] = b"one\ntwo\x1b[1m\n\
        2026-11-20T19:35:00.123Z proxy[12]: note: of before\n\
        2026-11-20T19:35:01.000Z INFO proxy::serve sim@node1 proxy[12]: note: hello\n\
        2026-11-20T19:35:02.000Z ERROR device sim@node1 proxy[12]: context 1\n\
        2026-11-20T19:35:03.000Z WARN far sim@node2 proxy[12]: cut\n\
        [14 TRACE] trace: 14 cuInit(flags=0) = 0\n\
        three";

    /// Returns the lines of a log of [`LOG`] that are wanted.
    fn read(name: &str, wanted: &Wanted, limit: Option<usize>) -> Vec<String> {
        let path = std::env::temp_dir().join(format!("kedge-logs-{name}-{}", std::process::id()));
        std::fs::write(&path, LOG).unwrap();
        let (log, here) = (Log::open(&path).unwrap(), "node1".to_owned());
        let mut lines = Lines { log, wanted, here };
        let found = lines.read(limit).unwrap();
        std::fs::remove_file(&path).unwrap();
        found.iter().map(|line| Line::parse(line).to_string()).collect()
    }

    #[test]
    fn only_the_last_lines_are_kept() {
        let read = |limit| read("last", &Wanted::default(), limit);
        let all = read(None);
        let now = "2026-11-20T19:35:01.000Z proxy[12]: note: hello";
        assert_eq!(all[..2], ["one", "two [1m"]);
        assert_eq!(all[3..4], [now]);
        assert_eq!(all[6..], ["[14] trace: 14 cuInit(flags=0) = 0", "three"]);
        assert_eq!(read(Some(1)), ["three"]);
        assert_eq!(read(Some(0)), [] as [&str; 0]);
    }

    #[test]
    fn only_what_is_wanted_is_kept() {
        let read = |wanted| {
            let lines = read("wanted", &wanted, None);
            lines.iter().map(|line| line.rsplit(' ').next().unwrap().to_owned()).collect::<Vec<_>>()
        };
        let level = |level| read(Wanted { level: Some(level), ..Wanted::default() });
        assert_eq!(level(Level::Error), ["1"]);
        assert_eq!(level(Level::Warn), ["one", "[1m", "1", "cut", "three"]);
        assert_eq!(level(Level::Debug), ["one", "[1m", "before", "hello", "1", "cut", "three"]);
        assert_eq!(level(Level::Trace).len(), 8);
        let target =
            |target: &str| read(Wanted { target: Some(target.into()), ..Wanted::default() });
        assert_eq!(target("proxy"), ["before", "hello"]);
        assert_eq!(target("proxy::serve"), ["hello"]);
        assert_eq!(target("shim"), ["0"]);
        let host = |host: &str| read(Wanted { host: Some(host.into()), ..Wanted::default() });
        assert_eq!(host("node2"), ["cut"]);
        assert_eq!(host("node1"), ["one", "[1m", "before", "hello", "1", "0", "three"]);
        let both =
            Wanted { level: Some(Level::Warn), host: Some("node1".into()), ..Wanted::default() };
        assert_eq!(read(both), ["one", "[1m", "1", "three"]);
    }
}
