//! Taking a checkpoint of the job that this process is the parent of.

use crate::base::phases;
use crate::checkpoint::amount::Amount;
use crate::checkpoint::error::CheckpointError;
use crate::checkpoint::launcher::Launcher;
use crate::checkpoint::launches::Launches;
use crate::checkpoint::meeting::{Builds, Meeting};
use crate::checkpoint::recovery::Recovery;
use crate::checkpoint::standing::{Leaves, Rest, Resting};
use crate::checkpoint::verify::read_back;
use crate::devices::gpu::GpuCheckpoint;
use crate::devices::proxies::Proxies;
use crate::job::jobs::{self, JobName, LastImage};
use crate::job::joint::Joint;
use crate::job::policy::{Policy, default_dir};
use crate::job::rank::{Held, Link};
use crate::job::tally::Tally;
use crate::job::turn::Turn;
use crate::services::control::{Content, Order, Progress};
use crate::services::keeper::At;
use kedge_control::gpu::GpuSpec;
use kedge_control::joblog::JobLog;
use kedge_control::proxy;
use kedge_control::{error, info, note, warn};
use kedge_image::{Choice, Claim, Devices, Manifest, retain};
use kedge_process::plugins::{FileContents, Plugin, RestoredFiles};
use kedge_process::{Begun, EngineError, Options, Roots, Standing, Together, Tracker};
use kedge_transport::managed;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A process gets its devices within some of these.
const CONNECTING: Duration = Duration::from_millis(20);
/// How long remote shells that are being started may hold one up.
pub(crate) const LAUNCHES: Duration = Duration::from_secs(30);
/// A clone of a process with less memory than this takes no longer than stopping it twice.
const LARGE: u64 = 128 << 20;
/// Most warnings that are passed on.
const MAX_WARNINGS: usize = 50;
/// Longest of these warnings, in characters.
const MAX_WARNING_LEN: usize = 1000;

/// Takes the checkpoints of one job, one at a time.
#[derive(Debug)]
pub(crate) struct Checkpointer {
    pub(crate) name: JobName,
    pub(crate) command: Vec<String>,
    /// The devices that the job is on, if any.
    pub(crate) devices: Mutex<Option<Devices>>,
    /// Where its processes ask for devices.
    pub(crate) socket: PathBuf,
    /// What drives them.
    pub(crate) proxies: Proxies,
    pub(crate) policy: Policy,
    pub(crate) roots: Roots,
    /// The program's first process, once it has been started.
    pub(crate) first: OnceLock<i32>,
    pub(crate) without: Without,
    pub(crate) log: Arc<JobLog>,
    /// Where the latest image is noted.
    pub(crate) last: PathBuf,
    /// How often one was durable, and how often one failed.
    pub(crate) tally: Tally,
    /// Had by a checkpoint from its beginning to its end.
    pub(crate) turn: Turn,
    /// Held by whoever ends the job.
    pub(crate) ending: Mutex<()>,
    pub(crate) recovery: Arc<Recovery>,
    /// What images stay in memory with.
    pub(crate) keeper: At,
    /// What has changed since the last image.
    pub(crate) tracker: Tracker,
    /// The move whose images that follows, if it follows none of the job's own.
    pub(crate) followed: Mutex<Option<String>>,
    /// The job's files that a restart has brought back.
    pub(crate) restored: RestoredFiles,
    /// The folder that the job's processes know.
    pub(crate) home: PathBuf,
    /// Which life of the job this is.
    pub(crate) life: String,
    /// The job that this one is a part of: from its beginning, or since it has had a remote shell.
    pub(crate) joint: OnceLock<Joint>,
    /// The relay of the rank that the job is, if it is one.
    pub(crate) rank: Option<Arc<Link>>,
    /// Remote shells that are being started.
    pub(crate) launches: Arc<Launches>,
    /// The job has been saved and ended with that: nothing is left to be saved.
    pub(crate) over: AtomicBool,
}

/// What becomes of a job where who takes its checkpoints is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Without {
    /// It goes on without a supervisor.
    GoesOn,
    /// It ends: its init was killed.
    Ends,
}

/// A name that no other life of the job has.
pub(crate) fn new_life() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{:x}-{:x}", std::process::id(), now.as_nanos())
}

impl Checkpointer {
    /// The devices that the job is on, if any.
    pub(crate) fn devices(&self) -> MutexGuard<'_, Option<Devices>> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses what cannot be done with devices of several places, by its name.
    pub(crate) fn of_one_place(&self, what: &str) -> Result<(), CheckpointError> {
        let spec = self.devices().as_ref().and_then(|devices| devices.gpu.parse::<GpuSpec>().ok());
        let refused = spec.and_then(|spec| spec.refuse_several(what));
        refused.map_or(Ok(()), |refused| Err(CheckpointError::Several(refused)))
    }

    /// Takes a checkpoint and tells how far it has come. One that fails leaves the job as it was,
    /// and no image.
    pub(crate) fn checkpoint(
        &self,
        order: &Order,
        tell: impl FnMut(Progress) + Send,
    ) -> Result<(), CheckpointError> {
        let mut tell = tell;
        if self.over.load(Ordering::SeqCst) {
            return Err(CheckpointError::Over);
        }
        if self.joint.get().is_none() {
            match self.checkpoint_one(order, (None, None), &mut tell) {
                Err(CheckpointError::Joined) => {}
                other => return other,
            }
        }
        let Some(joint) = self.joint.get() else { return Err(CheckpointError::Busy) };
        // A part that ends when all is done waits until it has been told.
        let _conducts = joint.conducts();
        let taken = self.conduct(joint, order, tell);
        // Who finds another at it asks again, and what is over has not failed.
        let quiet = |error: &CheckpointError| {
            matches!(error, CheckpointError::Busy | CheckpointError::Over)
        };
        let told = |error: &&CheckpointError| !quiet(error);
        if let Some(error) = taken.as_ref().err().filter(told) {
            error!(self.log, "checkpoint of {} failed: {error}", joint.job);
        }
        taken
    }

    /// As one part of those that meet there.
    pub(crate) fn checkpoint_part(
        &self,
        order: &Order,
        meeting: &Arc<Meeting>,
    ) -> Result<(), CheckpointError> {
        self.checkpoint_one(order, (Some(meeting), None), |_| {})
    }

    /// As a part of those that meet, or as a job that leaves with its image.
    pub(crate) fn checkpoint_one(
        &self,
        order: &Order,
        (meeting, leaves): (Option<&Arc<Meeting>>, Option<&dyn Leaves>),
        tell: impl FnMut(Progress) + Send,
    ) -> Result<(), CheckpointError> {
        let _one = self.turn.take().ok_or(CheckpointError::Busy)?;
        if !self.launches.wait_for_none(LAUNCHES) {
            return Err(CheckpointError::Launching);
        }
        if meeting.is_none() && self.joint.get().is_some() {
            return Err(CheckpointError::Joined);
        }
        // A thread of its own: what it traces is let go, at the latest, when it ends.
        let taken = thread::scope(|scope| {
            let tracing = thread::Builder::new().name("checkpoint".into());
            let tracing = tracing.spawn_scoped(scope, || self.take(order, (meeting, leaves), tell));
            tracing
                .map_err(|_| CheckpointError::Thread)?
                .join()
                .unwrap_or(Err(CheckpointError::Thread))
        });
        let taken = taken.map_err(CheckpointError::by_limit);
        // What ended while it was traced can be collected now.
        crate::base::signals::look_at_children();
        if let Err(error) = &taken {
            error!(self.log, "checkpoint failed: {error}");
        }
        // Those by which a job moves are none that anybody goes back to.
        if order.moves.is_none()
            && let Err(error) = self.tally.took(&taken)
        {
            warn!(self.log, "{error}");
        }
        taken
    }

    /// What images of this job, or of this part of a job, are called by.
    fn image_name(&self, as_part: bool) -> &JobName {
        let part = self.joint.get().filter(|_| as_part).map(|joint| &joint.part);
        part.unwrap_or(&self.name)
    }

    /// Whether a checkpoint is.
    pub(crate) fn is_under_way(&self) -> bool {
        self.turn.is_taken() || self.joint.get().is_some_and(Joint::is_conducting)
    }

    /// Returns when nobody is about to end the job.
    pub(crate) fn ended(&self) {
        drop(self.ending.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Returns when no checkpoint is under way, or at `deadline`.
    pub(crate) fn settle(&self, deadline: Option<Instant>) {
        while self.is_under_way() && deadline.is_none_or(|deadline| Instant::now() < deadline) {
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn take(
        &self,
        order: &Order,
        (meeting, leaves): (Option<&Arc<Meeting>>, Option<&dyn Leaves>),
        mut tell: impl FnMut(Progress) + Send,
    ) -> Result<(), CheckpointError> {
        let dir = self.dir(order)?;
        let codec = codec(order)?;
        let begin = Instant::now();
        let name = self.image_name(meeting.is_some());
        let name = order.moves.iter().fold(name.to_string(), |name, of| format!("{name}.{of}"));
        let mut tries = 0;
        let ttl = order.hold_ms.map(Duration::from_millis).or(self.policy.hold);
        let ttl = ttl.filter(|ttl| !ttl.is_zero() && !order.stop);
        // It is held from the first try on: the others have been told what it has done.
        let mut session = None;
        let (claim, written) = loop {
            tries += 1;
            let claim = Claim::new(&dir, &name)?;
            let contents = if order.keep_files { FileContents::Keep } else { FileContents::Save };
            let hold = order.stop;
            let ((tracker, full), whole) = match meeting {
                None => (self.content(order), None),
                Some(meeting) => self.content_of_part(meeting.builds()),
            };
            let follows = tracker.is_some() && meeting.is_none();
            let other = tracker.is_none().then(|| self.tracker.clone());
            let usual = Options {
                servants: Some(managed::SERVANT),
                ..Options::new(claim.folder().to_owned())
            };
            let except = self.last.parent().map(Path::to_owned).into_iter().collect();
            let together = meeting.map(|meeting| meeting.clone() as Arc<dyn Together>);
            // What has been stopped has no pause to be shortened, and what has been written once is
            // written late enough.
            let ahead = (order.ahead && !hold && tries == 1).then_some(LARGE);
            let options = Options {
                codec,
                contents,
                hold,
                tracker,
                other,
                full,
                whole,
                ahead,
                together,
                except,
                restored: self.restored.clone(),
                ..usual
            };
            let patience = options.patience;
            let amount = Amount::of(&options, self.devices().is_some());
            let written = amount.telling(order.tell, &mut tell, |mut tell| {
                let tell = &mut tell;
                let (reads, with) = ((order.verify, ttl.is_some()), (meeting, leaves));
                self.write(options, &claim, reads, with, &mut session, tell)
            });
            match written {
                Ok(written) => {
                    if follows {
                        self.followed().clone_from(&order.moves);
                    }
                    break (claim, written);
                }
                Err(error) => {
                    self.keeper.discard(claim.folder());
                    if !meeting.is_some_and(|meeting| meeting.may_count()) {
                        // A full disk may keep even this from being done; then `kedge rm` does it.
                        let _ = claim.abandon();
                    }
                    let for_good = meeting.is_some_and(|meeting| meeting.has_begun());
                    if for_good || !error.passes(tries) || begin.elapsed() > patience {
                        return Err(error);
                    }
                }
            }
            thread::sleep(CONNECTING);
        };
        let Written { manifest, stall_seconds, held, verified } = written;
        let image = claim.folder().to_owned();
        drop(claim);
        let (bytes, seconds) = (manifest.bytes(), begin.elapsed().as_secs_f64());
        if order.moves.is_none() {
            self.note(&image, &manifest, (stall_seconds, seconds), order.last_word);
            self.keeper.durable(&image, held.zip(ttl), &self.log);
            self.retain(&dir, &name);
        }
        tell(Progress::Durable { image, bytes, seconds, verified });
        Ok(())
    }

    /// Captures the job, makes the image durable, and reads it back if it is to be verified.
    fn write(
        &self,
        mut options: Options,
        claim: &Claim,
        (verify, holds): (bool, bool),
        (meeting, leaves): (Option<&Arc<Meeting>>, Option<&dyn Leaves>),
        session: &mut Option<Held>,
        tell: &mut impl FnMut(Progress),
    ) -> Result<Written, CheckpointError> {
        let (image, codec) = (options.folder.clone(), options.codec);
        let (track, full) = (options.tracker.is_some(), options.full || self.tracker.length() == 0);
        let (preparing, patience) = (proxy::Order::Prepare { track, full }, options.patience);
        options.plugins.push(Arc::new(Launcher::here()));
        options.plugins.extend(self.rank.clone().map(|rank| rank as Arc<dyn Plugin>));
        let mut begun = self.begin_while_it_runs(options, track)?;
        // Before the others stand still: what the rank has asked is answered while they run.
        let others = meeting.and_then(|meeting| meeting.others());
        if session.is_none() {
            *session = self.rank.as_ref().map(|rank| rank.hold()).transpose()?;
            session.iter().zip(others).try_for_each(|(held, others)| held.tell(others))?;
        }
        meeting.map(|meeting| meeting.prepared()).transpose().map_err(EngineError::Together)?;
        session.iter().zip(others).try_for_each(|(held, others)| held.settle(others))?;
        if leaves.is_some() {
            phases::moved("departs");
        }
        let before = leaves.map(|_| Rest::before(&self.roots));
        let resting = self.rest(&mut begun, &preparing, patience, meeting.is_none())?;
        let Resting { quiet, roots, captures, stopped } = resting;
        let mut rest = before.map(|before| Rest::begin(&roots, self.first.get().copied(), before));
        let captured = begun.capture(stopped, &[captures.plugin()]);
        // Before anything else is asked of the proxies, whose last answer it takes.
        captures.settle();
        let mut captured = captured?;
        let at = jobs::now();
        drop(session.take());
        // What the job did while its image is written would be done twice. Whatever fails, it goes
        // on.
        let standing = captured.stand();
        rest.iter_mut().for_each(Rest::stands);
        let (clients, ms, tries) = (quiet.clients.len(), quiet.seconds * 1e3, quiet.tries);
        // The devices have stood still until here.
        drop(quiet);
        phases::checkpointed("captured");
        if clients > 0 {
            note!(
                self.log,
                "the devices of {clients} processes came to rest within {ms:.1} ms ({tries} tries)"
            );
        }
        let stall_seconds = captured.stall.as_secs_f64();
        let processes = captured.processes().len();
        let warnings = self.warnings(&captured.warnings);
        tell(Progress::Captured { image: image.clone(), processes, stall_seconds, warnings });
        let name = self.image_name(meeting.is_some());
        let mut manifest = Manifest::new(name.to_string(), self.command.clone(), at);
        manifest.settings = self.policy.to_settings_in(&self.home);
        manifest.devices = self.devices().clone();
        let holder = holds.then_some((&self.keeper, &*self.log));
        let late = captured.late_warnings.clone();
        let (manifest, held) = captures.write(captured, manifest, claim, codec, holder)?;
        self.warnings(&late.lock().unwrap_or_else(PoisonError::into_inner));
        let verified = verify.then(|| read_back(&image, manifest.bytes(), tell)).transpose()?;
        if let Some(verified) = &verified {
            note!(self.log, "{}: read back from: {verified}", image.display());
        }
        if let Some(meeting) = meeting {
            let counts = meeting.durable(&image).map_err(CheckpointError::Part);
            // What is no part of a whole is nothing to build on.
            counts.inspect_err(|_| self.tracker.forget())?;
        }
        // Whatever fails until here, the job goes on.
        let leaves = leaves.zip(rest);
        if let Some((leaves, rest)) = &leaves {
            // From the decision on, nothing of it may run here, not even as it ends.
            let ends = standing.iter().filter(|_| self.without == Without::Ends);
            ends.for_each(Standing::ends_with_this_thread);
            leaves.decide(&image, rest)?;
        }
        if let Some(standing) = standing {
            // Whoever waits for the other parts now would hold up the end of this one.
            self.over.store(true, Ordering::SeqCst);
            self.recovery.give_up();
            standing.kill();
            kedge_process::signal(&roots, libc::SIGKILL);
        }
        if let Some((leaves, _)) = leaves {
            self.see_it_end(&roots);
            leaves.gone();
        }
        Ok(Written { manifest, stall_seconds, held, verified })
    }

    /// Does all that takes long while devices and processes go on.
    fn begin_while_it_runs(&self, options: Options, track: bool) -> Result<Begun, CheckpointError> {
        let mut begun = Begun::new(options)?;
        // No proxy starts meanwhile: it would be taken for a process of the job.
        let known = self.proxies.locked();
        let roots = self.roots.without(&Proxies::children(&known));
        // What belongs to devices is known when they are at rest.
        if known.is_empty() {
            let none = GpuCheckpoint::of(&[], Vec::new(), &self.socket, track);
            let none = none.map_err(CheckpointError::Connections)?;
            begun.survey(&roots, &[Arc::new(none)])?;
        }
        begun.watch(&roots)?;
        drop(known);
        begun.write_ahead(&roots)?;
        Ok(begun)
    }

    /// Logs them all, and gives back what fits into a message.
    fn warnings(&self, warnings: &[String]) -> Vec<String> {
        warnings.iter().for_each(|warning| warn!(self.log, "{warning}"));
        let short = |warning: &String| warning.chars().take(MAX_WARNING_LEN).collect();
        warnings.iter().take(MAX_WARNINGS).map(short).collect()
    }

    /// What follows the job's memory for this image, if anything does, and whether it builds on
    /// none.
    pub(crate) fn content(&self, order: &Order) -> (Option<Tracker>, bool) {
        let (tracker, full) = self.usual_content(order);
        if tracker.is_none() {
            return (tracker, full);
        }
        // Images by which a job moves go with it or are removed: no other builds on them, nor they
        // on others.
        let others = *self.followed() != order.moves;
        (tracker, full || others)
    }

    fn followed(&self) -> MutexGuard<'_, Option<String>> {
        self.followed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn usual_content(&self, order: &Order) -> (Option<Tracker>, bool) {
        if order.moves.is_some() {
            return (Some(self.tracker.clone()), order.content == Content::All);
        }
        let every = self.policy.full_every;
        let changes = match order.content {
            Content::Usual => every.is_some(),
            Content::Changes => true,
            // The next one may build on it.
            Content::All if every.is_some() => return (Some(self.tracker.clone()), true),
            Content::All => false,
        };
        let full = self.tracker.length() >= self.policy.longest_chain();
        (changes.then(|| self.tracker.clone()), full)
    }

    /// The same for a part's image, and the image of the whole job in which the one lies that it
    /// builds on.
    fn content_of_part(&self, builds: Builds) -> ((Option<Tracker>, bool), Option<PathBuf>) {
        match builds {
            Builds::Never => ((None, false), None),
            Builds::Next => ((Some(self.tracker.clone()), true), None),
            Builds::On(whole) => ((Some(self.tracker.clone()), false), Some(whole)),
        }
    }

    pub(crate) fn dir(&self, order: &Order) -> Result<PathBuf, CheckpointError> {
        match order.dir.as_ref().or(self.policy.dir.as_ref()) {
            Some(dir) => Ok(dir.clone()),
            None => default_dir().map_err(CheckpointError::NoFolder),
        }
    }

    fn note(
        &self,
        image: &Path,
        manifest: &Manifest,
        (stall_seconds, seconds): (f64, f64),
        last_word: bool,
    ) {
        if let (true, Some(joint)) = (last_word, self.joint.get()) {
            joint.saved.set();
        }
        let last = LastImage {
            image: image.to_owned(),
            captured: manifest.captured,
            bytes: manifest.bytes(),
            stall_seconds,
            last_word,
        };
        let noted = last.write(&self.last).and_then(|()| self.recovery.images.add(image));
        if let Err(error) = noted {
            warn!(self.log, "{error}");
        }
        info!(
            self.log,
            "checkpoint {}: {} processes, {} bytes, stood still for {:.1} ms, durable after {:.2} s",
            image.display(),
            manifest.processes.len(),
            manifest.bytes(),
            stall_seconds * 1e3,
            seconds
        );
    }

    /// Of the images of `job`.
    pub(crate) fn retain(&self, dir: &Path, job: &str) {
        let Some(keep) = self.policy.keep else { return };
        match retain(dir, job, keep.get() as usize) {
            Ok(removed) => {
                removed.iter().for_each(|image| info!(self.log, "removed {}", image.display()))
            }
            Err(error) => warn!(self.log, "cannot remove old images: {error}"),
        }
    }
}

/// An image that is durable.
struct Written {
    manifest: Manifest,
    /// For how many seconds the job stood still.
    stall_seconds: f64,
    /// Of how many clients something is held.
    held: Option<u32>,
    /// Where it was read back from.
    verified: Option<String>,
}

fn codec(order: &Order) -> Result<Choice, CheckpointError> {
    match &order.codec {
        None => Ok(Choice::Auto),
        Some(name) => name.parse().map_err(|_| CheckpointError::Codec(name.clone())),
    }
}
