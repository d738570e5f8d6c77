//! Processor time of a job: this process, its supervisor and the supervisor's other children.

use std::fs;
use std::time::{Duration, Instant};

/// The share of one core, in percent, that the job uses while this thread sleeps for `time`. `None`
/// where /proc does not tell.
pub(crate) fn idle_share(time: Duration) -> Option<f64> {
    let before = job_seconds()?;
    let start = Instant::now();
    std::thread::sleep(time);
    Some((job_seconds()? - before).max(0.0) / start.elapsed().as_secs_f64() * 100.0)
}

/// Processor seconds of the job's processes so far.
fn job_seconds() -> Option<f64> {
    let supervisor = parent(std::process::id())?;
    let mut total = seconds(supervisor)?;
    for entry in fs::read_dir("/proc").ok()?.flatten() {
        let pid = entry.file_name().to_str().and_then(|name| name.parse().ok());
        if let Some(pid) = pid.filter(|pid| parent(*pid) == Some(supervisor)) {
            total += seconds(pid).unwrap_or(0.0);
        }
    }
    Some(total)
}

/// Processor seconds so far of the supervisor's children that run the program `name`; `None` where
/// /proc does not tell.
pub(crate) fn seconds_of_children(name: &str) -> Option<f64> {
    let supervisor = parent(std::process::id())?;
    let is_named = |pid: &u32| {
        let read = fs::read_to_string(format!("/proc/{pid}/comm"));
        parent(*pid) == Some(supervisor) && read.is_ok_and(|comm| comm.trim_end() == name)
    };
    let pids = fs::read_dir("/proc").ok()?.flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    Some(pids.filter(is_named).filter_map(seconds).sum())
}

/// /proc/PID/stat after the name: field 0 is the state, 1 the parent.
fn parent(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(1)?.parse().ok()
}

/// Processor seconds of all threads of `pid`, from the scheduler's own nanoseconds.
fn seconds(pid: u32) -> Option<f64> {
    let mut total = 0.0;
    for thread in fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten() {
        let text = fs::read_to_string(thread.path().join("schedstat")).unwrap_or_default();
        let nanoseconds = text.split_whitespace().next().and_then(|word| word.parse::<f64>().ok());
        total += nanoseconds.unwrap_or(0.0) / 1e9;
    }
    Some(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_thread_is_seen() {
        let own = std::process::id();
        let before = seconds(own).unwrap();
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(100) {
            std::hint::spin_loop();
        }
        let used = seconds(own).unwrap() - before;
        assert!(used > 0.01, "{used}");
        assert!(parent(own).is_some());
    }
}
