//! Jobs of many processes, and of many threads: how long they stand still, and when they are back.

use super::{RESTART, STALL, job::Job, leave_out, plain};
use kedge_probe::Series;
use std::fs;
use std::path::{Path, PathBuf};

/// Processes with a thread each, and a process with so many threads.
const PROCESSES: u64 = 513;
const THREADS: u64 = 4000;
/// Bytes of memory that each process fills.
const EACH: u64 = 1 << 20;
/// Checkpoints of each job; restarts take longer.
const CHECKPOINTS: usize = 5;
const RESTARTS: usize = 3;

const MANY_PROCESSES: &str = "513 processes";
const MANY_THREADS: &str = "4,000 threads";

pub(super) fn measure(dir: &Path, sink: &mut dyn FnMut(Series)) -> Result<(), String> {
    // A checkpoint clones each process, and makes one more for each for a moment.
    if has_room(3 * PROCESSES, PROCESSES * EACH, MANY_PROCESSES, dir) {
        let (stalls, image) = checkpoints(&[PROCESSES, 1, EACH], dir)?;
        sink(stall(MANY_PROCESSES, stalls));
        let restart = |_| {
            let (job, seconds) = Job::restart(&image, &[])?;
            job.end();
            Ok(seconds)
        };
        let restarts = (0..RESTARTS).map(restart).collect::<Result<Vec<f64>, String>>()?;
        sink(Series::lower(format!("{RESTART}, {MANY_PROCESSES}"), "s", restarts).target(2.0));
        super::empty(dir)?;
    }
    if has_room(THREADS, EACH, MANY_THREADS, dir) {
        let (stalls, _) = checkpoints(&[1, THREADS, EACH], dir)?;
        sink(stall(MANY_THREADS, stalls));
        super::empty(dir)?;
    }
    Ok(())
}

fn stall(what: &str, samples: Vec<f64>) -> Series {
    Series::lower(format!("{STALL}, {what}"), "s", samples).target(0.15)
}

/// How long a job of so many processes, threads in each and bytes in each stands still, and its
/// last image.
fn checkpoints(job: &[u64; 3], dir: &Path) -> Result<(Vec<f64>, PathBuf), String> {
    let mut job = Job::many(job, dir)?;
    let (mut stalls, mut last) = (Vec::new(), None);
    for _ in 0..CHECKPOINTS {
        let taken = job.checkpoint(&[])?;
        // It goes on.
        job.ask("ping")?;
        stalls.push(taken.stall_seconds);
        if let Some(before) = last.replace(taken.image) {
            let _ = fs::remove_dir_all(before);
        }
    }
    job.end();
    Ok((stalls, last.ok_or("no checkpoint")?))
}

/// Whether this user and machine may have so many `tasks`, and as much memory and disk as a job of
/// `bytes` takes. Says so where not.
fn has_room(tasks: u64, bytes: u64, what: &str, dir: &Path) -> bool {
    let lacks = |limit: &str| {
        leave_out(&format!("a job of {what}: {limit}"));
        false
    };
    // Root is not held to it.
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nproc).current;
    if !rustix::process::geteuid().is_root() && limit.is_some_and(|most| most < tasks) {
        return lacks("this user may not have so many (ulimit -u)");
    }
    let number = |path: &Path| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let machine = ["/proc/sys/kernel/threads-max", "/proc/sys/kernel/pid_max"].map(PathBuf::from);
    let mut most = machine.into_iter().chain(own_groups());
    if most.any(|path| number(&path).is_some_and(|most| most < tasks)) {
        return lacks("there may not be so many (threads-max, pid_max, pids.max)");
    }
    // It holds more than it fills: stacks, and what its processes do not share.
    if plain::room(dir) < 2 * bytes {
        return lacks("there is too little memory or disk");
    }
    true
}

/// The limits of the control groups that this process is in.
fn own_groups() -> Vec<PathBuf> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let of = |line: &str| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let root = match controllers {
            "" => "/sys/fs/cgroup",
            "pids" => "/sys/fs/cgroup/pids",
            _ => return None,
        };
        let path = Path::new(root).join(path.trim_start_matches('/'));
        Some(path.ancestors().map(|group| group.join("pids.max")).collect::<Vec<_>>())
    };
    own.lines().filter_map(of).flatten().collect()
}
