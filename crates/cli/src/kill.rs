//! `kedge kill`.

use crate::Failure;
use crate::output;
use crate::time::Time;
use clap::Args;
use kedge_supervisor::control::{self, Kill};
use kedge_supervisor::jobs::{JobName, Jobs};
use serde::Serialize;
use std::time::{Duration, Instant};

const AFTER_HELP: &str = "\
Returns when the job has ended. Its images stay, and it does not go back to one (`kedge run \
--recover`).

Examples:
  kedge kill nightly
  kedge kill nightly --grace 1m      for a program that tidies up
  kedge kill nightly --signal USR1   nothing but that";

/// Between SIGTERM and SIGKILL, where nobody says otherwise.
pub(crate) const GRACE: Duration = Duration::from_secs(10);

/// End a job: all of its processes, by SIGTERM, and by SIGKILL those that are left after a while
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct KillArgs {
    /// The job
    #[arg(value_name = "JOB")]
    job: JobName,
    /// Send this signal to the job's processes and no other, such as USR1; with KILL the job ends
    /// at once
    #[arg(long, short, value_name = "SIGNAL", value_parser = signal, conflicts_with = "grace")]
    signal: Option<i32>,
    /// How long after SIGTERM what is left is ended by SIGKILL [default: 10s]
    #[arg(long, value_name = "TIME")]
    grace: Option<Time>,
    /// Print a JSON object: job, signal (the one that was sent; null where the job has ended),
    /// seconds (how long that took)
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    job: &'a str,
    signal: Option<i32>,
    seconds: f64,
}

/// Names without SIG, at their numbers less one.
const NAMES: [&str; 31] = [
    "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2",
    "PIPE", "ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG",
    "XCPU", "XFSZ", "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS",
];
const SIGKILL: i32 = 9;

/// `TERM`, `SIGTERM` or `15`.
fn signal(text: &str) -> Result<i32, String> {
    let upper = text.to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    let named = NAMES.iter().position(|known| *known == name).map(|index| index as i32 + 1);
    let number = || text.parse().ok().filter(|number| (1..=NAMES.len() as i32).contains(number));
    named
        .or_else(number)
        .ok_or_else(|| format!("`{text}` is no signal: give TERM, USR1 or a number"))
}

pub(crate) fn run(args: &KillArgs) -> Result<(), Failure> {
    let grace = args.grace.map_or(GRACE, |time| time.0);
    let end = |grace: Duration| Kill::End { grace_ms: grace.as_millis() as u64 };
    let kill = match args.signal {
        None => end(grace),
        Some(SIGKILL) => end(Duration::ZERO),
        Some(signal) => Kill::Signal(signal),
    };
    let begin = Instant::now();
    control::kill(&Jobs::open()?, &args.job, kill)?;
    if args.json {
        let signal = args.signal.filter(|signal| *signal != SIGKILL);
        let (job, seconds) = (args.job.to_string(), begin.elapsed().as_secs_f64());
        output::json(&Report { job: &job, signal, seconds })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_read_as_people_write_them() {
        assert_eq!(signal("TERM"), Ok(15));
        assert_eq!(signal("sigusr1"), Ok(10));
        assert_eq!(signal("9"), Ok(9));
        for bad in ["", "0", "32", "-1", "NO"] {
            assert!(signal(bad).is_err(), "{bad}");
        }
    }
}
