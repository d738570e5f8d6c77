//! Going back: a job that has lost a proxy, and with it what its devices held, or whose program was
//! killed, is ended and restarted from its newest good image. `kedge restart` does that, in the
//! place of the process that supervised the job: it has the same id, standard streams and signals,
//! so whoever waits for it notices nothing.

use crate::base::signals::{Signals, look_at_children};
use crate::checkpoint::checkpointer::Checkpointer;
use crate::checkpoint::departing::DepartError;
use crate::checkpoint::ending;
use crate::devices::proxies::ProxyId;
use crate::job::jobs::{self, JobDir, JobError, JobName};
use crate::job::policy::Policy;
use crate::job::postscript::Ended;
use crate::job::program::FAREWELL;
use crate::restart::run::{Back, RestartSpec};
use crate::services::keeper::{Held, HeldNote, Keeper};
use crate::services::warden::{self, Together};
use crate::services::warm::Own;
use crate::{Outcome, RunError};
use kedge_control::gpu::GpuSpec;
use kedge_control::joblog::JobLog;
use kedge_control::proxy::{EXIT_BUG, EXIT_LOST};
use kedge_control::session::FarSession;
use kedge_control::{error, fault, warn};
use kedge_image::{ImageError, Manifest};
use kedge_process::Roots;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Most images that are noted: more than anybody goes back past.
const MAX_IMAGES: usize = 32;
/// For a server to end a session.
const SERVER: Duration = Duration::from_secs(3);
/// A process that is killed may have much memory to give back.
pub(crate) const LAST: Duration = Duration::from_secs(30);

/// Whether a job goes back, and where to.
#[derive(Debug)]
pub(crate) struct Recovery {
    /// At most; `None`: never.
    pub(crate) limit: Option<u32>,
    /// How often it has.
    pub(crate) used: u32,
    pub(crate) images: Images,
    /// The job's.
    folder: PathBuf,
    pub(crate) log: Arc<JobLog>,
    pub(crate) fate: Mutex<Fate>,
    /// The job is one of several parts, whose wardens say whether, and where to.
    of_part: AtomicBool,
}

/// What has become of a job.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Fate {
    #[default]
    Whole,
    /// Nobody has looked yet whether the job can go back.
    Lost(Loss),
    /// And the job goes back.
    GoingBack,
    /// And the job goes on without, or its end was asked for.
    GivenUp,
}

/// What a job has lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Loss {
    /// Devices, with this proxy.
    Devices { proxy: ProxyId, how: Outcome },
    /// The program's first process, by SIGKILL: nothing that a program does ends it so, but the
    /// kernel where memory runs out.
    Program,
    /// Its init, and with it all processes.
    Init,
    /// The restart by which it was to go back.
    Restart,
    /// Another part of the job, or the way to it.
    Others,
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Loss::Devices { proxy, how } => {
                write!(f, "the devices of proxy {proxy} are lost ({how})")
            }
            Loss::Program => f.write_str("the program was killed (SIGKILL)"),
            Loss::Init => f.write_str("the restarted job was killed as a whole (SIGKILL)"),
            Loss::Restart => f.write_str("the job has not come back"),
            Loss::Others => f.write_str("its warden has the part stopped"),
        }
    }
}

impl Recovery {
    pub(crate) fn new(policy: &Policy, used: u32, dir: &JobDir, log: &Arc<JobLog>) -> Recovery {
        let limit = policy.recover.map(u32::from);
        let images = Images(dir.images());
        let (folder, log) = (dir.path().to_owned(), log.clone());
        let (fate, of_part) = (Mutex::default(), AtomicBool::new(false));
        Recovery { limit, used, images, folder, log, fate, of_part }
    }

    /// Says that the job is a part, which ends where it has lost something: its warden knows what
    /// follows.
    pub(crate) fn is_of_part(&self) {
        self.of_part.store(true, Ordering::SeqCst);
    }

    /// Whether it may come to that.
    pub(crate) fn is_wanted(&self) -> bool {
        self.limit.is_some() && *self.fate() != Fate::GivenUp
    }

    /// A proxy has ended.
    pub(crate) fn proxy_ended(&self, proxy: ProxyId, how: Outcome) {
        self.end_session(proxy, how);
        if how == Outcome::Exited(0) {
            return;
        }
        if is_loss(how) {
            let what = format!("proxy {proxy} was lost ({how}), and what its devices held");
            fault!(self.log, "{what}");
            self.lose(Loss::Devices { proxy, how });
        } else {
            warn!(self.log, "proxy {proxy} has ended: {how}");
        }
    }

    /// Has the server end the session of a proxy that could not, so that its devices' memory is
    /// free: before the job goes back to an image, which may want it.
    fn end_session(&self, (ProxyId::Child(pid) | ProxyId::Warm(pid)): ProxyId, how: Outcome) {
        let sessions = FarSession::take(&self.folder, pid);
        // It has said goodbye, or found that the server cannot be reached or has no such session.
        // Of several, it may have come to one alone.
        match matches!(how, Outcome::Exited(status) if [0, EXIT_LOST].contains(&status.into())) {
            true if sessions.len() <= 1 => {}
            true => end_sessions(sessions, |_| ()),
            false => end_sessions(sessions, |error| self.cannot_end(pid, error)),
        }
    }

    /// Has the servers end the sessions of a proxy that has ended, or is about to, if it has any.
    pub(crate) fn end_session_of(&self, pid: u32) {
        end_sessions(FarSession::take(&self.folder, pid), |error| self.cannot_end(pid, error));
    }

    fn cannot_end(&self, pid: u32, error: &dyn fmt::Display) {
        let why = "so its devices' memory is free only once the server gives the session up";
        warn!(self.log, "the session of proxy {pid} cannot be ended ({error}), {why}");
    }

    /// The program's first process has ended.
    pub(crate) fn program_ended(&self, how: Outcome) {
        if how == Outcome::Killed(libc::SIGKILL) {
            self.lose(Loss::Program);
        }
    }

    pub(crate) fn lose(&self, loss: Loss) {
        let mut fate = self.fate();
        if *fate == Fate::Whole {
            *fate = Fate::Lost(loss);
        }
    }

    /// Whether the job is to go back now. The log tells, also why not.
    pub(crate) fn is_due(&self) -> bool {
        let mut fate = self.fate();
        let Fate::Lost(lost) = *fate else { return *fate == Fate::GoingBack };
        if self.of_part.load(Ordering::SeqCst) {
            *fate = Fate::GoingBack;
            warn!(self.log, "{lost}: the part ends, and comes back with the others");
            if let (Some(warden), true) = (warden::own(), lost != Loss::Others) {
                warden.say(&format!("lost {lost}"));
            }
            return true;
        }
        *fate = match (self.limit, self.images.newest()) {
            (None, _) => Fate::GivenUp,
            (Some(limit), _) if self.used >= limit => {
                let times = self.used;
                error!(self.log, "{lost}: the job has gone back {times} times, not again");
                Fate::GivenUp
            }
            (Some(_), None) => {
                error!(self.log, "{lost}: there is no image yet to go back to");
                Fate::GivenUp
            }
            (Some(limit), Some((image, _))) => {
                let (time, image) = (self.used + 1, image.display());
                warn!(
                    self.log,
                    "{lost}: the job goes back to {image}, for time {time} of {limit} at most"
                );
                Fate::GoingBack
            }
        };
        *fate == Fate::GoingBack
    }

    /// The job's end was asked for: whatever its proxies do, it does not go back.
    pub(crate) fn give_up(&self) {
        *self.fate() = Fate::GivenUp;
        if self.of_part.load(Ordering::SeqCst) {
            warden::is_to_end();
        }
    }

    /// Has `decide` decide that the job leaves for another host, after which it does not go back
    /// here. While that is under way nobody begins to end it.
    ///
    /// # Errors
    /// It is being ended here, has lost something that it goes back for, or `decide` fails.
    pub(crate) fn leave(
        &self,
        decide: impl FnOnce() -> Result<(), DepartError>,
    ) -> Result<(), DepartError> {
        let mut fate = self.fate();
        if *fate != Fate::Whole {
            return Err(DepartError::Ends);
        }
        decide()?;
        *fate = Fate::GivenUp;
        Ok(())
    }

    fn fate(&self) -> MutexGuard<'_, Fate> {
        self.fate.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Has the servers end all sessions of a job whose restart has failed: its proxies were killed with
/// its init, and may not have said goodbye.
pub(crate) fn end_sessions_of(folder: &Path, log: &JobLog) {
    end_sessions(FarSession::take_all(folder), |error| {
        warn!(log, "a session of the job cannot be ended ({error}): its server gives it up");
    });
}

/// Has the servers end `sessions`; `failed` hears why one cannot be ended.
fn end_sessions(sessions: Vec<FarSession>, failed: impl Fn(&dyn fmt::Display)) {
    for FarSession { server, key } in sessions {
        if let Err(error) = kedge_remote::end_session(&server, key, SERVER) {
            failed(&error);
        }
    }
}

/// Returns whether devices are gone with a proxy that ended so. One that ends with another status
/// has a client that broke the rules, or has never had devices.
fn is_loss(how: Outcome) -> bool {
    match how {
        Outcome::Killed(_) => true,
        Outcome::Exited(status) => [EXIT_BUG, EXIT_LOST].contains(&i32::from(status)),
    }
}

/// The images that a job has made, or was restarted from: a file.
#[derive(Debug, Clone)]
pub(crate) struct Images(PathBuf);

impl Images {
    pub(crate) fn of(dir: &JobDir) -> Images {
        Images(dir.images())
    }

    /// Notes the newest one.
    pub(crate) fn add(&self, image: &Path) -> Result<(), JobError> {
        let mut all = self.read();
        all.retain(|known| known != image);
        all.push(image.to_owned());
        let old = all.len().saturating_sub(MAX_IMAGES);
        jobs::replace(&self.0, &all[old..].to_vec())
    }

    /// Those that are there, the newest first.
    pub(crate) fn all(&self) -> Vec<(PathBuf, Manifest)> {
        let found = self.read().into_iter().rev();
        found.filter_map(|path| Manifest::read(&path).ok().map(|read| (path, read))).collect()
    }

    fn newest(&self) -> Option<(PathBuf, Manifest)> {
        self.all().into_iter().next()
    }

    /// The oldest first.
    fn read(&self) -> Vec<PathBuf> {
        fs::read(&self.0)
            .ok()
            .and_then(|text| serde_json::from_slice(&text).ok())
            .unwrap_or_default()
    }
}

/// How the supervision of a job ended.
#[derive(Debug)]
pub enum End {
    Ended(Ended),
    GoBack(GoBack),
    /// This process is to become `kedge restart IMAGE --together NOTE`.
    Together(Together),
}

/// A job that is to go back, and of which nothing runs any more. This process is to become
/// `kedge restart IMAGE --back NOTE`.
#[derive(Debug)]
pub struct GoBack {
    /// The image that is tried first.
    pub image: PathBuf,
    /// For [`RestartSpec::of_note`].
    pub note: String,
    /// Its lock is handed on.
    _dir: JobDir,
    /// And what is held.
    _held: Option<Held>,
    /// And what keeps proxies ready.
    _warm: Option<Own>,
}

/// What the process that takes this one's place is to know.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    job: String,
    paths: Vec<(PathBuf, PathBuf)>,
    policy: Policy,
    gpu: Option<String>,
    #[serde(default)]
    soft_memory: Option<u64>,
    used: u32,
    lock: RawFd,
    held: Option<HeldNote>,
    #[serde(default)]
    warm: Option<RawFd>,
}

/// Most descriptors that a note may name: it is an argument, which may be no longer than 128 KiB.
const MAX_HELD: usize = 8000;

impl GoBack {
    /// Of the job `name`, which has gone back `used` times and is restarted as `spec` says.
    pub(crate) fn new(
        name: &JobName,
        dir: JobDir,
        spec: RestartSpec,
        used: u32,
        keeper: &Keeper,
        warm: Option<Own>,
    ) -> Result<GoBack, RunError> {
        let failed = |source| RunError::System { what: "hand the job's lock on", source };
        dir.stays_open(true).map_err(failed)?;
        let newest = Images::of(&dir).newest();
        let (image, _) = newest.ok_or(ImageError::NoImage { path: dir.images() })?;
        // Where it has moved by now, if it has: its image may be from before.
        let here = dir.gpu().filter(|gpu| gpu.parse::<GpuSpec>().is_ok());
        let gpu = here.or_else(|| spec.gpu.map(|gpu| gpu.to_string()));
        let (paths, policy, lock) = (spec.paths, spec.policy, dir.lock());
        let soft_memory = spec.soft_memory;
        let ours = |held: &Held| held.image == image && held.numbers().len() <= MAX_HELD;
        let held = keeper.take().filter(ours).filter(|held| held.stays_open().is_ok());
        let (job, used, noted) = (name.to_string(), used + 1, held.as_ref().map(Held::note));
        let kept = warm.as_ref().and_then(Own::stays_open);
        let note =
            Note { job, paths, policy, gpu, soft_memory, used, lock, held: noted, warm: kept };
        let note = serde_json::to_string(&note).map_err(|error| failed(error.into()))?;
        Ok(GoBack { image, note, _dir: dir, _held: held, _warm: warm })
    }
}

impl RestartSpec {
    /// What a note says that this process was started with.
    pub fn of_note(path: PathBuf, note: &str) -> Result<RestartSpec, RunError> {
        let bad = |source: serde_json::Error| RunError::System {
            what: "read what the job's supervisor has left",
            source: source.into(),
        };
        let note: Note = serde_json::from_str(note).map_err(bad)?;
        let held = note.held.map(HeldNote::take).transpose();
        let what = "take what is held in memory";
        let held = held.map_err(|source| RunError::System { what, source })?;
        Ok(RestartSpec {
            path,
            name: Some(note.job.parse()?),
            paths: note.paths,
            policy: note.policy,
            lazy: false,
            joining: None,
            together: None,
            far: None,
            parts: Vec::new(),
            showing: None,
            quiet: false,
            resume: None,
            gate: None,
            standby: false,
            gpu: note.gpu.map(|gpu| gpu.parse()).transpose()?,
            soft_memory: note.soft_memory,
            back: Some(Back {
                used: note.used,
                lock: note.lock,
                held: Back::holding(held),
                warm: note.warm,
            }),
        })
    }
}

/// Ends every child of this process, and what they leave behind, and collects them.
pub(crate) fn end_all() -> Result<(), RunError> {
    let all = Roots::ChildrenOf { parent: std::process::id() as i32, except: Vec::new() };
    let begin = Instant::now();
    for wait in ending::looks() {
        if !kedge_process::reap(&[]).more {
            break;
        }
        if begin.elapsed() > LAST {
            let what = "end the job's processes to go back to its image";
            return Err(RunError::System { what, source: std::io::ErrorKind::TimedOut.into() });
        }
        kedge_process::signal(&all, libc::SIGKILL);
        std::thread::sleep(wait);
    }
    Ok(())
}

/// The same, however long it takes: the job has moved, and runs elsewhere once this returns.
pub(crate) fn see_all_end() {
    while end_all().is_err() {}
}

/// A restarted job's init, which alone can see its proxies end.
pub(crate) struct Init<'a> {
    pub(crate) job: &'a Checkpointer,
    pub(crate) dir: &'a JobDir,
    /// The program's first process, and whether it has ended.
    pub(crate) root: i32,
    pub(crate) ended: bool,
}

impl Init<'_> {
    /// Looks at children that have ended: whether their end is all, and not the job's way back. For
    /// that, nothing of the job runs any more, and the supervisor has been told.
    pub(crate) fn look(&mut self, ended: &[(i32, i32)], signals: &Signals) -> bool {
        let recovery = &self.job.recovery;
        self.proxies(ended);
        let root = ended.iter().find(|(pid, _)| *pid == self.root);
        let outcome = root.map(|(_, status)| Outcome::of(*status));
        if outcome.is_some_and(|outcome| outcome != Outcome::Exited(0)) && recovery.is_wanted() {
            // It may have failed because its proxy was lost just before.
            self.see_proxies_off(signals);
        }
        if self.ended || outcome == Some(Outcome::Exited(0)) || !self.dir.is_supervised() {
            // Nobody is left to restart it.
            recovery.give_up();
        }
        self.ended |= outcome.is_some();
        outcome.into_iter().for_each(|outcome| recovery.program_ended(outcome));
        if !recovery.is_due() {
            return true;
        }
        if let Err(error) = fs::write(self.dir.lost(), "") {
            warn!(recovery.log, "{}: {error}", self.dir.lost().display());
        }
        self.job.end_by(libc::SIGKILL, LAST);
        false
    }

    fn proxies(&self, ended: &[(i32, i32)]) {
        for (pid, status) in ended {
            if let Some(proxy) = self.job.proxies.ended(*pid as u32) {
                self.job.recovery.proxy_ended(proxy, Outcome::of(*status));
            }
        }
        for (proxy, how) in self.job.proxies.take_left() {
            self.job.recovery.proxy_ended(proxy, how);
        }
    }

    fn see_proxies_off(&self, signals: &Signals) {
        let begin = Instant::now();
        while let Some(left) = FAREWELL.checked_sub(begin.elapsed()) {
            self.proxies(&kedge_process::reap(&[]).ended);
            if self.job.proxies.none() {
                break;
            }
            signals.child_within(left);
        }
        // Whoever waits for children does not know of those.
        look_at_children();
    }
}
