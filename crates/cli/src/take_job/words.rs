//! What is said to who has taken a job: by whoever moves it, by who has its streams, and by the
//! job.

use kedge_keys::Connection;
use kedge_remote::answer;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

/// How long whoever moves the job may take to ask whether it runs, when it has ended.
const ASKS: Duration = Duration::from_secs(60);

/// What becomes of a job that is here.
pub(super) enum Word {
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

/// Of who says something, and wakes who waits for that.
#[derive(Debug, Clone)]
pub(super) struct Tells {
    words: Sender<Word>,
    waker: Arc<UnixStream>,
}

impl Tells {
    pub(super) fn tell(&self, word: Word) {
        // Who is gone needs no word, and a full pipe wakes.
        let _ = self.words.send(word);
        let _ = (&*self.waker).write(b"w");
    }
}

/// Where it is heard.
pub(super) struct Words {
    words: Receiver<Word>,
    wake: UnixStream,
}

pub(super) fn channel() -> io::Result<(Tells, Words)> {
    let (tells, words) = mpsc::channel();
    let (waker, wake) = UnixStream::pair()?;
    waker.set_nonblocking(true)?;
    wake.set_nonblocking(true)?;
    Ok((Tells { words: tells, waker: Arc::new(waker) }, Words { words, wake }))
}

impl Words {
    /// The next word until then.
    pub(super) fn next(&mut self, until: Instant) -> Option<Word> {
        self.words.recv_timeout(until.saturating_duration_since(Instant::now())).ok()
    }

    /// The job runs, or has failed to: whoever moves it is answered so, whenever he asks, if he has
    /// not gone already.
    pub(super) fn decided(self, runs: Result<(), String>, is_alone: bool) -> Running {
        Running { words: self, runs, has_said: is_alone }
    }
}

/// Words about a job that runs here.
pub(super) struct Running {
    words: Words,
    runs: Result<(), String>,
    /// Whoever moves the job says nothing any more.
    has_said: bool,
}

impl Running {
    /// Answers whoever moves the job; other words are passed on.
    pub(super) fn of(&mut self, word: Word) -> Option<Word> {
        let (mut line, said) = match word {
            Word::Go(line) => (line, self.runs.clone()),
            Word::Stay(line) => (line, Err("it runs here".to_owned())),
            Word::Alone => {
                self.has_said = true;
                return None;
            }
            other => return Some(other),
        };
        self.has_said = true;
        let _ = answer(&mut line, said);
        None
    }

    /// The next of them until then.
    pub(super) fn next(&mut self, until: Instant) -> Option<Word> {
        loop {
            let word = self.words.next(until)?;
            if let Some(word) = self.of(word) {
                return Some(word);
            }
        }
    }

    /// One that is there already.
    pub(super) fn now(&mut self) -> Option<Word> {
        self.next(Instant::now())
    }

    /// Returns when whoever moves the job has asked for the last time, or is gone.
    pub(super) fn line_is_answered(&mut self) {
        let until = Instant::now() + ASKS;
        while !self.has_said
            && let Some(word) = self.words.next(until)
        {
            let _ = self.of(word);
        }
    }

    /// Becomes readable with each word.
    pub(super) fn wake(&self) -> BorrowedFd<'_> {
        self.words.wake.as_fd()
    }

    pub(super) fn is_awake(&self) {
        let _ = (&self.words.wake).read(&mut [0; 64]);
    }
}
