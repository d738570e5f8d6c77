//! `kedge logs`: what kedge had to say about a job.

use crate::Failure;
use crate::output;
use clap::Args;
use kedge_control::logfile::Log;
use kedge_supervisor::jobs::{JobName, Jobs, State};
use serde::Serialize;
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
    /// Only the last LINES lines
    #[arg(short = 'n', long = "lines", value_name = "LINES")]
    lines: Option<usize>,
    /// Print a JSON list of objects: time, process, text
    #[arg(long)]
    json: bool,
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

/// A line such as `2026-11-20T19:35:00.123Z proxy[12]: text`; one of another form is all text.
#[derive(Debug, Serialize, PartialEq, Eq)]
struct Line<'a> {
    time: Option<&'a str>,
    process: Option<&'a str>,
    text: &'a str,
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
    let mut log = Log::open(&path).map_err(bad)?;
    let lines = read(&mut log, args.lines).map_err(bad)?;
    if args.json {
        return Ok(output::json(&lines.iter().map(|line| parse(line)).collect::<Vec<_>>())?);
    }
    print(&lines)?;
    if args.follow {
        follow(&jobs, &name, &mut log).map_err(bad)?;
    }
    Ok(())
}

fn latest(jobs: &Jobs) -> Result<JobName, Failure> {
    let newest = jobs.list()?.into_iter().next().ok_or(LogsError::None)?;
    Ok(newest.name.parse()?)
}

/// What is there, or its last `limit` lines.
fn read(log: &mut Log, limit: Option<usize>) -> io::Result<VecDeque<String>> {
    let mut lines = VecDeque::new();
    let mut line = Vec::new();
    while log.read_line(&mut line)? > 0 {
        lines.push_back(output::harmless(String::from_utf8_lossy(&line).trim_end()));
        if limit.is_some_and(|limit| lines.len() > limit) {
            lines.pop_front();
        }
        line.clear();
    }
    Ok(lines)
}

fn print(lines: &VecDeque<String>) -> io::Result<()> {
    let mut text = String::new();
    for line in lines {
        text.push_str(line);
        text.push('\n');
    }
    output::print(&text)
}

/// Prints what is added until the job has ended and all of it is printed.
fn follow(jobs: &Jobs, name: &JobName, log: &mut Log) -> io::Result<()> {
    loop {
        // Asked before reading, so that the last lines are not missed.
        let running = jobs.find(name).is_some_and(|meta| meta.state == State::Running);
        print(&read(log, None)?)?;
        if !running || io::stdout().flush().is_err() {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn parse(line: &str) -> Line<'_> {
    let parts = line.split_once(' ').and_then(|(time, rest)| {
        let (process, text) = rest.split_once(": ")?;
        (time.ends_with('Z') && time.contains('T')).then_some((time, process, text))
    });
    match parts {
        Some((time, process, text)) => Line { time: Some(time), process: Some(process), text },
        None => Line { time: None, process: None, text: line },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_lines_are_kept() {
        let path = std::env::temp_dir().join(format!("kedge-logs-{}", std::process::id()));
        std::fs::write(&path, b"one\ntwo\x1b[1m\nthree").unwrap();
        let read = |limit| read(&mut Log::open(&path).unwrap(), limit).unwrap();
        assert_eq!(read(None), ["one", "two [1m", "three"]);
        assert_eq!(read(Some(1)), ["three"]);
        assert_eq!(read(Some(0)), [] as [&str; 0]);
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn lines_have_a_time_and_a_process() {
        let line = parse("2026-11-20T19:35:00.123Z proxy[12]: kernel f: illegal address");
        assert_eq!(line.process, Some("proxy[12]"));
        assert_eq!(line.text, "kernel f: illegal address");
        assert_eq!(parse("thread panicked: x").text, "thread panicked: x");
    }
}
