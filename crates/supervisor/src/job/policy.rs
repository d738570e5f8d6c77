//! What a job is run on, and how it is checkpointed.

use crate::job::files::{HOSTS, JOBS, variable};
use crate::job::name::JobName;
use kedge_control::gpu::{BadGpuSpec, GpuSpec};
use kedge_image::{ImageError, Manifest};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::num::NonZeroU32;
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;
use thiserror::Error;

/// The devices that a job sees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JobGpu {
    /// None: no driver on the library path, and no proxy.
    None,
    Devices(GpuSpec),
}

impl JobGpu {
    /// Returns what devices of several places cannot have that have a GPU among them, as
    /// [`JobGpu::refuse_several`] does.
    pub fn refuse_gpu_among(&self, what: &str) -> Option<String> {
        match self {
            JobGpu::None => None,
            JobGpu::Devices(spec) => spec.refuse_gpu_among(what),
        }
    }

    /// Returns what devices of several places cannot have: `what`, by name, and what mends it.
    pub fn refuse_several(&self, what: &str) -> Option<String> {
        match self {
            JobGpu::None => None,
            JobGpu::Devices(spec) => spec.refuse_several(what),
        }
    }
}

impl Policy {
    /// Returns the options that say what needs checkpoints, and whether each is given.
    pub fn needs_checkpoints(&self) -> [(&'static str, bool); 3] {
        [
            ("--interval", self.interval.is_some()),
            ("--on-term", self.on_term.is_some()),
            ("--recover", self.recover.is_some()),
        ]
    }

    /// Returns the options that say what needs devices of one place, and whether each is given.
    pub fn needs_one_place(&self) -> [(&'static str, bool); 2] {
        [("--hold", self.hold.is_some()), ("--warm", self.warm.is_some())]
    }
}

impl Policy {
    /// Returns whether the job's processes do not get SIGTERM, which they are all sent.
    pub(crate) fn withholds_term(&self) -> bool {
        self.on_term.is_some_and(|on_term| on_term.withheld)
    }

    /// Returns the options that say what a rank of a step of several cannot have, and whether each
    /// is given.
    pub(crate) fn needs_one_part(&self) -> [(&'static str, bool); 1] {
        [("--recover", self.recover.is_some())]
    }
}

impl FromStr for JobGpu {
    type Err = BadGpuSpec;
    fn from_str(text: &str) -> Result<JobGpu, BadGpuSpec> {
        match text {
            "none" => Ok(JobGpu::None),
            _ => text.parse().map(JobGpu::Devices),
        }
    }
}

impl fmt::Display for JobGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            JobGpu::None => f.write_str("none"),
            JobGpu::Devices(spec) => spec.fmt(f),
        }
    }
}

/// How a job is checkpointed, where a checkpoint does not say otherwise.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// Where its images go: absolute. `None` where there is no such folder by default.
    pub dir: Option<PathBuf>,
    /// Images that are kept; `None`: all.
    pub keep: Option<NonZeroU32>,
    /// Between two checkpoints that nobody asks for.
    pub interval: Option<Interval>,
    /// Checkpoint when this process is asked to end (SIGTERM), before the program is.
    #[serde(default)]
    pub on_term: Option<OnTerm>,
    /// Its images build on each other; so many, and then one that builds on none.
    #[serde(default)]
    pub full_every: Option<NonZeroU32>,
    /// How often it goes back to its newest image by itself when it has lost a proxy.
    #[serde(default)]
    pub recover: Option<NonZeroU32>,
    /// How long its newest image stays in memory too.
    #[serde(default)]
    pub hold: Option<Duration>,
    /// So many proxies are kept ready for it.
    #[serde(default)]
    pub warm: Option<NonZeroU32>,
    /// A program that ends with status 0 is noted to be done, for who resumes its job next.
    #[serde(default)]
    pub resume: bool,
}

/// The time between two checkpoints that nobody asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Interval {
    Every(Duration),
    /// The one that loses the least work, by what checkpoints turn out to cost.
    Auto {
        /// From one loss of the job to the next, on average.
        mtbf: Duration,
    },
}

impl Interval {
    /// The same, if it is not too short.
    fn checked(self) -> Option<Interval> {
        let (Interval::Every(time) | Interval::Auto { mtbf: time }) = self;
        (time >= MIN_INTERVAL).then_some(self)
    }
}

/// As `--interval` takes it.
impl fmt::Display for Interval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Interval::Every(time) => write!(f, "{}ms", time.as_millis()),
            Interval::Auto { mtbf } => write!(f, "auto,{}ms", mtbf.as_millis()),
        }
    }
}

/// From one loss of a job to the next where nobody says.
pub const MTBF: Duration = Duration::from_secs(24 * 3600);

/// Shortest time between two checkpoints that nobody asks for.
pub const MIN_INTERVAL: Duration = Duration::from_secs(1);

/// What an image's settings call the folder that the job's processes know.
const FOLDER: &str = "folder";

/// How often a job goes back where nobody says how often.
pub const RECOVERIES: NonZeroU32 = NonZeroU32::new(3).unwrap();

/// Images in a chain where nobody says how many.
pub const FULL_EVERY: NonZeroU32 = NonZeroU32::new(10).unwrap();

impl Policy {
    /// What an image keeps of it.
    pub(crate) fn to_settings(&self) -> Option<serde_json::Value> {
        serde_json::to_value(Policy { dir: None, ..self.clone() }).ok()
    }

    /// The same, and the folder that the job's processes know.
    pub(crate) fn to_settings_in(&self, folder: &Path) -> Option<serde_json::Value> {
        let mut settings = self.to_settings()?;
        settings.as_object_mut()?.insert(FOLDER.into(), folder.to_str()?.into());
        Some(settings)
    }

    /// Returns how many images that build on each other there are at most.
    pub(crate) fn longest_chain(&self) -> u32 {
        self.full_every.unwrap_or(FULL_EVERY).get()
    }

    /// What of it holds for a part that is started on another host. One part asks for all.
    pub(crate) fn of_other_part(&self) -> Policy {
        Policy {
            dir: self.dir.clone(),
            keep: self.keep,
            full_every: self.full_every,
            recover: self.recover,
            hold: self.hold,
            warm: self.warm,
            ..Policy::default()
        }
    }

    /// The policy of the job whose image that is.
    pub(crate) fn of_image(manifest: &Manifest) -> Policy {
        // What another kedge has written there may be none of this one's.
        let settings = manifest.settings.clone();
        let policy = settings.and_then(|value| serde_json::from_value(value).ok());
        let mut policy: Policy = policy.unwrap_or_default();
        policy.interval = policy.interval.and_then(Interval::checked);
        policy
    }

    /// This one, and where it says nothing what `before` says; where images go is not inherited.
    pub(crate) fn or(&self, before: Policy) -> Policy {
        Policy {
            dir: self.dir.clone(),
            keep: self.keep.or(before.keep),
            interval: self.interval.or(before.interval),
            on_term: self.on_term.or(before.on_term),
            full_every: self.full_every.or(before.full_every),
            recover: self.recover.or(before.recover),
            hold: self.hold.or(before.hold),
            warm: self.warm.or(before.warm),
            resume: self.resume || before.resume,
        }
    }
}

/// A checkpoint before the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct OnTerm {
    /// From the signal on; when it has passed, the program is asked to end and no image is waited
    /// for.
    pub deadline: Option<Duration>,
    /// What kedge ends with when the job has been captured so: the batch system requeues it.
    #[serde(default)]
    pub requeue_exit: Option<u8>,
    /// The program has SIGTERM blocked: the batch system sends it to all processes of the job. The
    /// job ends with its image.
    #[serde(default)]
    pub withheld: bool,
}

/// As `--on-term` takes it.
impl fmt::Display for OnTerm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.deadline {
            Some(deadline) => write!(f, "checkpoint,{}ms", deadline.as_millis()),
            None => f.write_str("checkpoint"),
        }
    }
}

/// The folder that the processes of the job know whose image that is.
///
/// # Errors
///
/// [`ImageError::Damaged`] where that is none that kedge gives to a job: links are made in it, and
/// what has their names is removed.
pub(crate) fn former_folder(manifest: &Manifest) -> Result<Option<PathBuf>, ImageError> {
    let noted = || manifest.settings.as_ref()?.get(FOLDER)?.as_str().map(PathBuf::from);
    let of_devices = manifest.devices.as_ref().map(|devices| devices.folder.clone());
    match of_devices.or_else(noted) {
        Some(path) if !is_of_a_job(&path) => {
            let what = "the folder that its processes know is no job's";
            Err(ImageError::Damaged { path, offset: 0, what })
        }
        former => Ok(former),
    }
}

/// Whether `path` is where kedge puts a job: `…/kedge/hosts/HOST/jobs/NAME`, `…/kedge/jobs/NAME`,
/// or `…/kedge-UID/jobs/NAME` with six letters behind the UID or none.
fn is_of_a_job(path: &Path) -> bool {
    let plain = |part| matches!(part, Component::RootDir | Component::Normal(_));
    let parts: Vec<&str> =
        path.iter().rev().take(5).map(|part| part.to_str().unwrap_or_default()).collect();
    let is_name = |text: &str| text.parse::<JobName>().is_ok();
    let is_known = match parts[..] {
        [name, JOBS, host, HOSTS, "kedge"] => is_name(name) && is_name(host),
        [name, JOBS, base, ..] => is_name(name) && is_base(base),
        _ => false,
    };
    path.is_absolute() && path.components().all(plain) && is_known
}

/// Whether a folder of jobs may lie in one of that name.
fn is_base(name: &str) -> bool {
    let Some(rest) = name.strip_prefix("kedge-") else { return name == "kedge" };
    let (user, unique) = rest.split_once('-').unwrap_or((rest, "XXXXXX"));
    let digits = !user.is_empty() && user.bytes().all(|byte| byte.is_ascii_digit());
    digits && unique.len() == 6 && unique.bytes().all(|byte| byte.is_ascii_alphanumeric())
}

#[derive(Debug, Error)]
#[error(
    "there is no folder for images: set HOME or XDG_STATE_HOME to an absolute path, or name a folder"
)]
pub struct NoStateFolder;

/// Where images go by default: `$XDG_STATE_HOME/kedge/images`, else `~/.local/state/kedge/images`.
pub fn default_dir() -> Result<PathBuf, NoStateFolder> {
    let state = variable("XDG_STATE_HOME")
        .or_else(|| variable("HOME").map(|home| home.join(".local/state")));
    Ok(state.ok_or(NoStateFolder)?.join("kedge/images"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restarted_job_inherits_what_nobody_says() {
        let first = Policy {
            dir: Some("/old".into()),
            keep: NonZeroU32::new(3),
            interval: Some(Interval::Every(Duration::from_secs(60))),
            full_every: Some(FULL_EVERY),
            ..Policy::default()
        };
        let mut manifest = Manifest::new("j".into(), vec![], 1);
        assert_eq!(Policy::of_image(&manifest), Policy::default());
        manifest.settings = first.to_settings();
        let interval = Some(Interval::Auto { mtbf: MTBF });
        let second = Policy { dir: Some("/new".into()), interval, ..Policy::default() };
        let inherited = second.or(Policy::of_image(&manifest));
        assert_eq!(inherited, Policy { keep: first.keep, full_every: first.full_every, ..second });
        manifest.settings = Some(serde_json::Value::String("other words".into()));
        assert_eq!(Policy::of_image(&manifest), Policy::default());
    }

    #[test]
    fn a_folder_out_of_an_image_is_a_job_s() {
        for good in [
            "/run/user/7/kedge/jobs/j",
            "/tmp/kedge-7/jobs/a.0",
            "/tmp/kedge-7-aB3xYz/jobs/a",
            "/kedge/jobs/x_1",
            "/home/a/.local/state/kedge/hosts/node-7.b/jobs/j",
        ] {
            assert!(is_of_a_job(Path::new(good)), "{good}");
        }
        for bad in [
            "/etc",
            "kedge/jobs/j",
            "/tmp/kedge-7/jobs/..",
            "/tmp/kedge-7/jobs/../../etc",
            "/tmp/../kedge/jobs/j",
            "/tmp/kedge-7/jobs",
            "/tmp/kedge-x/jobs/j",
            "/tmp/kedge-/jobs/j",
            "/home/a/jobs/j",
            "/tmp/kedge-7-aB3/jobs/j",
            "/kedge/hosts/jobs/j",
            "/hosts/a/jobs/j",
            "/kedge/hosts/../jobs/j",
            "/run/kedge/jobs/a b",
        ] {
            assert!(!is_of_a_job(Path::new(bad)), "{bad}");
            let mut manifest = Manifest::new("j".into(), vec![], 1);
            manifest.settings = Some(serde_json::json!({ FOLDER: bad }));
            assert!(former_folder(&manifest).is_err(), "{bad}");
        }
    }

    #[test]
    fn devices_read_as_they_print() {
        for text in ["none", "soft", "soft:2", "local:0,1"] {
            assert_eq!(text.parse::<JobGpu>().unwrap().to_string(), text);
        }
        assert!("no thing".parse::<JobGpu>().is_err());
        // It could be a host.
        assert_eq!("nothing".parse::<JobGpu>().unwrap().to_string(), "nothing:7531");
    }
}
