//! What is left of a job where it was, once it has moved to another host as a whole: a process that
//! holds its terminal, and passes streams, signals and the exit status on.

use crate::Failure;
use crate::events::EventsArgs;
use crate::output;
use crate::run::{Manner, ended_as};
use crate::shell::frame::{Frame, Stream};
use crate::shell::relay::Relay;
use clap::Args;
use kedge_control::job::Moved;
use kedge_keys::PskEnd;
use kedge_remote::{ConnectError, job_streams};
use kedge_supervisor::{Outcome, Passed, Sent, kedge_again};
use rustix::process::Signal;
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::ExitCode;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// Has this process's successor find where the job is: other users do not see it there.
const NOTE: &str = "KEDGE_MOVED_JOB";
/// For how long the other host is tried to be reached: it has the job wait for as long.
const REACHES: Duration = Duration::from_secs(300);
/// For the other host to hear that all was heard.
const HEARD: Duration = Duration::from_secs(5);
/// The same, that the job is to stop.
const STOPS: Duration = Duration::from_secs(1);
/// What has a job go on that was stopped.
const GOES_ON: u8 = Signal::CONT.as_raw() as u8;
/// What ends who passes on what the program has left behind: SIGHUP, SIGINT, SIGQUIT and SIGTERM.
const ENDS: [u8; 4] = [1, 2, 3, 15];
/// Between two tries.
const PAUSE: Duration = Duration::from_millis(100);

/// Pass on the streams of a job that has moved to another host
#[derive(Debug, Args)]
pub(crate) struct RelayJobArgs {
    /// Say nothing
    #[arg(long)]
    quiet: bool,
    /// Pass on only what the job's program has left behind says, when it has ended itself
    #[arg(long)]
    rest: bool,
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
    let reaching = Reaching::begin(&moved, Instant::now(), Duration::ZERO)?;
    if args.rest {
        let link = loop {
            match reaching.within(PAUSE) {
                Some(link) => break link.map_err(Failure::new)?,
                None if is_to_end(&signals) => return Ok(ExitCode::FAILURE),
                None => {}
            }
        };
        return Held::new(link, &moved, true, None)?.rest(&signals);
    }
    let manner = Manner { quiet: args.quiet, events: args.events.open_or_later() };
    let reached = reaching.within(Duration::MAX).unwrap_or_else(|| Err("it ended".to_owned()));
    let outcome = reached.map_err(Failure::new).and_then(|link| {
        let input = io::stdin().as_fd().try_clone_to_owned()?;
        Held::new(link, &moved, args.quiet, Some(input))?.hold(&signals)
    });
    ended_as(&manner, outcome)
}

/// Whether a signal has come that ends who passes on what the program has left behind.
fn is_to_end(signals: &Passed) -> bool {
    signals.taken().iter().any(|sent| ENDS.contains(&sent.signal))
}

/// Connects to the job's streams, tried since then. What that says is that nothing of the job runs
/// here any more.
fn reach(moved: &Moved, since: Instant) -> Result<TcpStream, String> {
    loop {
        match job_streams(&moved.server, moved.token) {
            Ok(link) => return Ok(link),
            Err(error) if is_final(&error) || since.elapsed() > REACHES => {
                return Err(format!(
                    "the job has moved to {}, and its streams cannot be had from there: {error}; \
                     `kedge ps` there tells whether it runs, and its last image is there",
                    moved.server
                ));
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

/// A thread that connects to the streams: what has come of them is written meanwhile.
#[derive(Debug)]
struct Reaching(Receiver<Result<TcpStream, String>>);

impl Reaching {
    /// Begins to, after a `pause`.
    fn begin(moved: &Moved, since: Instant, pause: Duration) -> io::Result<Reaching> {
        let (tells, reached) = mpsc::sync_channel(1);
        let moved = moved.clone();
        let reaches = move || {
            thread::sleep(pause);
            let _ = tells.send(reach(&moved, since));
        };
        thread::Builder::new().name("reach".into()).spawn(reaches)?;
        Ok(Reaching(reached))
    }

    /// Returns what came of it, if that shows so soon.
    fn within(&self, wait: Duration) -> Option<Result<TcpStream, String>> {
        match self.0.recv_timeout(wait) {
            Ok(reached) => Some(reached),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(Err("a thread has failed".to_owned())),
        }
    }
}

/// A line that was lost, until the other end goes on.
#[derive(Debug)]
struct Lost {
    since: Instant,
    why: String,
    /// Not while there is a connection again.
    reaching: Option<Reaching>,
}

/// The streams, as this host has them.
struct Held<'a> {
    relay: Relay,
    moved: &'a Moved,
    quiet: bool,
    /// It was said that there is no room for what the job says.
    said_full: bool,
    lost: Option<Lost>,
}

impl Held<'_> {
    fn new(
        link: TcpStream,
        moved: &Moved,
        quiet: bool,
        input: Option<OwnedFd>,
    ) -> Result<Held<'_>, Failure> {
        let mut relay = Relay::outliving(link, moved.secret, PskEnd::First)?;
        input.into_iter().for_each(|input| relay.read_from(Stream::In, input));
        relay.write_to(Stream::Out, io::stdout().as_fd().try_clone_to_owned()?);
        relay.write_to(Stream::Err, io::stderr().as_fd().try_clone_to_owned()?);
        Ok(Held { relay, moved, quiet, said_full: false, lost: None })
    }

    /// Passes all on until the program has ended. What it has left behind, and has the streams
    /// still, is left to a process of its own, as a program that runs here leaves it behind.
    fn hold(mut self, signals: &Passed) -> Result<Outcome, Failure> {
        let mut outcome = None;
        let mut killed = None;
        loop {
            self.turn(signals)?;
            for told in self.relay.told() {
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
                Some(outcome) if self.relay.has_written() => {
                    self.end();
                    return Ok(outcome);
                }
                // How it has ended is known, whether or not the line is there again.
                Some(_) => drop(self.mend()),
                None => {
                    if let Err(failure) = self.mend() {
                        self.write_what_has_come(signals)?;
                        return Err(failure);
                    }
                }
            }
        }
    }

    /// Passes on what the program has left behind says, until it has ended, or this is to end.
    fn rest(mut self, signals: &Passed) -> Result<ExitCode, Failure> {
        while self.relay.has_sinks() || !self.relay.has_written() {
            self.relay.turn(Some(signals.wake()), self.pause())?;
            self.relay.told();
            if is_to_end(signals) {
                return Ok(ExitCode::FAILURE);
            }
            if self.mend().is_err() {
                self.write_what_has_come(signals)?;
                return Ok(ExitCode::FAILURE);
            }
        }
        self.say_heard();
        Ok(ExitCode::SUCCESS)
    }

    /// How long a turn may take.
    fn pause(&self) -> Option<Duration> {
        self.lost.is_some().then_some(PAUSE)
    }

    /// Moves what can be moved.
    fn turn(&mut self, signals: &Passed) -> Result<(), Failure> {
        self.relay.turn(Some(signals.wake()), self.pause())?;
        for sent in signals.taken() {
            self.pass(sent, signals)?;
        }
        if self.relay.is_full() && !self.said_full {
            self.said_full = true;
            self.say("there is no room for what the job says: it waits until there is");
        }
        Ok(())
    }

    /// Passes a signal on. One that stops the job stops this process, too, and both go on together.
    fn pass(&mut self, sent: Sent, signals: &Passed) -> Result<(), Failure> {
        let Sent { signal, to_group } = sent;
        if sent.stops() {
            self.relay.say(&Frame::GroupSignal(signal));
            self.send(STOPS)?;
            signals.stop();
            self.relay.say(&Frame::GroupSignal(GOES_ON));
        } else if to_group {
            self.relay.say(&Frame::GroupSignal(signal));
        } else {
            self.relay.say(&Frame::Signal(signal));
        }
        Ok(())
    }

    /// Sends what was said, if that can be so soon.
    fn send(&mut self, limit: Duration) -> Result<(), Failure> {
        let begin = Instant::now();
        while !(self.relay.has_sent() || self.relay.is_closed())
            && let Some(left) = limit.checked_sub(begin.elapsed())
        {
            self.relay.turn(None, Some(left))?;
        }
        Ok(())
    }

    /// Has a line that is lost taken up again.
    ///
    /// # Errors
    /// It cannot be, or was for too long.
    fn mend(&mut self) -> Result<(), Failure> {
        let server = &self.moved.server;
        match (&mut self.lost, self.relay.is_closed()) {
            (None, false) => {}
            (None, true) => {
                let (since, why) = (Instant::now(), self.relay.why_closed().to_owned());
                self.say(&format!("the line to {server} is lost ({why}): it is tried again"));
                let reaching = Some(Reaching::begin(self.moved, since, Duration::ZERO)?);
                self.lost = Some(Lost { since, why, reaching });
            }
            (Some(_), false) if self.relay.goes_on() => {
                self.lost = None;
                self.say(&format!("the line to {server} is there again: nothing was lost"));
            }
            (Some(_), false) => {}
            (Some(lost), true) => match &lost.reaching {
                Some(reaching) => {
                    let Some(reached) = reaching.within(Duration::ZERO) else { return Ok(()) };
                    lost.reaching = None;
                    let link = reached.map_err(|error| {
                        let why = &lost.why;
                        Failure::new(format!("{error}; the line was lost before that ({why})"))
                    })?;
                    self.relay.resume(link)?;
                }
                // And lost before the other end had said where it goes on.
                None => lost.reaching = Some(Reaching::begin(self.moved, lost.since, PAUSE)?),
            },
        }
        Ok(())
    }

    /// Writes what has come of the streams, when nothing more comes; not if this is to end.
    fn write_what_has_come(&mut self, signals: &Passed) -> Result<(), Failure> {
        while !self.relay.has_written() && !is_to_end(signals) {
            self.relay.turn(Some(signals.wake()), None)?;
        }
        Ok(())
    }

    fn say(&self, what: &str) {
        if !self.quiet {
            output::complain(what);
        }
    }

    /// The program has ended, and all that it has said is written.
    fn end(&mut self) {
        self.say_heard();
        if self.relay.has_sinks()
            && let Err(failure) = self.leave_rest()
        {
            // The program has ended as it has ended.
            self.say(&format!(
                "what the program has left behind is not heard here: {}",
                failure.message()
            ));
        }
    }

    /// Nobody waits for the process that passes the rest on, as nobody waits for what it stands
    /// for.
    fn leave_rest(&self) -> Result<(), Failure> {
        let note = serde_json::to_string(self.moved)?;
        let mut rest = kedge_again();
        rest.arg0("kedge").args(["relay-job", "--rest"]).env(NOTE, note);
        rest.spawn()?;
        Ok(())
    }

    /// The other host may forget what it has kept. One that does not hear it keeps that in files.
    fn say_heard(&mut self) {
        self.relay.tell_heard();
        let _ = self.send(HEARD);
        self.relay.shut();
    }
}
