//! `kedge balance`: moves the user's jobs to better devices as those become free.
//!
//! [`decide`] has the policy, which is a function of what is known at one moment; what is here
//! looks, asks and tells. docs/design/0051-balance.md has why it is so.

mod decide;
mod errors;
mod gains;
mod log;
mod memory;
mod places;

use crate::Failure;
use crate::child;
use crate::migrate;
use crate::readiness;
use crate::serve::ignored_signals;
use crate::time::Time;
use clap::Args;
use decide::{Decision, Free, JobView, PlaceView, Rules, Trigger, View, Wait, decide};
use errors::Errors;
use gains::Gains;
use kedge_control::gpu::GpuSpec;
use kedge_control::joblog::JobLog;
use kedge_control::note;
use kedge_control::size::Size;
use kedge_supervisor::Supervisor;
use kedge_supervisor::control::{self, AskError, Migrate, Moving};
use kedge_supervisor::jobs::{JobName, Jobs, Meta, State};
use log::{Event, Log};
use memory::{Memory, Pauses};
use places::Places;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const AFTER_HELP: &str = "\
Places are devices as `kedge migrate --to` takes them, the best first. Jobs that are on one of \
them move to another; jobs on other devices stay where they are. A job moves

  - when devices of this machine are free that stand before those that it is on. Free is what \
`kedge migrate --when free` means by it, and that no other job of yours is on them;
  - when its program would be --gain times as fast elsewhere, by a model of the line (`kedge model \
fit`, --model) and by what it asked of its devices when it ran before (`kedge run --stats=FILE`, \
--stats). Where that can be predicted, it alone decides;
  - when the devices that it is on report errors: GPUs of this machine by nvidia-smi (uncorrected \
errors of memory), any devices in the file --errors, a JSON object such as {\"gpu-host/0\": 2}.

One job moves at a time, as by `kedge migrate`, and then nothing for --hold-off; a job that has \
moved stays for --settle, unless its devices report errors. Where a move fails, the job stays where \
it is, and that move is tried again after --hold-off, later less often, up to 4 hours.

No job moves between GPUs of this machine and a server's devices: between a server and `soft`.

Each decision is told with its numbers. With --json, a line for each event: begins, decides (job, \
from, to, trigger: free, gain or errors, and its numbers), moved (job, to, seconds, pause_seconds, \
bytes), failed (job, to, why, again_seconds), waits (job, to, why), lacks (why) and ends.

Ctrl-C ends it; where a job moves, once that has moved. A second Ctrl-C ends it at once, and the \
move goes on without it. One runs for each user; a second one is refused, unless --dry-run.

Options can stand in a file (`kedge config --help`):

  [balance]
  place = [\"local:0\", \"local:1\"]
  settle = \"10m\"

Examples:
  kedge balance --place soft --place gpu-host:7531/0
  kedge balance --place local:0 --place soft --dry-run --once
  kedge balance --place soft --place gpu-host --model line.json --stats sim.json --gain 1.5
  kedge balance --place local:0 --place local:1 --errors /run/gpu-errors.json --json";

/// Between two looks whether somebody has asked it to end.
const TICK: Duration = Duration::from_millis(100);
/// Between two looks, at least.
const EVERY: Duration = Duration::from_millis(100);
/// After a move, at least.
const HOLD_OFF: Duration = Duration::from_secs(1);

/// Move your jobs to better devices as those become free
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct BalanceArgs {
    /// A place, the best first: soft, local[:I,J…] or HOST[:PORT][/I,J…]; twice or more
    #[arg(long, value_name = "DEVICES")]
    place: Vec<String>,
    /// Only jobs of these names
    #[arg(long, value_name = "JOB")]
    job: Vec<JobName>,
    /// How many times as fast a program must be elsewhere, the move counted in; more than 1
    #[arg(long, value_name = "X", default_value_t = 1.2)]
    gain: f64,
    /// What `kedge model fit` has written, of one line each
    #[arg(long, value_name = "FILE", requires = "stats")]
    model: Vec<PathBuf>,
    /// What `kedge run --stats=FILE` has written of the same command, on devices here
    #[arg(long, value_name = "FILE", requires = "model")]
    stats: Vec<PathBuf>,
    /// A file that tells of devices' errors; read again at each look
    #[arg(long, value_name = "FILE")]
    errors: Option<PathBuf>,
    /// Errors that devices may have reported and still count as whole
    #[arg(long, value_name = "N", default_value_t = 0)]
    max_errors: u64,
    /// Between two looks, 100ms or more
    #[arg(long, value_name = "TIME", default_value = "5s")]
    every: Time,
    /// After a move, or one that has failed: nothing else moves for so long, 1s or more
    #[arg(long, value_name = "TIME", default_value = "10s")]
    hold_off: Time,
    /// A job that has moved, by whomever, stays for so long
    #[arg(long, value_name = "TIME", default_value = "5m")]
    settle: Time,
    /// As of `kedge migrate`: a job that would stand still for longer stays
    #[arg(long, value_name = "TIME")]
    max_pause: Option<Time>,
    /// As of `kedge migrate`: bytes a second that cross at most while the program runs
    #[arg(long, value_name = "SIZE")]
    rate: Option<Size>,
    /// Look once, move one job at most, and end
    #[arg(long)]
    once: bool,
    /// Decide, and move nothing. Whether devices are free is found out all the same
    #[arg(long)]
    dry_run: bool,
    /// Print events as lines of JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &BalanceArgs) -> Result<(), Failure> {
    let places = Places::read(&args.place).map_err(Failure::of_usage)?;
    // With 1, jobs would move to and fro between places that are alike.
    if !args.gain.is_finite() || args.gain <= 1.0 {
        return Err(Failure::of_usage(format!("--gain {}: give more than 1", args.gain)));
    }
    for (option, given, least) in
        [("--every", args.every, EVERY), ("--hold-off", args.hold_off, HOLD_OFF)]
    {
        if given.0 < least {
            let why = format!("{option} {given}: give {} or more", Time(least));
            return Err(Failure::of_usage(why));
        }
    }
    let gains = Gains::read(&args.model, &args.stats)?;
    let jobs = Jobs::open()?;
    // One that moves nothing may look beside another.
    let _only = if args.dry_run { None } else { Some(jobs.only_balance()?) };
    let told = told_to_end()?;
    let mut log = Log::new(args.json);
    log.tell(&Event::Begins {
        places: places.iter().map(GpuSpec::to_string).collect(),
        gain: args.gain,
        settle_seconds: args.settle.0.as_secs_f64(),
        dry_run: args.dry_run,
    });
    let errors = Errors::new(args.errors.as_deref(), places.iter());
    let memory = Memory::new(Pauses { hold_off: args.hold_off.0, settle: args.settle.0 });
    let begin = Instant::now();
    readiness::ready("looking for better devices");
    let mut daemon = Daemon { args, jobs, places, gains, errors, memory, log, begin, told };
    while !daemon.is_told() {
        match daemon.look() {
            Err(failure) if args.once => return Err(failure),
            // What cannot be read now may be at the next look.
            Err(failure) => daemon.log.tell(&Event::Lacks { why: failure.message().to_owned() }),
            Ok(()) if args.once => break,
            Ok(()) => {}
        }
        daemon.sleep(args.every.0);
    }
    readiness::stopping();
    daemon.log.tell(&Event::Ends);
    Ok(daemon.log.end()?)
}

/// Whether this process is to end: it was told so. Told again, it ends at once. Signals that it was
/// started to ignore stay ignored.
fn told_to_end() -> Result<Arc<AtomicBool>, Failure> {
    let (told, ignored) = (Arc::new(AtomicBool::new(false)), ignored_signals());
    for signal in [SIGTERM, SIGINT, SIGHUP].into_iter().filter(|signal| !ignored(*signal)) {
        // In this order: the first one finds it unset.
        flag::register_conditional_default(signal, told.clone())?;
        flag::register(signal, told.clone())?;
    }
    Ok(told)
}

struct Daemon<'a> {
    args: &'a BalanceArgs,
    jobs: Jobs,
    places: Places,
    gains: Gains,
    errors: Errors,
    memory: Memory,
    log: Log,
    begin: Instant,
    told: Arc<AtomicBool>,
}

/// A job that runs and is on one of the places.
struct Found {
    name: JobName,
    /// What supervises it: whoever has its name later is another job.
    by: Supervisor,
    at: usize,
    meta: Meta,
}

impl Daemon<'_> {
    fn is_told(&self) -> bool {
        self.told.load(Ordering::SeqCst)
    }

    fn now(&self) -> Duration {
        self.begin.elapsed()
    }

    fn sleep(&self, time: Duration) {
        let begin = Instant::now();
        while !self.is_told() && begin.elapsed() < time {
            std::thread::sleep(TICK.min(time));
        }
    }

    /// Looks once, and moves a job if it is time.
    fn look(&mut self) -> Result<(), Failure> {
        let metas = self.running()?;
        let found: Vec<Found> = metas.iter().filter_map(|meta| self.find(meta)).collect();
        let now = self.now();
        // Also those that are elsewhere: they may come back.
        let seen = |meta: &'_ Meta| {
            Some((meta.name.clone(), Supervisor::of_meta(meta)?, meta.gpu.clone()))
        };
        self.memory.see(now, metas.iter().filter_map(seen));
        if found.is_empty() {
            self.log.waits(Vec::new());
        }
        if found.is_empty() || self.memory.holds(now) {
            return Ok(());
        }
        let mut view = self.view(&metas, &found, now);
        let rules = Rules { gain: self.args.gain, most_errors: self.args.max_errors };
        while !self.is_told() {
            match decide(&view, &rules) {
                Decision::Look(place) => view.places[place].free = self.is_free(place, &view),
                Decision::Move { job, to, trigger, free } => {
                    let (from, to_name) = (view.jobs[job].at, &view.places[to].name);
                    // To look has taken a while.
                    if let Some(why) = self.changed(&found[job], to)? {
                        let job = view.jobs[job].name.clone();
                        self.log.waits(vec![Wait { job, to: to_name.clone(), why }]);
                        return Ok(());
                    }
                    let decides = Event::Decides {
                        job: view.jobs[job].name.clone(),
                        from: view.places[from].name.clone(),
                        to: to_name.clone(),
                        trigger,
                        free_bytes: free,
                        dry_run: self.args.dry_run,
                    };
                    self.log.tell(&decides);
                    self.moves(&found[job], to, to_name, trigger);
                    return Ok(());
                }
                Decision::Stay(waits) => {
                    self.log.waits(waits);
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// The jobs that go on, the oldest first.
    fn running(&self) -> Result<Vec<Meta>, Failure> {
        let mut metas = self.jobs.list()?;
        let goes_on = |meta: &Meta| matches!(meta.state, State::Running | State::Unsupervised);
        // Programs that look whether devices are free are over in a moment.
        metas.retain(|meta| goes_on(meta) && !meta.name.starts_with(child::PROBE));
        metas.reverse();
        Ok(metas)
    }

    /// Why a job is not to move there after all: it is not what was decided about, or somebody has
    /// come there.
    fn changed(&self, found: &Found, to: usize) -> Result<Option<String>, Failure> {
        let Some(to) = self.places.iter().nth(to) else { return Ok(None) };
        Ok(change(&self.running()?, &found.meta, found.by, to))
    }

    /// That job, if it is to be looked after.
    fn find(&self, meta: &Meta) -> Option<Found> {
        let name: JobName = meta.name.parse().ok()?;
        let asked = self.args.job.is_empty() || self.args.job.contains(&name);
        if !asked || meta.state != State::Running {
            return None;
        }
        let (by, at) = (Supervisor::of_meta(meta)?, self.places.find(&meta.gpu)?);
        Some(Found { name, by, at, meta: meta.clone() })
    }

    fn view(&mut self, metas: &[Meta], found: &[Found], now: Duration) -> View {
        let log = &mut self.log;
        let reading = self.errors.read(|why| log.tell(&Event::Lacks { why: why.to_owned() }));
        let place = |(at, spec): (usize, &GpuSpec)| PlaceView {
            name: spec.to_string(),
            near: places::is_near(spec),
            bound: places::is_bound(spec),
            devices: places::count(spec),
            taken: at_place(metas, spec),
            errors: self.errors.of(at, spec, &reading),
            free: self.memory.free(at, now),
        };
        let job = |job: &Found| {
            let expected = self.gains.of(&job.meta.command, self.places.iter());
            JobView {
                name: job.meta.name.clone(),
                at: job.at,
                settles: self.memory.settles(&job.meta.name, now),
                barred: self.memory.barred(&job.meta.name, now),
                seconds: expected.seconds,
                move_seconds: expected.move_seconds,
            }
        };
        let places = self.places.iter().enumerate().map(place).collect();
        View { places, jobs: found.iter().map(job).collect() }
    }

    /// Finds out whether a place is free: a program of kedge's own runs there.
    fn is_free(&mut self, place: usize, view: &View) -> Free {
        match migrate::is_free(&view.places[place].name) {
            Ok(bytes) => {
                self.memory.is_free(place);
                Free::Yes { bytes }
            }
            Err(why) => {
                let now = self.now();
                self.memory.is_not_free(place, now, &why);
                Free::No(why)
            }
        }
    }

    /// Moves a job, and returns when it has moved or stays.
    fn moves(&mut self, found: &Found, to: usize, to_name: &str, trigger: Trigger) {
        let job = found.meta.name.clone();
        if self.args.dry_run {
            let now = self.now();
            return self.memory.would(&job, to, now);
        }
        // Who reads the job's log finds why it has moved.
        let who = format!("kedge balance[{}]", std::process::id());
        if let Ok(joblog) = JobLog::open(&self.jobs.log_path(&found.name), who) {
            note!(joblog, "moves to {to_name}: {}", log::because(&trigger));
        }
        let (mut seconds, mut pause_seconds, mut bytes) = (0.0, 0.0_f64, 0);
        let tell = |moving: &Moving| match *moving {
            Moving::Round { bytes: more, .. } => bytes += more,
            Moving::Pause { bytes: more, seconds, .. } => {
                bytes += more;
                pause_seconds = pause_seconds.max(seconds);
            }
            Moving::Stays { .. } => {}
            Moving::Done { seconds: all, .. } => seconds = all,
        };
        let order = self.order(to_name);
        let moved = control::migrate(&self.jobs, &found.name, Some(found.by), &order, tell);
        let (now, to_name) = (self.now(), to_name.to_owned());
        let event = match moved {
            Ok(()) => {
                self.memory.moved(&job, &to_name, now);
                Event::Moved { job, to: to_name, seconds, pause_seconds, bytes }
            }
            Err(error) => {
                let never = matches!(
                    error,
                    AskError::Refused(_) | AskError::Ended(_) | AskError::Unknown(_)
                );
                let why = error.to_string();
                let again = self.memory.failed(&job, to, now, &why, never);
                let again_seconds = again.map(|again| again.as_secs_f64());
                Event::Failed { job, to: to_name, why, again_seconds }
            }
        };
        self.log.tell(&event);
    }

    fn order(&self, to: &str) -> Migrate {
        let max_pause = self.args.max_pause.map_or(migrate::MAX_PAUSE, |time| time.0);
        Migrate {
            to: to.to_owned(),
            max_pause_ms: u64::try_from(max_pause.as_millis()).unwrap_or(u64::MAX),
            rounds: migrate::ROUNDS,
            // Who names a time counts on it.
            or_stay: self.args.max_pause.is_some(),
            rate: self.args.rate.map(|rate| rate.0),
            check: false,
        }
    }
}

/// A job that has devices there.
fn at_place(metas: &[Meta], place: &GpuSpec) -> Option<String> {
    let is_there =
        |meta: &&Meta| meta.gpu.parse::<GpuSpec>().is_ok_and(|gpu| places::overlap(&gpu, place));
    metas.iter().find(is_there).map(|meta| meta.name.clone())
}

/// What keeps a job, as it was once, from moving among the jobs that there are now.
fn change(now: &[Meta], job: &Meta, by: Supervisor, to: &GpuSpec) -> Option<String> {
    let same = |meta: &Meta| {
        meta.name == job.name && meta.gpu == job.gpu && Supervisor::of_meta(meta) == Some(by)
    };
    if !now.iter().any(same) {
        return Some("it has moved or ended meanwhile".to_owned());
    }
    at_place(now, to).map(|other| format!("the job {other} is there"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_has_changed_meanwhile_is_not_moved() {
        let meta = |name: &str, supervisor: u32, gpu: &str, state: &str| -> Meta {
            let meta = serde_json::json!({
                "name": name, "supervisor": supervisor, "pid": null, "command": [], "gpu": gpu,
                "started": 0, "ended": null, "state": state,
            });
            serde_json::from_value(meta).expect("a job")
        };
        let this = std::process::id();
        let job = meta("j", this, "far/0", "running");
        let by = Supervisor::of_meta(&job).expect("it runs");
        let to = "local:0".parse().expect("a place");
        let changed = Some("it has moved or ended meanwhile");
        for (now, said) in [
            (vec![job.clone()], None),
            (vec![job.clone(), meta("k", this, "local:1", "running")], None),
            (vec![job.clone(), meta("k", this, "local", "running")], Some("the job k is there")),
            (vec![], changed),
            (vec![meta("j", this, "far/1", "running")], changed),
            (vec![meta("j", 1, "far/0", "running")], changed),
            (vec![meta("k", this, "far/0", "running")], changed),
        ] {
            assert_eq!(change(&now, &job, by, &to).as_deref(), said, "{now:?}");
        }
    }
}
