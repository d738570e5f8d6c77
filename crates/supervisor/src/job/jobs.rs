//! Jobs on disk: `jobs/NAME/{lock, meta.json, last.json, images.json, checkpoints.json, next.json,
//! log, former/, socket, control, lib/, bin/}` in a folder private to the user, which [`places`]
//! finds.
//!
//! A supervisor holds its job's lock for as long as it lives, so a job whose lock is free has
//! ended, however it ended. The log and the facts of the latest jobs are kept.

mod commands;
mod dir;
mod former;
mod joint;
mod lock;
mod only;
mod places;
mod watched;

pub use crate::job::files::now;
pub(crate) use crate::job::files::{io_error, private_dir, replace};
use crate::job::held::HeldImage;
use crate::job::left::{Left, Marks};
pub use crate::job::name::{JobError, JobName};
use crate::job::policy::Policy;
use crate::job::tally::Checkpoints;
pub use commands::SHELL;
pub(crate) use dir::{JobDir, StandIn};
pub(crate) use joint::by_number;
use lock::{is_locked, lock_soon, stays_locked, taken};
pub(crate) use lock::{open_lock, try_lock};
use places::Surroundings;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::{FromRawFd, RawFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, SystemTime};
pub use watched::Next;
pub(crate) use watched::note_next;

/// Finished jobs that are kept.
const KEPT: usize = 50;
/// So many more there may be before they are looked at, which takes as long as the end of a short
/// job.
const MORE: usize = 16;
/// How long processes that were killed with their supervisor may take to end: they may have much
/// memory to give back.
const ENDING: Duration = Duration::from_secs(3);
/// Beside the job's socket, where NVML is answered.
pub(crate) const NVML_SOCKET: &str = "nvml";
const CHECKPOINTS: &str = "checkpoints.json";

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    Running,
    /// With this status.
    Exited(i32),
    /// By this signal.
    Killed(i32),
    /// Its processes run, and its supervisor was killed.
    Unsupervised,
    /// As a whole, to this server: it goes on there.
    Moved(String),
}

impl State {
    /// All that [`State::name`] returns.
    pub const NAMES: [&str; 5] = ["running", "unsupervised", "exited", "killed", "moved"];

    /// Returns the word that tells it from the others.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            State::Running => "running",
            State::Unsupervised => "unsupervised",
            State::Exited(_) => "exited",
            State::Killed(_) => "killed",
            State::Moved(_) => "moved",
        }
    }
}

/// What `meta.json` says.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Meta {
    pub name: String,
    /// The supervisor's process id.
    pub supervisor: u32,
    /// The program's.
    pub pid: Option<u32>,
    pub command: Vec<String>,
    pub gpu: String,
    /// Seconds since 1970.
    pub started: u64,
    pub ended: Option<u64>,
    pub state: State,
    #[serde(default)]
    pub policy: Option<Policy>,
    /// The job that this one is a part of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub joint: Option<String>,
    /// How its processes are known if its supervisor is killed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub marks: Option<Marks>,
}

impl Meta {
    /// What is known of the job's processes, in `folder`, where its supervisor has ended.
    pub(crate) fn left<'a>(&'a self, folder: &'a Path) -> Left<'a> {
        Left { marks: self.marks.as_ref(), program: self.pid, folder }
    }
}

/// The job's latest image that is durable: `last.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LastImage {
    pub image: PathBuf,
    /// Seconds since 1970.
    pub captured: u64,
    pub bytes: u64,
    /// How long the job stood still for it.
    pub stall_seconds: f64,
    /// Whether the job ended with it, as all ranks do that are asked to end (`--on-term`).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub last_word: bool,
}

impl LastImage {
    pub(crate) fn write(&self, path: &Path) -> Result<(), JobError> {
        replace(path, self)
    }
}

/// The user's jobs.
#[derive(Debug, Clone)]
pub struct Jobs {
    /// Of new jobs.
    dir: PathBuf,
    /// Where there may be others.
    others: Vec<PathBuf>,
}

impl Jobs {
    /// Opens the user's folder for this host, or makes it: `$XDG_STATE_HOME/kedge/hosts/HOST`, else
    /// `~/.local/state/kedge/hosts/HOST`; where there is no home, `$XDG_RUNTIME_DIR/kedge`, else
    /// `/tmp/kedge-UID-…`.
    pub fn open() -> Result<Jobs, JobError> {
        let surroundings = Surroundings::here();
        let dir = surroundings.jobs()?;
        let others = surroundings.others(&dir);
        Ok(Jobs { dir, others })
    }

    /// The job's folder: where it is, or is to be.
    fn job_dir(&self, name: &JobName) -> PathBuf {
        let new = self.dir.join(&name.0);
        let mut old = self.others.iter().map(|dir| dir.join(&name.0));
        if new.exists() { new } else { old.find(|dir| dir.exists()).unwrap_or(new) }
    }

    /// Takes `name` for a job of this process. What an ended job of that name has left goes when
    /// this one has come to be and ended.
    pub(crate) fn create(&self, name: &JobName) -> Result<JobDir, JobError> {
        if self.others.iter().any(|other| stays_locked(&other.join(&name.0))) {
            return Err(JobError::InUse { name: name.clone() });
        }
        let dir = self.dir.join(&name.0);
        loop {
            match DirBuilder::new().mode(0o700).create(&dir) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(io_error(&dir)(e));
                }
                _ => {}
            }
            let path = dir.join("lock");
            let options =
                OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).clone();
            let lock = match options.open(&path) {
                // Another supervisor removed the folder in between.
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                other => other.map_err(io_error(&path))?,
            };
            if !lock_soon(&lock) {
                return Err(JobError::InUse { name: name.clone() });
            }
            // The lock counts only if it is still the one that others would open.
            let same = fs::metadata(&path)
                .is_ok_and(|now| lock.metadata().is_ok_and(|ours| ours.ino() == now.ino()));
            if !same {
                continue;
            }
            if has_left(&dir) {
                return Err(JobError::LeftRunning { name: name.clone() });
            }
            former::put_aside(&dir).map_err(io_error(&dir))?;
            lock.set_modified(SystemTime::now()).map_err(io_error(&path))?;
            let dir = JobDir { dir, lock };
            dir.clear();
            let _ = fs::remove_file(dir.warm());
            return Ok(dir);
        }
    }

    /// The job `name`, which the process that this one has taken the place of had: by its lock.
    pub(crate) fn take_over(&self, name: &JobName, lock: RawFd) -> Result<JobDir, JobError> {
        let dir = self.job_dir(name);
        let known = fs::metadata(dir.join("lock")).map_err(io_error(&dir))?;
        let handed = fs::metadata(format!("/proc/self/fd/{lock}")).map_err(io_error(&dir))?;
        if lock < 3 || (known.dev(), known.ino()) != (handed.dev(), handed.ino()) {
            return Err(JobError::InUse { name: name.clone() });
        }
        // SAFETY: the descriptor is open, as was just seen, and nothing of this process has made
        // it.
        let lock = unsafe { File::from_raw_fd(lock) };
        let dir = JobDir { dir, lock };
        dir.stays_open(false).map_err(io_error(&dir.dir))?;
        dir.clear();
        Ok(dir)
    }

    /// All jobs, the newest first, with their state as it is now. A job whose supervisor died
    /// without a word counts as killed.
    pub fn list(&self) -> Result<Vec<Meta>, JobError> {
        let entries = fs::read_dir(&self.dir).map_err(io_error(&self.dir))?;
        let others = self.others.iter().filter_map(|other| fs::read_dir(other).ok()).flatten();
        let mut jobs: Vec<(Option<SystemTime>, Meta)> = entries
            .chain(others)
            .flatten()
            // Of two jobs of one name, the one that the name leads to.
            .filter(|entry| {
                let name = entry.file_name().to_str().and_then(|name| name.parse().ok());
                name.is_some_and(|name| self.job_dir(&name) == entry.path())
            })
            .filter_map(|entry| Some((taken(&entry.path()), current(&entry.path())?)))
            .collect();
        jobs.sort_by_key(|(taken, meta)| Reverse((meta.started, *taken)));
        Ok(jobs.into_iter().map(|(_, meta)| meta).collect())
    }

    /// The job `name`, as [`Jobs::list`] shows it.
    pub fn find(&self, name: &JobName) -> Option<Meta> {
        current(&self.job_dir(name))
    }

    /// Whether somebody has the name `name`, for a job that may not have come to be as yet.
    pub(crate) fn begins(&self, name: &JobName) -> bool {
        is_locked(&self.job_dir(name))
    }

    /// Forgets the job `name`, unless it runs.
    pub fn remove(&self, name: &JobName) {
        let dir = self.job_dir(name);
        // Under the lock, so that a new job of the same name is not taken for the old one.
        if open_lock(&dir).is_ok_and(|lock| try_lock(&lock)) {
            let _ = fs::remove_dir_all(&dir);
        }
    }

    /// The folder where the parts of the joint job `job` meet: private, made if need be.
    pub(crate) fn joint_dir(&self, job: &JobName) -> Result<PathBuf, JobError> {
        // SAFETY: a plain call.
        let uid = unsafe { libc::geteuid() };
        let all = self.dir.with_file_name("joint");
        private_dir(&all, uid)?;
        let dir = all.join(&job.0);
        private_dir(&dir, uid)?;
        Ok(dir)
    }

    /// The folder of all jobs.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Where the job `name` lies.
    pub(crate) fn folder(&self, name: &JobName) -> PathBuf {
        self.job_dir(name)
    }

    /// Where the log of job `name` lies.
    pub fn log_path(&self, name: &JobName) -> PathBuf {
        self.job_dir(name).join("log")
    }

    /// Where the job `name` answers while it runs.
    pub(crate) fn control_path(&self, name: &JobName) -> PathBuf {
        self.job_dir(name).join("control")
    }

    /// Where the job `name` is asked to let go of what it holds.
    pub(crate) fn keeper_path(&self, name: &JobName) -> PathBuf {
        self.job_dir(name).join("keeper")
    }

    /// Where the job `name` has proxies kept ready for it.
    pub(crate) fn warm_path(&self, name: &JobName) -> PathBuf {
        self.job_dir(name).join("warm")
    }

    /// What is held in memory of the job `name`, which runs.
    pub fn held(&self, name: &JobName) -> Option<HeldImage> {
        let dir = self.job_dir(name);
        let held = fs::read(dir.join("held.json")).ok().filter(|_| is_locked(&dir))?;
        serde_json::from_slice(&held).ok()
    }

    /// The latest image of job `name`.
    pub fn last_image(&self, name: &JobName) -> Option<LastImage> {
        serde_json::from_slice(&fs::read(self.job_dir(name).join("last.json")).ok()?).ok()
    }

    /// How the checkpoints of job `name` went.
    pub fn checkpoints(&self, name: &JobName) -> Checkpoints {
        Checkpoints::read(&self.job_dir(name).join(CHECKPOINTS))
    }

    /// Removes all but the latest ended jobs, if there are many more.
    pub(crate) fn prune(&self) {
        if fs::read_dir(&self.dir).map_or(0, Iterator::count) <= KEPT + MORE {
            return;
        }
        let goes_on = [State::Running, State::Unsupervised];
        let ended = self.list().unwrap_or_default().into_iter();
        let ended = ended.filter(|meta| !goes_on.contains(&meta.state));
        for meta in ended.skip(KEPT) {
            if let Ok(name) = meta.name.parse() {
                self.remove(&name);
            }
        }
    }
}

/// Whether the job that had `dir`, whose lock is held here, has left processes that go on. Those
/// that were killed with their supervisor may need a moment to end.
fn has_left(dir: &Path) -> bool {
    let Some(meta) = read_meta(dir).filter(|meta| meta.state == State::Running) else {
        return false;
    };
    let end = Instant::now() + ENDING;
    while meta.left(dir).any() {
        if Instant::now() > end {
            return true;
        }
        thread::sleep(Duration::from_millis(5));
    }
    false
}

/// What the job in `dir` says of itself, and whether its supervisor still lives, or what it left.
fn current(dir: &Path) -> Option<Meta> {
    let former = || {
        let unused = open_lock(dir).is_ok_and(|lock| try_lock(&lock) && former::put_back(dir));
        unused.then(|| read_meta(dir)).flatten()
    };
    let mut meta = read_meta(dir).or_else(former)?;
    if meta.state == State::Running && !is_locked(dir) {
        let left = meta.left(dir).any();
        meta.state = if left { State::Unsupervised } else { State::Killed(libc::SIGKILL) };
    }
    Some(meta)
}

/// Notes in a job's folder that it is on other devices.
pub(crate) fn note_gpu(dir: &Path, gpu: &str) -> Result<(), JobError> {
    match read_meta(dir) {
        Some(meta) => replace(&dir.join("meta.json"), &Meta { gpu: gpu.to_owned(), ..meta }),
        None => Ok(()),
    }
}

pub(crate) fn read_meta(dir: &Path) -> Option<Meta> {
    serde_json::from_slice(&fs::read(dir.join("meta.json")).ok()?).ok()
}

#[cfg(test)]
mod tests;
