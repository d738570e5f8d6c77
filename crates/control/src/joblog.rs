//! The job's log: what kedge has to say goes here and never to the program's terminal.

use crate::logfile::Appended;
use std::fmt;
use std::io;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Longest line, bytes; the rest is cut.
const MAX_LINE: usize = 8 << 10;

/// Begins a line that tells of nothing amiss.
const NOTE: &str = "note: ";
/// Begins a line that tells of devices, or what has them, that have failed a program.
const FAULT: &str = "fault: ";
/// Begins a line that tells what a program was refused. The shim writes such lines, too.
const REFUSED: &str = "refused: ";

/// A log that several processes append to, one write a line. A full disk loses lines, no more; of a
/// log that grows without end, the last lines are kept.
#[derive(Debug)]
pub struct JobLog {
    kept: Kept,
    who: String,
}

/// Where its lines go.
enum Kept {
    Nowhere,
    In(Appended),
    /// Elsewhere, without time and name.
    By(Box<dyn Fn(&str) + Send + Sync>),
}

impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kept::Nowhere => f.write_str("Nowhere"),
            Kept::In(file) => f.debug_tuple("In").field(file).finish(),
            Kept::By(_) => f.write_str("By"),
        }
    }
}

impl JobLog {
    /// `who` begins each line, such as `proxy[1234]`.
    pub fn open(path: &Path, who: String) -> io::Result<JobLog> {
        Ok(JobLog { kept: Kept::In(Appended::open(path)?), who })
    }

    /// Keeps nothing.
    pub fn none() -> JobLog {
        JobLog { kept: Kept::Nowhere, who: String::new() }
    }

    /// Hands each line to `keep`, which writes it down elsewhere: on another host.
    pub fn told(keep: impl Fn(&str) + Send + Sync + 'static) -> JobLog {
        JobLog { kept: Kept::By(Box::new(keep)), who: String::new() }
    }

    /// Appends a line that tells of nothing amiss.
    pub fn note(&self, text: &str) {
        self.line(&format!("{NOTE}{text}"));
    }

    /// Appends a line that tells of devices, or what has them, that have failed the program.
    pub fn fault(&self, text: &str) {
        self.line(&format!("{FAULT}{text}"));
    }

    /// Appends a line that tells what the program was refused.
    pub fn refused(&self, text: &str) {
        self.line(&format!("{REFUSED}{text}"));
    }

    /// Appends one line. Control characters become spaces: a client's text forges no line.
    pub fn line(&self, text: &str) {
        let file = match &self.kept {
            Kept::Nowhere => return,
            Kept::By(keep) => return keep(text),
            Kept::In(file) => file,
        };
        let mut line = format!("{} {}: ", timestamp(SystemTime::now()), self.who);
        line.extend(text.trim_end().chars().map(|c| if c.is_control() { ' ' } else { c }));
        if line.len() > MAX_LINE {
            let mut end = MAX_LINE;
            while !line.is_char_boundary(end) {
                end -= 1;
            }
            line.truncate(end);
            line.push('…');
        }
        line.push('\n');
        // A log that cannot be written must not stop the program that it speaks of.
        let _ = file.write(line.as_bytes());
    }
}

/// What a log's line says of something amiss: neither when nor who. `None` for notes, and for what
/// kedge has not written.
pub fn telling(line: &str) -> Option<&str> {
    match failure(line) {
        Some(Failure::Fault(text) | Failure::Refused(text)) => Some(text),
        None => text(line).filter(|text| !text.starts_with(NOTE)).map(str::trim),
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
    let text = text(line)?.trim();
    let fault = text.strip_prefix(FAULT).map(Failure::Fault);
    fault.or_else(|| text.strip_prefix(REFUSED).map(Failure::Refused))
}

/// What a line says: `TIME WHO[PID]: TEXT`, or the shim's `[PID] TEXT`; the supervisor's init has
/// no id that means anything outside.
fn text(line: &str) -> Option<&str> {
    match line.strip_prefix('[') {
        Some(shims) => shims.split_once("] ").map(|(_, text)| text),
        None => line.split_once("]: ").or_else(|| line.split_once(" init: ")).map(|(_, text)| text),
    }
}

/// `2026-11-20T19:35:00.123Z`.
pub fn timestamp(at: SystemTime) -> String {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, second) = ((since.as_secs() / 86_400) as i64, since.as_secs() % 86_400);
    let (year, month, day) = civil(days);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.{:03}Z",
        second / 3600,
        second / 60 % 60,
        second % 60,
        since.subsec_millis()
    )
}

/// Year, month and day of a day since 1970-01-01, counting years from March so that the leap day
/// comes last.
fn civil(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let era = days.div_euclid(146_097);
    let day_of_era = days.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn dates_are_the_calendar_s() {
        let at = |secs| timestamp(UNIX_EPOCH + Duration::from_secs(secs));
        assert_eq!(at(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00.000Z");
        assert_eq!(at(1_709_251_199), "2024-02-29T23:59:59.000Z");
        assert_eq!(at(4_102_444_800), "2100-01-01T00:00:00.000Z");
    }

    #[test]
    fn what_is_amiss_is_told_from_notes() {
        let line = "2026-11-21T15:50:32.941Z proxy[5276]: no device: [x]: none\n";
        assert_eq!(telling(line), Some("no device: [x]: none"));
        assert_eq!(telling("2026-11-21T15:50:32.941Z proxy[5276]: note: hello"), None);
        assert_eq!(telling("[5275] cuInit: refused"), Some("cuInit: refused"));
        assert_eq!(telling("[5275] refused: cuFoo"), Some("cuFoo"));
        assert_eq!(telling("Killed"), None);
    }

    #[test]
    fn failures_are_told_from_the_rest() {
        let proxy = "2026-11-21T15:50:32.941Z proxy[5276]: fault: context 1: [x]: none\n";
        assert_eq!(failure(proxy), Some(Failure::Fault("context 1: [x]: none")));
        let init = "2026-11-21T15:50:32.941Z init: fault: a proxy is gone";
        assert_eq!(failure(init), Some(Failure::Fault("a proxy is gone")));
        let shim = failure("[5275] refused: cuFoo is not supported");
        assert_eq!(shim, Some(Failure::Refused("cuFoo is not supported")));
        assert_eq!(failure("[5275] a module did not load"), None);
        assert_eq!(failure("fault: nobody's"), None);
    }

    #[test]
    fn a_client_s_text_forges_no_line() {
        let path = std::env::temp_dir().join(format!("kedge-joblog-{}", std::process::id()));
        let log = JobLog::open(&path, "test".into()).unwrap();
        log.line("one\n2026 forged\r\x1b[31m");
        log.line(&"é".repeat(MAX_LINE));
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(text.lines().count(), 2);
        assert!(!text.contains('\x1b'));
        assert!(text.lines().all(|line| line.len() <= MAX_LINE + '…'.len_utf8()));
    }
}
