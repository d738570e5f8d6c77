//! `kedge run`.

use crate::Failure;
use crate::cache::ForProgram;
use crate::events::{Event, Events, EventsArgs};
use crate::gpu;
use crate::mistyped;
use crate::moved_job;
use crate::output;
use crate::restart;
use crate::time::Time;
use clap::Args;
use kedge_control::gpu::GpuSpec;
use kedge_control::size::Size;
use kedge_control::stats::JobStats;
use kedge_image::DeviceLimits;
use kedge_supervisor::jobs::JobName;
use kedge_supervisor::policy::{self, Interval, JobGpu, OnTerm, Policy};
use kedge_supervisor::{
    End, Ended, Far, JobSpec, MoveTo, Outcome, Parts, RestartSpec, RunError, die_of,
};
use kedge_supervisor::{kedge_again, resume};
use std::ffi::OsString;
use std::num::NonZeroU32;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

/// A server keeps a session no longer.
const MAX_RECONNECT: Duration = Duration::from_secs(3600);

const AFTER_HELP: &str = "\
Examples:
  kedge run -- ./program --its-own --arguments
  kedge run --gpu soft:2 --soft-memory 2G -- ./program
  CUDA_VISIBLE_DEVICES=1 kedge run --gpu local -- ./program   as without kedge
  kedge run --gpu a/0,a/1,b/0,local:0 -- ./program   devices of two servers and of this machine
  kedge run --job nightly -- make check     every program that make starts runs on the device
  kedge run --gpu none --interval 10m --keep 3 -- ./simulate
                                            no device; an image every ten minutes, the last three kept";

/// Run a program on virtual GPUs; exits as the program does
///
/// The program and all that it starts find kedge's driver through LD_LIBRARY_PATH. Its descriptors,
/// its terminal and its signals are its own; kedge writes to the job's log (`kedge logs`). When it
/// has ended, and its devices have failed it, what it needs was refused, or checkpoints that were
/// due could not be taken, that is said on standard error.
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct RunArgs {
    /// Devices that the program sees: local for this machine's GPUs, local:I,J… for some of them,
    /// soft, or soft:N for N software devices (with :apart, managed memory is in theirs),
    /// HOST[:PORT][/I,J…] for those of a machine that runs `kedge serve`, several of these, by
    /// number and between commas, or none for a job of the CPU alone [default: local where there
    /// are a driver and a GPU, else soft]
    #[arg(long, value_name = "SPEC")]
    gpu: Option<JobGpu>,
    /// Memory of each software device, such as 4G [default: half of this machine's, shared out]
    #[arg(long, value_name = "SIZE")]
    soft_memory: Option<Size>,
    /// Memory of each GPU that each of the job's processes may have, such as 4G, and is told that
    /// there is; managed memory beyond it is the host's [default: what is there]
    #[arg(long, value_name = "SIZE")]
    gpu_memory: Option<Size>,
    /// Memory of each GPU that a checkpoint may take for its copy, such as 16G [default: what is
    /// spare]
    #[arg(long, value_name = "SIZE")]
    cache_gpu: Option<Size>,
    /// Pinned host memory that it may take, where a GPU has not enough [default: half of what is
    /// free]
    #[arg(long, value_name = "SIZE")]
    cache_host: Option<Size>,
    /// Bytes a second that a checkpoint's copy leaves a GPU with at most, such as 2G [default: as
    /// fast as the program does not notice much of it]
    #[arg(long, value_name = "SIZE")]
    drain_rate: Option<Size>,
    /// Move the job's devices there once it runs, as `kedge migrate --to` does: start it on devices
    /// far away, or in software, rather than to wait for others
    #[arg(long, value_name = "DEVICES", conflicts_with = "resume")]
    move_to: Option<GpuSpec>,
    /// With --move-to: as soon as nobody else has memory of those devices to speak of
    #[arg(long, requires = "move_to")]
    when_free: bool,
    /// Of devices on another machine: how long a line that was cut is tried anew before the program
    /// is told that they are lost (an hour at most) [default: 60s]
    #[arg(long, value_name = "TIME")]
    reconnect: Option<Time>,
    /// The job's name, for `kedge ps` and `kedge logs` [default: made from the program's]
    #[arg(long, value_name = "NAME")]
    job: Option<JobName>,
    /// Run the program as one part of the job NAME: all that join it are checkpointed and restarted
    /// as one. The parts are NAME.0, NAME.1 …
    #[arg(long, value_name = "NAME", conflicts_with_all = ["job", "on_term"])]
    join: Option<JobName>,
    /// Go on from the newest good image of the job that --job names, where there is one that it has
    /// made since it last ended with status 0; otherwise start it
    #[arg(long, requires = "job")]
    resume: bool,
    /// Absorb what is written below DIR in spare memory while the job runs, as `kedge cache start
    /// --close memory` does; when it has ended, wait until all of it is there. Not for a job that
    /// goes back to its images
    #[arg(long, value_name = "DIR", conflicts_with_all = ["resume", "recover"])]
    cache: Option<PathBuf>,
    /// With --cache: have all writes go through the cache's daemon. Otherwise programs that use the
    /// C library write at the ends of files into the cache's memory by themselves
    #[arg(long, requires = "cache")]
    no_direct: bool,
    /// Say nothing when the program has ended
    #[arg(long, short)]
    quiet: bool,
    #[command(flatten)]
    events: EventsArgs,
    /// Count what the program asks of its devices, tell it on standard error and in the job's log
    /// when it has ended, and write it to FILE as JSON, for `kedge model predict`
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true)]
    stats: Option<Option<PathBuf>>,
    #[command(flatten)]
    hosts: HostArgs,
    #[command(flatten)]
    checkpoints: CheckpointArgs,
    /// The program and its arguments
    #[arg(
        value_name = "CMD",
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    command: Vec<OsString>,
}

impl RunArgs {
    /// Where the job's images go; `None` where there is no folder by default.
    ///
    /// # Errors
    /// The current folder is gone.
    pub(crate) fn images(&self) -> Result<Option<PathBuf>, Failure> {
        Ok(self.checkpoints.policy()?.dir)
    }
}

/// Where the parts of a job on several hosts meet; `kedge restart` takes the same.
#[derive(Debug, Args)]
pub(crate) struct HostArgs {
    /// The job's parts are on several hosts, and meet at this address of one of them. All of them
    /// know a key: see --join-key
    #[arg(long, value_name = "HOST:PORT")]
    at: Option<String>,
    /// A file that only you may read, with the key that the parts of the job share [default: what
    /// the variable KEDGE_JOIN_KEY has]
    #[arg(long, value_name = "FILE", requires = "at")]
    join_key: Option<PathBuf>,
}

impl HostArgs {
    /// Whether the key is the environment's.
    pub(crate) fn key_is_in_environment(&self) -> bool {
        self.at.is_some() && self.join_key.is_none()
    }

    pub(crate) fn far(&self) -> Result<Option<Far>, Failure> {
        let far = self.at.as_ref().map(|at| kedge_supervisor::far(at, self.join_key.as_deref()));
        far.transpose().map_err(|error| Failure::new(error.to_string()))
    }
}

/// How the job is checkpointed; `kedge restart` takes the same.
#[derive(Debug, Args)]
#[command(next_help_heading = "Checkpoints")]
pub(crate) struct CheckpointArgs {
    /// Where the job's images go [default: $XDG_STATE_HOME/kedge/images, else
    /// ~/.local/state/kedge/images]
    #[arg(long, value_name = "DIR")]
    ckpt_dir: Option<PathBuf>,
    /// Keep the newest N images of the job: an older one goes when a new one is durable, unless
    /// another builds on it [default: keep all]
    #[arg(long, value_name = "N")]
    keep: Option<NonZeroU32>,
    /// Checkpoint the job every so often, such as 10m or 1.5h; auto: as often as loses the least
    /// work, by what its checkpoints cost, where the job is lost every so often [default for auto:
    /// auto,24h]
    #[arg(long, value_name = "TIME|auto[,TIME]", value_parser = interval)]
    interval: Option<Interval>,
    /// Store only what has changed since the image before, where the kernel can tell (Linux 6.7)
    #[arg(long)]
    incremental: bool,
    /// Every so many images, one holds everything [default with --incremental: 10]
    #[arg(long, value_name = "N", requires = "incremental")]
    full_every: Option<NonZeroU32>,
    /// When a proxy of the job dies, and with it what its devices hold, its program is killed, or
    /// one of its several parts is lost (which are all given this), restart the job from its newest
    /// good image; N times at most [default for N: 3]
    #[arg(long, value_name = "N", num_args = 0..=1, require_equals = true, default_missing_value = "3")]
    recover: Option<NonZeroU32>,
    /// Keep what the newest image has of the devices in memory too, on the devices where they have
    /// room: the job goes back much sooner. For TIME, or until another image is made or the memory
    /// is needed
    /// [default for TIME: 10m]
    #[arg(long, value_name = "TIME", num_args = 0..=1, require_equals = true, default_missing_value = "10m")]
    hold: Option<Time>,
    /// Keep N proxies ready whose devices are started, so that the job goes back, and its processes
    /// get their devices, sooner: each holds some 0.5 GB of a GPU's memory [default for N: 1]
    #[arg(long, value_name = "N", num_args = 0..=1, require_equals = true, default_missing_value = "1")]
    warm: Option<NonZeroU32>,
    /// Checkpoint the job when kedge is asked to end by SIGTERM, as batch systems do, and pass the
    /// signal on when the job is captured; at the latest after TIME, such as 30s
    #[arg(long, value_name = "checkpoint[,TIME]", value_parser = on_term)]
    on_term: Option<OnTerm>,
    /// With --on-term: end with STATUS where the job was captured before it ended, so that a batch
    /// system puts it into its queue again
    #[arg(long, value_name = "STATUS", requires = "on_term", value_parser = clap::value_parser!(u8).range(1..125))]
    requeue_exit: Option<u8>,
    /// With --on-term: start the program with SIGTERM blocked, which its children inherit, and end
    /// the job when it is captured; for batch systems that send the signal to all of a job's
    /// processes, which would be gone before they are saved
    #[arg(long, requires = "on_term")]
    withhold_term: bool,
}

/// `10m`, `auto` or `auto,12h`.
fn interval(text: &str) -> Result<Interval, String> {
    let time = |text: &str| match text.parse::<Time>() {
        Ok(Time(time)) if time < policy::MIN_INTERVAL => {
            Err("shorter than a second: give 1s or more".to_owned())
        }
        Ok(Time(time)) => Ok(time),
        Err(bad) => Err(bad.to_string()),
    };
    match text.split_once(',') {
        None if text == "auto" => Ok(Interval::Auto { mtbf: policy::MTBF }),
        Some(("auto", mtbf)) => time(mtbf).map(|mtbf| Interval::Auto { mtbf }),
        _ => time(text).map(Interval::Every),
    }
}

/// `checkpoint` or `checkpoint,30s`.
fn on_term(text: &str) -> Result<OnTerm, String> {
    let (what, deadline) = match text.split_once(',') {
        Some((what, deadline)) => (what, Some(deadline)),
        None => (text, None),
    };
    if what != "checkpoint" {
        return Err(format!("`{what}` is nothing that kedge does on SIGTERM: give checkpoint"));
    }
    let deadline = deadline.map(str::parse::<Time>).transpose().map_err(|bad| bad.to_string())?;
    Ok(OnTerm { deadline: deadline.map(|time| time.0), requeue_exit: None, withheld: false })
}

impl CheckpointArgs {
    pub(crate) fn names_a_dir(&self) -> bool {
        self.ckpt_dir.is_some()
    }

    pub(crate) fn policy(&self) -> Result<Policy, Failure> {
        let dir = match &self.ckpt_dir {
            Some(dir) => Some(std::path::absolute(dir)?),
            None => policy::default_dir().ok(),
        };
        let full_every = self.incremental.then_some(self.full_every.unwrap_or(policy::FULL_EVERY));
        let requeue_exit = self.requeue_exit;
        let withheld = self.withhold_term;
        let on_term = self.on_term.map(|on_term| OnTerm { requeue_exit, withheld, ..on_term });
        let (keep, interval, recover) = (self.keep, self.interval, self.recover);
        let (hold, warm) = (self.hold.map(|time| time.0), self.warm);
        Ok(Policy { dir, keep, interval, on_term, full_every, recover, hold, warm, resume: false })
    }
}

/// Runs the job. Does not return where a signal ended the program: that ends this process too.
pub(crate) fn run(args: RunArgs) -> Result<ExitCode, Failure> {
    mistyped::refuse::<RunArgs>("run", &args.command)?;
    let mut policy = args.checkpoints.policy()?;
    policy.resume = args.resume;
    let far = args.hosts.far()?;
    if far.is_some() && args.join.is_none() {
        return Err(Failure::new("--at is for jobs of several parts: give --join NAME with it"));
    }
    if let (true, Some(dir), Some(job)) = (args.resume, &policy.dir, &args.job)
        && !resume::images(dir, job).unwrap_or_default().is_empty()
    {
        let manner = Manner { quiet: args.quiet, events: args.events.open()? };
        let spec = resumed(&args, &manner, dir.clone(), job.clone(), policy.clone());
        return manner.conclude(kedge_supervisor::restart(&spec));
    }
    let move_to = args.move_to.as_ref().map(ToString::to_string);
    let move_to = move_to.map(|to| MoveTo { to, when_free: args.when_free });
    if move_to.is_some() && matches!(args.gpu, Some(JobGpu::None)) {
        return Err(Failure::new("--move-to: a job of the CPU alone has no devices to move"));
    }
    let manner = Manner { quiet: args.quiet, events: args.events.open()? };
    let mut words = args.command.into_iter();
    let soft_only = args.soft_memory.map(|_| "--soft-memory");
    let (gpu, gpu_default) = gpu::of_job(args.gpu.as_ref(), soft_only)?;
    let named = |(option, given)| if given { gpu.refuse_several(option) } else { None };
    let moves = [("--move-to", move_to.is_some())];
    let among = |(option, given)| if given { gpu.refuse_gpu_among(option) } else { None };
    let refused = policy.needs_one_place().into_iter().chain(moves).find_map(named);
    if let Some(refused) =
        refused.or_else(|| policy.needs_checkpoints().into_iter().find_map(among))
    {
        return Err(Failure::new(refused));
    }
    if args.gpu_memory.is_some() && !matches!(gpu, JobGpu::Devices(GpuSpec::Local { .. })) {
        return Err(Failure::new(format!(
            "--gpu-memory bounds what is taken of this machine's GPUs, and the job's devices are \
             {gpu}: give --gpu local, or --soft-memory for software devices"
        )));
    }
    let bytes = |size: Option<Size>| size.map(|size| size.0);
    let limits = DeviceLimits {
        soft_memory: bytes(args.soft_memory),
        gpu_memory: bytes(args.gpu_memory),
        cache_gpu: bytes(args.cache_gpu),
        cache_host: bytes(args.cache_host),
        drain_rate: bytes(args.drain_rate),
        reconnect_ms: args.reconnect.map(|time| time.0.min(MAX_RECONNECT).as_millis() as u64),
    };
    let direct = args.cache.is_some() && !args.no_direct;
    let preload = direct.then(preload).transpose()?;
    let spec = JobSpec {
        gpu,
        gpu_default,
        limits,
        name: args.job,
        // Who names the parts of a job starts them himself.
        shells: args.join.is_none(),
        join: args.join,
        far,
        program: words.next().unwrap_or_default(),
        arguments: words.collect(),
        policy,
        stats: args.stats.is_some(),
        check: None,
        trace: None,
        move_to,
        preload,
        quiet: args.quiet,
    };
    let cached = args.cache.as_deref().map(ForProgram::begin).transpose()?;
    let end = kedge_supervisor::run(&spec);
    // A job that goes back has not ended.
    if let (Some(cached), Ok(End::Ended(_)) | Err(_)) = (cached, &end) {
        cached.end();
    }
    if let (Some(to), Ok(End::Ended(Ended { stats: Some(stats), .. }))) = (&args.stats, &end) {
        tell_stats(stats, to.as_deref(), args.quiet);
    }
    manner.conclude(end)
}

/// Returns the library that a job is to be given.
fn preload() -> Result<PathBuf, Failure> {
    let library = Parts::preload().map_err(|error| Failure::new(error.to_string()))?;
    // What separates libraries in LD_PRELOAD (ld.so(8)).
    if library.to_str().is_none_or(|path| path.contains([':', ' '])) {
        return Err(Failure::new(format!(
            "{}: a library cannot be preloaded from there: install kedge in a folder whose name \
             has no blank and no colon, or go with --no-direct",
            library.display()
        )));
    }
    Ok(library)
}

/// What `--resume` restarts. The devices are those that are named, or that the job had.
fn resumed(
    args: &RunArgs,
    manner: &Manner,
    path: PathBuf,
    job: JobName,
    policy: Policy,
) -> RestartSpec {
    let gpu = match &args.gpu {
        Some(JobGpu::Devices(gpu)) => Some(gpu.clone()),
        Some(JobGpu::None) | None => None,
    };
    RestartSpec {
        path,
        name: Some(job.clone()),
        policy,
        gpu,
        soft_memory: args.soft_memory.map(|size| size.0),
        showing: restart::showing(manner),
        quiet: args.quiet,
        resume: Some(job),
        ..RestartSpec::default()
    }
}

/// Tells what the job has asked of its devices. The program has ended as it has, whether or not
/// that can be written.
fn tell_stats(stats: &JobStats, file: Option<&Path>, quiet: bool) {
    if !quiet {
        let lines = stats.stats.lines();
        lines.iter().for_each(|line| output::complain(&format!("{}: {line}", stats.job)));
    }
    let Some(file) = file else { return };
    let written = serde_json::to_vec_pretty(stats)
        .map_err(std::io::Error::from)
        .and_then(|text| std::fs::write(file, text));
    if let Err(error) = written {
        output::complain(&format!("{}: {error}: the figures are not kept", file.display()));
    }
}

/// What is said of a job's end, and where.
#[derive(Debug, Default)]
pub(crate) struct Manner {
    /// Nothing to people.
    pub(crate) quiet: bool,
    pub(crate) events: Events,
}

impl Manner {
    /// Ends as the job has ended, or goes back with it.
    ///
    /// What there is to say comes when the program has ended: in a pipe, too, its own words come
    /// first.
    pub(crate) fn conclude(&self, end: Result<End, RunError>) -> Result<ExitCode, Failure> {
        let events = &self.events;
        let end = end.map_err(|error| {
            let failure = Failure::of_run(&error);
            events.tell(&Event::Failed { error: failure.message() });
            failure
        });
        match end? {
            End::Ended(Ended { moved: Some(moved), .. }) => Err(moved_job::go_along(&moved, self)),
            End::Ended(Ended { outcome, postscript, .. }) => {
                events.tell(&ended(outcome));
                let lines = postscript.iter().filter(|_| !self.quiet);
                lines.for_each(|line| output::complain(line));
                match outcome {
                    Outcome::Exited(code) => Ok(ExitCode::from(code)),
                    Outcome::Killed(signal) => die_of(signal),
                }
            }
            End::GoBack(back) => {
                events.tell(&Event::GoesBack { image: &back.image });
                let mut command = kedge_again();
                command.arg0("kedge").arg("restart").arg(&back.image).arg("--back").arg(&back.note);
                Err(self.go_on_as(command))
            }
            End::Together(together) => {
                events.tell(&Event::GoesBack { image: &together.image });
                Err(self.go_on_as(together.command()))
            }
        }
    }

    /// Becomes the kedge that brings the job back; or why it cannot.
    fn go_on_as(&self, mut command: Command) -> Failure {
        command.args(self.quiet.then_some("--quiet"));
        if let Some(path) = self.events.path() {
            // One word: its name may begin as an option does.
            let mut events = OsString::from("--events=");
            events.push(path);
            command.arg(events);
        }
        Failure::new(format!("cannot start kedge again: {}", command.exec()))
    }
}

/// Ends as a job has that ran elsewhere.
///
/// # Errors
/// It is not known how it has.
pub(crate) fn ended_as(
    manner: &Manner,
    outcome: Result<Outcome, Failure>,
) -> Result<ExitCode, Failure> {
    let outcome = outcome
        .inspect_err(|failure| manner.events.tell(&Event::Failed { error: failure.message() }))?;
    manner.events.tell(&ended(outcome));
    match outcome {
        Outcome::Exited(code) => Ok(ExitCode::from(code)),
        Outcome::Killed(signal) => die_of(signal),
    }
}

fn ended(outcome: Outcome) -> Event<'static> {
    match outcome {
        Outcome::Exited(status) => Event::Ended { status: Some(status), signal: None },
        Outcome::Killed(signal) => Event::Ended { status: None, signal: Some(signal) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::error::ErrorKind;

    #[test]
    fn intervals_are_read() {
        let every = |seconds| Ok(Interval::Every(Duration::from_secs(seconds)));
        let auto = |mtbf| Ok(Interval::Auto { mtbf });
        let each = [every(600), every(1), auto(Duration::from_secs(6 * 3600))];
        each.into_iter()
            .for_each(|said| assert_eq!(interval(&said.clone().unwrap().to_string()), said));
        assert_eq!((interval("10m"), interval("1s")), (every(600), every(1)));
        assert_eq!(interval("auto"), auto(policy::MTBF));
        assert_eq!(interval("auto,6h"), auto(Duration::from_secs(6 * 3600)));
        for bad in ["", "900ms", "0", "auto,", "auto,10ms", "10m,6h", "Auto", "auto,6h,1h"] {
            assert!(interval(bad).is_err(), "{bad}");
        }
    }

    /// What brings the job back knows nothing of the cache, which would stay.
    #[test]
    fn a_cache_is_for_a_job_that_does_not_go_back() {
        let read = |option: &[&str]| {
            let words = [&["run", "--cache", "/scratch"], option, &["--", "true"]].concat();
            RunArgs::augment_args(clap::Command::new("run")).try_get_matches_from(words)
        };
        assert!(read(&[]).is_ok() && read(&["--interval", "10m"]).is_ok());
        assert!(read(&["--no-direct"]).is_ok());
        for option in [&["--recover"][..], &["--recover=2"], &["--job", "j", "--resume"]] {
            let refused = read(option).expect_err("a conflict");
            assert_eq!(refused.kind(), ErrorKind::ArgumentConflict, "{option:?}: {refused}");
        }
    }
}
