//! What is said on a control socket: a length in four bytes, little-endian, and that much JSON.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::path::PathBuf;

/// Longest message, in bytes: paths are the long part.
const MAX_MESSAGE_LEN: u32 = 64 << 10;
/// Changes with what messages mean.
pub const VERSION: u32 = 1;

#[derive(Debug, Serialize, Deserialize)]
pub struct Request {
    pub version: u32,
    pub ask: Ask,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ask {
    Checkpoint(Order),
    /// To be told when no checkpoint is under way.
    Settle,
    Kill(Kill),
    /// Take the job's memory off its devices, or bring it back.
    Swap {
        out: bool,
    },
    /// Capture what the job's devices hold, and read, encode and sum it as a checkpoint does: for
    /// `kedge bench checkpoint`, which wants to know how long that takes. There is no image.
    Measure {
        codec: CodecName,
    },
    /// Move the job's devices while it runs.
    Migrate(Migrate),
    /// Take the last image of a job that moves to another host as a whole, for which it stands
    /// still until a [`Verdict`] comes on the connection.
    Depart(Order),
    /// To be told which life of the job this is: another one after each restart.
    Life,
    /// To start a part of the job on another host. No checkpoint begins until the asker closes the
    /// connection.
    Launch {
        /// The host, as the resolver knows it: decides the address at which the parts meet, where
        /// they have none.
        toward: Option<String>,
    },
}

/// What a part on another host is started with.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub struct Launch {
    /// The job that it joins.
    pub job: String,
    /// Where the job's parts meet: HOST:PORT.
    pub at: String,
    /// The address of this host on the way there, which a process of the job may not know: where it
    /// was restarted, it is told its former one.
    pub own: IpAddr,
    /// What they share, and nobody else knows.
    pub key: String,
    /// Its devices, as `kedge run --gpu` has them.
    pub gpu: String,
    /// Their limits, as images keep them.
    pub limits: serde_json::Value,
    /// How it is checkpointed, as images keep it.
    pub policy: serde_json::Value,
    /// What the user is to be told, once for a job.
    #[serde(default)]
    pub warning: Option<String>,
}

/// Without the key.
impl std::fmt::Debug for Launch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Launch").field("job", &self.job).field("at", &self.at).finish()
    }
}

/// A move that is asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Migrate {
    /// Where to, as `kedge migrate --to` has it.
    pub to: String,
    /// The last difference is taken across when that is expected to take no longer.
    pub max_pause_ms: u64,
    /// Or after so many rounds.
    pub rounds: u32,
    /// Whether to stay where it is rather than to stand still for longer than that.
    #[serde(default)]
    pub or_stay: bool,
    /// Bytes a second that cross while the program runs, at most.
    #[serde(default)]
    pub rate: Option<u64>,
    /// Whether only to find out if it can: a first round crosses, and everything stays.
    #[serde(default)]
    pub check: bool,
}

/// Why what is left crosses while the devices stand still.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Settles {
    /// It is expected to take no longer than it may.
    #[default]
    Fits,
    /// A round has brought no less than the one before.
    NoLess,
    /// There have been as many rounds as there may be.
    Rounds,
    /// What is made and ended on the devices cannot be followed: all of it crosses.
    Anew,
}

/// How far a move has come.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum Moving {
    /// A round is over: so many bytes have crossed while the program ran.
    Round { process: u32, round: u32, bytes: u64, seconds: f64 },
    /// The devices stood still for so long, while so many bytes crossed, and why they did so then.
    Pause {
        process: u32,
        bytes: u64,
        seconds: f64,
        #[serde(default)]
        why: Settles,
    },
    /// It stays where it is: so many bytes change while as many cross, for which it would have
    /// stood still for so long.
    Stays { process: u32, bytes: u64, seconds: f64 },
    /// All of it is over.
    Done { processes: u32, seconds: f64 },
}

/// What becomes of a job that stands still for its last image here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// The other host has all of it, and waits.
    Leave(Moved),
    /// It goes on here.
    Stay,
}

/// Where a job has moved, and how its streams are reached there.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    /// As `kedge migrate --host` has it, with its port.
    pub server: String,
    /// What names the move there.
    pub token: [u8; 16],
    /// What seals the streams.
    pub secret: [u8; 32],
}

/// Without the secret.
impl std::fmt::Debug for Moved {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Moved").field("server", &self.server).finish_non_exhaustive()
    }
}

/// What is to be done to the job's processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kill {
    /// All end: by SIGTERM, and what is left of them by SIGKILL, so many milliseconds later. The
    /// answer comes when none is left.
    End { grace_ms: u64 },
    /// All get this signal.
    Signal(i32),
}

/// A checkpoint that is asked for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// Where the image goes: absolute. `None`: where the job's images go.
    pub dir: Option<PathBuf>,
    /// `None`: chosen for each part of memory.
    pub codec: Option<CodecName>,
    /// Whether the contents of files that are open for writing stay out of the image.
    #[serde(default)]
    pub keep_files: bool,
    /// Whether it holds what has changed since the last one, all, or what the job's policy says.
    #[serde(default)]
    pub content: Content,
    /// Whether the job ends when the image is durable.
    pub stop: bool,
    /// Whether it may be captured later, for a shorter pause: when most of its memory has been
    /// written.
    #[serde(default)]
    pub ahead: bool,
    /// Whether the image is read back from its device, which is before the job ends if it is to.
    #[serde(default)]
    pub verify: bool,
    /// How many milliseconds it stays in memory too. `None`: what the job's policy says.
    #[serde(default)]
    pub hold_ms: Option<u64>,
    /// Whether it is told from time to time how much has been written: [`Progress::Writing`].
    #[serde(default)]
    pub tell: bool,
    /// Whether the job ends with it because it was asked to (`--on-term`): each of its parts then
    /// ends as one that was saved.
    #[serde(default)]
    pub last_word: bool,
    /// By what the image is called beside the job's name, if it is one of those by which the job
    /// moves to another host: it follows the job's memory, and is none of the images that the job
    /// is known to have.
    #[serde(default)]
    pub moves: Option<String>,
}

/// What an image holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Content {
    /// As the job's policy has it.
    #[default]
    Usual,
    /// What has changed since the last one, on which it builds where that can be.
    Changes,
    All,
}

/// A codec by its name, such as `lz4`.
pub type CodecName = String;

/// How far a checkpoint has come.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Progress {
    /// So much of the memory has been written, of `bytes` as far as that is known: of devices it is
    /// not. For those only who have asked for it.
    Writing { done: u64, bytes: Option<u64> },
    /// The job runs again. What a restart will not bring back is a warning.
    Captured { image: PathBuf, processes: usize, stall_seconds: f64, warnings: Vec<String> },
    /// The image is on the disk, and so much of it has been read back.
    Verifying { image: PathBuf, done: u64, bytes: u64 },
    /// The image counts. Where it was read back from, if it was: `device`, `dropped cache` or
    /// `memory`.
    Durable {
        image: PathBuf,
        bytes: u64,
        seconds: f64,
        #[serde(default)]
        verified: Option<String>,
    },
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reply {
    Progress(Progress),
    Settled,
    /// So many bytes are off the devices now.
    Swapped {
        bytes: u64,
    },
    /// So many bytes would have been written, which took so long from the moment that the devices
    /// went on.
    Measured {
        bytes: u64,
        seconds: f64,
    },
    Moving(Moving),
    /// The job stands still, and its last image is there: a [`Verdict`] is waited for.
    Standing {
        image: PathBuf,
    },
    /// Nothing of the job runs here any more.
    Departed,
    Life(String),
    Launch(Box<Launch>),
    Failed {
        kind: FailureKind,
        message: String,
    },
}

/// What a script may want to tell apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FailureKind {
    Busy,
    /// What was asked for cannot be done, now or later.
    Refused,
    /// The job has moved, and a process of it has lost its devices.
    Lost,
    Failed,
    Version,
}

pub fn send(mut stream: impl Write, message: &impl Serialize) -> io::Result<()> {
    let body = serde_json::to_vec(message)?;
    let length = u32::try_from(body.len()).ok().filter(|length| *length <= MAX_MESSAGE_LEN);
    let length = length.ok_or_else(|| io::Error::other("a message is too long"))?;
    let mut bytes = length.to_le_bytes().to_vec();
    bytes.extend(body);
    stream.write_all(&bytes)
}

pub fn receive<T: DeserializeOwned>(mut stream: impl Read) -> io::Result<T> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length);
    if length > MAX_MESSAGE_LEN {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a message is too long"));
    }
    let mut body = vec![0; length as usize];
    stream.read_exact(&mut body)?;
    Ok(serde_json::from_slice(&body)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_back_as_they_were() {
        let order = Order { dir: Some("/x".into()), stop: true, ..Order::default() };
        let mut bytes = Vec::new();
        send(&mut bytes, &Request { version: 1, ask: Ask::Checkpoint(order.clone()) }).unwrap();
        send(&mut bytes, &Request { version: 2, ask: Ask::Settle }).unwrap();
        let mut rest = &bytes[..];
        let first: Request = receive(&mut rest).unwrap();
        assert!(matches!(first.ask, Ask::Checkpoint(found) if found == order));
        assert_eq!(receive::<Request>(&mut rest).unwrap().version, 2);
    }

    #[test]
    fn hostile_messages_are_refused() {
        let long = [&(MAX_MESSAGE_LEN + 1).to_le_bytes()[..], &[b' '; 100]].concat();
        let short = [&100_u32.to_le_bytes()[..], b"{}"].concat();
        let nonsense = [&4_u32.to_le_bytes()[..], b"null"].concat();
        let deep = [&60_000_u32.to_le_bytes()[..], &[b'['; 60_000]].concat();
        for bytes in [&long[..], &short, &nonsense, &deep, b"", b"ab"] {
            assert!(receive::<Request>(bytes).is_err());
        }
    }
}
