//! Jobs of several parts, each with a supervisor of its own: `kedge run --join NAME`. Parts are
//! jobs as any others, named NAME.0, NAME.1 …; together they are checkpointed and restarted as one.
//!
//! ```text
//! joint/NAME/{coordinator, coordinator.lock, parts.lock}   who coordinates, and where
//! jobs/NAME.K/…                                             the parts
//! ```

mod hosts;
mod saved;

use crate::base::signals::Signals;
use crate::job::jobs::{JobDir, JobError, JobName, Jobs, Meta, State};
pub use hosts::{KEY, far};
use kedge_coordinator::{Client, ClientError, Far, Leader, Member, Place};
pub(crate) use saved::Saved;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, TryLockError};
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

/// The space of what kedge itself publishes.
pub(crate) const SPACE: &str = "kedge";
/// Most parts of one job on one node.
pub(crate) const MAX_PARTS: u32 = 4096;

/// The job that this one is a part of.
#[derive(Debug, Clone)]
pub(crate) struct Joint {
    /// Its name.
    pub(crate) job: JobName,
    /// This part's.
    pub(crate) part: JobName,
    /// Where the coordinator is.
    pub(crate) place: Place,
    pub(crate) jobs: Jobs,
    /// What has joined already, for whoever is to answer calls.
    joined: Arc<Mutex<Option<Client>>>,
    /// Read by whoever conducts a checkpoint here, until its asker knows how it went.
    conducting: Arc<RwLock<()>>,
    /// How many ranks the step has whose ranks the parts are, if they are a step's.
    pub(crate) ranks: Option<u32>,
    /// That these have been saved and end.
    pub(crate) saved: Saved,
}

/// Removes what an ended job has left whose parts these are.
pub(crate) fn clear(jobs: &Jobs, parts: &[Meta]) {
    if !parts.iter().any(|meta| meta.state == State::Running) {
        let names = parts.iter().filter_map(|meta| meta.name.parse().ok());
        names.for_each(|name: JobName| jobs.remove(&name));
    }
}

/// Of the joint job `job`: the part with that number.
pub(crate) fn part_name(job: &JobName, number: u32) -> Result<JobName, JobError> {
    format!("{job}.{number}").parse()
}

impl Joint {
    /// Takes the next free part of the job `job` for this process: on this host, or on all those of
    /// `far`.
    pub(crate) fn enter(
        jobs: &Jobs,
        job: &JobName,
        far: Option<&Far>,
    ) -> Result<(Joint, JobDir), JobError> {
        let folder = jobs.joint_dir(job)?;
        let _one = lock(&folder.join("parts.lock"))?;
        let before = jobs.parts(job)?;
        clear(jobs, &before);
        for number in 0..MAX_PARTS {
            let part = part_name(job, number)?;
            // The number of one that has ended stays its own while others run.
            if jobs.find(&part).is_some() {
                continue;
            }
            let joint = Joint::of(jobs, job, part.clone(), far.cloned())?;
            if far.is_some() && !joint.claim()? {
                continue;
            }
            match jobs.create(&part) {
                Ok(dir) => return Ok((joint, dir)),
                Err(JobError::InUse { .. }) => {}
                Err(other) => return Err(other),
            }
        }
        Err(JobError::InUse { name: job.clone() })
    }

    /// The part `part` of the job `job`.
    pub(crate) fn of(
        jobs: &Jobs,
        job: &JobName,
        part: JobName,
        far: Option<Far>,
    ) -> Result<Joint, JobError> {
        let place = Place { folder: jobs.joint_dir(job)?, far };
        let (job, jobs) = (job.clone(), jobs.clone());
        let (joined, conducting) = (Arc::default(), Arc::default());
        let saved = Saved::new();
        Ok(Joint { job, part, place, jobs, joined, conducting, ranks: None, saved })
    }

    /// The same, where the parts are the ranks of a step, if they are: so many.
    pub(crate) fn with_ranks(self, ranks: Option<u32>) -> Joint {
        Joint { ranks, ..self }
    }

    /// Joins as that part, unless another host has it.
    pub(crate) fn claim(&self) -> Result<bool, JobError> {
        // A coordinator's thread must not take the signals that this process waits for later.
        let join = || {
            let _blocked = Signals::block();
            self.join(true)
        };
        let joined = thread::scope(|scope| scope.spawn(join).join());
        let failed = |why: String| JobError::Join { job: self.job.clone(), why };
        match joined.map_err(|_| failed("a thread has failed".to_owned()))? {
            Ok(client) => {
                *self.joined.lock().unwrap_or_else(PoisonError::into_inner) = Some(client);
                Ok(true)
            }
            Err(ClientError::Taken { .. }) => Ok(false),
            Err(error) => Err(failed(error.to_string())),
        }
    }

    /// As the part: what has joined when it entered, or anew.
    pub(crate) fn join_as_part(&self) -> Result<Client, ClientError> {
        let joined = self.joined.lock().unwrap_or_else(PoisonError::into_inner).take();
        joined.map_or_else(|| self.join(true), Ok)
    }

    /// That a checkpoint is conducted here, for as long as this is kept.
    pub(crate) fn conducts(&self) -> RwLockReadGuard<'_, ()> {
        self.conducting.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether one is.
    pub(crate) fn is_conducting(&self) -> bool {
        matches!(self.conducting.try_write(), Err(TryLockError::WouldBlock))
    }

    /// Whether it is the part that does what one of them is to do.
    pub(crate) fn is_first(&self) -> bool {
        part_name(&self.job, 0).is_ok_and(|first| first == self.part)
    }

    /// Joins the coordination, as this part or as a guest; coordinates where nobody does.
    pub(crate) fn join(&self, part: bool) -> Result<Client, ClientError> {
        let (place, job) = (self.place.clone(), self.job.to_string());
        let find = Box::new(move || {
            let (stream, leader) = place.reach(&job)?;
            if let Leader::This(server) = leader {
                server.forever();
            }
            Ok(stream)
        });
        // Two that conduct at one time are two members.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let guest = || format!("{} ({now:x})", self.part);
        let name = if part { self.part.to_string() } else { guest() };
        let member = Member { job: self.job.to_string(), name, node: self.node(), part };
        Client::join(&member, find)
    }

    /// This host, as far as the job goes: by the name that others know, and the folder in which its
    /// parts meet.
    pub(crate) fn node(&self) -> String {
        let name = rustix::system::uname();
        let name: String = name.nodename().to_string_lossy().chars().take(40).collect();
        let folder = fs::metadata(&self.place.folder);
        let (device, inode) = folder.map_or((0, 0), |folder| (folder.dev(), folder.ino()));
        format!("{name} {device:x}:{inode:x}")
    }

    /// The first part whose supervisor was killed, and so nobody can checkpoint.
    pub(crate) fn lost(&self) -> Option<Meta> {
        let parts = self.jobs.parts(&self.job).unwrap_or_default();
        parts.into_iter().find(|meta| {
            meta.ended.is_none() && meta.state != State::Running && meta.pid.is_some_and(lives)
        })
    }
}

/// Whether there is such a process, and it has not ended.
fn lives(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit(')').next().and_then(|rest| rest.trim_start().chars().next());
    state.is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

/// Waits for a lock, which goes with the file.
pub(crate) fn lock(path: &Path) -> Result<File, JobError> {
    let open = || -> io::Result<File> {
        let file =
            OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
        file.lock()?;
        Ok(file)
    };
    open().map_err(|source| JobError::Io { path: path.to_owned(), source })
}
