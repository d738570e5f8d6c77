//! What there is to see at one moment: values, from wherever they were gathered.

use kedge_supervisor::HeldImage;
use kedge_supervisor::jobs::{JobName, LastImage, State};
use kedge_supervisor::{Checkpoints, LastFailure};
use serde::Serialize;
use std::path::PathBuf;
use std::time::Duration;

/// All jobs of the user, at one moment.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Board {
    /// Seconds since 1970; 0 where nothing has been gathered as yet.
    pub(crate) now: u64,
    pub(crate) jobs: Vec<Job>,
}

/// A job. Ages are seconds.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Job {
    /// As its folder says, whatever that is.
    pub(crate) name: String,
    pub(crate) state: State,
    pub(crate) supervisor: u32,
    /// Seconds since 1970.
    pub(crate) started: u64,
    pub(crate) ended: Option<u64>,
    /// As `--gpu` took it, or where the devices have moved to.
    pub(crate) gpu: String,
    pub(crate) command: Vec<String>,
    pub(crate) log: PathBuf,
    pub(crate) image: Option<LastImage>,
    pub(crate) checkpoints: Checkpoints,
    pub(crate) held: Option<HeldImage>,
    /// Between two checkpoints that nobody asks for.
    pub(crate) interval: Option<Duration>,
    /// When the next of these is due, seconds since 1970.
    pub(crate) next: Option<u64>,
    /// For how long its supervisor has not answered; `None` where it has.
    pub(crate) silent: Option<Duration>,
    pub(crate) processes: Vec<Process>,
    pub(crate) devices: Devices,
    /// The last lines of its log, of the chosen job alone.
    pub(crate) tail: Vec<String>,
}

/// A process of a job.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    pub(crate) name: String,
    /// Whether it is kedge's own: the supervisor, or what has the devices.
    pub(crate) kedge: bool,
    /// Bytes.
    pub(crate) resident: u64,
    /// Processors that it has used since the last look, in hundredths of one.
    pub(crate) processor_percent: Option<f64>,
}

/// What the proxies of a job tell of its devices.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Devices {
    /// Each once, whichever of the job's processes use it.
    pub(crate) each: Vec<Device>,
    /// Processes that use devices and have answered.
    pub(crate) clients: usize,
    /// Those that have not.
    pub(crate) silent: usize,
    pub(crate) rates: Option<Rates>,
    /// Whether device memory of some process is swapped out.
    pub(crate) swapped_out: bool,
}

/// A device that a job uses.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Device {
    pub(crate) name: String,
    /// Where it is: `software`, `GPU`, or a server's address.
    pub(crate) place: String,
    /// Bytes of it that the job has, all of its processes together; `None` where that is not told.
    pub(crate) used: Option<u64>,
    /// Bytes.
    pub(crate) size: u64,
}

/// What a job has asked of its devices lately, a second.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(crate) struct Rates {
    /// Launches, each of a graph for one.
    pub(crate) launches: f64,
    pub(crate) copies: f64,
}

impl Job {
    /// Whether some of it runs.
    pub(crate) fn goes_on(&self) -> bool {
        matches!(self.state, State::Running | State::Unsupervised)
    }

    /// For how long it has run, or ran; seconds.
    pub(crate) fn age(&self, now: u64) -> u64 {
        self.ended.unwrap_or(now).saturating_sub(self.started)
    }

    /// The name that orders are given by; `None` of a folder that says what no job is called.
    pub(crate) fn known(&self) -> Option<JobName> {
        self.name.parse().ok()
    }

    /// The program's processes.
    pub(crate) fn program(&self) -> impl Iterator<Item = &Process> {
        self.processes.iter().filter(|process| !process.kedge)
    }

    /// Bytes of device memory: what the job has, and of how much. `None` where nothing is told.
    pub(crate) fn memory(&self) -> Option<(u64, u64)> {
        let told = self.devices.each.iter().filter_map(|one| Some((one.used?, one.size)));
        told.reduce(|all, one| (all.0.saturating_add(one.0), all.1.saturating_add(one.1)))
    }
}

/// A job, as `--json` prints it.
#[derive(Debug, Serialize)]
pub(crate) struct Row<'a> {
    name: &'a str,
    state: &'static str,
    supervisor: u32,
    /// Seconds, or null where it answers.
    silent_seconds: Option<f64>,
    started: u64,
    age_seconds: u64,
    gpu: &'a str,
    command: &'a [String],
    log: &'a PathBuf,
    processes: &'a [Process],
    devices: &'a [Device],
    device_memory_bytes: Option<u64>,
    device_memory_size: Option<u64>,
    launches_per_second: Option<f64>,
    copies_per_second: Option<f64>,
    swapped_out: bool,
    clients: usize,
    clients_silent: usize,
    image: Option<&'a LastImage>,
    image_age_seconds: Option<u64>,
    checkpoints: &'a Checkpoints,
    interval_seconds: Option<f64>,
    next_checkpoint: Option<u64>,
}

impl Board {
    /// Returns what `--json` prints of the jobs.
    pub(crate) fn rows(&self) -> Vec<Row<'_>> {
        let row = |job| Row::of(job, self.now);
        self.jobs.iter().map(row).collect()
    }
}

impl Row<'_> {
    fn of(job: &Job, now: u64) -> Row<'_> {
        let memory = job.memory();
        Row {
            name: &job.name,
            state: job.state.name(),
            supervisor: job.supervisor,
            silent_seconds: job.silent.map(|time| time.as_secs_f64()),
            started: job.started,
            age_seconds: job.age(now),
            gpu: &job.gpu,
            command: &job.command,
            log: &job.log,
            processes: &job.processes,
            devices: &job.devices.each,
            device_memory_bytes: memory.map(|(used, _)| used),
            device_memory_size: memory.map(|(_, size)| size),
            launches_per_second: job.devices.rates.map(|rates| rates.launches),
            copies_per_second: job.devices.rates.map(|rates| rates.copies),
            swapped_out: job.devices.swapped_out,
            clients: job.devices.clients,
            clients_silent: job.devices.silent,
            image: job.image.as_ref(),
            image_age_seconds: job.image.as_ref().map(|image| now.saturating_sub(image.captured)),
            checkpoints: &job.checkpoints,
            interval_seconds: job.interval.map(|interval| interval.as_secs_f64()),
            next_checkpoint: job.next,
        }
    }
}

/// Why the latest checkpoint failed that did, where none has been made since.
pub(crate) fn failure(job: &Job) -> Option<&LastFailure> {
    let failure = job.checkpoints.last_failure.as_ref()?;
    let since = job.image.as_ref().is_some_and(|image| image.captured > failure.at);
    (!since).then_some(failure)
}
