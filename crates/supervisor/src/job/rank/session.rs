//! The session with the step's daemon, as far as kedge itself asks.

use super::Seat;
use kedge_pmi::{Command, PmiError, Rank, Session};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use thiserror::Error;

/// How long the daemon may need for what it knows itself.
const SOON: Duration = Duration::from_secs(10);

/// Why a rank cannot be one of kedge's.
#[derive(Debug, Error)]
pub enum RankError {
    #[error("the step daemon cannot be reached (PMI_FD): {0}")]
    Daemon(io::Error),
    #[error("the step daemon has ended the session")]
    Ended,
    #[error("the step daemon does not answer `{0}`")]
    Silent(&'static str),
    #[error(transparent)]
    Pmi(#[from] PmiError),
    #[error(
        "not all ranks of the step came within {0} s: each of them is to be started by kedge \
         (`srun kedge …`)"
    )]
    Others(u64),
    #[error(
        "the first rank's job is {first}, and this one's {own} (--job): ranks of one step are one \
         job; for jobs of their own: env -u PMI_FD kedge run …"
    )]
    Named { own: String, first: String },
    #[error(
        "the first rank {first} the job, and this one {own} it: all of them are to find the same \
         images (--ckpt-dir, on a file system that all nodes share)"
    )]
    Apart { own: String, first: String },
    #[error("the first rank of the step has told nothing: let all ranks be started by one kedge")]
    Untold,
    #[error("another rank of the step: {0}")]
    Failed(String),
    #[error("{0} is nothing that a rank of a step (srun --mpi=pmi2) can have: leave it out")]
    Option(&'static str),
    #[error("the image has {parts} parts and the step {ranks} ranks: give srun -n {parts}")]
    Size { parts: usize, ranks: u32 },
    #[error("the step has {ranks} ranks, and a job at most {most} parts")]
    Many { ranks: u32, most: u32 },
    #[error("the rank waits for its step (`{0}`), which no image holds: try again")]
    Waits(String),
    #[error("cannot make a relay for the rank: {0}")]
    Relay(io::Error),
}

/// A session that has begun.
#[derive(Debug)]
pub(crate) struct Open {
    daemon: UnixStream,
    session: Session,
    buffer: Vec<u8>,
    pub(crate) rank: Rank,
}

impl Open {
    /// Begins the session. A step has one only for each of its ranks.
    ///
    /// # Errors
    /// The daemon refuses or is silent.
    pub(crate) fn begin(seat: &Seat) -> Result<Open, RankError> {
        let none = Rank { rank: 0, size: 0, application: -1, answer: Vec::new() };
        let mut open = Open::after(seat, none)?;
        if let Err(error) = open.greet(seat.rank) {
            // Who has the socket besides may wait for as long as it likes.
            let _ = open.daemon.set_read_timeout(None);
            return Err(error);
        }
        Ok(open)
    }

    fn greet(&mut self, rank: u32) -> Result<(), RankError> {
        self.send(&Session::init())?;
        let end = Instant::now() + SOON;
        while !Session::inited(&mut self.buffer)? {
            self.receive("init", Some(end))?;
        }
        let begin = self.session.begin(rank)?;
        self.rank = Session::begun(self.ask(&begin, "fullinit", Some(SOON))?)?;
        Ok(())
    }

    /// Returns the session that another process has begun as `rank`, and uses no more.
    ///
    /// # Errors
    /// The daemon's socket is closed.
    pub(crate) fn after(seat: &Seat, rank: Rank) -> Result<Open, RankError> {
        let session = Session { step: seat.step.clone() };
        Ok(Open { daemon: seat.connection()?, session, buffer: Vec::new(), rank })
    }

    /// Returns a session with whoever has the other end of `daemon`.
    #[cfg(test)]
    pub(super) fn of(daemon: UnixStream, step: &str, rank: Rank) -> Open {
        Open { daemon, session: Session { step: step.to_owned() }, buffer: Vec::new(), rank }
    }

    /// Its step.
    pub(crate) fn step(&self) -> &str {
        &self.session.step
    }

    /// Another descriptor of the daemon's socket.
    pub(crate) fn daemon(&self) -> io::Result<UnixStream> {
        self.daemon.try_clone()
    }

    /// What the daemon has said and nobody has asked for; nothing more is asked.
    pub(crate) fn into_rest(self) -> Vec<u8> {
        self.buffer
    }

    /// Tells all ranks of a key, which they have after the next fence.
    pub(crate) fn put(&mut self, key: &str, value: &str) -> Result<(), RankError> {
        let answer = self.ask(&Session::put((key, value))?, "kvs-put", Some(SOON))?;
        Ok(Session::done(&answer, "kvs-put")?)
    }

    /// Waits for all ranks; `None`: for as long as it takes.
    pub(crate) fn fence(&mut self, limit: Option<Duration>) -> Result<(), RankError> {
        let answer = match self.ask(&Session::fence()?, "kvs-fence", limit) {
            Err(RankError::Silent(_)) => {
                return Err(RankError::Others(limit.unwrap_or_default().as_secs()));
            }
            other => other?,
        };
        Ok(Session::done(&answer, "kvs-fence")?)
    }

    /// What a rank has told by that key.
    pub(crate) fn get(&mut self, key: &str) -> Result<Option<String>, RankError> {
        let get = self.session.get(key)?;
        Ok(Session::got(&self.ask(&get, "kvs-get", Some(SOON))?)?)
    }

    /// Tells the step again what the rank has told another one, for after the next fence.
    pub(crate) fn repeat(&mut self, frame: &[u8]) -> Result<(), RankError> {
        let answer = self.ask(frame, "what the rank has told", Some(SOON))?;
        match Command::parse(&answer)?.failure() {
            Some(why) => Err(PmiError::Refused { request: "what the rank has told", why }.into()),
            None => Ok(()),
        }
    }

    /// Ends the session.
    pub(crate) fn end(&mut self) -> Result<(), RankError> {
        let answer = self.ask(&Session::end()?, "finalize", Some(SOON))?;
        Ok(Session::done(&answer, "finalize")?)
    }

    fn ask(
        &mut self,
        request: &[u8],
        name: &'static str,
        limit: Option<Duration>,
    ) -> Result<Vec<u8>, RankError> {
        let end = limit.map(|limit| Instant::now() + limit);
        self.send(request)?;
        loop {
            if let Some(answer) = Session::next(&mut self.buffer)? {
                return Ok(answer);
            }
            self.receive(name, end)?;
        }
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), RankError> {
        self.daemon.write_all(bytes).map_err(RankError::Daemon)
    }

    fn receive(&mut self, name: &'static str, end: Option<Instant>) -> Result<(), RankError> {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return Err(RankError::Silent(name));
        }
        self.daemon.set_read_timeout(left).map_err(RankError::Daemon)?;
        let mut bytes = [0; 4096];
        match self.daemon.read(&mut bytes) {
            Ok(0) => Err(RankError::Ended),
            Ok(count) => {
                self.buffer.extend_from_slice(&bytes[..count]);
                Ok(())
            }
            Err(error) => match error.kind() {
                io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock => Ok(()),
                _ => Err(RankError::Daemon(error)),
            },
        }
    }
}
