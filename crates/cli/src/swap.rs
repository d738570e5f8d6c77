//! `kedge swap`.

use crate::Failure;
use crate::events::{Event, EventsArgs};
use crate::output;
use crate::progress::{self, Progress};
use clap::{Args, ValueEnum};
use kedge_control::size::Size;
use kedge_supervisor::control::{self, Sending};
use kedge_supervisor::jobs::{JobName, Jobs};
use serde::Serialize;
use std::time::Instant;

const AFTER_HELP: &str = "\
Out: what the job has in its devices' memory is packed into host memory (kedge run --cache-host \
is the limit), and the devices' memory is others'. The job runs on; as soon as it asks its \
devices for anything, that comes back by itself, and waits until there is memory for it. \
Addresses stay as they were.

Memory that the program has made by cuMemCreate, arrays and module variables stay on the devices.

Examples:
  kedge swap out notebook      while nobody computes there
  kedge swap in notebook       ahead of time";

/// Take an idle job's memory off its devices, or bring it back
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct SwapArgs {
    /// Which way
    #[arg(value_enum)]
    way: Way,
    /// The job
    #[arg(value_name = "JOB")]
    job: JobName,
    /// Print a JSON object: job, way ("out" or "in"), bytes (null for in), seconds
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    events: EventsArgs,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    job: &'a str,
    way: &'static str,
    /// `None` for `in`.
    bytes: Option<u64>,
    seconds: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Way {
    Out,
    In,
}

pub(crate) fn run(args: &SwapArgs) -> Result<(), Failure> {
    let events = args.events.open()?;
    let (job, begin) = (args.job.to_string(), Instant::now());
    let (out, way) = match args.way {
        Way::Out => (true, "out"),
        Way::In => (false, "in"),
    };
    let what = if out { "taking its memory off the devices" } else { "bringing its memory back" };
    let shown = Progress::new(&format!("{job}: {what}…"));
    let sending = Sending::default();
    progress::on_interrupt(&sending, format!("the swap of {job}"), "kedge ps");
    let swapped = control::swap(&Jobs::open()?, &args.job, out, &sending);
    drop(shown);
    if let Err(error) = &swapped {
        events.tell(&Event::Failed { error: &error.to_string() });
    }
    // How much was away is not known by then: what the job has used since was back already.
    let bytes = out.then_some(swapped?);
    let (seconds, job) = (begin.elapsed().as_secs_f64(), job.as_str());
    events.tell(&Event::Swapped { job, way, bytes, seconds });
    match args.way {
        _ if args.json => return Ok(output::json(&Report { job, way, bytes, seconds })?),
        Way::Out => {
            output::print(&format!("{} are off the devices\n", Size(bytes.unwrap_or(0))))?;
        }
        Way::In => {}
    }
    output::tell(&closing(job, bytes, seconds));
    Ok(())
}

/// How fast it was. Nothing may have had to move.
fn closing(job: &str, bytes: Option<u64>, seconds: f64) -> String {
    let Some(bytes) = bytes else {
        return format!("{job}  on the devices again in {seconds:.1} s");
    };
    let speed = match bytes > 0 && seconds > 0.0 {
        true => format!(", {}/s", Size((bytes as f64 / seconds) as u64)),
        false => String::new(),
    };
    format!("{job}  {} off the devices in {seconds:.1} s{speed}", Size(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_closing_line_says_how_fast_it_was() {
        let line = "j  40 GiB off the devices in 4.0 s, 10 GiB/s";
        assert_eq!(closing("j", Some(40 << 30), 4.0), line);
        assert_eq!(closing("j", Some(0), 0.04), "j  0 B off the devices in 0.0 s");
        assert_eq!(closing("j", None, 9.04), "j  on the devices again in 9.0 s");
    }
}
