//! What is said of a job on standard error when it has ended: why it failed, as its log tells.

use crate::job::jobs::JobName;
use crate::job::outcome::Outcome;
use kedge_control::check::Found;
use kedge_control::job::Moved;
use kedge_control::joblog::{self, Failure};
use kedge_control::logfile::{Log, Mark};
use kedge_control::stats::JobStats;
use kedge_control::trace::Merged;
use std::path::{Path, PathBuf};

/// Most bytes of a log that are looked at: the first that went wrong explains the rest.
const MAX_LOG_LEN: usize = 64 << 20;
/// Sentences that are told; of more, their number.
const TOLD: usize = 3;
/// Longest sentence, in characters.
const MAX_SENTENCE_LEN: usize = 500;

/// How a job ended, and what there is to say of it.
#[derive(Debug)]
pub struct Ended {
    pub outcome: Outcome,
    /// Lines for whoever started it. None where all went well.
    pub postscript: Vec<String>,
    /// What it asked of its devices, where that was counted.
    pub stats: Option<Box<JobStats>>,
    /// What was found in it, where it was checked.
    pub found: Option<Found>,
    /// Its trace, where one was wanted, or why there is none.
    pub traced: Option<Result<Merged, String>>,
    /// Where it goes on, if it has not ended but moved as a whole.
    pub moved: Option<Moved>,
}

impl From<Outcome> for Ended {
    fn from(outcome: Outcome) -> Ended {
        let postscript = Vec::new();
        Ended { outcome, postscript, stats: None, found: None, traced: None, moved: None }
    }
}

/// A job's log, from the moment on that this process supervises it.
#[derive(Debug)]
pub(crate) struct Postscript {
    log: PathBuf,
    from: Mark,
}

impl Postscript {
    pub(crate) fn begin(log: PathBuf) -> Postscript {
        // What a job says that goes back, it has said of its former life.
        let from = Mark::end(&log);
        Postscript { log, from }
    }

    /// Returns how the job ended, with what there is to say of it: `missed` of checkpoints, and
    /// what the log tells. Failed devices are told of however the program ended: it may not have
    /// looked. What it was refused may be why it failed, but not where a user has ended it.
    pub(crate) fn of(&self, job: &JobName, outcome: Outcome, missed: Vec<String>) -> Ended {
        let mut told = missed;
        // A log that cannot be read is said to be so by `kedge logs`.
        let lines = read(&self.log, self.from).unwrap_or_default();
        let failed = has_failed(outcome);
        for line in &lines {
            let text = match joblog::failure(line) {
                Some(Failure::Fault(text)) => text,
                Some(Failure::Refused(text)) if failed => text,
                _ => continue,
            };
            let text = shortened(text);
            if !told.contains(&text) {
                told.push(text);
            }
        }
        Ended { postscript: said(job, &told), ..Ended::from(outcome) }
    }
}

/// Whether the program has failed by itself.
fn has_failed(outcome: Outcome) -> bool {
    const ASKED: [libc::c_int; 5] =
        [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGPIPE];
    match outcome {
        Outcome::Exited(status) => status != 0,
        Outcome::Killed(signal) => !ASKED.contains(&signal),
    }
}

fn read(log: &Path, from: Mark) -> std::io::Result<Vec<String>> {
    let mut log = Log::open_at(log, from)?;
    let (mut lines, mut line, mut bytes) = (Vec::new(), Vec::new(), 0);
    while bytes < MAX_LOG_LEN && log.read_line(&mut line)? > 0 {
        let text = String::from_utf8_lossy(&line);
        if joblog::failure(&text).is_some() {
            lines.push(text.into_owned());
        }
        bytes += line.len();
        line.clear();
    }
    Ok(lines)
}

/// A terminal obeys nothing that is in a log.
fn shortened(text: &str) -> String {
    let harmless = |c: char| if c.is_control() { ' ' } else { c };
    let mut short: String = text.chars().take(MAX_SENTENCE_LEN).map(harmless).collect();
    if text.chars().nth(MAX_SENTENCE_LEN).is_some() {
        short.push('…');
    }
    short
}

fn said(job: &JobName, told: &[String]) -> Vec<String> {
    let mut lines: Vec<String> =
        told.iter().take(TOLD).map(|text| format!("{job}: {text}")).collect();
    match (told.len().saturating_sub(TOLD), lines.last_mut()) {
        (0, Some(last)) => last.push_str(&format!(" (kedge logs {job})")),
        (more, Some(_)) => lines.push(format!("{job}: and {more} more (kedge logs {job})")),
        (_, None) => {}
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_control::joblog::JobLog;
    use kedge_control::{fault, note, refused, warn};

    const FAILED: Outcome = Outcome::Exited(1);

    fn of(outcome: Outcome, missed: &[&str], write: impl Fn(&JobLog)) -> Vec<String> {
        let thread = std::thread::current();
        let name = thread.name().unwrap_or_default().replace("::", "-");
        let path = std::env::temp_dir().join(format!("kedge-{name}-{}", std::process::id()));
        let log = JobLog::open(&path, "proxy[7]".into()).unwrap();
        fault!(log, "of a former life");
        let postscript = Postscript::begin(path.clone());
        write(&log);
        let missed = missed.iter().map(|text| (*text).to_owned()).collect();
        let ended = postscript.of(&"sim".parse().unwrap(), outcome, missed);
        std::fs::remove_file(&path).unwrap();
        ended.postscript
    }

    #[test]
    fn a_good_end_has_no_postscript() {
        let log = |log: &JobLog| {
            note!(log, "all is well");
            warn!(log, "checkpoint sim-0001: 1 processes");
            refused!(log, "cuFoo is not supported");
        };
        assert!(of(Outcome::Exited(0), &[], log).is_empty());
        assert!(of(Outcome::Killed(libc::SIGINT), &[], log).is_empty());
        assert_eq!(of(FAILED, &[], log), ["sim: cuFoo is not supported (kedge logs sim)"]);
        let killed = of(Outcome::Killed(libc::SIGSEGV), &[], log);
        assert_eq!(killed.len(), 1);
    }

    #[test]
    fn faults_are_told_however_the_program_ends() {
        let log = |log: &JobLog| fault!(log, "context 1: illegal address");
        assert_eq!(
            of(Outcome::Exited(0), &[], log),
            ["sim: context 1: illegal address (kedge logs sim)"]
        );
        let missed = of(FAILED, &["no checkpoint for 20 min"], log);
        let both =
            ["sim: no checkpoint for 20 min", "sim: context 1: illegal address (kedge logs sim)"];
        assert_eq!(missed, both);
    }

    #[test]
    fn many_failures_are_counted_and_long_ones_cut() {
        let many = of(FAILED, &[], |log| {
            for number in [1, 1, 2, 3, 4, 5] {
                fault!(log, "context {number}");
            }
        });
        assert_eq!(many[2..], ["sim: context 3", "sim: and 2 more (kedge logs sim)"]);
        let long = of(FAILED, &[], |log| fault!(log, "{}", "é".repeat(2000)));
        assert_eq!(long[0].chars().filter(|c| *c == 'é').count(), MAX_SENTENCE_LEN);
        assert!(shortened("a\x1b[2Jb").starts_with("a [2Jb"));
    }
}
