//! `kedge restart`.

use crate::Failure;
use crate::events::{Event, Events, EventsArgs};
use crate::images::to_restart;
use crate::output;
use crate::progress::Progress;
use crate::run::{CheckpointArgs, HostArgs, Manner};
use clap::Args;
use kedge_control::gpu::GpuSpec;
use kedge_control::size::Size;
use kedge_image::Manifest;
use kedge_supervisor::jobs::JobName;
use kedge_supervisor::{Joining, RestartSpec, Showing};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Instant;

const AFTER_HELP: &str = "\
The job has its process ids, in namespaces of its own; for an ordinary user that takes a user \
namespace, which an administrator can forbid. A restart happens as a whole or not at all. Every \
checksum is compared: of a folder of images, a damaged one is passed over for the next older, \
which `kedge logs` tells. Ctrl-C ends a restart that is under way; nothing is left of it, and the \
image is as it was.

Examples:
  kedge restart nightly                   the newest image of the job nightly
  kedge restart nightly-0004              an image, from the folder where images go by default
  kedge restart /scratch/images           the newest good one in a folder
  kedge restart nightly-0004 --job again  under another name";

/// Bring a job back from its image; exits as its program does
///
/// Its standard input, output and error are those of this command, and so are the terminal, the
/// signals and the exit status.
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct RestartArgs {
    /// An image, or a folder of images for the newest good one: a path, or a name in the folder
    /// where images go by default; or a job's name, for the newest image of that job
    #[arg(value_name = "IMAGE|DIR|JOB")]
    path: PathBuf,
    /// The job's name [default: the one that it had]
    #[arg(long, value_name = "NAME")]
    job: Option<JobName>,
    /// Take the files below OLD, as the job knows them, from below NEW
    #[arg(long = "path-map", value_name = "OLD=NEW", value_parser = pair)]
    paths: Vec<(PathBuf, PathBuf)>,
    /// The devices, as `kedge run` takes them [default: those that the job had]
    #[arg(long, value_name = "DEVICES")]
    gpu: Option<GpuSpec>,
    /// Memory of each software device [default: as much as it had]
    #[arg(long, value_name = "SIZE")]
    soft_memory: Option<Size>,
    /// Let the job go on at once: its memory comes when it is first used, and all of it in the
    /// background. Takes root (CAP_SYS_PTRACE)
    #[arg(long)]
    lazy: bool,
    /// Restart only these parts of a job of several, such as 0,2: others are restarted on other
    /// hosts, with the same --at
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',', requires = "at")]
    parts: Vec<u32>,
    /// Say nothing: neither how the restart goes nor, when the program has ended, why it failed
    #[arg(long, short)]
    quiet: bool,
    #[command(flatten)]
    events: EventsArgs,
    #[command(flatten)]
    hosts: HostArgs,
    #[command(flatten)]
    checkpoints: CheckpointArgs,
    /// What the process that this one takes the place of has left: a job goes back
    #[arg(long, value_name = "JSON", hide = true)]
    back: Option<String>,
    /// Which parts of a job come back, as their wardens have agreed
    #[arg(long, value_name = "JSON", hide = true)]
    together: Option<String>,
    /// Where the image is: said by root's kedge to the one that it starts as the image's owner
    #[arg(long, value_name = "PATH", hide = true)]
    resolved: Option<PathBuf>,
    /// A socket on which it is said when the job may run
    #[arg(long, value_name = "FD", hide = true)]
    gate: Option<i32>,
    /// Begin before the last image is there: those that build on this one are told of at --gate
    #[arg(long, requires = "gate", conflicts_with = "lazy", hide = true)]
    standby: bool,
    /// What a part of several is to know of the others
    #[arg(long, value_name = "JSON", hide = true)]
    part: Option<String>,
}

/// What is being restarted: the image's name, its size, since when. A copy of it goes to the job's
/// init, which tells when the job has come back.
static SHOWN: Mutex<Option<(String, Size, Instant)>> = Mutex::new(None);

/// Where its events go.
static EVENTS: OnceLock<Events> = OnceLock::new();

/// How a restart is shown to people.
const SHOWING: Showing = Showing { show, take_back, came_back, restarted };
/// And where only programs are told of it.
const EVENTS_ALONE: Showing =
    Showing { show: begins, take_back: nothing, came_back: nothing, restarted };

/// How this process's restart is shown.
pub(crate) fn showing(manner: &Manner) -> Option<Showing> {
    let events = EVENTS.get_or_init(|| manner.events.clone());
    match manner.quiet {
        false => Some(SHOWING),
        true => events.are_wanted().then_some(EVENTS_ALONE),
    }
}

fn tell(event: &Event<'_>) {
    EVENTS.get().inspect(|events| events.tell(event));
}

fn nothing() {}

fn begins(job: &JobName, image: &Path, manifest: &Manifest) {
    let (job, bytes) = (&*job.to_string(), manifest.bytes());
    tell(&Event::Restarting { job, image, bytes });
    let name = output::harmless(&image.file_name().unwrap_or_default().to_string_lossy());
    let shown = Some((name, Size(bytes), Instant::now()));
    *SHOWN.lock().unwrap_or_else(PoisonError::into_inner) = shown;
}

fn restarted(job: &JobName, image: &Path) {
    let shown = SHOWN.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some((_, Size(bytes), begin)) = shown {
        let (job, seconds) = (&*job.to_string(), begin.elapsed().as_secs_f64());
        tell(&Event::Restarted { job, image, bytes, seconds });
    }
}

fn show(job: &JobName, image: &Path, manifest: &Manifest) {
    begins(job, image, manifest);
    let bytes = Size(manifest.bytes());
    let job = output::harmless(&job.to_string());
    let name = output::harmless(&image.file_name().unwrap_or_default().to_string_lossy());
    Progress::new(&format!("restarting {job} from {name}: {bytes}…")).leave();
}

/// Runs in another process than `show`, too: on the same terminal.
fn take_back() {
    Progress::new("").leave();
}

/// As [`take_back`], of a job that has come back: from here on the terminal is the program's.
fn came_back() {
    take_back();
    let shown = SHOWN.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some((name, bytes, begin)) = shown {
        let seconds = begin.elapsed().as_secs_f64();
        output::tell(&format!("{name}  {bytes}, restarted in {seconds:.1} s"));
    }
}

pub(crate) fn pair(text: &str) -> Result<(PathBuf, PathBuf), String> {
    let pair = text.split_once('=').map(|(old, new)| (PathBuf::from(old), PathBuf::from(new)));
    pair.filter(|(old, new)| old.is_absolute() && new.is_absolute())
        .ok_or_else(|| format!("`{text}` maps no path: give OLD=NEW, two absolute paths"))
}

/// The image's path without links and dots. Does not return where root restarts another user's
/// image: kedge is started anew as that user.
fn resolve(given: &Path, hosts: &HostArgs) -> Result<PathBuf, Failure> {
    let path = to_restart(given)?;
    // The way to it is looked at as it was named; a bare name is one of the folder where images go.
    let by_path = given.canonicalize().is_ok_and(|found| found == path);
    let named = if by_path { given } else { &path };
    let found = kedge_supervisor::other_owner(named, path.clone());
    let (path, owner) = found.map_err(|error| Failure::of_run(&error))?;
    let Some(owner) = owner else { return Ok(path) };
    if hosts.key_is_in_environment() {
        return Err(Failure::new(format!(
            "{} is user {}'s, who is not given the key in {}: name a file with the key that this \
             user may read (--join-key)",
            path.display(),
            owner.uid,
            kedge_supervisor::KEY
        )));
    }
    anstream::eprintln!(
        "kedge: {} is user {}'s: it is restarted as that user, with that user's rights",
        path.display(),
        owner.uid
    );
    let mut arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    arguments.extend(["--resolved".into(), path.into_os_string()]);
    Err(Failure::of_run(&kedge_supervisor::start_as(&owner, &arguments)))
}

/// Runs the job. Does not return where a signal ended the program: that ends this process too.
pub(crate) fn run(args: RestartArgs) -> Result<ExitCode, Failure> {
    if let Some(note) = &args.back {
        // Where nobody reads any more, the job goes back all the same.
        let events = args.events.open_or_later();
        // On the terminal the job's own output goes on.
        let showing = showing(&Manner { quiet: true, events: events.clone() });
        let manner = Manner { quiet: args.quiet, events };
        let spec =
            RestartSpec::of_note(args.path, note).map(|spec| RestartSpec { showing, ..spec });
        return manner.conclude(spec.and_then(|spec| kedge_supervisor::restart(&spec)));
    }
    if let Some(note) = &args.together {
        let (quiet, events) = (args.quiet, args.events.open_or_later());
        let spec = RestartSpec::of_return(args.path, note);
        let spec = spec.map(|spec| RestartSpec { quiet, ..spec });
        let manner = Manner { quiet, events };
        return manner.conclude(spec.and_then(|spec| kedge_supervisor::restart(&spec)));
    }
    let policy = args.checkpoints.policy()?;
    let path = match args.resolved {
        Some(path) => path,
        None => resolve(&args.path, &args.hosts)?,
    };
    let manner = Manner { quiet: args.quiet, events: args.events.open()? };
    // Its images stay together.
    let beside = !args.checkpoints.names_a_dir();
    let (name, paths, gpu, lazy) = (args.job, args.paths, args.gpu, args.lazy);
    let joining = args.part.as_deref().and_then(Joining::parse);
    if args.part.is_some() != joining.is_some() {
        return Err(Failure::new("--part is for kedge's own use"));
    }
    let (far, parts, back) = (args.hosts.far()?, args.parts, None);
    let soft_memory = args.soft_memory.map(|size| size.0);
    // Whoever restarts all parts has one terminal for them.
    let showing = joining.is_none().then(|| showing(&manner)).flatten();
    let spec = RestartSpec {
        path,
        name,
        lazy,
        paths,
        policy,
        beside,
        gpu,
        soft_memory,
        back,
        joining,
        together: None,
        far,
        parts,
        showing,
        quiet: args.quiet,
        resume: None,
        gate: args.gate,
        standby: args.standby,
    };
    manner.conclude(kedge_supervisor::restart(&spec))
}
