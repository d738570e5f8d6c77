//! `kedge take-job`, which a server starts: takes a job that moves here from another host, has it
//! restarted once nothing of it runs there any more, and holds its streams.
//!
//! ```text
//! kedge migrate ── line ──► take-job ── gate, streams ──► kedge restart: the job
//! kedge relay-job ── streams ──┘
//! ```

mod arrival;
mod standby;
mod streams;
mod words;

use crate::Failure;
use arrival::{Arrival, Arrived};
use clap::Args;
use kedge_keys::{Connection, Secrets};
use kedge_remote::{ToTaker, answer, hear};
use kedge_socket::{Channel, SocketError};
use kedge_supervisor::{GO, RUNS, WAITS, hold_move, kedge_again};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::setsid;
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use streams::Streams;
use words::{Tells, Word, Words};

/// For the server to hand the line over.
const HANDED: Duration = Duration::from_secs(30);
/// For all of the job to be here, from the last image on, and for it to run once it may.
const ALL_MADE: Duration = Duration::from_secs(600);
/// How long a job waits that is here and may run elsewhere: whoever has its streams tries as long.
const UNDECIDED: Duration = Duration::from_secs(300);
/// For a restart to undo what it has done.
const UNDONE: Duration = Duration::from_secs(60);
/// Between two looks whether a restart goes on.
const LOOK: Duration = Duration::from_millis(50);
/// What is passed on of what a restart says that has failed.
const SAID: u64 = 2000;

/// Take a job that moves here
#[derive(Debug, Args)]
pub(crate) struct TakeJobArgs {}

pub(crate) fn run(_: &TakeJobArgs) -> Result<(), Failure> {
    let line = TcpStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let control = Channel::new(io::stdout().as_fd().try_clone_to_owned()?);
    // The server's end is none of the job's.
    let _ = setsid();
    let (secrets, _) = control.receive::<Option<Secrets>>(HANDED)?;
    let mut line = Connection::new(line, secrets)?;
    line.stream().set_write_timeout(Some(HANDED))?;
    let Arrived { mut arrival, image } = match Arrival::receive(&mut line)? {
        Some(arrived) => arrived,
        None => return Ok(()),
    };
    let standby = arrival.take_standby().and_then(|standby| standby.last(&image));
    let job = match standby.map_or_else(|| Waiting::make(&arrival, &image), Ok) {
        Ok(job) => job,
        Err(why) => {
            answer(&mut line, Err(why))?;
            // He has it go on where it is.
            return Ok(arrival.remove()?);
        }
    };
    hold_move("made");
    // From the answer on it may be decided that the job runs here.
    if let Err(error) = arrival.stays() {
        job.give_up();
        answer(&mut line, Err(format!("{}: {error}", arrival.folder.display())))?;
        return Ok(arrival.remove()?);
    }
    answer(&mut line, Ok(()))?;
    let (tells, words) = words::channel()?;
    hear_line(line, tells.clone())?;
    hear_links(control, tells.clone())?;
    job.conclude(&mut arrival, words, tells)
}

/// Hears what whoever moves the job says last.
fn hear_line(mut line: Connection, tells: Tells) -> io::Result<()> {
    let hears = move || {
        let heard = line.stream().set_read_timeout(None).map(|()| hear(&mut line));
        tells.tell(match heard {
            Ok(Ok(ToTaker::Go {})) => Word::Go(line),
            Ok(Ok(ToTaker::Stay {})) => Word::Stay(line),
            _ => Word::Alone,
        });
    };
    thread::Builder::new().name("line".into()).spawn(hears).map(drop)
}

/// Hears of connections to the job's streams for as long as the server is there.
fn hear_links(control: Channel, tells: Tells) -> io::Result<()> {
    let hears = move || {
        loop {
            let (secrets, mut fds) = match control.receive::<Option<Secrets>>(ALL_MADE) {
                Err(SocketError::TimedOut { .. }) => continue,
                Err(_) => return,
                Ok(received) => received,
            };
            let stream = fds.pop().map(TcpStream::from);
            let link = stream.and_then(|stream| Connection::new(stream, secrets).ok());
            if let Some(link) = link {
                tells.tell(Word::Link(link));
            }
        }
    };
    thread::Builder::new().name("links".into()).spawn(hears).map(drop)
}

/// A job that is here, as a whole unless it stands by for its last image, and does not run.
#[derive(Debug)]
struct Waiting {
    restart: Child,
    gate: UnixStream,
    streams: Streams,
}

impl Waiting {
    /// Restarts the job up to where it waits; or why not, in the restart's words.
    fn make(arrival: &Arrival, image: &Path) -> Result<Waiting, String> {
        let said = |error: io::Error| format!("cannot restart the job: {error}");
        let mut begun = Waiting::begin(arrival, image, &[]).map_err(said)?;
        match wait_for(&begun.gate, WAITS, &mut begun.restart, ALL_MADE) {
            Ok(()) => Ok(begun),
            Err(error) => {
                let Waiting { mut restart, gate, mut streams } = begun;
                // Its init undoes what it has done.
                drop(gate);
                end(&mut restart);
                Err(streams.last_words(SAID).unwrap_or_else(|| said(error)))
            }
        }
    }

    /// Begins to restart the job from an image, with further arguments of kedge's own.
    fn begin(arrival: &Arrival, image: &Path, more: &[&str]) -> io::Result<Waiting> {
        let (gate, theirs) = UnixStream::pair()?;
        fcntl_setfd(&theirs, FdFlags::empty())?;
        let mut command: Command = kedge_again();
        command.arg("restart").arg(image).args(["--quiet", "--job", &arrival.job.to_string()]);
        command.arg("--gate").arg(theirs.as_raw_fd().to_string()).args(more);
        for (old, new) in &arrival.paths {
            let mut pair = old.clone().into_os_string();
            pair.push("=");
            pair.push(new);
            command.arg("--path-map").arg(pair);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // The job's group, to which the terminal's signals go, is without this process.
        command.process_group(0);
        let mut restart = command.spawn()?;
        let streams = Streams::of(&mut restart, arrival);
        Ok(Waiting { restart, gate, streams })
    }

    /// Has the job run, or go away.
    fn conclude(
        mut self,
        arrival: &mut Arrival,
        mut words: Words,
        tells: Tells,
    ) -> Result<(), Failure> {
        let (until, mut is_alone) = (Instant::now() + UNDECIDED, false);
        let asked = loop {
            match words.next(until) {
                Some(asked @ (Word::Go(_) | Word::Link(_))) => break asked,
                Some(Word::Stay(mut line)) => {
                    self.give_up();
                    arrival.remove()?;
                    return Ok(answer(&mut line, Ok(()))?);
                }
                Some(Word::Alone) => is_alone = true,
                Some(Word::Ended(_)) => {}
                None => {
                    self.give_up();
                    return Err(Failure::new(format!(
                        "{}: nobody has said whether it runs here: it does not, and its images \
                         are in {}",
                        arrival.job,
                        arrival.folder.display()
                    )));
                }
            }
        };
        let goes = self.go();
        let said = goes.as_ref().map(|_| ()).map_err(ToString::to_string);
        // Whoever moves the job asks, too, or has asked, for as long as he is there.
        let mut runs = words.decided(said, is_alone);
        let link = runs.of(asked);
        if let Err(error) = goes {
            if let Some(Word::Link(mut link)) = link {
                let _ = answer(&mut link, Err(error.to_string()));
            }
            runs.line_is_answered();
            return Err(error.into());
        }
        let Waiting { restart, streams, .. } = self;
        let link = match link {
            Some(Word::Link(link)) => Some(link),
            _ => None,
        };
        let held = streams.hold(restart, link, &mut runs, tells);
        runs.line_is_answered();
        held
    }

    fn go(&mut self) -> io::Result<()> {
        self.gate.write_all(&[GO])?;
        wait_for(&self.gate, RUNS, &mut self.restart, ALL_MADE)
    }

    /// Nothing of the job is left here when this returns.
    fn give_up(self) {
        let Waiting { mut restart, gate, streams } = self;
        // Its init undoes what it has done.
        drop(gate);
        let _ = restart.wait();
        drop(streams);
    }
}

/// Returns when the restart has ended, which has been told that it is not wanted.
fn end(restart: &mut Child) {
    let begin = Instant::now();
    while !matches!(restart.try_wait(), Ok(Some(_))) {
        if begin.elapsed() > UNDONE {
            let _ = restart.kill();
            let _ = restart.wait();
            return;
        }
        thread::sleep(LOOK);
    }
}

/// Waits until the restart says `word`, for so long at most.
fn wait_for(
    mut gate: &UnixStream,
    word: u8,
    restart: &mut Child,
    most: Duration,
) -> io::Result<()> {
    let (begin, mut has_ended) = (Instant::now(), false);
    gate.set_read_timeout(Some(LOOK))?;
    loop {
        let mut said = [0];
        match gate.read(&mut said) {
            Ok(1) if said == [word] => return Ok(()),
            Ok(_) => {
                restart.wait()?;
                return Err(io::Error::other("it has ended"));
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                if has_ended {
                    return Err(io::Error::other("it has ended"));
                }
                // It may have said it, and ended, just now.
                has_ended = restart.try_wait()?.is_some();
                if begin.elapsed() > most {
                    return Err(error);
                }
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Another descriptor of the same.
fn again(fd: &impl AsFd) -> io::Result<OwnedFd> {
    fd.as_fd().try_clone_to_owned()
}
