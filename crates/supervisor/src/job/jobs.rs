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

use crate::job::left::{self, Marks};
use crate::job::policy::Policy;
use crate::job::tally::Checkpoints;
use crate::services::keeper::HeldImage;
pub use commands::SHELL;
pub(crate) use dir::{JobDir, StandIn};
pub(crate) use joint::by_number;
use lock::{is_locked, lock_soon, stays_locked, taken};
pub(crate) use lock::{open_lock, try_lock};
use places::Surroundings;
pub(crate) use places::{HOSTS, JOBS, variable};
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::{FromRawFd, RawFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use thiserror::Error;
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

#[derive(Debug, Error)]
pub enum JobError {
    #[error("{path}: {source}; {}", remedy(source))]
    Io { path: PathBuf, source: io::Error },
    #[error(
        "{path} is not a folder of yours that others cannot enter: remove it, or set XDG_STATE_HOME"
    )]
    NotPrivate { path: PathBuf },
    #[error(
        "XDG_STATE_HOME is {path}, where others than root can make changes: root keeps nothing \
         there; unset it, or name a folder of root's"
    )]
    NotRoots { path: PathBuf },
    #[error("a job named {name} is running: choose another name, or end it first")]
    InUse { name: JobName },
    #[error(
        "processes of the job {name}, whose supervisor was killed, still run: end them first \
         (kedge kill {name}), or choose another name"
    )]
    LeftRunning { name: JobName },
    #[error(
        "`{0}` is no job name: use up to 64 letters, digits, '.', '_', '-', the first one a letter or digit"
    )]
    BadName(String),
    #[error(
        "a kedge balance of yours runs on this host already{}: end it first", by_process(*pid)
    )]
    Balances { pid: Option<u32> },
    #[error("{job}: cannot join it: {why}")]
    Join { job: JobName, why: String },
}

fn by_process(pid: Option<u32>) -> String {
    pid.map(|pid| format!(" (process {pid})")).unwrap_or_default()
}

fn remedy(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EMFILE) => "raise the limit on open files (`ulimit -n`)",
        Some(libc::EFBIG) => "raise the limit on the size of files (`ulimit -f`)",
        _ => "set XDG_STATE_HOME to a folder that you can write to",
    }
}

fn io_error(path: &Path) -> impl FnOnce(io::Error) -> JobError {
    move |source| JobError::Io { path: path.to_owned(), source }
}

/// A name that is safe as a folder's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobName(String);

impl FromStr for JobName {
    type Err = JobError;
    fn from_str(text: &str) -> Result<JobName, JobError> {
        let proper = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        if text.len() > 64
            || !text.starts_with(|c: char| c.is_ascii_alphanumeric())
            || !text.chars().all(proper)
        {
            return Err(JobError::BadName(text.to_owned()));
        }
        Ok(JobName(text.to_owned()))
    }
}

impl std::fmt::Display for JobName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl JobName {
    /// A name for a job that was given none: the program's, and the supervisor's process id.
    pub(crate) fn generated(program: &Path) -> JobName {
        let base = program.file_name().unwrap_or_default().to_string_lossy();
        let base: String = base.chars().filter(char::is_ascii_alphanumeric).take(40).collect();
        let base = if base.is_empty() { "job" } else { &base };
        JobName(format!("{base}-{}", std::process::id()))
    }
}

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

pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
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

/// Replaces the file `path` as a whole.
pub(crate) fn replace(path: &Path, value: &impl Serialize) -> Result<(), JobError> {
    let new = path.with_extension("json.new");
    let text = serde_json::to_vec_pretty(value).map_err(|e| io_error(path)(e.into()))?;
    let written = fs::write(&new, text).and_then(|()| fs::rename(&new, path));
    written.map_err(|error| {
        let _ = fs::remove_file(&new);
        io_error(path)(error)
    })
}

/// Makes `path` if need be, and refuses it unless it is a folder of `uid` that only it can enter.
pub(crate) fn private_dir(path: &Path, uid: u32) -> Result<(), JobError> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(io_error(path)(e)),
        _ => {}
    }
    let meta = fs::symlink_metadata(path).map_err(io_error(path))?;
    if !meta.is_dir() || meta.uid() != uid || meta.permissions().mode() & 0o077 != 0 {
        return Err(JobError::NotPrivate { path: path.to_owned() });
    }
    Ok(())
}

/// Whether the job that had `dir`, whose lock is held here, has left processes that go on. Those
/// that were killed with their supervisor may need a moment to end.
fn has_left(dir: &Path) -> bool {
    let Some(meta) = read_meta(dir).filter(|meta| meta.state == State::Running) else {
        return false;
    };
    let end = Instant::now() + ENDING;
    while left::any(&meta, dir) {
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
        let left = left::any(&meta, dir);
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
