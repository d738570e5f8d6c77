//! The streams of a job that has moved here: whoever held them where it was has them again by a
//! connection; without one, what the job says is kept in files beside its images.

use super::again;
use super::arrival::Arrival;
use super::words::{Running, Tells, Word};
use crate::Failure;
use crate::shell::frame::{Frame, Stream};
use crate::shell::relay::Relay;
use kedge_keys::{Connection, PskEnd};
use kedge_remote::{SessionSecret, answer};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::io::{self, Read};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, ExitStatus};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How long a job may run before somebody has its streams: what it says waits in pipes.
const FETCHED: Duration = Duration::from_secs(300);
/// For what was said last to be taken.
const LAST: Duration = Duration::from_secs(60);

/// The other ends of a job's streams.
#[derive(Debug)]
pub(super) struct Streams {
    input: Option<OwnedFd>,
    output: Option<OwnedFd>,
    errors: Option<OwnedFd>,
    secret: SessionSecret,
    /// What is kept without anybody to take it begins with this.
    kept: PathBuf,
}

impl Streams {
    pub(super) fn of(restart: &mut Child, arrival: &Arrival) -> Streams {
        Streams {
            input: restart.stdin.take().map(OwnedFd::from),
            output: restart.stdout.take().map(OwnedFd::from),
            errors: restart.stderr.take().map(OwnedFd::from),
            secret: arrival.secret,
            kept: arrival.folder.join(arrival.job.to_string()),
        }
    }

    /// What a restart that has failed has said, of so many bytes.
    pub(super) fn last_words(&mut self, most: u64) -> Option<String> {
        let mut said = Vec::new();
        File::from(self.errors.take()?).take(most).read_to_end(&mut said).ok()?;
        let said = String::from_utf8_lossy(&said);
        let said = said.trim().trim_start_matches("kedge: ").to_owned();
        (!said.is_empty()).then_some(said)
    }

    /// Holds them until the job has ended, and whoever has them knows how.
    pub(super) fn hold(
        mut self,
        mut restart: Child,
        link: Option<Connection>,
        told: &mut Running,
        tells: Tells,
    ) -> Result<(), Failure> {
        let pid = i32::try_from(restart.id()).ok().and_then(Pid::from_raw);
        let waits = move || {
            if let Ok(status) = restart.wait() {
                tells.tell(Word::Ended(status));
            }
        };
        thread::Builder::new().name("wait".into()).spawn(waits)?;
        let (link, status) = match link {
            Some(link) => (Some(link), None),
            None => fetched(told),
        };
        let Some(link) = link else { return self.keep(told, status) };
        let held = self.relay(link, pid, told, status)?;
        match held {
            Held::Told => Ok(()),
            // Whoever had them is gone, and the job is not.
            Held::Lost(status) => self.keep(told, status),
        }
    }

    /// Passes all on between the job and the connection.
    fn relay(
        &mut self,
        link: Connection,
        pid: Option<Pid>,
        told: &mut Running,
        mut status: Option<ExitStatus>,
    ) -> io::Result<Held> {
        let Ok(link) = accept(link) else { return Ok(Held::Lost(status)) };
        let mut relay = Relay::new(link, self.secret, PskEnd::Second)?;
        if let Some(input) = self.input.take() {
            relay.write_to(Stream::In, input);
        }
        let output = self.output.iter().map(|fd| (Stream::Out, fd));
        for (stream, fd) in output.chain(self.errors.iter().map(|fd| (Stream::Err, fd))) {
            relay.read_from(stream, again(fd)?);
        }
        while status.is_none() || relay.has_sources() {
            relay.turn(Some(told.wake()), None)?;
            told.is_awake();
            while let Some(word) = told.now() {
                if let Word::Ended(ended) = word {
                    status = Some(ended);
                }
            }
            for frame in relay.told() {
                if let (Frame::Signal(signal), Some(pid), None) = (frame, pid, status)
                    && let Some(signal) = Signal::from_named_raw(signal.into())
                {
                    // One that has just ended takes none.
                    let _ = kill_process(pid, signal);
                }
            }
            if relay.is_closed() {
                return Ok(Held::Lost(status));
            }
        }
        tell(&mut relay, status)?;
        Ok(Held::Told)
    }

    /// Keeps what the job says in files, until it has ended.
    fn keep(self, told: &mut Running, mut status: Option<ExitStatus>) -> Result<(), Failure> {
        // Nobody says anything to it any more.
        drop(self.input);
        let beside = |end: &str| {
            let mut path = self.kept.clone().into_os_string();
            path.push(end);
            PathBuf::from(path)
        };
        let output = self.output.map(|from| keep(from, beside(".out")));
        let errors = self.errors.map(|from| keep(from, beside(".err")));
        while status.is_none() {
            match told.next(Instant::now() + FETCHED) {
                Some(Word::Ended(ended)) => status = Some(ended),
                Some(Word::Link(mut link)) => {
                    let why = "what the job says is kept in files there by now";
                    let _ = answer(&mut link, Err(why.to_owned()));
                }
                _ => {}
            }
        }
        for kept in output.into_iter().chain(errors) {
            let _ = kept?.join();
        }
        Ok(())
    }
}

/// How a connection to the streams has ended.
enum Held {
    /// The job has, and whoever had it knows.
    Told,
    /// It is gone; so is the job, if it has a status.
    Lost(Option<ExitStatus>),
}

/// Waits for somebody who has the streams.
fn fetched(told: &mut Running) -> (Option<Connection>, Option<ExitStatus>) {
    let until = Instant::now() + FETCHED;
    let mut status = None;
    loop {
        match told.next(until) {
            Some(Word::Link(link)) => return (Some(link), status),
            Some(Word::Ended(ended)) => status = Some(ended),
            Some(_) => {}
            None => return (None, status),
        }
    }
}

fn accept(mut link: Connection) -> io::Result<TcpStream> {
    answer(&mut link, Ok(()))?;
    let (stream, _) = link.into_ends()?;
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    Ok(stream)
}

/// Tells how the job has ended, and returns when the other end has heard all.
fn tell(relay: &mut Relay, status: Option<ExitStatus>) -> io::Result<()> {
    let signal = status.and_then(|status| status.signal());
    if let Some(signal) = signal.and_then(|signal| u8::try_from(signal).ok()) {
        relay.say(&Frame::Signal(signal));
    }
    let code = status.and_then(|status| status.code()).and_then(|code| u8::try_from(code).ok());
    relay.say(&Frame::Exit(code.unwrap_or(u8::MAX)));
    let begin = Instant::now();
    let mut is_shut = false;
    while !relay.is_closed() && begin.elapsed() < LAST {
        if relay.has_sent() && !is_shut {
            is_shut = true;
            relay.shut();
        }
        relay.turn(None, Some(LAST.saturating_sub(begin.elapsed())))?;
    }
    Ok(())
}

/// Copies what comes to the end of a file of the user's, on a thread of its own.
fn keep(from: OwnedFd, path: PathBuf) -> io::Result<JoinHandle<()>> {
    let file = File::options().append(true).create(true).mode(0o600).open(path);
    let copies = move || {
        let mut from = File::from(from);
        // The job goes on, also where there is no room for what it says.
        let copied = file.and_then(|mut to| io::copy(&mut from, &mut to));
        if copied.is_err() {
            let _ = io::copy(&mut from, &mut io::sink());
        }
    };
    thread::Builder::new().name("keep".into()).spawn(copies)
}
