//! `kedge checkpoint`.

use crate::Failure;
use crate::events::{Event, Events, EventsArgs};
use crate::output;
use crate::progress::{self, Speed};
use crate::time::Time;
use clap::{Args, ValueEnum};
use kedge_control::size::Size;
use kedge_supervisor::control::{self, Content, Order, Progress, Sending, Until};
use kedge_supervisor::jobs::{JobName, Jobs};
use serde::Serialize;
use std::path::{Path, PathBuf};

const AFTER_HELP: &str = "\
Prints the image's path. The job stands still for some milliseconds and goes on while the image \
is written; an image counts only once it is durable. A checkpoint that fails leaves the job as it \
was. Ctrl-C ends the waiting, not the checkpoint; one that had not been asked for by then is not \
made, and the command says which. On a terminal, a line on standard error tells how far it is, and \
the last one how large the image is, how long the job stood still and how long all took. With \
--verify, and with --stop, the image is read back from its device; one that is damaged \
is removed, the command fails, and the job goes on.

With --json, an object: image, state (\"captured\" or \"durable\"), processes, stall_seconds (how \
long the job stood still), bytes and seconds (null where it was not waited for), verified \
(\"device\", \"dropped cache\" or \"memory\", where it was read back from; null if it was not), \
warnings

Examples:
  kedge checkpoint nightly
  kedge checkpoint nightly --wait captured
  kedge checkpoint nightly --stop && kedge restart nightly-0004   now, or after a reboot";

/// Save a running job as an image from which `kedge restart` brings it back
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct CheckpointArgs {
    /// The job: one that `kedge run` or `kedge restart` has started
    #[arg(value_name = "JOB")]
    job: JobName,
    /// Return when the job runs again, or when the image is on the disk
    #[arg(long, value_enum, default_value_t = Wait::Durable)]
    wait: Wait,
    /// End the job when the image is durable and has been verified; it stands still until then, so
    /// that nothing that it does is done twice
    #[arg(long, conflicts_with = "wait")]
    stop: bool,
    /// Read the image back from its device, past the page cache, and check all of it [default with
    /// --stop]
    #[arg(long)]
    verify: bool,
    /// Do not: with --stop the job ends as soon as the image is durable
    #[arg(long, conflicts_with = "verify")]
    no_verify: bool,
    /// Keep what the devices held in memory too, for TIME or until another image is made: a job
    /// that is run with --recover goes back much sooner [default for TIME: 10m] [default: as the
    /// job was started]
    #[arg(long, value_name = "TIME", num_args = 0..=1, require_equals = true, default_missing_value = "10m")]
    hold: Option<Time>,
    /// Where the image goes [default: the job's --ckpt-dir]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Store only what has changed since the job's last incremental image [default: as the job was
    /// started]
    #[arg(long, conflicts_with = "full")]
    incremental: bool,
    /// Store everything, whatever the job was started with
    #[arg(long)]
    full: bool,
    /// How memory is stored; auto: LZ4 where that helps, raw elsewhere
    #[arg(long, value_enum, default_value_t = Codec::Auto)]
    codec: Codec,
    /// What becomes of files that are open for writing: save their contents with the image, from
    /// which a restart brings them back; or keep them where they are, and restart with what is
    /// there then
    #[arg(long, value_enum, default_value_t = Files::Save)]
    files: Files,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    events: EventsArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Wait {
    Captured,
    Durable,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Files {
    Save,
    Keep,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Codec {
    Auto,
    Raw,
    Lz4,
    Zstd,
    Gzip,
}

#[derive(Debug, Default, Serialize)]
struct Report {
    image: PathBuf,
    state: &'static str,
    processes: usize,
    stall_seconds: f64,
    bytes: Option<u64>,
    seconds: Option<f64>,
    verified: Option<String>,
    warnings: Vec<String>,
}

pub(crate) fn run(args: &CheckpointArgs) -> Result<(), Failure> {
    let dir = args.dir.as_ref().map(std::path::absolute).transpose()?;
    let codec = args.codec.to_possible_value().map(|value| value.get_name().to_owned());
    let content = match (args.incremental, args.full) {
        (true, _) => Content::Changes,
        (_, true) => Content::All,
        _ => Content::Usual,
    };
    let (keep_files, stop) = (args.files == Files::Keep, args.stop);
    let hold_ms = args.hold.map(|time| time.0.as_millis() as u64);
    // Who waits until it is durable does not mind when it is captured.
    let ahead = matches!(args.wait, Wait::Durable);
    let verify = (args.verify || stop) && !args.no_verify;
    let until = match args.wait {
        Wait::Captured => Until::Captured,
        Wait::Durable => Until::Durable,
    };
    let shown = progress::Progress::new("bringing the job to rest…");
    let events = args.events.open()?;
    let tell = shown.is_shown() || events.are_wanted();
    let last_word = false;
    let order = Order {
        dir,
        codec,
        keep_files,
        content,
        stop,
        ahead,
        verify,
        hold_ms,
        tell,
        last_word,
        moves: None,
    };
    let mut report = Report::default();
    let jobs = Jobs::open()?;
    let sending = Sending::default();
    let what = format!("the checkpoint of {}", args.job);
    progress::on_interrupt(&sending, what, "kedge images");
    let (writing, mut reading) = (Speed::new(), None);
    let name = args.job.to_string();
    let asked = control::checkpoint(&jobs, &args.job, &order, until, &sending, |progress| {
        tell_progress(&events, &name, &report.image, progress);
        match progress.clone() {
            Progress::Writing { done, bytes } => {
                let image = named(&report.image);
                shown.show(&format!("writing{image}: {}…", writing.of(done, bytes)));
            }
            Progress::Captured { image, processes, stall_seconds, warnings } => {
                shown.clear();
                warnings.iter().for_each(|text| {
                    anstream::eprintln!("kedge: warning: {}", output::harmless(text));
                });
                let (name, still) = (named(&image), milliseconds(stall_seconds));
                shown.show(&format!("captured, stood still for {still}; writing{name}…"));
                let state = "captured";
                let known = Report { image, state, processes, stall_seconds, ..Report::default() };
                report = Report { warnings, ..known };
            }
            Progress::Verifying { done, bytes, .. } => {
                let speed = reading.get_or_insert_with(Speed::new).of(done, Some(bytes));
                shown.show(&format!("on the disk; reading it back: {speed}…"));
            }
            Progress::Durable { bytes, seconds, verified, .. } => {
                report.state = "durable";
                (report.bytes, report.seconds) = (Some(bytes), Some(seconds));
                report.verified = verified;
            }
        }
    });
    if let Err(error) = &asked {
        events.tell(&Event::Failed { error: &error.to_string() });
    }
    asked?;
    drop(shown);
    // A supervisor that was started by an older kedge does not know how.
    if verify && report.state == "durable" && report.verified.is_none() {
        anstream::eprintln!(
            "kedge: warning: the image was not read back: the job was started by an older kedge; see `kedge verify`"
        );
    }
    match args.json {
        true => Ok(output::json(&report)?),
        false => {
            output::print(&format!("{}\n", report.image.display()))?;
            // Scripts read the path alone.
            output::tell(&closing(&report));
            Ok(())
        }
    }
}

fn tell_progress(events: &Events, job: &str, known: &Path, progress: &Progress) {
    events.tell(&match progress {
        Progress::Writing { done, bytes } => {
            let image = (!known.as_os_str().is_empty()).then_some(known);
            Event::Writing { job, image, done: *done, bytes: *bytes }
        }
        Progress::Captured { image, processes, stall_seconds, warnings } => {
            let (processes, stall_seconds) = (*processes, *stall_seconds);
            Event::Captured { job, image, processes, stall_seconds, warnings }
        }
        Progress::Verifying { image, done, bytes } => {
            Event::Verifying { image, done: *done, bytes: *bytes }
        }
        Progress::Durable { image, bytes, seconds, verified } => {
            let (bytes, seconds, verified) = (*bytes, *seconds, verified.as_deref());
            Event::Durable { job, image, bytes, seconds, verified }
        }
    });
}

/// The image's name behind a space; nothing while it has none.
fn named(image: &Path) -> String {
    let name = image.file_name().unwrap_or_default().to_string_lossy();
    if name.is_empty() { String::new() } else { format!(" {}", output::harmless(&name)) }
}

fn milliseconds(seconds: f64) -> String {
    format!("{:.0} ms", seconds * 1e3)
}

/// What the image is, what the job noticed of it, and how safe it is.
fn closing(report: &Report) -> String {
    let name = named(&report.image);
    let still = milliseconds(report.stall_seconds);
    let (Some(bytes), Some(seconds)) = (report.bytes, report.seconds) else {
        return format!("{}  stood still {still}, is being written", name.trim_start());
    };
    let size = Size(bytes);
    let verified = if report.verified.is_some() { ", read back" } else { "" };
    format!(
        "{}  {size}, stood still {still}, durable in {seconds:.1} s{verified}",
        name.trim_start()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_closing_line_says_what_there_is() {
        let image = PathBuf::from("/images/sim-0008");
        let captured = Report { image, stall_seconds: 0.113, ..Report::default() };
        assert_eq!(closing(&captured), "sim-0008  stood still 113 ms, is being written");
        let (bytes, seconds) = (Some(3 << 30), Some(4.12));
        let durable = Report { bytes, seconds, ..captured };
        assert_eq!(closing(&durable), "sim-0008  3 GiB, stood still 113 ms, durable in 4.1 s");
        let verified = Report { verified: Some("device".into()), ..durable };
        assert!(closing(&verified).ends_with("durable in 4.1 s, read back"));
    }
}
