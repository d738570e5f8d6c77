//! Restarting a job from its image: it is a job as any other, but that its processes live in
//! namespaces of their own, where the init that made them takes its checkpoints.

use crate::base::signals::{self, Signals};
use crate::checkpoint::checkpointer::{Checkpointer, Without, new_life};
use crate::checkpoint::departing;
use crate::checkpoint::joint::{self, JOIN, Joining, Joint, far};
use crate::checkpoint::together::Ranks;
use crate::checkpoint::watch::Watch;
use crate::devices::gpu;
use crate::devices::gpu::{GPU, Restart};
use crate::devices::proxies::{Launch, Proxies};
use crate::job::jobs::{self, JobDir, JobName, Jobs, Meta, StandIn, State};
use crate::job::left::Marks;
use crate::job::missed::Missed;
use crate::job::parts::Parts;
use crate::job::policy::{Policy, former_folder};
use crate::job::postscript::{Ended, Postscript};
use crate::job::rank::{PMI, RankError, Seat};
use crate::job::shown::{SHOWN, Showing};
use crate::job::tally::Tally;
use crate::job::turn::Turn;
use crate::restart::gate::GATE;
use crate::restart::recover::{self, End, GoBack, Images, Init, Loss, Recovery};
use crate::restart::resume;
use crate::services::control;
use crate::services::keeper::{At, Held, Keeper};
use crate::services::management::Management;
use crate::services::warden::{self, As, Before, Return};
use crate::services::warm::{Kind, Own, Sources, WarmProxy};
use crate::{
    Outcome, RunError, end_together, finish, left_for, management_of, open_log, tell_warden,
    warm_of,
};
use kedge_control::gpu::GpuSpec;
use kedge_control::joblog::JobLog;
use kedge_control::{error, info, warn};
use kedge_coordinator::Far;
use kedge_image::{Devices, ImageError, Manifest};
use kedge_pmi::Rank;
use kedge_process::plugins::{More, PathMap, Rendezvous, settle_all};
use kedge_process::{Arrivals, EngineError, Rebuilt, RestartOptions, Restarted, Tracker};
use std::fs;
use std::io::{self, Write};
use std::os::fd::RawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::Instant;

/// What to restart.
#[derive(Debug, Clone, Default)]
pub struct RestartSpec {
    /// An image, or a folder of images: then its newest good one.
    pub path: PathBuf,
    /// `None`: the name that the job had.
    pub name: Option<JobName>,
    /// Memory comes when it is first used.
    pub lazy: bool,
    /// Where files are that were elsewhere: old and new.
    pub paths: Vec<(PathBuf, PathBuf)>,
    /// What it does not say is as it was when the image was made.
    pub policy: Policy,
    /// `None`: the devices that the job had.
    pub gpu: Option<GpuSpec>,
    /// `None`: as much as software devices had.
    pub soft_memory: Option<u64>,
    /// That this process goes on with a job, in the place of another.
    pub back: Option<Back>,
    /// That it is one part of several that are restarted.
    pub joining: Option<Joining>,
    /// That the parts come back with those that other wardens bring back.
    pub together: Option<Return>,
    /// Where its parts on all hosts meet, if they are restarted on several.
    pub far: Option<Far>,
    /// The numbers of the parts that are restarted here; none: all.
    pub parts: Vec<u32>,
    /// What the user is shown until the job runs.
    pub showing: Option<Showing>,
    /// Nothing is said when it has ended.
    pub quiet: bool,
    /// Of the images in `path`, only this job's that it has not outlived are meant.
    pub resume: Option<JobName>,
    /// A socket on which it is said when the job may run, once all else of it is there.
    pub gate: Option<RawFd>,
    /// Begins before the job's last image is there: images that build on this one are told of at
    /// the gate ([`bring_image`](crate::bring_image)), and the job is that of the last one.
    pub standby: bool,
}

impl RestartSpec {
    /// What the warden of a part, or the supervisor that it has told, has left.
    ///
    /// # Errors
    /// It is none of theirs.
    pub fn of_return(path: PathBuf, note: &str) -> Result<RestartSpec, RunError> {
        let bad =
            |source: io::Error| RunError::System { what: "read which parts come back", source };
        let note: Return = serde_json::from_str(note).map_err(|error| bad(error.into()))?;
        // It may have been another's since the warden has read it.
        note.check(&path).map_err(|why| bad(io::Error::other(why)))?;
        let at = note.at.as_ref().map(|at| far(at, None)).transpose();
        let far = at.map_err(|error| bad(io::Error::other(error)))?;
        let policy = Policy { dir: note.dir.clone(), ..Policy::default() };
        let (name, parts) = (Some(note.job.parse()?), note.parts.clone());
        let As { paths, gpu, soft_memory } = note.again.clone();
        let gpu = gpu.map(|gpu| gpu.parse()).transpose()?;
        let together = Some(note);
        let none = RestartSpec::default();
        let spec = RestartSpec { path, name, policy, far, parts, together, ..none };
        Ok(RestartSpec { paths, gpu, soft_memory, ..spec })
    }
}

/// A job that goes back, as the process before this one has left it.
#[derive(Debug, Clone)]
pub struct Back {
    /// How many times the job has gone back, this time counted.
    pub(crate) used: u32,
    /// The lock of its folder: a descriptor.
    pub(crate) lock: RawFd,
    /// What is held of its newest image, for the first who takes it.
    pub(crate) held: Arc<Mutex<Option<Held>>>,
    /// What tells the job's own keeper of warm proxies that the job goes on: a descriptor.
    pub(crate) warm: Option<RawFd>,
}

impl Back {
    pub(crate) fn holding(held: Option<Held>) -> Arc<Mutex<Option<Held>>> {
        Arc::new(Mutex::new(held))
    }
}

/// Restarts a job and runs it to its end. Takes this process's signals and children over; it must
/// have one thread only.
pub fn restart(spec: &RestartSpec) -> Result<End, RunError> {
    let begin = Instant::now();
    signals::block_file_limit();
    if let Some(fd) = spec.gate {
        let what = "take the socket at which it is to wait";
        GATE.wait_at(fd).map_err(|source| RunError::System { what, source })?;
    }
    // What a restart has left that was killed with all that belonged to it.
    settle_all().said.iter().for_each(|said| tell(said));
    if let (None, None) = (&spec.back, &spec.joining) {
        let images = spec.images()?;
        if images.first().is_some_and(|(_, manifest)| !manifest.parts.is_empty()) {
            return joint::restart_parts(spec, &images).map(|outcome| End::Ended(outcome.into()));
        }
        if let Some(refused) = images.first().and_then(|(_, first)| spec.refuse_several(first)) {
            return Err(RunError::Several(refused));
        }
        // Each of several ranks would bring it back.
        if spec.resume.is_some()
            && let Some(ranks) = Seat::here().filter(Seat::has_others).map(|seat| seat.size)
        {
            return Err(RankError::Size { parts: 1, ranks }.into());
        }
    }
    let jobs = Jobs::open()?;
    let (name, dir, images) = place(spec, &jobs)?;
    let joint = spec.joining.as_ref().map(|joining| joining.joint(&jobs, &name)).transpose()?;
    let keeper = Keeper::of(&dir);
    // Before this process adopts what others leave.
    spec.start_warden(joint.as_ref(), dir.path(), &images)?;
    let warm = spec.warm(&dir, &images);
    let _management = spec.management(&dir, &images);
    let place = Place { name: &name, joint: joint.as_ref(), dir: &dir, warm: warm.as_ref(), begin };
    let outcome = restart_one(spec, &place, &images, &keeper);
    if let Some(warden) = warden::own() {
        match &outcome {
            Ok(Some(_)) => {}
            Ok(None) => return Ok(end_together(warden, dir)),
            // One that its user has ended is given up below.
            Err(RunError::Restart(EngineError::GivenUp)) if !warden::has_stopped_it() => {}
            Err(error) => {
                warden.say(&format!("lost it has not come back: {error}"));
                recover::end_all()?;
                return Ok(end_together(warden, dir));
            }
        }
    }
    if let (Err(_), None) = (&outcome, &spec.back) {
        dir.remove_meta();
    }
    let outcome = given_up(outcome, spec.requeue_exit(&images));
    tell_warden(&outcome);
    if let Ok(None) = outcome {
        let used = spec.used();
        return GoBack::new(&name, dir, spec.clone(), used, &keeper, warm).map(End::GoBack);
    }
    if let (Err(error), Some(_)) = (&outcome, &spec.back) {
        if spec.goes_back(&dir, &images, Loss::Restart) {
            recover::end_all()?;
            return GoBack::new(&name, dir, spec.clone(), spec.used(), &keeper, warm)
                .map(End::GoBack);
        }
        dir.note_failure(error.exit_code());
    }
    dir.retire();
    jobs.prune();
    Ok(End::Ended(outcome?.unwrap_or(Outcome::Killed(libc::SIGKILL).into())))
}

/// Undoes what restarts that were killed have left half done, of this user's files: what was done,
/// a sentence each.
pub fn settle_restarts() -> Vec<String> {
    settle_all().said
}

/// Whoever has closed his end of standard error is not told.
pub(crate) fn tell(what: &str) {
    let _ = writeln!(io::stderr(), "kedge: {what}");
}

/// A restart that a signal has ended is no failure: this process ends as [`given_up_by`] that
/// signal, once nothing is left.
fn given_up(
    outcome: Result<Option<Ended>, RunError>,
    requeue: Option<u8>,
) -> Result<Option<Ended>, RunError> {
    let Err(RunError::Restart(EngineError::GivenUp)) = outcome else { return outcome };
    recover::end_all()?;
    let signal = signals::sent_to_end().unwrap_or(libc::SIGINT);
    Ok(Some(given_up_by(signal, requeue).into()))
}

/// The image is as it was: a job that is asked to end is to be requeued as one that was saved.
fn given_up_by(signal: libc::c_int, requeue: Option<u8>) -> Outcome {
    let requeue = requeue.filter(|_| signal == libc::SIGTERM);
    requeue.map_or(Outcome::Killed(signal), Outcome::Exited)
}

/// The job's name, its folder, and the images that it may be restarted from, the newest first.
fn place(spec: &RestartSpec, jobs: &Jobs) -> Result<(JobName, JobDir, Candidates), RunError> {
    if let (Some(back), Some(name)) = (&spec.back, &spec.name) {
        let dir = jobs.take_over(name, back.lock)?;
        let images = Images::of(&dir).all();
        return Ok((name.clone(), dir, images));
    }
    let images = spec.images()?;
    let (_, first) = images.first().ok_or(ImageError::NoImage { path: spec.path.clone() })?;
    let name = spec.name.clone().map_or_else(|| first.job.parse(), Ok)?;
    let dir = jobs.create(&name)?;
    Ok((name, dir, images))
}

/// With their folders.
pub(crate) type Candidates = Vec<(PathBuf, Manifest)>;

/// The folder of images that `path` is, or is in if it is an image.
pub fn images_of(path: &Path) -> Option<PathBuf> {
    match Manifest::read(path) {
        Ok(_) => path.parent().map(Path::to_owned),
        Err(_) => Some(path.to_owned()),
    }
}

/// The image at `path`, or those in it, the newest first: all of one job and of one user.
pub(crate) fn candidates(path: &Path) -> Result<Candidates, ImageError> {
    match Manifest::read(path) {
        Ok(manifest) => return Ok(vec![(path.to_owned(), manifest)]),
        Err(ImageError::NoImage { .. }) => {}
        Err(other) => return Err(other),
    }
    let mut images = kedge_image::list(path)?;
    // An image is a program: who asks for the newest one does not ask for another user's instead.
    let owner = |folder: &Path| fs::symlink_metadata(folder).map(|found| found.uid()).ok();
    let first = images.first().map(|(folder, manifest)| (manifest.job.clone(), owner(folder)));
    images.retain(|(folder, manifest)| {
        first.as_ref().is_some_and(|(job, user)| *job == manifest.job && *user == owner(folder))
    });
    Ok(images)
}

/// Which job is restarted where.
struct Place<'a> {
    name: &'a JobName,
    joint: Option<&'a Joint>,
    dir: &'a JobDir,
    /// What keeps proxies ready for it.
    warm: Option<&'a Own>,
    /// When that began.
    begin: Instant,
}

/// `None`: the job goes back, and nothing of it runs any more.
fn restart_one(
    spec: &RestartSpec,
    place: &Place<'_>,
    images: &[(PathBuf, Manifest)],
    keeper: &Keeper,
) -> Result<Option<Ended>, RunError> {
    let dir = place.dir;
    let log = open_log(dir)?;
    let postscript = Postscript::begin(dir.log());
    if let Some(why) = spec.joining.as_ref().and_then(|joining| joining.why.as_ref()) {
        warn!(log, "{why}");
    }
    // Of a job that goes back it is there.
    if let (Some((_, manifest)), None) = (images.first(), &spec.back) {
        dir.write_meta(&meta_of(spec, place, manifest))?;
    }
    let signals = Signals::block();
    signals::become_subreaper();
    let (restarted, manifest, _stand_in) = first_that_works(spec, place, images, &log)?;
    if let Some(held) = GPU.held() {
        keeper.adopt(held);
    }
    if manifest.devices.is_some()
        && let Err(error) = keeper.serve()
    {
        warn!(log, "{}: {error}: nothing is held in memory", dir.keeper().display());
    }
    let policy = spec.policy.or(Policy::of_image(manifest));
    let pid = restarted.root();
    let meta = Meta { pid, marks: Some(Marks::here(pid)), ..meta_of(spec, place, manifest) };
    // It runs: a disk that has become full does not change that.
    if let Err(error) = dir.write_meta(&meta) {
        warn!(log, "{error}");
    }
    let restarted = Arc::new(restarted);
    let missed = Arc::new(Missed::new());
    let ranks = Ranks::of(place.joint, &policy, dir);
    let outcome = watch((policy.clone(), ranks), dir, &log, &signals, &restarted, &missed);
    if let Some(moved) = departing::moved_from(dir.path()) {
        drop(restarted);
        recover::see_all_end();
        departing::keep_signals(dir.path(), &signals);
        return Ok(Some(left_for(dir, meta, moved, &log)));
    }
    let part = warden::own();
    let is_lost = dir.lost().exists() || outcome.is_some_and(warden::is_about_to_stop);
    if let (true, Some(warden)) = (is_lost || outcome.is_none(), part) {
        warden.say("lost its program or its devices are lost");
    }
    let goes_back = || part.is_some() || spec.goes_back(dir, images, Loss::Init);
    if is_lost || outcome.is_none() && goes_back() {
        drop(restarted);
        recover::end_all()?;
        return Ok(None);
    }
    // An init that was killed takes the job with it.
    let outcome = outcome.unwrap_or(Outcome::Killed(libc::SIGKILL));
    finish(dir, meta, outcome, &log);
    let concluded = resume::concluded(place.name, &policy, outcome, &missed, &log);
    let mut ended = postscript.of(place.name, outcome, missed.told());
    ended.outcome = concluded;
    Ok(Some(ended))
}

/// What is told of a job that does not run as yet.
fn meta_of(spec: &RestartSpec, place: &Place<'_>, manifest: &Manifest) -> Meta {
    Meta {
        name: place.name.to_string(),
        supervisor: std::process::id(),
        pid: None,
        command: manifest.command.clone(),
        gpu: spec.devices(manifest).map_or("none".into(), |devices| devices.gpu),
        started: jobs::now(),
        ended: None,
        state: State::Running,
        policy: Some(spec.policy.or(Policy::of_image(manifest))),
        joint: place.joint.map(|joint| joint.job.to_string()),
        marks: Some(Marks::here(None)),
    }
}

/// Restarts the newest image that is whole; a damaged one is passed over, which the log tells.
fn first_that_works<'a>(
    spec: &RestartSpec,
    place: &Place<'_>,
    images: &'a [(PathBuf, Manifest)],
    log: &Arc<JobLog>,
) -> Result<(Restarted, &'a Manifest, Option<StandIn>), RunError> {
    let Place { name, joint, dir, warm, begin } = *place;
    let mut rest = images.iter().peekable();
    let mut held = spec.held();
    let mut again = None;
    loop {
        let Some((folder, manifest)) = again.take().or_else(|| rest.next()) else {
            return Err(ImageError::NoImage { path: spec.path.clone() }.into());
        };
        let held = held.take().filter(|held| held.image == *folder);
        let mut inherits = held.as_ref().map(Held::numbers).unwrap_or_default();
        let proxies = Proxies::default();
        let devices = spec.devices(manifest);
        let launch = devices.as_ref().map(|devices| launch(devices, dir, warm, log)).transpose()?;
        dir.link_commands()?;
        let former = former_folder(manifest)?;
        let stand_in = former.as_ref().map(|former| dir.stand_in_for(former, devices.is_some()));
        if let Some(None) = stand_in {
            warn!(
                log,
                "the folder that the job had is another job's by now, or another user's: its programs cannot ask for checkpoints, and processes that it starts get no devices"
            );
        }
        if let Some(launch) = &launch {
            let warm = launch.warm(clients(manifest));
            inherits.extend(warm.iter().flat_map(WarmProxy::numbers));
            let (launch, proxies) = (launch.clone().cold(), proxies.clone());
            let (files, folder) = (manifest.files.clone(), folder.clone());
            let socket = dir.socket();
            GPU.restart_with(Restart { launch, proxies, socket, files, folder, held, warm });
        }
        if let Some((seat, rank)) = spec.seat(folder)? {
            inherits.push(seat.fd);
            PMI.restart_in(seat, rank);
        }
        if let (Some(joint), Some(joining)) = (joint, &spec.joining) {
            JOIN.wait_for_others(joint.clone(), joining.clone());
        }
        if let Some(showing) = spec.showing {
            SHOWN.show(showing, name, (folder, manifest));
        }
        let home = former.unwrap_or_else(|| dir.path().to_owned());
        let checkpointer =
            Checkpointing { spec, name, joint, dir, home, manifest, devices, proxies, launch };
        let paths = PathMap::new(spec.paths.iter().cloned());
        inherits.extend(GATE.number());
        let plugins: More = vec![&GPU, &PMI, &JOIN, &SHOWN, &GATE];
        let others = spec.joining.as_ref().map(|_| &JOIN as &dyn Rendezvous);
        let usual = RestartOptions::new(folder.clone());
        let give_up = || signals::sent_to_end().is_some() || warden::has_stopped_it();
        let policy = spec.policy.or(Policy::of_image(manifest));
        let ranks = joint.and_then(|joint| joint.ranks);
        // It was withheld, and meant for a step in which the job is no longer.
        let withheld = ranks.is_some() || policy.withholds_term();
        let forgets = policy.on_term.filter(|_| withheld).map(|_| libc::SIGTERM);
        let options = RestartOptions {
            paths,
            plugins,
            lazy: spec.lazy,
            inherits,
            give_up,
            tell,
            others,
            arrivals: spec.standby.then_some(&GATE as &dyn Arrivals),
            forgets,
            ..usual
        };
        let restarted = kedge_process::restart(&options, |job| checkpointer.serve(job));
        if restarted.is_err() {
            SHOWN.take_back();
            recover::end_sessions_of(dir.path(), log);
        }
        match restarted {
            Ok(restarted) => {
                GATE.passed();
                let (ms, image) = (begin.elapsed().as_secs_f64() * 1e3, &restarted.image);
                info!(log, "restarted from {} within {ms:.0} ms", image.display());
                if let Some(showing) = spec.showing {
                    (showing.restarted)(name, image);
                }
                if let Err(error) = Images::of(dir).add(image) {
                    warn!(log, "{error}");
                }
                restarted.notes.iter().for_each(|note| warn!(log, "{note}"));
                return Ok((restarted, manifest, stand_in.flatten()));
            }
            // Another part may have been told first, which is this one's error then.
            Err(error) if matches!(error, EngineError::GivenUp) || give_up() => {
                let by = if warden::has_stopped_it() { "the part's warden" } else { "a signal" };
                warn!(log, "the restart was ended by {by}: nothing is left of it");
                return Err(EngineError::GivenUp.into());
            }
            Err(error) if GPU.held().is_some() => {
                let image = folder.display();
                warn!(log, "{image} does not come back from memory ({error}): now from its files");
                again = images.iter().find(|(path, _)| path == folder);
            }
            Err(error) => {
                error!(log, "{} cannot be restarted: {error}", folder.display());
                let cores = thread::available_parallelism().map_or(1, usize::from);
                if rest.peek().is_none() || kedge_image::verify(folder, cores).is_ok() {
                    return Err(error.into());
                }
            }
        }
    }
}

/// Waits for the job's end: how that was; `None` where its init was killed, and nobody knows.
fn watch(
    (policy, ranks): (Policy, Option<Ranks>),
    dir: &JobDir,
    log: &Arc<JobLog>,
    signals: &Signals,
    restarted: &Arc<Restarted>,
    missed: &Arc<Missed>,
) -> Option<Outcome> {
    let status = Arc::new(OnceLock::new());
    let (waiting, told) = (restarted.clone(), status.clone());
    let wait = move || {
        let _ = told.set(waiting.wait().ok().map(Outcome::of));
        signals::look_at_children();
    };
    if thread::Builder::new().name("wait".into()).spawn(wait).is_err() {
        error!(log, "cannot start a thread: the job's end will not be noticed");
    }
    let signalled = restarted.clone();
    if let Some(warden) = warden::own() {
        let killed = restarted.clone();
        // Its init sees it end, and ends the rest.
        if warden.on_stop(move || drop(killed.signal(libc::SIGKILL))).is_err() {
            warn!(log, "cannot start a thread: the part's warden ends it by force");
        }
    }
    let control = dir.control();
    let watch = Watch {
        control: control.clone(),
        settle: Box::new(move |deadline| control::settle(&control, deadline)),
        policy,
        log: log.clone(),
        // One that has ended takes no signal.
        signal: Arc::new(move |signal| drop(signalled.signal(signal))),
        missed: missed.clone(),
        ranks,
    };
    watch.wait(signals, || status.get().copied())
}

impl RestartSpec {
    /// The images that it may be restarted from, the newest first.
    fn images(&self) -> Result<Candidates, ImageError> {
        match &self.resume {
            Some(job) => resume::images(&self.path, job),
            None => candidates(&self.path),
        }
    }

    /// Whether the job goes back after such a loss, which its init cannot tell of; the log tells,
    /// also why not.
    fn goes_back(&self, dir: &JobDir, images: &[(PathBuf, Manifest)], loss: Loss) -> bool {
        let (Some((_, first)), Ok(log)) = (images.first(), open_log(dir)) else { return false };
        let policy = self.policy.or(Policy::of_image(first));
        let recovery = Recovery::new(&policy, self.used(), dir, &log);
        recovery.lose(loss);
        recovery.is_due()
    }

    /// The rank of a step that the job in `image` is to be, and as whom another process has begun.
    fn seat(&self, image: &Path) -> Result<Option<(Seat, Option<Rank>)>, RankError> {
        match &self.joining {
            Some(joining) => Ok(joining.rank.clone().map(|(seat, rank)| (seat, Some(rank)))),
            None => Ok(Seat::of_image(image, &self.policy)?.map(|seat| (seat, None))),
        }
    }

    /// What kedge ends with where the job is to be requeued (`--requeue-exit`).
    fn requeue_exit(&self, images: &[(PathBuf, Manifest)]) -> Option<u8> {
        let (_, first) = images.first()?;
        self.policy.or(Policy::of_image(first)).on_term?.requeue_exit
    }

    /// How often the job has gone back.
    fn used(&self) -> u32 {
        self.back.as_ref().map_or(0, |back| back.used)
    }

    /// What is held in memory of the job's newest image: asked once.
    fn held(&self) -> Option<Held> {
        let back = self.back.as_ref()?;
        back.held.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// What keeps proxies ready for the job: the former process's, or a new one where its policy
    /// wants some.
    fn warm(&self, dir: &JobDir, images: &[(PathBuf, Manifest)]) -> Option<Own> {
        if let Some(back) = &self.back {
            return Own::take_over(dir, back.warm?);
        }
        let (_, first) = images.first()?;
        let policy = self.policy.or(Policy::of_image(first));
        let devices = self.devices(first)?;
        let kind = Kind::here(&Parts::find().ok()?, &devices.gpu.parse().ok()?, &devices.limits);
        warm_of(dir, &kind, &policy)
    }

    /// Starts the part's warden, where the job goes back by itself.
    fn start_warden(
        &self,
        joint: Option<&Joint>,
        dir: &Path,
        images: &[(PathBuf, Manifest)],
    ) -> Result<(), RunError> {
        let (Some(joint), Some(joining)) = (joint, &self.joining) else { return Ok(()) };
        let Some((image, first)) = images.first() else { return Ok(()) };
        // Ranks have their session from whoever has started the step.
        if joining.rank.is_some() {
            return Ok(());
        }
        let policy = self.policy.or(Policy::of_image(first));
        let (times, parts, image) = (joining.times, Some(joining.parts), Some(image.clone()));
        let gpu = self.gpu.as_ref().map(ToString::to_string);
        let again = As { paths: self.paths.clone(), gpu, soft_memory: self.soft_memory };
        let before = Before { times, parts, image, again };
        let started = warden::start(joint, dir, &policy, before, self.quiet);
        started.map_err(|source| RunError::System { what: "start the part's warden", source })
    }

    /// What answers the job's questions to NVML.
    fn management(&self, dir: &JobDir, images: &[(PathBuf, Manifest)]) -> Option<Management> {
        let devices = self.devices(&images.first()?.1)?;
        management_of(dir, &Parts::find().ok()?, &devices.gpu.parse().ok()?, &devices.limits)
    }

    /// What is asked for that devices of several places cannot have, if the job is to have such.
    fn refuse_several(&self, manifest: &Manifest) -> Option<String> {
        let gpu = self.devices(manifest)?.gpu.parse::<GpuSpec>().ok()?;
        let policy = self.policy.or(Policy::of_image(manifest));
        let mut asked = policy.needs_one_place().into_iter().filter(|(_, given)| *given);
        asked.find_map(|(option, _)| gpu.refuse_several(option))
    }

    /// The devices that the job is to have: those that it had, or others; none if it had none.
    fn devices(&self, manifest: &Manifest) -> Option<Devices> {
        let mut devices = manifest.devices.clone()?;
        if let Some(gpu) = &self.gpu {
            devices.gpu = gpu.to_string();
        }
        devices.limits.soft_memory = self.soft_memory.or(devices.limits.soft_memory);
        Some(devices)
    }
}

/// How many of its processes have devices.
fn clients(manifest: &Manifest) -> usize {
    manifest.files.iter().filter(|file| gpu::is_of_client(&file.name)).count()
}

/// What the job's proxies are started with.
fn launch(
    devices: &Devices,
    dir: &JobDir,
    warm: Option<&Own>,
    log: &Arc<JobLog>,
) -> Result<Launch, RunError> {
    let (gpu, parts) = (devices.gpu.parse()?, Parts::find()?);
    dir.link_driver(&parts)?;
    let kind = Kind::here(&parts, &gpu, &devices.limits);
    let warm = Sources::new(kind, warm.map(|own| own.socket().to_owned()), log.clone());
    Ok(Launch::new(&parts, &gpu, &devices.limits, dir).with_warm(warm))
}

/// What the restarted job's init needs to take checkpoints.
struct Checkpointing<'a> {
    spec: &'a RestartSpec,
    name: &'a JobName,
    joint: Option<&'a Joint>,
    dir: &'a JobDir,
    /// The folder that the job's processes know.
    home: PathBuf,
    manifest: &'a Manifest,
    devices: Option<Devices>,
    proxies: Proxies,
    launch: Option<Launch>,
}

impl Checkpointing<'_> {
    /// Runs in the init, until nothing of the job is left.
    fn serve(&self, job: &mut Rebuilt) {
        // The init has closed what it inherited.
        warden::is_a_copy();
        let log =
            JobLog::open(&self.dir.log(), "init".to_owned()).unwrap_or_else(|_| JobLog::none());
        let log = Arc::new(log);
        let policy = self.spec.policy.or(Policy::of_image(self.manifest));
        let recovery = Arc::new(Recovery::new(&policy, self.spec.used(), self.dir, &log));
        if self.joint.is_some() && policy.recover.is_some() {
            recovery.is_of_part();
        }
        let checkpointer = Arc::new(Checkpointer {
            name: self.name.clone(),
            command: self.manifest.command.clone(),
            devices: Mutex::new(self.devices.clone()),
            socket: self.dir.socket(),
            proxies: self.proxies.clone(),
            policy,
            roots: job.roots(),
            first: job.root().into(),
            without: Without::Ends,
            log: log.clone(),
            last: self.dir.last_image(),
            tally: Tally::new(self.dir.checkpoints()),
            turn: Turn::default(),
            ending: Mutex::default(),
            recovery,
            keeper: At::of(self.dir),
            tracker: Tracker::default(),
            followed: Mutex::default(),
            home: self.home.clone(),
            life: new_life(),
            joint: self.joint.cloned().map(OnceLock::from).unwrap_or_default(),
            launches: Arc::default(),
            over: AtomicBool::new(false),
        });
        // Nobody can ask for warm ones in here: the job has namespaces of its own.
        let launch = self.launch.clone().map(Launch::cold);
        if let (Some(launch), Some(listener)) = (launch, GPU.listener())
            && let Err(error) = self.proxies.serve(listener, launch, log.clone(), None)
        {
            error!(log, "cannot start a thread: {error}: no devices for other processes");
        }
        if let Err(error) = control::serve(&self.dir.control(), checkpointer.clone()) {
            error!(log, "{}: {error}: no checkpoints", self.dir.control().display());
        }
        if let Err(error) = PMI.serve(log.clone()) {
            warn!(log, "{error}");
        }
        checkpointer.take_part();
        // SIGCHLD is blocked here as in the process that this is a copy of.
        let signals = Signals::block();
        let mut init = Init { job: &checkpointer, dir: self.dir, root: job.root(), ended: false };
        while job.collect(|ended| init.look(ended, &signals)) {
            signals.child();
        }
        if let Some(failure) = job.failure() {
            error!(log, "the job was ended: {failure}");
        }
        checkpointer.ended();
        checkpointer.settle(None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::chown;

    #[test]
    fn a_restart_that_sigterm_ends_is_requeued() {
        assert_eq!(given_up_by(libc::SIGTERM, Some(85)), Outcome::Exited(85));
        assert_eq!(given_up_by(libc::SIGTERM, None), Outcome::Killed(libc::SIGTERM));
        assert_eq!(given_up_by(libc::SIGINT, Some(85)), Outcome::Killed(libc::SIGINT));
    }

    #[test]
    fn an_image_of_another_user_takes_no_other_s_place() {
        let all = std::env::temp_dir().join(format!("kedge-candidates-{}", std::process::id()));
        let image = |number: u64| {
            let folder = all.join(format!("j-{number:04}"));
            fs::create_dir_all(&folder).unwrap();
            Manifest::new("j".into(), vec![], number).write(&folder).unwrap();
            folder
        };
        let [one, two, three] = [1, 2, 3].map(image);
        let found = || -> Vec<PathBuf> {
            candidates(&all).unwrap().into_iter().map(|(folder, _)| folder).collect()
        };
        assert_eq!(found(), [three.clone(), two.clone(), one.clone()]);
        let give = |folder: &Path| {
            let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
            let all = files.chain([folder.to_owned()]);
            all.for_each(|path| chown(path, Some(1234), None).unwrap());
        };
        // Root alone can make such ones.
        if rustix::process::geteuid().is_root() {
            give(&two);
            assert_eq!(found(), [three.clone(), one]);
            give(&three);
            assert_eq!(found(), [three, two]);
        }
        fs::remove_dir_all(&all).unwrap();
    }
}
