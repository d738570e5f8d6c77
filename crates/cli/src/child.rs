//! Running `kedge probe` as a job of its own, and as a program without kedge.

use crate::output::harmless;
use kedge_control::gpu::GpuSpec;
use kedge_control::joblog::{self, Line};
use kedge_control::size::Size;
use kedge_supervisor::jobs::{JobName, Jobs};
use kedge_supervisor::kedge_again;
use rustix::process::{Pid, Signal, kill_process};
use std::ffi::OsString;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Begins the names of jobs that are probes.
pub(crate) const PROBE: &str = "kedge-probe-";

/// Where a probe runs.
#[derive(Debug, Clone)]
pub(crate) enum Place {
    /// Under `kedge run`, on these devices.
    Job { gpu: GpuSpec, soft_memory: Option<Size> },
    /// As any program, on this machine's own driver.
    Native,
}

impl Place {
    /// A job on devices of the usual size.
    pub(crate) fn job(gpu: GpuSpec) -> Place {
        Place::Job { gpu, soft_memory: None }
    }
}

/// Runs `kedge probe ARGUMENTS` and hands over each line that it prints. Fails with what the probe,
/// or else the job's log, said; also when it says nothing for `patience`.
pub(crate) fn probe(
    place: Place,
    arguments: &[OsString],
    patience: Duration,
    mut line: impl FnMut(&str),
) -> Result<(), String> {
    let (mut command, name) = command(place, arguments)?;
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| format!("cannot start kedge: {error}"))?;
    let lines = read_lines(&mut child);
    let complaints = read_stderr(&mut child);
    let timed_out = loop {
        match lines.recv_timeout(patience) {
            Ok(text) => line(&text),
            Err(RecvTimeoutError::Disconnected) => break false,
            Err(RecvTimeoutError::Timeout) => break true,
        }
    };
    if timed_out {
        end(&mut child);
    }
    let status = child.wait().map_err(|error| error.to_string())?;
    let log = name.map(last_words).unwrap_or_default();
    if timed_out {
        return Err(format!("no answer within {} s", patience.as_secs()));
    }
    if status.success() {
        return Ok(());
    }
    let said = complaints.recv().unwrap_or_default();
    Err(reason(&said, &log, status))
}

/// What the probe said, and what kedge wrote to the log of it: the one has the error, the other
/// why.
pub(crate) fn reason(stderr: &str, log: &str, status: ExitStatus) -> String {
    fn last(text: &str) -> Option<&str> {
        text.lines().last().map(str::trim)
    }
    let shown = |line| Line::parse(line).to_string();
    let said = last(stderr).map(|line| line.strip_prefix("kedge: ").unwrap_or(line));
    let why = log.lines().rev().find_map(joblog::telling);
    let words = match (said, why) {
        (Some(said), Some(why)) => format!("{said}: {why}"),
        (Some(said), None) => said.to_owned(),
        (None, why) => match why.map(str::to_owned).or_else(|| last(log).map(shown)) {
            Some(why) => format!("{status}: {why}"),
            None => status.to_string(),
        },
    };
    harmless(&words)
}

fn command(place: Place, arguments: &[OsString]) -> Result<(Command, Option<JobName>), String> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let mut command = kedge_again();
    let kedge = command.get_program().to_owned();
    let mut name = None;
    if let Place::Job { gpu, soft_memory } = place {
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let job = format!("{PROBE}{}-{count}", std::process::id());
        // Why it failed is looked for in the log.
        command.args(["run", "--quiet", "--gpu", &gpu.to_string(), "--job", &job]);
        if let Some(Size(bytes)) = soft_memory {
            command.args(["--soft-memory", &bytes.to_string()]);
        }
        command.arg("--").arg(&kedge);
        name = job.parse().ok();
    }
    command.arg("probe").args(arguments);
    Ok((command, name))
}

/// The child's lines, as they come.
pub(crate) fn read_lines(child: &mut Child) -> mpsc::Receiver<String> {
    read_lines_within(child, u64::MAX)
}

/// Lines of the first `most` bytes that the child prints.
pub(crate) fn read_lines_within(child: &mut Child, most: u64) -> mpsc::Receiver<String> {
    let (send, receive) = mpsc::channel();
    if let Some(stdout) = child.stdout.take() {
        std::thread::spawn(move || {
            for line in BufReader::new(stdout.take(most)).lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    return;
                }
            }
        });
    }
    receive
}

/// All that the child complains of, once it has ended.
pub(crate) fn read_stderr(child: &mut Child) -> mpsc::Receiver<String> {
    const MAX_LEN: u64 = 64 << 10;
    let (send, receive) = mpsc::channel();
    if let Some(stderr) = child.stderr.take() {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let _ = stderr.take(MAX_LEN).read_to_end(&mut bytes);
            let _ = send.send(String::from_utf8_lossy(&bytes).into_owned());
        });
    }
    receive
}

/// Ends a job that does not answer: asks first, because its supervisor then ends what it started.
pub(crate) fn end(child: &mut Child) {
    let asked = Instant::now();
    if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, Signal::TERM);
    }
    while asked.elapsed() < Duration::from_secs(2) {
        if child.try_wait().is_ok_and(|status| status.is_some()) {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let _ = child.kill();
}

/// The log of a probe's job, which nobody needs afterwards.
pub(crate) fn last_words(name: JobName) -> String {
    let Ok(jobs) = Jobs::open() else { return String::new() };
    let log = fs::read(jobs.log_path(&name)).unwrap_or_default();
    jobs.remove(&name);
    String::from_utf8_lossy(&log).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;

    #[test]
    fn the_most_telling_words_are_kept() {
        let killed = ExitStatus::from_raw(9);
        assert_eq!(reason("x\nkedge: cuInit: no\n", "log", killed), "cuInit: no");
        assert_eq!(reason("", "a\nb\n", killed), "signal: 9 (SIGKILL): b");
        assert_eq!(reason("", "", killed), "signal: 9 (SIGKILL)");
        let time = "2026-11-20T19:35:00.123Z";
        let log = format!(
            "{time} proxy[2]: note: client 1 (x) has connected\n\
             {time} WARN proxy::serve x@node1 proxy[2]: no device: buy one\n"
        );
        let log = &*log;
        assert_eq!(reason("kedge: cuInit: no", log, killed), "cuInit: no: no device: buy one");
        assert_eq!(reason("", log, killed), "signal: 9 (SIGKILL): no device: buy one");
        let quiet = log.lines().next().unwrap();
        assert_eq!(reason("kedge: x: failed", quiet, killed), "x: failed");
        let quiet = format!("{time} INFO proxy::serve x@node1 proxy[2]: hello");
        let shown = format!("signal: 9 (SIGKILL): {time} proxy[2]: hello");
        assert_eq!(reason("", &quiet, killed), shown);
    }
}
