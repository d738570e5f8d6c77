//! Jobs that move to another host as a whole: what the host that they leave says to the one that
//! takes them.

use crate::connect::{ConnectError, bad_answer, open};
use crate::frame::{FrameError, read_one, write_one};
use crate::messages::{CHUNK, LINE, Offer, Purpose, Refused, SessionKey};
use kedge_keys::Connection;
use kedge_wire::{Bytes, List, Text, Wire, wire};
use std::fs::File;
use std::io::{self, Read};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::time::Duration;
use thiserror::Error;

/// For the server to start who takes the job.
const BEGIN: Duration = Duration::from_secs(30);
/// For the job to be looked at, or to be made there: it may be large.
const WORK: Duration = Duration::from_secs(600);
/// Longest question and answer, bytes of a file aside.
const MAX: usize = CHUNK + (1 << 10);
/// Pairs of paths, and bytes of one.
const PATHS: usize = 64;
const PATH: usize = 8 << 10;
/// Bytes of a file's name, or a folder's.
const NAME: usize = 255;

wire! {
    /// From the host that a job leaves. Each but [`ToTaker::Chunk`] is answered.
    #[derive(Debug, Clone, PartialEq)]
    pub enum ToTaker {
        /// What comes: the job's name, kedge's version there, where its files lie here (OLD=NEW),
        /// and what seals its streams later.
        Hello = 1 {
            job: Text<NAME>,
            build: Text<NAME>,
            paths: List<Text<PATH>, PATHS>,
            secret: SessionSecret,
        },
        /// The folder of an image, by its name alone, and whether it holds the last of the job.
        Image = 2 { name: Text<NAME> },
        /// A file of it, of so many bytes, which follow.
        File = 3 { name: Text<NAME>, bytes: u64 },
        /// Bytes of a file.
        Chunk = 4 { bytes: Bytes<CHUNK> },
        /// Whether the job could be restarted from that image.
        Check = 5 { name: Text<NAME> },
        /// The job, from that image, up to where only it is left to run.
        Restart = 6 { name: Text<NAME> },
        /// Nothing of it runs elsewhere any more → once it runs.
        Go = 7 {},
        /// It stays where it was: nothing of it is left here.
        Stay = 8 {},
        /// The job's processes and memory may be made as they are in that image, before the last
        /// one comes → when they are, or will not be.
        Standby = 9 { name: Text<NAME> },
    }
}

/// What seals a job's streams.
pub type SessionSecret = [u8; 32];

/// Why the other host does not take a job.
#[derive(Debug, Error)]
pub enum JobLineError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("{server}: {why}")]
    Refused { server: String, why: String },
    #[error("the connection to {server} is lost: {source}")]
    Lost { server: String, source: FrameError },
    #[error("{path}: {source}")]
    File { path: PathBuf, source: io::Error },
    #[error("`{what}` is longer than may be said to another host")]
    TooLong { what: String },
}

/// The line to the host that takes a job.
#[derive(Debug)]
pub struct JobLine {
    server: String,
    line: Connection,
}

impl JobLine {
    /// Has a server take a job; `token` names the move.
    ///
    /// # Errors
    /// It is not there, does not allow that, or speaks another version.
    pub fn connect(server: &str, token: SessionKey) -> Result<JobLine, JobLineError> {
        let mut line = open(server, Purpose::TakeJob { token }, BEGIN)?;
        offered(server, &mut line)?;
        Ok(JobLine { server: server.to_owned(), line })
    }

    /// Says something and waits for the answer.
    ///
    /// # Errors
    /// The line is lost, or the other host refuses.
    pub fn ask(&mut self, what: &ToTaker) -> Result<(), JobLineError> {
        self.say(what)?;
        let timed = self.line.stream().set_read_timeout(Some(WORK));
        timed.map_err(|error| self.lost(error.into()))?;
        let answer = read_one::<Result<Offer, Refused>>(&mut self.line, LINE + 64);
        let server = || self.server.clone();
        match answer.map_err(|error| self.lost(error))? {
            Ok(Offer {}) => Ok(()),
            Err(Refused { why }) => {
                Err(JobLineError::Refused { server: server(), why: why.into_inner() })
            }
        }
    }

    /// Says something that is not answered.
    ///
    /// # Errors
    /// The line is lost.
    pub fn say(&mut self, what: &impl Wire) -> Result<(), JobLineError> {
        write_one(&mut self.line, what).map_err(|error| self.lost(error.into()))
    }

    /// Sends a file of an image: how many bytes crossed. `pace` hears of each piece.
    ///
    /// # Errors
    /// It cannot be read, or the line is lost.
    pub fn send(
        &mut self,
        folder: &Path,
        name: &str,
        mut pace: impl FnMut(u64),
    ) -> Result<u64, JobLineError> {
        let path = folder.join(name);
        let failed = |source| JobLineError::File { path: path.clone(), source };
        let mut file = File::open(&path).map_err(failed)?;
        let bytes = file.metadata().map_err(failed)?.len();
        self.say(&ToTaker::File { name: short(name)?, bytes })?;
        let mut left = bytes;
        while left > 0 {
            let mut piece = vec![0; usize::try_from(left).unwrap_or(CHUNK).min(CHUNK)];
            file.read_exact(&mut piece).map_err(failed)?;
            left -= piece.len() as u64;
            pace(piece.len() as u64);
            self.say(&ToTaker::Chunk { bytes: Bytes::new(piece).unwrap_or_default() })?;
        }
        let answer = read_one::<Result<Offer, Refused>>(&mut self.line, LINE + 64);
        match answer.map_err(|error| self.lost(error))? {
            Ok(Offer {}) => Ok(bytes),
            Err(Refused { why }) => {
                Err(JobLineError::Refused { server: self.server.clone(), why: why.into_inner() })
            }
        }
    }

    fn lost(&self, source: FrameError) -> JobLineError {
        JobLineError::Lost { server: self.server.clone(), source }
    }
}

impl ToTaker {
    /// Says what comes.
    ///
    /// # Errors
    /// There is more than may be said.
    pub fn hello(
        job: &str,
        build: &str,
        paths: &[String],
        secret: SessionSecret,
    ) -> Result<ToTaker, JobLineError> {
        let paths = paths.iter().map(|pair| short(pair)).collect::<Result<Vec<_>, _>>()?;
        let many = |_| JobLineError::TooLong { what: "--path-map".to_owned() };
        let paths = List::new(paths).map_err(many)?;
        Ok(ToTaker::Hello { job: short(job)?, build: short(build)?, paths, secret })
    }

    /// Begins the image in a folder, by its name alone.
    ///
    /// # Errors
    /// That is too long.
    pub fn image(folder: &Path) -> Result<ToTaker, JobLineError> {
        Ok(ToTaker::Image { name: name_of(folder)? })
    }

    /// Asks whether the job could be restarted from that image.
    ///
    /// # Errors
    /// As [`ToTaker::image`].
    pub fn check(folder: &Path) -> Result<ToTaker, JobLineError> {
        Ok(ToTaker::Check { name: name_of(folder)? })
    }

    /// Lets the job be made as it is in that image, as far as its last one is not needed.
    ///
    /// # Errors
    /// As [`ToTaker::image`].
    pub fn standby(folder: &Path) -> Result<ToTaker, JobLineError> {
        Ok(ToTaker::Standby { name: name_of(folder)? })
    }

    /// Has the job made from that image.
    ///
    /// # Errors
    /// As [`ToTaker::image`].
    pub fn restart(folder: &Path) -> Result<ToTaker, JobLineError> {
        Ok(ToTaker::Restart { name: name_of(folder)? })
    }
}

fn name_of(folder: &Path) -> Result<Text<NAME>, JobLineError> {
    short(&folder.file_name().unwrap_or_default().to_string_lossy())
}

/// Makes a bounded text.
fn short<const MAX: usize>(text: &str) -> Result<Text<MAX>, JobLineError> {
    Text::new(text.to_owned()).map_err(|_| JobLineError::TooLong { what: text.to_owned() })
}

/// Connects to the streams of a job that has moved: whoever does that says that nothing of it runs
/// where it was.
///
/// # Errors
/// The server is not there, or has no such job.
pub fn job_streams(server: &str, token: SessionKey) -> Result<TcpStream, ConnectError> {
    let mut line = open(server, Purpose::JobStreams { token }, BEGIN)?;
    offered(server, &mut line)?;
    let ends = line.into_ends();
    let failed = |source| ConnectError::Connect { server: server.to_owned(), source };
    let (stream, _) = ends.map_err(failed)?;
    stream.set_read_timeout(None).map_err(failed)?;
    Ok(stream)
}

fn offered(server: &str, line: &mut Connection) -> Result<(), ConnectError> {
    let offered = read_one::<Result<Offer, Refused>>(line, LINE + 64);
    let offered = offered.map_err(|error| bad_answer(server, error))?;
    offered.map(|Offer {}| ()).map_err(|refused| refused.by(server))
}

/// Hears who has a job move here.
///
/// # Errors
/// The line is lost.
pub fn hear(line: &mut Connection) -> Result<ToTaker, FrameError> {
    read_one(line, MAX)
}

/// Answers him; `Err` says why not, for people.
///
/// # Errors
/// The line is lost.
pub fn answer(line: &mut Connection, what: Result<(), String>) -> io::Result<()> {
    let refused = |why| Refused { why: Text::truncated(why) };
    write_one(line, &what.map(|()| Offer {}).map_err(refused))
}
