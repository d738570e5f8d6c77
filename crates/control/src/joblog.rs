//! The job's log: what kedge has to say goes here and never to the program's terminal.
//!
//! A process says something by [`note!`](crate::note), [`info!`](crate::info),
//! [`warn!`](crate::warn), [`error!`](crate::error), [`fault!`](crate::fault) or
//! [`refused!`](crate::refused), each of which is an event of `tracing` for one log: its level and
//! target are the macro's and the module's, its job, process and host the log's.

mod entry;
mod events;
mod line;

pub use entry::{Entry, Kind};
pub use line::{Failure, Level, Line, failure, telling};
/// For the macros.
#[doc(hidden)]
pub use tracing;

use crate::logfile::Appended;
use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// The target of what devices say.
pub const DEVICE: &str = "device";
/// The target of what the parts of a job agree on.
pub const COORDINATOR: &str = "coordinator";
/// The target of what the far end of a session says.
const FAR: &str = "far";

/// A log that several processes append to, one write a line. A full disk loses lines, no more; of a
/// log that grows without end, the last lines are kept.
#[derive(Debug, Clone)]
pub struct JobLog {
    sink: Option<Arc<Sink>>,
}

/// Where lines go, and what they have in common.
#[derive(Debug, Clone)]
pub(crate) struct Sink {
    to: Arc<To>,
    job: String,
    host: String,
    process: String,
}

enum To {
    File(Appended),
    /// Whoever writes it down elsewhere, in a form of its own.
    Elsewhere(Box<dyn Fn(&Entry<'_>) + Send + Sync>),
}

impl fmt::Debug for To {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            To::File(file) => f.debug_tuple("File").field(file).finish(),
            To::Elsewhere(_) => f.write_str("Elsewhere"),
        }
    }
}

impl JobLog {
    /// Opens a log: a file named `log` is that of the job whose folder it lies in. `who` names the
    /// process in each line, such as `proxy[1234]`.
    ///
    /// # Errors
    /// As of files.
    pub fn open(path: &Path, who: String) -> io::Result<JobLog> {
        // Another file, as `KEDGE_LOG` may name one, is no job's.
        let folder = path.parent().filter(|_| path.file_name().is_some_and(|name| name == "log"));
        let job = folder.and_then(Path::file_name).unwrap_or_default().to_string_lossy();
        Ok(JobLog::of(To::File(Appended::open(path)?), &job, who))
    }

    /// Keeps nothing.
    pub fn none() -> JobLog {
        JobLog { sink: None }
    }

    /// Hands each event to `keep`, which writes it down elsewhere: on another host, or for whoever
    /// runs a server.
    pub fn told(who: String, keep: impl Fn(&Entry<'_>) + Send + Sync + 'static) -> JobLog {
        JobLog::of(To::Elsewhere(Box::new(keep)), "", who)
    }

    fn of(to: To, job: &str, process: String) -> JobLog {
        events::install();
        let (job, host) = (line::word(job), here());
        JobLog { sink: Some(Arc::new(Sink { to: to.into(), job, host, process })) }
    }

    /// Returns the same log, for what happens on another host, such as `node2` or `node2:7531`.
    pub fn on(&self, host: &str) -> JobLog {
        let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
        let in_brackets = name.strip_prefix('[').and_then(|name| name.strip_suffix(']'));
        let name = in_brackets.unwrap_or(name);
        let on = |sink: &Arc<Sink>| Arc::new(Sink { host: line::word(name), ..(**sink).clone() });
        JobLog { sink: self.sink.as_ref().map(on) }
    }

    /// Appends a line that another host's [`JobLog::told`] was told: [`Entry::line`].
    pub fn relay(&self, text: &str) {
        match Kind::of(text) {
            (Kind::Note, text) => crate::note!(target: FAR, self, "{text}"),
            (Kind::Fault, text) => crate::fault!(target: FAR, self, "{text}"),
            (Kind::Refused, text) => crate::refused!(target: FAR, self, "{text}"),
            (Kind::Plain, text) => crate::warn!(target: FAR, self, "{text}"),
        }
    }

    /// Has this log take the event that `emit` makes. For the macros.
    #[doc(hidden)]
    pub fn take(&self, emit: impl FnOnce()) {
        if let Some(sink) = &self.sink {
            events::within(sink, emit);
        }
    }
}

/// Returns this host's name, as lines have it.
pub fn here() -> String {
    line::word(&rustix::system::uname().nodename().to_string_lossy())
}

impl Sink {
    /// Writes an event down. A log that cannot be written must not stop the program that it speaks
    /// of.
    fn keep(&self, entry: &Entry<'_>) {
        match &self.to.as_ref() {
            To::File(file) => drop(file.write(line::written(SystemTime::now(), entry).as_bytes())),
            To::Elsewhere(keep) => keep(entry),
        }
    }
}

/// Logs an event: its level, its [`Kind`], a target where it is not the module's, fields of its own
/// where it has any, the log, and what it says, as `format!` has it.
#[macro_export]
macro_rules! job_event {
    ($level:ident $kind:ident, target: $target:expr, fields: { $($fields:tt)* }, $log:expr,
     $($text:tt)+) => {
        $log.take(|| {
            $crate::joblog::tracing::event!(
                target: $target,
                $crate::joblog::tracing::Level::$level,
                { kind = $crate::joblog::Kind::$kind.name(), $($fields)* },
                $($text)+
            )
        })
    };
    ($level:ident $kind:ident, target: $target:expr, $log:expr, $($text:tt)+) => {
        $crate::job_event!($level $kind, target: $target, fields: {}, $log, $($text)+)
    };
    ($level:ident $kind:ident, $log:expr, $($text:tt)+) => {
        $crate::job_event!($level $kind, target: module_path!(), $log, $($text)+)
    };
}

/// Logs what tells of nothing amiss, and says so.
#[macro_export]
macro_rules! note {
    ($($event:tt)+) => { $crate::job_event!(INFO Note, $($event)+) };
}

/// Logs what happens in the course of things.
#[macro_export]
macro_rules! info {
    ($($event:tt)+) => { $crate::job_event!(INFO Plain, $($event)+) };
}

/// Logs what is amiss; the job goes on.
#[macro_export]
macro_rules! warn {
    ($($event:tt)+) => { $crate::job_event!(WARN Plain, $($event)+) };
}

/// Logs that something failed which somebody has asked for.
#[macro_export]
macro_rules! error {
    ($($event:tt)+) => { $crate::job_event!(ERROR Plain, $($event)+) };
}

/// Logs that devices, or what has them, have failed the program.
#[macro_export]
macro_rules! fault {
    ($($event:tt)+) => { $crate::job_event!(ERROR Fault, $($event)+) };
}

/// Logs what the program was refused.
#[macro_export]
macro_rules! refused {
    ($($event:tt)+) => { $crate::job_event!(WARN Refused, $($event)+) };
}

/// Returns the time as `2026-11-20T19:35:00.123Z`.
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

/// Returns year, month and day of a day since 1970-01-01, counting years from March so that the
/// leap day comes last.
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
    use std::path::PathBuf;
    use std::sync::Mutex;
    use std::time::Duration;

    /// A job's folder.
    struct Job(PathBuf);

    impl Job {
        fn new(name: &str) -> Job {
            let path = std::env::temp_dir().join(format!("{name}-{}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            Job(path)
        }

        fn open(&self, who: &str) -> JobLog {
            JobLog::open(&self.0.join("log"), who.into()).unwrap()
        }

        fn text(&self) -> String {
            std::fs::read_to_string(self.0.join("log")).unwrap()
        }
    }

    impl Drop for Job {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn dates_are_the_calendar_s() {
        let at = |secs| timestamp(UNIX_EPOCH + Duration::from_secs(secs));
        assert_eq!(at(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00.000Z");
        assert_eq!(at(1_709_251_199), "2024-02-29T23:59:59.000Z");
        assert_eq!(at(4_102_444_800), "2100-01-01T00:00:00.000Z");
    }

    #[test]
    fn a_client_s_text_forges_no_line() {
        let job = Job::new("kedge-joblog-forged");
        let log = job.open("test[1]");
        crate::warn!(log, "{}", "one\n2026 forged\r\x1b[31m");
        crate::warn!(log, "{}", "é".repeat(1 << 20));
        let text = job.text();
        assert_eq!(text.lines().count(), 2);
        assert!(!text.contains('\x1b'));
        assert!(text.lines().all(|line| line.len() <= entry::MAX_TEXT + 300), "{}", text.len());
        let read: Vec<Line<'_>> = text.lines().map(Line::parse).collect();
        assert!(read[0].text.starts_with("one 2026 forged") && read[1].text.ends_with('…'));
        assert!(read.iter().all(|line| line.process == Some("test[1]")));
    }

    #[test]
    fn an_event_has_its_level_target_job_process_and_host() {
        let job = Job::new("kedge-joblog-fields");
        let log = job.open("proxy[7]");
        let number = 3;
        crate::note!(log, "a {number}");
        crate::info!(log, "b {}", 4);
        crate::warn!(target: DEVICE, log, "c");
        crate::error!(log, "d");
        crate::fault!(log, "e");
        crate::refused!(log, "f");
        log.on("node2:7531").relay("fault: g");
        log.on("[::1]:7531").relay("h");
        let text = job.text();
        let lines: Vec<Line<'_>> = text.lines().map(Line::parse).collect();
        let module = Some("control::joblog::tests");
        let said =
            |line: &Line<'_>| (line.level, line.target.map(str::to_owned), line.text.to_owned());
        let expected = [
            (Level::Info, module, "note: a 3"),
            (Level::Info, module, "b 4"),
            (Level::Warn, Some("device"), "c"),
            (Level::Error, module, "d"),
            (Level::Error, module, "fault: e"),
            (Level::Warn, module, "refused: f"),
            (Level::Error, Some("far"), "fault: g"),
            (Level::Warn, Some("far"), "h"),
        ];
        let expected = expected
            .map(|(level, target, text)| (level, target.map(str::to_owned), text.to_owned()));
        assert_eq!(lines.iter().map(said).collect::<Vec<_>>(), expected);
        let name = job.0.file_name().unwrap().to_string_lossy();
        assert!(lines.iter().all(|line| line.job == Some(&*name)), "{text}");
        assert!(lines.iter().all(|line| line.process == Some("proxy[7]")), "{text}");
        assert!(lines[..6].iter().all(|line| line.host == Some(&here())), "{text}");
        assert_eq!((lines[6].host, lines[7].host), (Some("node2"), Some("::1")));
    }

    #[test]
    fn each_of_a_process_s_logs_has_its_own_events() {
        let jobs = ["kedge-joblog-one", "kedge-joblog-two"].map(Job::new);
        let logs = jobs.each_ref().map(|job| job.open("kedge[1]"));
        std::thread::scope(|threads| {
            for log in &logs {
                let name = &log.sink.as_ref().unwrap().job;
                threads.spawn(move || (0..100).for_each(|n| crate::warn!(log, "{n} of {name}")));
            }
        });
        // A log that is spoken to while another is: what is told is made by then.
        let inner = || {
            crate::warn!(logs[1], "inner");
            "outer"
        };
        crate::warn!(logs[0], "{}", inner());
        crate::warn!(JobLog::none(), "nowhere");
        tracing::warn!("a library's");
        for (job, last) in jobs.iter().zip(["outer", "inner"]) {
            let (text, name) = (job.text(), job.0.file_name().unwrap().to_string_lossy());
            let (of, rest): (Vec<&str>, Vec<&str>) =
                text.lines().partition(|line| line.ends_with(&format!(" of {name}")));
            assert_eq!(of.len(), 100, "{text}");
            assert!(rest.len() == 1 && rest[0].ends_with(last), "{rest:?}");
        }
    }

    #[test]
    fn what_is_told_elsewhere_has_all_of_it() {
        let told = Arc::new(Mutex::new(Vec::new()));
        let keep = told.clone();
        let log = JobLog::told("kedge[9]".into(), move |entry: &Entry<'_>| {
            let Entry { level, target, process, kind, .. } = *entry;
            let said = format!("{level:?} {target} {process} {kind:?} {}", entry.line());
            keep.lock().unwrap().push(said);
        });
        let (key, none) = (Some("alice\n"), None::<&str>);
        crate::job_event!(WARN Refused, target: "server", fields: { key, none, proxy = 7 }, log, "no\n");
        crate::note!(target: "server", log, "yes");
        let expected = [
            "Warn server kedge[9] Refused refused: no key=alice proxy=7",
            "Info server kedge[9] Note note: yes",
        ];
        assert_eq!(*told.lock().unwrap(), expected);
    }

    #[test]
    fn a_log_that_cannot_be_written_loses_lines_and_no_more() {
        let log = JobLog::open(Path::new("/dev/full"), "kedge[1]".into()).unwrap();
        crate::warn!(log, "lost");
        assert_eq!(log.sink.as_ref().unwrap().job, "");
    }
}
