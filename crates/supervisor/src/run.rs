//! Running a job: its folder, what runs beside it, its program, and its end.

use crate::base::ends::{FAREWELL, LAST};
use crate::base::signals::{self, Signals};
use crate::base::sockets::listen;
use crate::checkpoint::checkpointer::{Checkpointer, Without, new_life};
use crate::checkpoint::recovery::{Loss, Recovery};
use crate::checkpoint::server;
use crate::checkpoint::together::Ranks;
use crate::checkpoint::watch::Watch;
use crate::devices::proxies::{Launch, Proxies};
use crate::job::jobs::{self, JobDir, JobName, Jobs, State};
use crate::job::joint::Joint;
use crate::job::leaving;
use crate::job::left::Marks;
use crate::job::missed::Missed;
use crate::job::noted::{finish, first_meta, left_for, open_log};
use crate::job::outcome::Outcome;
use crate::job::parts::Parts;
use crate::job::policy::JobGpu;
use crate::job::postscript::{Ended, Postscript};
use crate::job::program::Program;
use crate::job::rank::{self, Link, Open, RankError, Seat};
use crate::job::spec::{JobSpec, RunError};
use crate::job::tally::Tally;
use crate::job::turn::{Starting, Turn};
use crate::job::{check, stats, trace};
use crate::restart::back::{End, GoBack};
use crate::restart::end::end_all;
use crate::restart::part::{end_together, tell_warden};
use crate::restart::spec::RestartSpec;
use crate::restart::{ranks, resume};
use crate::services::beside::{management_of, warm_of};
use crate::services::keeper::{At, Keeper};
use crate::services::management::Management;
use crate::services::warden::{self, Before};
use crate::services::warm::{Kind, Own, Sources};
use kedge_control::gpu::GpuSpec;
use kedge_control::{error, note, warn};
use kedge_image::Devices;
use kedge_process::plugins::RestoredFiles;
use kedge_process::{Roots, Tracker};
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// For proxies that write down what they have counted, found or traced, on a busy machine, too: how
/// long they may take after the program.
const LAST_WORDS: Duration = Duration::from_secs(10);

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

/// The job's name, the job that it is a part of, and its folder.
fn place(
    spec: &mut JobSpec,
    jobs: &Jobs,
    open: Option<&mut Open>,
) -> Result<(JobName, Option<Joint>, JobDir), RunError> {
    if let Some(open) = open.filter(|open| open.rank.size > 1) {
        let (joint, dir) = ranks::enter_step(spec, jobs, open)?;
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
        let listener = listen(&dir.socket()).map_err(bad)?;
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
    let rank = rank.map(|(seat, open)| rank::serve(&seat, open, &log)).transpose()?;
    let (rank, end) = rank.unzip();
    let parts = (joint, rank);
    let checkpointer = checkpointer_of(spec, name, parts, dir, roots, &proxies, &recovery);
    // Nobody captures what is on its way to become the program.
    let starting = checkpointer.turn.start();
    serve_control(dir, &checkpointer, &starting);
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
        let outcome = reap(&program, &proxies, &recovery);
        if outcome.is_some_and(|outcome| outcome != Outcome::Exited(0)) && recovery.is_wanted() {
            // It may have failed because its proxy was lost just before.
            see_proxies_off(&program, spec, &signals, (&proxies, &recovery));
            if outcome.is_some_and(warden::is_about_to_stop) {
                recovery.lose(Loss::Others);
            }
        }
        outcome.into_iter().for_each(|outcome| recovery.program_ended(outcome));
        if outcome != Some(Outcome::Exited(0)) && recovery.is_due() {
            checkpointer.end_by(libc::SIGKILL, LAST);
            return Some(None);
        }
        outcome.map(Some)
    });
    let Some(outcome) = outcome else {
        end_all()?;
        return Ok(None);
    };
    let took = begin.elapsed();
    checkpointer.ended();
    if let Some(moved) = leaving::moved_from(dir.path()) {
        // However long a last image may take: whoever has its streams says that nothing is left.
        checkpointer.settle(None);
        checkpointer.see_it_end(&checkpointer.program());
        see_proxies_off(&program, spec, &signals, (&proxies, &recovery));
        leaving::keep_signals(dir.path(), &signals);
        return Ok(Some(left_for(dir, meta, moved, &log)));
    }
    see_proxies_off(&program, spec, &signals, (&proxies, &recovery));
    finish(dir, meta, outcome, &log);
    let concluded = resume::concluded(name, &spec.policy, outcome, &missed, &log);
    let mut ended = postscript.of(name, outcome, missed.told());
    ended.outcome = concluded;
    ended.found = spec.check.and_then(|_| check::of_job(dir, &log));
    ended.traced = spec.trace.as_ref().map(|wanted| trace::of_job(dir, wanted, &log));
    ended.stats = spec.stats.then(|| Box::new(stats::of_job(spec, name, dir, took, &log)));
    Ok(Some(ended))
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
    (joint, rank): (Option<Joint>, Option<Arc<Link>>),
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
        restored: RestoredFiles::default(),
        home: dir.path().to_owned(),
        life: new_life(),
        joint: joint.map(OnceLock::from).unwrap_or_default(),
        rank,
        launches: Arc::default(),
        over: AtomicBool::new(false),
    })
}

/// Answers on the job's control socket. A job that cannot be checkpointed runs all the same.
/// Whoever asks before the program is there waits for it: who starts that has the turn already.
fn serve_control(dir: &JobDir, checkpointer: &Arc<Checkpointer>, _starting: &Starting<'_>) {
    if let Err(error) = server::serve(&dir.control(), checkpointer.clone()) {
        error!(checkpointer.log, "{}: {error}: no checkpoints", dir.control().display());
    }
    checkpointer.take_part();
}

/// Collects every child that has ended: the program's outcome if it is among them. What the job's
/// proxies leave is looked at.
fn reap(program: &Program, proxies: &Proxies, recovery: &Recovery) -> Option<Outcome> {
    let outcome = program.reap(|pid, ended| {
        if let Some(proxy) = proxies.ended(pid) {
            recovery.proxy_ended(proxy, ended);
        }
    });
    for (proxy, how) in proxies.take_left() {
        recovery.proxy_ended(proxy, how);
    }
    outcome
}

/// Waits a moment for the proxies of clients that ended with the program: their last lines are then
/// in the log, and no zombie is left to an init that may not care.
fn see_proxies_off(
    program: &Program,
    spec: &JobSpec,
    signals: &Signals,
    (proxies, recovery): (&Proxies, &Recovery),
) {
    let start = Instant::now();
    let tells = spec.stats || spec.check.is_some() || spec.trace.is_some();
    let limit = if tells { LAST_WORDS } else { FAREWELL };
    while let Some(left) = limit.checked_sub(start.elapsed()) {
        reap(program, proxies, recovery);
        if proxies.none() {
            return;
        }
        signals.child_within(left);
    }
}
