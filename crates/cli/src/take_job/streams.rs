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
use kedge_supervisor::signal_group_of;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use std::fs::File;
use std::io::{self, Read, Write};
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
/// For a line that was cut to be there again: whoever has the streams tries as long.
const RESUMED: Duration = Duration::from_secs(300);
/// For what was said last to be taken, and for what the program has left behind to be asked for.
const LAST: Duration = Duration::from_secs(60);
/// After the program's end: who has its streams then is no process that ends with it.
const SETTLED: Duration = Duration::from_millis(500);
/// Between two looks.
const LOOK: Duration = Duration::from_millis(50);

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
        let mut ends = Ends { pid: restart.id(), status: None };
        let waits = move || {
            if let Ok(status) = restart.wait() {
                tells.tell(Word::Ended(status));
            }
        };
        thread::Builder::new().name("wait".into()).spawn(waits)?;
        let mut link = link;
        let mut is_told = false;
        loop {
            let limit = if is_told { LAST } else { FETCHED };
            let Some(next) = link.take().or_else(|| fetched(told, &mut ends, limit)) else {
                return self.keep(Unheard::default(), told, ends.status);
            };
            match self.relay(next, told, &mut ends, is_told) {
                Held::Told(_) if self.output.is_none() && self.errors.is_none() => return Ok(()),
                // What the program has left behind has them still.
                Held::Told(next) => (is_told, link) = (true, next.map(|next| *next)),
                Held::Never => {}
                // Whoever had them is gone, and the job is not.
                Held::Lost(unheard) => return self.keep(unheard, told, ends.status),
            }
        }
    }

    /// Begins to pass all on: nothing of it has changed where that fails.
    fn begin(&mut self, link: Connection) -> io::Result<Relay> {
        let mut relay = Relay::outliving(accept(link)?, self.secret, PskEnd::Second)?;
        let output = self.output.iter().map(|fd| (Stream::Out, fd));
        for (stream, fd) in output.chain(self.errors.iter().map(|fd| (Stream::Err, fd))) {
            relay.read_from(stream, again(fd)?);
        }
        if let Some(input) = self.input.take() {
            relay.write_to(Stream::In, input);
        }
        Ok(relay)
    }

    /// Passes all on between the job and whoever has a connection, one after the other: until the
    /// program has ended, or if it `is_over` until nobody has the streams any more.
    fn relay(
        &mut self,
        link: Connection,
        told: &mut Running,
        ends: &mut Ends,
        is_over: bool,
    ) -> Held {
        let Ok(mut relay) = self.begin(link) else { return Held::Never };
        let (mut left, mut ended, mut cut): (_, Option<Instant>, Option<Instant>) =
            (Left::default(), None, None);
        let mut has_said = false;
        loop {
            let wait = match (cut, ended) {
                (None, Some(_)) if has_said => None,
                (None, None) => None,
                _ => Some(LOOK),
            };
            if relay.turn(Some(told.wake()), wait).is_err() {
                return Held::Lost(Unheard::of(&relay));
            }
            told.is_awake();
            while let Some(word) = told.now() {
                match word {
                    Word::Ended(status) => ends.status = Some(status),
                    Word::Link(link) => {
                        // It may be for what the program has left behind: that comes when the end
                        // was heard.
                        if has_said && hears_end(&mut relay) {
                            return Held::Told(Some(Box::new(link)));
                        }
                        let resumed = accept(link).and_then(|link| relay.resume(link));
                        cut = cut.filter(|_| resumed.is_err());
                    }
                    _ => {}
                }
            }
            relay.told().into_iter().for_each(|frame| ends.heed(&frame));
            self.forget(&relay, &left);
            // Who passes on what the program has left behind begins when all was heard.
            if has_said && (relay.is_heard() || relay.is_another()) {
                return Held::Told(None);
            }
            if relay.is_closed() {
                let since = *cut.get_or_insert_with(Instant::now);
                if since.elapsed() > if has_said { LAST } else { RESUMED } {
                    return Held::Lost(Unheard::of(&relay));
                }
            }
            if ends.status.is_none() || has_said {
                continue;
            }
            let since = *ended.get_or_insert_with(Instant::now);
            if since.elapsed() > SETTLED && !is_over {
                left.note(&mut relay);
            }
            if !relay.has_sources() {
                ends.tell(&mut relay);
                has_said = true;
            }
        }
    }

    /// Closes streams that nobody reads any more, or that have ended.
    fn forget(&mut self, relay: &Relay, left: &Left) {
        let each = [(Stream::Out, &mut self.output), (Stream::Err, &mut self.errors)];
        for (stream, fd) in each {
            if !relay.reads(stream) && !left.0.contains(&stream) {
                *fd = None;
            }
        }
    }

    /// Keeps what the job says in files, until it has ended.
    fn keep(
        self,
        unheard: Unheard,
        told: &mut Running,
        mut status: Option<ExitStatus>,
    ) -> Result<(), Failure> {
        // Nobody says anything to it any more.
        drop(self.input);
        let beside = |end: &str| {
            let mut path = self.kept.clone().into_os_string();
            path.push(end);
            PathBuf::from(path)
        };
        let output = keep(self.output, beside(".out"), unheard.output);
        let errors = keep(self.errors, beside(".err"), unheard.errors);
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
        for kept in [output?, errors?].into_iter().flatten() {
            let _ = kept.join();
        }
        Ok(())
    }
}

/// What the program of a job does at its end, and before.
struct Ends {
    /// Its supervisor.
    pid: u32,
    status: Option<ExitStatus>,
}

impl Ends {
    /// Passes a signal on.
    fn heed(&self, frame: &Frame) {
        if self.status.is_some() {
            return;
        }
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        // One that has just ended takes none.
        match frame {
            Frame::Signal(signal) => {
                if let (Some(pid), Some(signal)) = (pid, Signal::from_named_raw((*signal).into())) {
                    let _ = kill_process(pid, signal);
                }
            }
            Frame::GroupSignal(signal) => match Signal::from_named_raw((*signal).into()) {
                // Its supervisor does not pass these on: it stops and goes on with the job.
                Some(signal @ (Signal::TSTP | Signal::CONT)) => {
                    let _ = pid.map(|pid| kill_process_group(pid, signal));
                }
                _ => drop(signal_group_of(self.pid, *signal)),
            },
            _ => {}
        }
    }

    /// Tells how the program has ended.
    fn tell(&self, relay: &mut Relay) {
        let signal = self.status.and_then(|status| status.signal());
        if let Some(signal) = signal.and_then(|signal| u8::try_from(signal).ok()) {
            relay.say(&Frame::Signal(signal));
        }
        let code = self.status.and_then(|status| status.code());
        let code = code.and_then(|code| u8::try_from(code).ok());
        relay.say(&Frame::Exit(code.unwrap_or(u8::MAX)));
    }
}

/// Streams that what the program has left behind has still.
#[derive(Default)]
struct Left(Vec<Stream>);

impl Left {
    /// Has no more of the streams be read than is there: all that the program itself has said.
    fn note(&mut self, relay: &mut Relay) {
        let open = [Stream::Out, Stream::Err].into_iter().filter(|stream| relay.reads(*stream));
        self.0.extend(open.filter(|stream| !self.0.contains(stream)).collect::<Vec<_>>());
        // Pipes tell how much is in them.
        let _ = relay.read_what_is_there();
    }
}

/// How a connection to the streams has ended.
enum Held {
    /// The program has ended, and whoever had the streams knows; and the next connection, if it
    /// has come already.
    Told(Option<Box<Connection>>),
    /// It has not begun.
    Never,
    /// It is gone; what was said into it and was not heard.
    Lost(Unheard),
}

/// Whether the other end has heard all, by what has come.
fn hears_end(relay: &mut Relay) -> bool {
    let _ = relay.turn(None, Some(Duration::ZERO));
    relay.is_heard()
}

/// What the job has said that nobody is known to have heard.
#[derive(Debug, Default)]
struct Unheard {
    output: Vec<u8>,
    errors: Vec<u8>,
}

impl Unheard {
    fn of(relay: &Relay) -> Unheard {
        Unheard { output: relay.unheard(Stream::Out), errors: relay.unheard(Stream::Err) }
    }
}

/// Waits so long for somebody who has the streams.
fn fetched(told: &mut Running, ends: &mut Ends, limit: Duration) -> Option<Connection> {
    let until = Instant::now() + limit;
    loop {
        match told.next(until)? {
            Word::Link(link) => return Some(link),
            Word::Ended(ended) => ends.status = Some(ended),
            _ => {}
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

/// Copies what was not heard, and what comes, to the end of a file of the user's, on a thread of
/// its own.
fn keep(
    from: Option<OwnedFd>,
    path: PathBuf,
    unheard: Vec<u8>,
) -> io::Result<Option<JoinHandle<()>>> {
    if from.is_none() && unheard.is_empty() {
        return Ok(None);
    }
    let file = File::options().append(true).create(true).mode(0o600).open(path);
    let copies = move || {
        // The job goes on, also where there is no room for what it says.
        let mut file = file.and_then(|mut to| to.write_all(&unheard).map(|()| to));
        let Some(mut from) = from.map(File::from) else { return };
        let copied = file.as_mut().map(|to| io::copy(&mut from, to));
        if !matches!(copied, Ok(Ok(_))) {
            let _ = io::copy(&mut from, &mut io::sink());
        }
    };
    thread::Builder::new().name("keep".into()).spawn(copies).map(Some)
}
