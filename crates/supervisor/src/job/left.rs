//! What a supervisor that was killed has left behind: the job's processes, which run on without it.
//!
//! A process is the job's if it is the program's first one, as the job's folder tells (by its id
//! and the moment of its start, in this boot of the machine), or if it was started with the job's
//! control socket in its environment and is in the supervisor's control group still; and whatever
//! descends from such a one. So nobody is taken for it who has only been given its id since, or its
//! environment by a batch system. Signals go to what a descriptor holds, not to an id.

use crate::base::ends::looks;
use kedge_process::{running_since, runs};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// Killed processes are gone by then, unless the kernel holds them.
const LAST: Duration = Duration::from_secs(10);

/// How the processes of a job are known without its supervisor: a part of `meta.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Marks {
    /// The machine's boot, as the kernel names it.
    pub boot: String,
    /// The supervisor's control groups.
    pub groups: String,
    /// When the program's first process was started: ticks since the boot.
    pub started: Option<u64>,
}

impl Marks {
    /// Those of a job of this process, with this program.
    pub(crate) fn here(program: Option<u32>) -> Marks {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let started = program.and_then(|pid| running_since(pid as i32));
        Marks { boot: boot(), groups: read("/proc/self/cgroup"), started }
    }
}

/// The machine's boot, as the kernel names it now; empty where it does not.
#[must_use]
pub fn boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// A process, which keeps its id as long as it has this start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Process {
    pid: i32,
    started: u64,
}

impl Process {
    /// Sends it a signal; whether it is there to take it.
    fn signal(self, signal: i32) -> bool {
        let named = Pid::from_raw(self.pid).zip(Signal::from_named_raw(signal));
        let Some((pid, signal)) = named else { return false };
        let Ok(held) = pidfd_open(pid, PidfdFlags::empty()) else { return false };
        // Whoever has the id now is the one that the descriptor holds.
        running_since(self.pid) == Some(self.started) && pidfd_send_signal(held, signal).is_ok()
    }
}

/// What is known of the processes of a job whose supervisor has ended.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Left<'a> {
    /// How they are known.
    pub(crate) marks: Option<&'a Marks>,
    /// The program's first one.
    pub(crate) program: Option<u32>,
    /// The job's.
    pub(crate) folder: &'a Path,
}

impl Left<'_> {
    /// Returns those that still run.
    fn find(&self) -> BTreeSet<Process> {
        let Some(marks) = self.marks.filter(|marks| marks.boot == boot()) else {
            return BTreeSet::new();
        };
        let all = users_processes();
        let first = self.program.map(|pid| pid as i32).zip(marks.started);
        let first = first.map(|(pid, started)| Process { pid, started });
        let variable =
            [b"KEDGE_CONTROL=", self.folder.join("control").as_os_str().as_bytes()].concat();
        let is_its_own = |process: &Process| {
            Some(*process) == first
                || was_given(process.pid, &variable) && is_in(process.pid, marks)
        };
        let mut found: BTreeSet<Process> = all.keys().copied().filter(is_its_own).collect();
        add_descendants(&mut found, &all);
        // Who asks may have been started by the job.
        found.retain(|process| process.pid != std::process::id() as i32);
        found
    }

    /// Whether any runs.
    pub(crate) fn any(&self) -> bool {
        !self.find().is_empty()
    }

    /// Whether any runs that was not killed, and that nobody who is about to end holds.
    pub(crate) fn any_goes_on(&self) -> bool {
        self.find().iter().any(|process| runs(process.pid))
    }

    /// Sends all of them a signal.
    pub(crate) fn signal(&self, signal: i32) {
        for process in self.find() {
            process.signal(signal);
        }
    }

    /// Ends all of them: by SIGTERM, and what is left after `grace` by SIGKILL. Whether nothing is
    /// left.
    pub(crate) fn end(&self, grace: Duration) -> bool {
        let ended = !grace.is_zero() && self.end_by(libc::SIGTERM, grace);
        ended || self.end_by(libc::SIGKILL, LAST)
    }

    fn end_by(&self, signal: i32, limit: Duration) -> bool {
        let begin = Instant::now();
        let mut sent = BTreeSet::new();
        for wait in looks() {
            let found = self.find();
            if found.is_empty() {
                return true;
            }
            found.iter().filter(|process| sent.insert(**process)).for_each(|process| {
                process.signal(signal);
            });
            if begin.elapsed() > limit {
                break;
            }
            thread::sleep(wait);
        }
        false
    }
}

fn add_descendants(found: &mut BTreeSet<Process>, all: &BTreeMap<Process, i32>) {
    loop {
        let ids: BTreeSet<i32> = found.iter().map(|process| process.pid).collect();
        let before = found.len();
        found.extend(all.iter().filter(|(_, parent)| ids.contains(parent)).map(|(child, _)| child));
        if found.len() == before {
            break;
        }
    }
}

/// The children that a supervisor has had: what is known of its processes by whoever is none.
#[derive(Debug, Clone, Default)]
pub(crate) struct Kin(BTreeSet<Process>);

impl Kin {
    /// Notes those that it has now.
    pub(crate) fn note(&mut self, supervisor: i32) {
        let own = std::process::id() as i32;
        let tasks = fs::read_dir(format!("/proc/{supervisor}/task")).into_iter().flatten();
        let lists = tasks
            .flatten()
            .filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
        let lists: Vec<String> = lists.collect();
        let children = lists.iter().flat_map(|list| list.split_whitespace());
        let children = children.filter_map(|pid| pid.parse().ok()).filter(|pid| *pid != own);
        let known = |pid: i32| Some(Process { pid, started: running_since(pid)? });
        self.0.retain(|process| running_since(process.pid) == Some(process.started));
        self.0.extend(children.filter_map(known));
    }

    /// Ends them, and whatever descends from them. Whether nothing is left.
    pub(crate) fn end(&self) -> bool {
        let all = users_processes();
        let mut found: BTreeSet<Process> =
            self.0.iter().copied().filter(|process| all.contains_key(process)).collect();
        add_descendants(&mut found, &all);
        found.retain(|process| process.pid != std::process::id() as i32);
        for process in &found {
            process.signal(libc::SIGKILL);
        }
        if !found.is_empty() {
            thread::sleep(Duration::from_millis(5));
        }
        found.is_empty()
    }
}

/// The user's processes that have not ended, each with its parent's id.
fn users_processes() -> BTreeMap<Process, i32> {
    let own = rustix::process::geteuid().as_raw();
    // A job of root's may have processes that are others' by now.
    let all = own == 0;
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let of_user = entries.filter(|entry| {
        // One that hides from its user shows root as its owner; it is asked about as a child.
        all || entry.metadata().is_ok_and(|found| [own, 0].contains(&found.uid()))
    });
    let process = |entry: fs::DirEntry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        let started = running_since(pid)?;
        let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
        let parent = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()?;
        Some((Process { pid, started }, parent))
    };
    of_user.filter_map(process).collect()
}

/// Whether a process was started with that in its environment.
fn was_given(pid: i32, variable: &[u8]) -> bool {
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    environment.split(|byte| *byte == 0).any(|entry| entry == variable)
}

/// Whether a process is in the supervisor's control groups.
fn is_in(pid: i32, marks: &Marks) -> bool {
    fs::read_to_string(format!("/proc/{pid}/cgroup")).is_ok_and(|groups| groups == marks.groups)
}
