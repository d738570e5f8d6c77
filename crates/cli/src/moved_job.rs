//! What is left of a job where it was, once it has moved to another host as a whole: a process that
//! holds its terminal, and passes streams, signals and the exit status on.

use crate::Failure;
use crate::events::EventsArgs;
use crate::run::{Manner, ended_as};
use crate::shell::frame::{Frame, Stream};
use crate::shell::relay::Relay;
use clap::Args;
use kedge_control::job::Moved;
use kedge_keys::PskEnd;
use kedge_remote::{ConnectError, job_streams};
use kedge_supervisor::{Outcome, Passed, kedge_again};
use std::io;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

/// Has this process's successor find where the job is: other users do not see it there.
const NOTE: &str = "KEDGE_MOVED_JOB";
/// For how long the other host is tried to be reached: it has the job wait for as long.
const REACHES: Duration = Duration::from_secs(300);
/// Between two tries.
const PAUSE: Duration = Duration::from_millis(100);

/// Pass on the streams of a job that has moved to another host
#[derive(Debug, Args)]
pub(crate) struct RelayJobArgs {
    /// Say nothing
    #[arg(long)]
    quiet: bool,
    #[command(flatten)]
    events: EventsArgs,
}

/// Has this process become what passes the job's streams on; returns where that cannot be.
pub(crate) fn go_along(moved: &Moved, manner: &Manner) -> Failure {
    let note = match serde_json::to_string(moved) {
        Ok(note) => note,
        Err(error) => return error.into(),
    };
    let mut command = kedge_again();
    command.arg0("kedge").arg("relay-job").args(manner.quiet.then_some("--quiet")).env(NOTE, note);
    if let Some(path) = manner.events.path() {
        // One word: its name may begin as an option does.
        let mut events = std::ffi::OsString::from("--events=");
        events.push(path);
        command.arg(events);
    }
    Failure::new(format!("cannot start kedge again: {}", command.exec()))
}

/// Passes all on until the job has ended, and ends as it has.
pub(crate) fn run(args: &RelayJobArgs) -> Result<ExitCode, Failure> {
    let moved: Moved = std::env::var(NOTE)
        .ok()
        .and_then(|note| serde_json::from_str(&note).ok())
        .ok_or_else(|| Failure::new("`kedge relay-job` is for kedge's own use"))?;
    let signals = Passed::begin()?;
    let manner = Manner { quiet: args.quiet, events: args.events.open_or_later() };
    let outcome = reach(&moved).and_then(|link| hold(link, &moved, &signals));
    ended_as(&manner, outcome)
}

/// Connects to the job's streams. What that says is that nothing of the job runs here any more.
fn reach(moved: &Moved) -> Result<TcpStream, Failure> {
    let begin = Instant::now();
    loop {
        match job_streams(&moved.server, moved.token) {
            Ok(link) => return Ok(link),
            Err(error) if is_final(&error) || begin.elapsed() > REACHES => {
                return Err(Failure::new(format!(
                    "the job has moved to {}, and its streams cannot be had from there: {error}; \
                     `kedge ps` there tells whether it runs, and its last image is there",
                    moved.server
                )));
            }
            Err(_) => thread::sleep(PAUSE),
        }
    }
}

fn is_final(error: &ConnectError) -> bool {
    matches!(
        error,
        ConnectError::Refused { .. } | ConnectError::Keys { .. } | ConnectError::Distrust { .. }
    )
}

fn hold(link: TcpStream, moved: &Moved, signals: &Passed) -> Result<Outcome, Failure> {
    let mut relay = Relay::new(link, moved.secret, PskEnd::First)?;
    relay.read_from(Stream::In, io::stdin().as_fd().try_clone_to_owned()?);
    relay.write_to(Stream::Out, io::stdout().as_fd().try_clone_to_owned()?);
    relay.write_to(Stream::Err, io::stderr().as_fd().try_clone_to_owned()?);
    let mut outcome = None;
    let mut killed = None;
    loop {
        relay.turn(Some(signals.wake()), None)?;
        signals.taken().into_iter().for_each(|signal| relay.say(&Frame::Signal(signal)));
        for told in relay.told() {
            match told {
                // By this one; what else it is told comes with it.
                Frame::Signal(signal) => killed = Some(signal),
                Frame::Exit(code) => {
                    let by = |signal| Outcome::Killed(i32::from(signal));
                    outcome = Some(killed.map_or(Outcome::Exited(code), by));
                }
                _ => {}
            }
        }
        match outcome {
            Some(outcome) if relay.has_written() => return Ok(outcome),
            None if relay.is_closed() && relay.has_written() => {
                return Err(Failure::new(format!(
                    "the line to {} is lost ({}): the job goes on there, and what it says is kept \
                     beside its images",
                    moved.server,
                    relay.why_closed()
                )));
            }
            _ => {}
        }
    }
}
