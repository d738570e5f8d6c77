//! `kedge migrate`.

mod host;
mod when;

use crate::Failure;
use crate::output;
use crate::time::Time;
use clap::Args;
use kedge_control::gpu::GpuSpec;
use kedge_control::joblog::JobLog;
use kedge_control::note;
use kedge_control::size::Size;
use kedge_supervisor::Supervisor;
use kedge_supervisor::control::{self, AskError, Migrate, Moving, Settles};
use kedge_supervisor::jobs::{JobName, Jobs};
use std::io;
use std::path::PathBuf;
use std::time::Duration;
pub(crate) use when::is_free;
use when::{Mover, Waiting, When};

const AFTER_HELP: &str = "\
What the job has on its devices crosses to new ones while the program runs, in rounds: first all \
of it, then what has changed since. At last the devices stand still for a moment, what is left \
crosses, and the new ones have the program, which notices nothing but that pause. Until then, \
whatever fails leaves the job where it is. While a job moves a checkpoint is refused, and the \
reverse.

Software devices move to as many other software devices, on this machine or on those of a server \
(kedge serve), and back: those of all of a job's processes, in one step. GPUs move to GPUs of this \
machine, and to and from software devices of it as far as a restart could bring them there; for a \
moment they hold what the job has three times. GPUs of servers are refused as yet, as are programs \
that share device memory with other processes.

A program may change its memory faster than that crosses. Without --max-pause it then stands \
still for as long as what has changed needs; with it, the job stays where it is, unless \
--stop-and-copy.

With --host all of the job goes to another host, its processes too, and goes on there; the command \
that has started it still has its terminal, signals and exit status. Its memory crosses while it \
runs, in images that build on each other; for the last one it stands still. Files that it has \
open lie on a file system that both hosts share, or come along if it writes them, or are the same \
there (--path-map); that is looked at before it stands still. It goes on where it was, unless all \
of it is there and only waits.

--when says when that begins: at a time (+10m); idle, when the job has asked nothing of its devices \
for a second; free, when next to nothing is taken of the memory of the devices that it is to go to. \
Until then nothing has begun, and Ctrl-C ends the wait. With --keep-trying a move that cannot be \
is tried again, at first after 5 s, later less often, until the job has moved or ended, \
or can never move there.

With --json, a line for each event: waits (for, why), round (process, round, bytes, seconds), \
pause (process, bytes, seconds, why: fits, no-less, rounds or anew), stays (process, bytes, \
seconds) and done (processes, seconds).

Examples:
  kedge migrate sim --to soft
  kedge migrate sim --to local:1
  kedge migrate sim --to gpu-host:7531/0
  kedge migrate sim --to local:1 --when free --keep-trying
  kedge migrate sim --to soft --max-pause 20ms --json
  kedge migrate sim --host node7
  kedge migrate sim --host node7 --path-map /scratch/a=/scratch/b";

/// What a pause is to be within where nothing is said of it.
pub(crate) const MAX_PAUSE: Duration = Duration::from_millis(50);
/// Rounds, at most, likewise.
pub(crate) const ROUNDS: u32 = 8;

/// Time between a move that could not be and the next try, at first.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// Longest time between two tries: each waits twice as long as the one before.
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(300);

/// Move a running job elsewhere: its devices, or all of it
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct MigrateArgs {
    /// The job
    #[arg(value_name = "JOB")]
    job: JobName,
    /// Where its devices go: soft, local[:I,J…] or HOST[:PORT][/I,J…]
    #[arg(long, value_name = "DEVICES", required_unless_present = "host", default_value = "")]
    to: String,
    /// Move the whole job, its processes too, to this host, which runs `kedge serve --take-jobs`
    #[arg(
        long, value_name = "NAME[:PORT]",
        conflicts_with_all = ["to", "when", "keep_trying", "begins"]
    )]
    host: Option<String>,
    /// With --host: files below OLD here are below NEW there
    #[arg(long = "path-map", value_name = "OLD=NEW", value_parser = crate::restart::pair)]
    #[arg(requires = "host")]
    paths: Vec<(PathBuf, PathBuf)>,
    /// When that begins: now, idle, free, or after a time, such as +10m
    #[arg(long, value_name = "WHEN", default_value = "now")]
    when: When,
    /// Where it cannot move, try again until it can
    #[arg(long)]
    keep_trying: bool,
    /// The job is about to begin, and this supervises it
    #[arg(long, hide = true, value_name = "PID:START")]
    begins: Option<Supervisor>,
    /// Have the program stand still for no longer than this, as far as that can be expected, or
    /// stay. Without it: as soon as what is left is expected to cross within 50 ms, or, if that
    /// does not come, for as long as it takes
    #[arg(long, value_name = "TIME")]
    max_pause: Option<Time>,
    /// With --max-pause: move it all the same where that cannot be expected
    #[arg(long, requires = "max_pause")]
    stop_and_copy: bool,
    /// Rounds, at most
    #[arg(long, value_name = "N", default_value_t = ROUNDS)]
    rounds: u32,
    /// Bytes a second that cross at most while the program runs: it keeps more of the processors
    /// and of the line
    #[arg(long, value_name = "SIZE")]
    rate: Option<Size>,
    /// Only find out if it can: all of it crosses once, beside the program, and everything stays
    /// where it is
    #[arg(long)]
    check: bool,
    /// Print events as lines of JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &MigrateArgs) -> Result<(), Failure> {
    let jobs = Jobs::open()?;
    if let Some(host) = &args.host {
        return host::run(args, &jobs, host);
    }
    if let (When::Free, Err(bad)) = (args.when, args.to.parse::<GpuSpec>()) {
        // Such devices are never free.
        return Err(Failure::new(format!("--to {}: {bad}", args.to)));
    }
    let mover = match args.begins {
        Some(by) => Mover::of_new(&jobs, &args.job, by),
        None => Mover::of(&jobs, &args.job),
    };
    // Who starts with the job has no terminal.
    let log = args.begins.filter(|_| mover.runs()).and_then(|_| {
        let who = format!("kedge migrate[{}]", std::process::id());
        JobLog::open(&jobs.log_path(&args.job), who).ok()
    });
    let mut voice = Voice { args, log, noted: String::new(), printed: Ok(()) };
    let (mut when, mut pause) = (args.when, RETRY_INTERVAL);
    loop {
        when::wait(when, &mover, &args.to, |waiting| voice.waits(waiting));
        if let When::In(_) = when {
            // That time comes once.
            when = When::Now;
        }
        if mover.is_over() {
            // Whoever has its name by now is another one.
            return Err(AskError::Ended(args.job.clone()).into());
        }
        let tell = |moving: &Moving| voice.moves(moving);
        let moved = control::migrate(&jobs, &args.job, mover.by(), &order(args), tell);
        match moved {
            Ok(()) => return Ok(voice.printed?),
            // A job that goes back does not answer meanwhile.
            Err(error @ (AskError::Failed(_) | AskError::Silent { .. })) if args.keep_trying => {
                voice.fails(&error.to_string(), pause);
                mover.sleep(pause);
                pause = (pause * 2).min(MAX_RETRY_INTERVAL);
            }
            Err(error) => {
                voice.note(&format!("--move-to {}: not tried again: {error}", args.to));
                return Err(error.into());
            }
        }
    }
}

/// Tells what becomes of a move.
struct Voice<'a> {
    args: &'a MigrateArgs,
    /// Of the job, for what nobody else reads.
    log: Option<JobLog>,
    /// What it was told last.
    noted: String,
    printed: io::Result<()>,
}

impl Voice<'_> {
    fn print(&mut self, said: &str) {
        // The move goes on without anybody who reads.
        if self.printed.is_ok() {
            self.printed = output::print(said);
        }
    }

    /// Notes it in the job's log, unless it was the last that was noted.
    fn note(&mut self, said: &str) {
        if let Some(log) = self.log.as_ref().filter(|_| self.noted != said) {
            note!(log, "{said}");
            self.noted = said.to_owned();
        }
    }

    fn waits(&mut self, waiting: &Waiting) {
        let said = awaited(waiting, self.args);
        self.note(&format!("--move-to {}: {}", self.args.to, said.trim_end()));
        self.print(&said);
    }

    fn moves(&mut self, moving: &Moving) {
        let said = match self.args.json {
            true => line(moving),
            false => told(moving, self.args),
        };
        self.print(&said);
    }

    /// It is tried again after `pause`.
    fn fails(&mut self, why: &str, pause: Duration) {
        let (job, to, seconds) = (&self.args.job, &self.args.to, pause.as_secs());
        output::complain(&format!("{job}: {why}; tried again in {seconds} s"));
        let said = format!("--move-to {to}: tried again, as {why}");
        self.note(&said);
    }
}

/// What the job is asked for.
fn order(args: &MigrateArgs) -> Migrate {
    let max_pause = args.max_pause.as_ref().map_or(MAX_PAUSE, |time| time.0);
    let max_pause_ms = u64::try_from(max_pause.as_millis()).unwrap_or(u64::MAX);
    // Who names a time counts on it; who does not wants the job moved.
    let or_stay = args.max_pause.is_some() && !args.stop_and_copy;
    let rate = args.rate.map(|rate| rate.0);
    let (to, rounds, check) = (args.to.clone(), args.rounds, args.check);
    Migrate { to, max_pause_ms, rounds, or_stay, rate, check }
}

fn line(event: &impl serde::Serialize) -> String {
    serde_json::to_string(event).map(|line| line + "\n").unwrap_or_default()
}

/// What is waited for, as it is asked to be told.
fn awaited(waiting: &Waiting, args: &MigrateArgs) -> String {
    if args.json {
        return line(waiting);
    }
    let Waiting::Waits { what, why } = waiting;
    let until = match *what {
        "idle" => "until the job asks nothing of its devices",
        "free" => "until those devices are free",
        _ => "for the time to come",
    };
    let why = why.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
    format!("waiting {until}{why}\n")
}

/// An event, for people.
fn told(moving: &Moving, args: &MigrateArgs) -> String {
    let milliseconds = |seconds: f64| Duration::from_secs_f64(seconds.max(0.0)).as_secs_f64() * 1e3;
    match *moving {
        Moving::Round { process, round, bytes, seconds } => format!(
            "process {process}, round {round}: {} in {:.1} ms\n",
            Size(bytes),
            milliseconds(seconds)
        ),
        Moving::Pause { process, bytes, seconds, why } => format!(
            "process {process} has moved: {} in a pause of {:.1} ms{}\n",
            Size(bytes),
            milliseconds(seconds),
            match why {
                Settles::Fits => "",
                Settles::NoLess => ", as it changes them as fast as they cross",
                Settles::Rounds => ", after as many rounds as there may be",
                Settles::Anew => ", as what it makes and ends could not be followed",
            }
        ),
        // The command's own error says so.
        Moving::Stays { .. } => String::new(),
        Moving::Done { processes, .. } if args.check => {
            format!("{processes} processes can move to {}\n", args.to)
        }
        Moving::Done { processes, seconds } => {
            format!("{processes} processes have moved within {seconds:.2} s\n")
        }
    }
}
