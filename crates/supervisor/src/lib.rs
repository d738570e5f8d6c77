//! The supervisor of one job, and the folders of all.
//!
//! [`run`] makes the job's folder, listens on its socket, starts the program, gives each process of
//! the job that connects a proxy of its own, and ends when the program does.

mod base;
mod checkpoint;
mod devices;
mod job;
mod restart;
mod services;

pub use base::again::{CONFIG, kedge_again};
pub use base::phases::moved as hold_move;
use base::signals;
pub use base::signals::{die_of, on_interrupt, signal_group_of};
use checkpoint::checkpointer::{Checkpointer, Without, new_life};
use checkpoint::joint::Joint;
pub use checkpoint::joint::{Joining, KEY, far};
use checkpoint::together::Ranks;
use checkpoint::watch::Watch;
use checkpoint::{departing, joint};
pub use devices::gpu::is_of_devices;
use devices::proxies;
use devices::proxies::{Launch, Proxies};
pub use job::departed::Departure;
use job::jobs::{JobDir, JobError, JobName, Jobs, Meta, State};
use job::left::Marks;
pub use job::left::boot;
use job::missed::Missed;
pub use job::mover::{MoveTo, Supervisor};
pub use job::parts::{Parts, PartsError};
use job::policy::{JobGpu, Policy};
pub use job::postscript::Ended;
use job::postscript::Postscript;
pub use job::program::Outcome;
use job::program::Program;
use job::rank::{Open, Seat};
pub use job::rank::{RankError, is_one_of_ranks};
pub use job::relayed::{Passed, Sent};
pub use job::shown::Showing;
use job::tally::Tally;
pub use job::tally::{Checkpoints, LastFailure};
use job::turn::{Starting, Turn};
use job::{check, rank, stats, trace};
pub use job::{jobs, policy};
use kedge_control::check::Check;
use kedge_control::gpu::GpuSpec;
use kedge_control::job::Moved;
use kedge_control::joblog::JobLog;
use kedge_control::trace::Wanted;
use kedge_control::{error, info, note, warn};
pub use kedge_coordinator::{Far, FarError};
use kedge_image::{DeviceLimits, Devices};
use kedge_process::{Roots, Tracker};
pub use restart::gate::{GO, MADE, RUNS, WAITS, bring_image};
pub use restart::owner::{other_owner, start_as};
use restart::recover;
pub use restart::recover::{End, GoBack};
use restart::recover::{Loss, Recovery};
pub use restart::resume;
pub use restart::run::{Back, RestartSpec, images_of, restart, settle_restarts};
use services::keeper::{At, Keeper};
pub use services::keeper::{HeldImage, release};
use services::management::Management;
use services::warden;
use services::warden::{Before, Verdict};
pub use services::warden::{Return, Together, ward};
use services::warm::{Kind, Own, Sources};
pub use services::{control, warm};
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;
use thiserror::Error;

/// What to run, and on what.
#[derive(Debug, Clone)]
pub struct JobSpec {
    /// Devices that the program sees.
    pub gpu: JobGpu,
    /// Why these are the default, where nobody named any.
    pub gpu_default: Option<String>,
    /// What is not said is the proxies' own choice.
    pub limits: DeviceLimits,
    /// `None`: made from the program's name.
    pub name: Option<JobName>,
    /// The job that this one is a part of; it has its name from that.
    pub join: Option<JobName>,
    /// Where its parts on all hosts meet, if there are several.
    pub far: Option<Far>,
    pub program: OsString,
    pub arguments: Vec<OsString>,
    /// Whether the remote shells that it starts are parts of the job.
    pub shells: bool,
    pub policy: Policy,
    /// What the job asks of its devices is counted.
    pub stats: bool,
    /// What its devices, software devices, look for in the program.
    pub check: Option<Check>,
    /// What it does and when is written down.
    pub trace: Option<Wanted>,
    /// Where its devices move once it runs.
    pub move_to: Option<MoveTo>,
    /// A library by which its programs write into a cache's memory by themselves.
    pub preload: Option<PathBuf>,
    /// Nothing is said when it has ended.
    pub quiet: bool,
}

/// What `kedge` itself exits with when it, and not the program, has failed.
pub const EXIT_KEDGE_FAILED: u8 = 125;

#[derive(Debug, Error)]
pub enum RunError {
    #[error(transparent)]
    Job(#[from] JobError),
    #[error(transparent)]
    Parts(#[from] PartsError),
    #[error(
        "cannot listen on {path}: {source}; XDG_STATE_HOME may name a folder where there can be sockets"
    )]
    Listen { path: PathBuf, source: io::Error },
    #[error("cannot {what}: {source}")]
    System { what: &'static str, source: io::Error },
    #[error(transparent)]
    Image(#[from] kedge_image::ImageError),
    #[error("the image's devices: {0}")]
    Devices(#[from] kedge_control::gpu::BadGpuSpec),
    /// What devices of several places cannot have.
    #[error("{0}")]
    Several(String),
    #[error(transparent)]
    Restart(#[from] kedge_process::EngineError),
    #[error("the image has no part {part}: it has {all}, from 0")]
    NoPart { part: u32, all: u32 },
    #[error(
        "{part} is being restarted already, by {by}: a part can be restarted on one host only (`--parts`)"
    )]
    PartTaken { part: JobName, by: String },
    #[error(transparent)]
    Rank(#[from] RankError),
    #[error("{program}: {}", start_error(source))]
    Start { program: String, source: io::Error },
}

fn start_error(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "no such program".into(),
        io::ErrorKind::PermissionDenied => "not executable, or not yours to execute".into(),
        _ => error.to_string(),
    }
}

impl RunError {
    /// As shells do it: 127 where there is no such program, 126 where it cannot be executed; 125
    /// where it is kedge that failed.
    pub fn exit_code(&self) -> u8 {
        match self {
            RunError::Start { source, .. } if source.kind() == io::ErrorKind::NotFound => 127,
            RunError::Start { .. } => 126,
            _ => EXIT_KEDGE_FAILED,
        }
    }
}

impl JobSpec {
    /// The program and its arguments, for people.
    fn command(&self) -> Vec<String> {
        let words = std::iter::once(&self.program).chain(&self.arguments);
        words.map(|word| word.to_string_lossy().into_owned()).collect()
    }
}

/// Runs the job to its end. Takes this process's signals and children over.
pub fn run(spec: &JobSpec) -> Result<End, RunError> {
    signals::block_file_limit();
    let devices = match &spec.gpu {
        JobGpu::None => None,
        JobGpu::Devices(gpu) => Some((gpu, Parts::find()?)),
    };
    let jobs = Jobs::open()?;
    let (mut rank, unseated) = seated(spec)?;
    let mut spec = spec.clone();
    let (name, joint, dir) = place(&mut spec, &jobs, rank.as_mut().map(|(_, open)| open))?;
    if let (Some(error), Ok(log)) = (unseated, open_log(&dir)) {
        note!(log, "the program has no relay to its step: {error}");
    }
    if joint.as_ref().is_some_and(|joint| !joint.is_first()) {
        // One of the parts asks for all of them.
        spec.policy.interval = None;
    }
    let spec = &spec;
    let keeper = Keeper::of(&dir);
    // Before this process adopts what others leave.
    let warm = devices.as_ref().and_then(|(gpu, parts)| {
        let kind = Kind::here(parts, gpu, &spec.limits);
        warm_of(&dir, &kind, &spec.policy)
    });
    if let Some(to) = &spec.move_to {
        // The same.
        to.start(&name)
            .map_err(|source| RunError::System { what: "start `kedge migrate`", source })?;
    }
    if let Some(joint) = &joint {
        // The same.
        let started = warden::start(joint, dir.path(), &spec.policy, Before::default(), spec.quiet);
        started.map_err(|source| RunError::System { what: "start the part's warden", source })?;
    }
    let devices = devices.as_ref();
    let outcome = supervise(spec, &name, (joint, rank), &dir, devices, &keeper, warm.as_ref());
    if let (Ok(None), Some(warden)) = (&outcome, warden::own()) {
        return Ok(end_together(warden, dir));
    }
    tell_warden(&outcome);
    if let Ok(None) = outcome {
        let (path, policy) = (dir.images(), spec.policy.clone());
        let spec = RestartSpec { path, policy, ..RestartSpec::default() };
        return GoBack::new(&name, dir, spec, 0, &keeper, warm).map(End::GoBack);
    }
    dir.retire();
    jobs.prune();
    Ok(End::Ended(outcome?.unwrap_or(Outcome::Killed(libc::SIGKILL).into())))
}

/// What becomes of a part of which nothing runs any more, as its warden says.
fn end_together(warden: &warden::Warden, dir: JobDir) -> End {
    match warden.verdict() {
        Verdict::Back(together) => {
            dir.note_end(State::Killed(libc::SIGKILL));
            End::Together(*together)
        }
        Verdict::End(why) => {
            let killed = Outcome::Killed(libc::SIGKILL);
            dir.note_end(State::Killed(libc::SIGKILL));
            dir.retire();
            End::Ended(Ended { postscript: vec![why], ..killed.into() })
        }
    }
}

/// Tells this part's warden, if it has one, how it has ended: so it stays.
fn tell_warden(outcome: &Result<Option<Ended>, RunError>) {
    let Some(warden) = warden::own() else { return };
    match outcome {
        Ok(Some(ended)) => warden.say(&format!("ended {}", ended.outcome)),
        Ok(None) => {}
        Err(error) => warden.say(&format!("ended {error}")),
    }
}

/// A rank of a step, and its session.
type Seated = (Seat, Open);

/// The rank of a step that the job is; or why the one rank of a step has none.
fn seated(spec: &JobSpec) -> Result<(Option<Seated>, Option<RankError>), RunError> {
    // Who says how the parts meet starts them himself.
    if spec.join.is_some() || spec.far.is_some() {
        return Ok((None, None));
    }
    let Some(seat) = Seat::here() else {
        Seat::leave();
        return Ok((None, None));
    };
    if spec.policy.recover.is_some() && !seat.has_others() {
        return Err(RankError::Option("--recover").into());
    }
    match Open::begin(&seat) {
        Ok(open) => Ok((Some((seat, open)), None)),
        // A program before this one in the task has had the session.
        Err(error) if !seat.has_others() => Ok((None, Some(error))),
        Err(error) => Err(error.into()),
    }
}

/// What keeps proxies ready for the job, where its policy wants some.
fn warm_of(dir: &JobDir, kind: &Kind, policy: &Policy) -> Option<Own> {
    let own = Own::start(dir, kind, policy.warm?);
    if let (Err(error), Ok(log)) = (&own, open_log(dir)) {
        warn!(log, "no proxies are kept ready: {error}");
    }
    own.ok()
}

/// What answers the job's questions to NVML, where there is a library to ask with.
fn management_of(
    dir: &JobDir,
    parts: &Parts,
    gpu: &GpuSpec,
    limits: &DeviceLimits,
) -> Option<Management> {
    parts.nvml.as_ref()?;
    let management = Management::start(dir, parts, gpu, limits);
    if let (Err(error), Ok(log)) = (&management, open_log(dir)) {
        warn!(log, "no process answers for NVML: {error}");
    }
    management.ok()
}

/// The job's name, the job that it is a part of, and its folder.
fn place(
    spec: &mut JobSpec,
    jobs: &Jobs,
    open: Option<&mut Open>,
) -> Result<(JobName, Option<Joint>, JobDir), RunError> {
    if let Some(open) = open.filter(|open| open.rank.size > 1) {
        let (joint, dir) = joint::enter_step(spec, jobs, open)?;
        spec.join = Some(joint.job.clone());
        // Whoever has started the ranks starts them on all hosts.
        spec.shells = false;
        return Ok((joint.part.clone(), Some(joint), dir));
    }
    if let Some(join) = &spec.join {
        let (joint, dir) = Joint::enter(jobs, join, spec.far.as_ref())?;
        return Ok((joint.part.clone(), Some(joint), dir));
    }
    let name = spec.name.clone();
    let name = name.unwrap_or_else(|| JobName::generated(Path::new(&spec.program)));
    let dir = jobs.create(&name)?;
    Ok((name, None, dir))
}

/// `None`: the job goes back, and nothing of it runs any more.
fn supervise(
    spec: &JobSpec,
    name: &JobName,
    (joint, rank): (Option<Joint>, Option<Seated>),
    dir: &JobDir,
    devices: Option<&(&GpuSpec, Parts)>,
    keeper: &Keeper,
    warm: Option<&Own>,
) -> Result<Option<Ended>, RunError> {
    let log = open_log(dir)?;
    let postscript = Postscript::begin(dir.log());
    if let Some((_, parts)) = devices {
        dir.link_driver(parts)?;
    }
    if spec.shells
        && let Err(error) = dir.link_commands()
    {
        warn!(log, "remote shells of the job are none of its parts: {error}");
    }
    let mut meta = first_meta(spec, name);
    dir.write_meta(&meta)?;

    // Blocked before any thread starts, so that only the waiting below sees them.
    let signals = signals::Signals::block();
    let proxies = Proxies::default();
    if let Some((gpu, parts)) = devices {
        // Worth saying once a process asks for devices.
        let why = spec.gpu_default.as_ref();
        let note = why.map(|why| format!("--gpu {gpu} is the default here: {why}"));
        let kind = Kind::here(parts, gpu, &spec.limits);
        let warm = Sources::new(kind, warm.map(|own| own.socket().to_owned()), log.clone());
        let mut launch = Launch::new(parts, gpu, &spec.limits, dir).with_warm(warm);
        if spec.stats {
            launch = launch.with_stats(&dir.make(dir.stats())?);
        }
        if let Some(check) = spec.check {
            launch = launch.with_check(check, &dir.make(dir.findings())?);
        }
        if let Some(wanted) = &spec.trace {
            launch = launch.with_trace(&dir.make(dir.trace())?, wanted.limit);
        }
        let bad = |source| RunError::Listen { path: dir.socket(), source };
        let listener = proxies::listen(&dir.socket()).map_err(bad)?;
        keeper.serve().map_err(|source| RunError::Listen { path: dir.keeper(), source })?;
        let served = proxies.serve(listener, launch, log.clone(), note);
        served.map_err(|source| RunError::System { what: "start a thread", source })?;
    }
    signals::become_subreaper();
    let management = devices.and_then(|(gpu, parts)| management_of(dir, parts, gpu, &spec.limits));
    let beside = management.iter().map(Management::pid);
    let except = beside.map(|pid| pid as i32).collect();
    let roots = Roots::ChildrenOf { parent: std::process::id() as i32, except };
    let recovery = Arc::new(Recovery::new(&spec.policy, 0, dir, &log));
    let stopped = recovery.clone();
    warden_stops(&recovery, move || stopped.lose(Loss::Others))?;
    let ranks = Ranks::of(joint.as_ref(), &spec.policy, dir);
    let checkpointer = checkpointer_of(spec, name, joint, dir, roots, &proxies, &recovery);
    // Nobody captures what is on its way to become the program.
    let starting = checkpointer.turn.start();
    serve_control(dir, &checkpointer, &starting);
    let end = rank.map(|(seat, open)| rank::serve(&seat, open, &log)).transpose()?;
    // Where SIGTERM reaches all processes of a step, the job is to be there when it is captured.
    let withheld = ranks.as_ref().and(spec.policy.on_term).map(|_| libc::SIGTERM);
    let program = match Program::start(spec, name, dir, (&signals, withheld), end) {
        Ok(program) => Arc::new(program),
        Err(error) => {
            meta.state = State::Exited(i32::from(error.exit_code()));
            meta.ended = Some(jobs::now());
            let _ = dir.write_meta(&meta);
            return Err(error);
        }
    };
    let _ = checkpointer.first.set(program.pid as i32);
    drop(starting);
    let begin = Instant::now();
    (meta.pid, meta.marks) = (Some(program.pid), Some(Marks::here(Some(program.pid))));
    let _ = dir.write_meta(&meta);
    let signalled = program.clone();
    let missed = Arc::new(Missed::new());
    let watch = Watch {
        control: dir.control(),
        settle: Box::new({
            let checkpointer = checkpointer.clone();
            move |deadline| checkpointer.settle(deadline)
        }),
        policy: spec.policy.clone(),
        log: log.clone(),
        signal: Arc::new(move |signal| signalled.signal(signal)),
        missed: missed.clone(),
        ranks,
    };
    let outcome = watch.wait(&signals, || {
        let outcome = program.reap(&proxies, &recovery);
        if outcome.is_some_and(|outcome| outcome != Outcome::Exited(0)) && recovery.is_wanted() {
            // It may have failed because its proxy was lost just before.
            program.see_proxies_off(spec, &signals, &proxies, &recovery);
            if outcome.is_some_and(warden::is_about_to_stop) {
                recovery.lose(Loss::Others);
            }
        }
        outcome.into_iter().for_each(|outcome| recovery.program_ended(outcome));
        if outcome != Some(Outcome::Exited(0)) && recovery.is_due() {
            checkpointer.end_by(libc::SIGKILL, recover::LAST);
            return Some(None);
        }
        outcome.map(Some)
    });
    let Some(outcome) = outcome else {
        recover::end_all()?;
        return Ok(None);
    };
    let took = begin.elapsed();
    checkpointer.ended();
    if let Some(moved) = departing::moved_from(dir.path()) {
        // However long a last image may take: whoever has its streams says that nothing is left.
        checkpointer.settle(None);
        checkpointer.see_it_end(&checkpointer.program());
        program.see_proxies_off(spec, &signals, &proxies, &recovery);
        departing::keep_signals(dir.path(), &signals);
        return Ok(Some(left_for(dir, meta, moved, &log)));
    }
    program.see_proxies_off(spec, &signals, &proxies, &recovery);
    finish(dir, meta, outcome, &log);
    let concluded = resume::concluded(name, &spec.policy, outcome, &missed, &log);
    let mut ended = postscript.of(name, outcome, missed.told());
    ended.outcome = concluded;
    ended.found = spec.check.and_then(|_| check::of_job(dir, &log));
    ended.traced = spec.trace.as_ref().map(|wanted| trace::of_job(dir, wanted, &log));
    ended.stats = spec.stats.then(|| Box::new(stats::of_job(spec, name, dir, took, &log)));
    Ok(Some(ended))
}

/// Notes how the job ended.
fn finish(dir: &JobDir, mut meta: Meta, outcome: Outcome, log: &JobLog) {
    meta.state = match outcome {
        Outcome::Exited(code) => State::Exited(i32::from(code)),
        Outcome::Killed(signal) => State::Killed(signal),
    };
    meta.ended = Some(jobs::now());
    // It may have moved.
    meta.gpu = dir.gpu().unwrap_or(meta.gpu);
    // The program has ended as it has ended; a full disk does not change that.
    if let Err(error) = dir.write_meta(&meta) {
        warn!(log, "{error}");
    }
}

/// Notes that the job has left for another host, where this process's streams are to be its.
fn left_for(dir: &JobDir, mut meta: Meta, moved: Moved, log: &JobLog) -> Ended {
    info!(log, "the job has moved to {}", moved.server);
    (meta.state, meta.ended) = (State::Moved(moved.server.clone()), Some(jobs::now()));
    if let Err(error) = dir.write_meta(&meta) {
        warn!(log, "{error}");
    }
    Ended { moved: Some(moved), ..Ended::from(Outcome::Killed(libc::SIGKILL)) }
}

/// Has this part's warden, if it has one, be heard: once it says that the part is to stop, `stop`
/// is called.
fn warden_stops(
    recovery: &Arc<Recovery>,
    stop: impl Fn() + Send + 'static,
) -> Result<(), RunError> {
    let Some(warden) = warden::own() else { return Ok(()) };
    recovery.is_of_part();
    let heard = warden.on_stop(move || {
        stop();
        signals::look_at_children();
    });
    heard.map_err(|source| RunError::System { what: "start a thread", source })
}

/// What takes the job's checkpoints.
fn checkpointer_of(
    spec: &JobSpec,
    name: &JobName,
    joint: Option<Joint>,
    dir: &JobDir,
    roots: Roots,
    proxies: &Proxies,
    recovery: &Arc<Recovery>,
) -> Arc<Checkpointer> {
    let (gpu, limits) = (spec.gpu.to_string(), spec.limits);
    let has_devices = matches!(spec.gpu, JobGpu::Devices(_));
    let devices = has_devices.then_some(Devices { gpu, limits, folder: dir.path().to_owned() });
    Arc::new(Checkpointer {
        name: name.clone(),
        command: spec.command(),
        devices: Mutex::new(devices),
        socket: dir.socket(),
        proxies: proxies.clone(),
        policy: spec.policy.clone(),
        roots,
        first: OnceLock::new(),
        without: Without::GoesOn,
        log: recovery.log.clone(),
        last: dir.last_image(),
        tally: Tally::new(dir.checkpoints()),
        turn: Turn::default(),
        ending: Mutex::default(),
        recovery: recovery.clone(),
        keeper: At::of(dir),
        tracker: Tracker::default(),
        followed: Mutex::default(),
        home: dir.path().to_owned(),
        life: new_life(),
        joint: joint.map(OnceLock::from).unwrap_or_default(),
        launches: Arc::default(),
        over: AtomicBool::new(false),
    })
}

/// Answers on the job's control socket. A job that cannot be checkpointed runs all the same.
/// Whoever asks before the program is there waits for it: who starts that has the turn already.
fn serve_control(dir: &JobDir, checkpointer: &Arc<Checkpointer>, _starting: &Starting<'_>) {
    if let Err(error) = control::serve(&dir.control(), checkpointer.clone()) {
        error!(checkpointer.log, "{}: {error}: no checkpoints", dir.control().display());
    }
    checkpointer.take_part();
}

fn open_log(dir: &JobDir) -> Result<Arc<JobLog>, JobError> {
    let log = JobLog::open(&dir.log(), format!("kedge[{}]", std::process::id()));
    log.map(Arc::new).map_err(|source| JobError::Io { path: dir.log(), source })
}

fn first_meta(spec: &JobSpec, name: &JobName) -> Meta {
    Meta {
        name: name.to_string(),
        supervisor: std::process::id(),
        pid: None,
        command: spec.command(),
        gpu: spec.gpu.to_string(),
        started: jobs::now(),
        ended: None,
        state: State::Running,
        policy: Some(spec.policy.clone()),
        joint: spec.join.as_ref().map(JobName::to_string),
        marks: Some(Marks::here(None)),
    }
}
