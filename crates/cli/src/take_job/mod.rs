//! `kedge take-job`, which a server starts: takes a job that moves here from another host, has it
//! restarted once nothing of it runs there any more, and holds its streams.
//!
//! ```text
//! kedge migrate ── line ──► take-job ── gate, streams ──► kedge restart: the job
//! kedge relay-job ── streams ──┘
//! ```

mod arrival;
mod streams;

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
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};
use streams::Streams;

/// For the server to hand the line over.
const HANDED: Duration = Duration::from_secs(30);
/// For all of the job to be here, from the last image on, and for it to run once it may.
const MADE: Duration = Duration::from_secs(600);
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

/// What becomes of a job that is here and waits.
enum Word {
    /// It is to run; who says it wants an answer.
    Go(Connection),
    /// It runs where it was, and goes on there.
    Stay(Connection),
    /// Whoever moves it is gone.
    Alone,
    /// A connection to its streams.
    Link(Connection),
    /// It has ended.
    Ended(ExitStatus),
}

pub(crate) fn run(_: &TakeJobArgs) -> Result<(), Failure> {
    let line = TcpStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let control = Channel::new(io::stdout().as_fd().try_clone_to_owned()?);
    // The server's end is none of the job's.
    let _ = setsid();
    let (secrets, _) = control.receive::<Option<Secrets>>(HANDED)?;
    let mut line = Connection::new(line, secrets)?;
    line.stream().set_write_timeout(Some(HANDED))?;
    let Arrived { arrival, image } = match Arrival::receive(&mut line)? {
        Some(arrived) => arrived,
        None => return Ok(()),
    };
    let job = match Waiting::make(&arrival, &image) {
        Ok(job) => job,
        Err(why) => {
            answer(&mut line, Err(why))?;
            // He has it go on where it is.
            return Ok(arrival.remove()?);
        }
    };
    hold_move("made");
    answer(&mut line, Ok(()))?;
    let (tells, told) = mpsc::channel();
    hear_line(line, tells.clone())?;
    hear_links(control, tells.clone())?;
    job.conclude(&arrival, &told, tells)
}

/// Hears what whoever moves the job says last.
fn hear_line(mut line: Connection, tells: Sender<Word>) -> io::Result<()> {
    let hears = move || {
        let heard = line.stream().set_read_timeout(None).map(|()| hear(&mut line));
        let _ = tells.send(match heard {
            Ok(Ok(ToTaker::Go {})) => Word::Go(line),
            Ok(Ok(ToTaker::Stay {})) => Word::Stay(line),
            _ => Word::Alone,
        });
    };
    thread::Builder::new().name("line".into()).spawn(hears).map(drop)
}

/// Hears of connections to the job's streams for as long as the server is there.
fn hear_links(control: Channel, tells: Sender<Word>) -> io::Result<()> {
    let hears = move || {
        loop {
            let (secrets, mut fds) = match control.receive::<Option<Secrets>>(MADE) {
                Err(SocketError::TimedOut { .. }) => continue,
                Err(_) => return,
                Ok(received) => received,
            };
            let stream = fds.pop().map(TcpStream::from);
            let link = stream.and_then(|stream| Connection::new(stream, secrets).ok());
            if link.is_some_and(|link| tells.send(Word::Link(link)).is_err()) {
                return;
            }
        }
    };
    thread::Builder::new().name("links".into()).spawn(hears).map(drop)
}

/// A job that is here as a whole, but does not run.
struct Waiting {
    restart: Child,
    gate: UnixStream,
    streams: Streams,
}

impl Waiting {
    /// Restarts the job up to where it waits; or why not, in the restart's words.
    fn make(arrival: &Arrival, image: &std::path::Path) -> Result<Waiting, String> {
        let said = |error: io::Error| format!("cannot restart the job: {error}");
        let (gate, theirs) = UnixStream::pair().map_err(said)?;
        fcntl_setfd(&theirs, FdFlags::empty()).map_err(|error| said(error.into()))?;
        let mut command: Command = kedge_again();
        command.arg("restart").arg(image).args(["--quiet", "--job", &arrival.job.to_string()]);
        command.arg("--gate").arg(theirs.as_raw_fd().to_string());
        for (old, new) in &arrival.paths {
            let mut pair = old.clone().into_os_string();
            pair.push("=");
            pair.push(new);
            command.arg("--path-map").arg(pair);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut restart = command.spawn().map_err(said)?;
        drop((command, theirs));
        let mut streams = Streams::of(&mut restart, arrival);
        match wait_for(&gate, WAITS, &mut restart) {
            Ok(()) => Ok(Waiting { restart, gate, streams }),
            Err(error) => {
                // Its init undoes what it has done.
                drop(gate);
                end(&mut restart);
                Err(streams.last_words(SAID).unwrap_or_else(|| said(error)))
            }
        }
    }

    /// Has the job run, or go away.
    fn conclude(
        mut self,
        arrival: &Arrival,
        told: &Receiver<Word>,
        tells: Sender<Word>,
    ) -> Result<(), Failure> {
        let until = Instant::now() + UNDECIDED;
        let link = loop {
            match told.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(Word::Go(mut line)) => {
                    let goes = self.go();
                    let said = goes.as_ref().err().map_or(Ok(()), |error| Err(error.to_string()));
                    let _ = answer(&mut line, said);
                    goes?;
                    break None;
                }
                Ok(Word::Link(link)) => {
                    self.go()?;
                    break Some(link);
                }
                Ok(Word::Stay(mut line)) => {
                    self.give_up();
                    arrival.remove()?;
                    return Ok(answer(&mut line, Ok(()))?);
                }
                Ok(Word::Alone | Word::Ended(_)) => {}
                Err(_) => {
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
        let Waiting { restart, streams, .. } = self;
        streams.hold(restart, link, told, tells)
    }

    fn go(&mut self) -> io::Result<()> {
        self.gate.write_all(&[GO])?;
        wait_for(&self.gate, RUNS, &mut self.restart)
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

/// Waits until the restart says `word`.
fn wait_for(mut gate: &UnixStream, word: u8, restart: &mut Child) -> io::Result<()> {
    let begin = Instant::now();
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
                if restart.try_wait()?.is_some() {
                    return Err(io::Error::other("it has ended"));
                }
                if begin.elapsed() > MADE {
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
