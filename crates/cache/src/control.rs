//! What the command asks a daemon, and how it answers: a line of JSON each, over a local socket.

use crate::engine::{Engine, Unclaimed};
use crate::partner::PartnerStatus;
use crate::spec::{Fsync, Medium, memory_home};
use crate::tier::lock;
use crate::{CacheError, home};
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The name of the socket in the folder of the cache's memory.
pub(crate) const SOCKET: &str = "control";
/// The longest line.
const MOST: u64 = 16 << 20;

/// What a daemon is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ask {
    /// How it stands.
    Status,
    /// To write below all that it holds, and say when that is done.
    Drain,
    /// To drain, unmount and end.
    Stop,
    /// The same, and to leave in the tiers what cannot be drained.
    Leave,
}

/// How a daemon answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Answer {
    /// How it stands.
    Status(Box<Status>),
    /// It is done.
    Done,
    /// It has ended, and what could not be drained is left in the tiers.
    Left(String),
    /// It could not be done.
    Failed(String),
}

/// How a tier stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierStatus {
    /// What it is made of.
    pub medium: Medium,
    /// The folder that it uses.
    pub folder: PathBuf,
    /// Bytes that it may hold now: less than was asked for where the host's memory is short.
    pub limit: u64,
    /// Bytes that it holds.
    pub used: u64,
}

/// How the device of a tier stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceStatus {
    /// Whether the process that holds its memory has ended.
    pub gone: bool,
    /// Bytes of the device that are free; `None` where no other program can have them.
    pub free: Option<u64>,
    /// Bytes of it that are to stay free.
    pub keep: u64,
    /// Bytes that programs wait for just now.
    pub wanted: u64,
    /// Orders that were not answered in time.
    pub late: u64,
}

/// A file that is not below yet, for a reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stuck {
    /// Its name, from the folder that is cached.
    pub path: String,
    /// Bytes that are held.
    pub bytes: u64,
    /// Why.
    pub why: String,
}

/// How a cache stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The folder that is cached.
    pub under: PathBuf,
    /// The daemon.
    pub pid: u32,
    /// What has the data when fsync returns.
    pub fsync: Fsync,
    /// The tiers, in the order in which they are filled.
    pub tiers: Vec<TierStatus>,
    /// Bytes that are not below.
    pub dirty: u64,
    /// Files with such bytes.
    pub files: u64,
    /// Seconds for which the file that has such bytes for the longest has had some.
    #[serde(default)]
    pub oldest: Option<u64>,
    /// Writes that wait for room.
    pub waiting: u64,
    /// Requests of programs that wait for the file system below.
    pub below: u64,
    /// What each user's files hold: user and bytes.
    pub users: Vec<(u32, u64)>,
    /// Bytes that programs wrote into tiers, since the daemon started.
    pub absorbed: u64,
    /// Bytes that programs wrote below at once, because no tier could take them.
    pub through: u64,
    /// Bytes that were drained.
    pub drained: u64,
    /// Bytes that moved from host memory to a device.
    #[serde(default)]
    pub moved: u64,
    /// Bytes that moved from a device back to host memory.
    #[serde(default)]
    pub back: u64,
    /// How the device of a tier stands.
    #[serde(default)]
    pub device: Option<DeviceStatus>,
    /// How the partner stands.
    #[serde(default)]
    pub partner: Option<PartnerStatus>,
    /// Writes that had to wait for room.
    pub waited: u64,
    /// Files that cannot be drained, or were not found again: the first of them.
    pub stuck: Vec<Stuck>,
    /// How many there are.
    pub stuck_files: u64,
}

/// So many files are named.
pub(crate) const NAMED: usize = 100;

impl Engine {
    /// Returns how the cache stands.
    pub(crate) fn status(&self) -> Status {
        let (mut files, mut stuck, mut stuck_files) = (0, Vec::new(), 0);
        let known: Vec<_> = lock(&self.files).by_number.values().cloned().collect();
        for file in known {
            let state = file.lock();
            let bytes = state.extents.unwritten();
            files += u64::from(bytes > 0);
            stuck_files += u64::from(state.trouble.is_some());
            if let Some(trouble) = state.trouble.filter(|_| stuck.len() < NAMED) {
                let why = io::Error::from_raw_os_error(trouble.errno).to_string();
                let path = String::from_utf8_lossy(&state.path).into_owned();
                stuck.push(Stuck { path, bytes, why });
            }
        }
        stuck_files += self.unclaimed.len() as u64;
        let broken = lock(&self.broken);
        stuck_files += broken.files;
        stuck.extend(broken.named.iter().cloned());
        drop(broken);
        let unclaimed = self.unclaimed.iter().take(NAMED);
        stuck.extend(unclaimed.map(|lost| self.unclaimed_file(lost)));
        let partner = self.partner_status();
        let desk = self.desk();
        let tiers = self.tiers.iter().zip(desk.limits.rooms());
        let count = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        let mut users: Vec<_> = desk.limits.users().iter().map(|(u, bytes)| (*u, *bytes)).collect();
        users.sort_unstable();
        Status {
            under: self.spec.under.clone(),
            pid: std::process::id(),
            fsync: self.spec.fsync,
            tiers: tiers
                .map(|(tier, room)| TierStatus {
                    medium: tier.medium,
                    folder: tier.folder.clone(),
                    limit: room.limit,
                    used: room.used,
                })
                .collect(),
            dirty: self.below.promised(),
            files,
            oldest: desk.order.longest(self.now()).map(|age| age / 1000),
            waiting: desk.waiting.len() as u64,
            below: self.pool.len() as u64,
            users,
            absorbed: count(&self.counters.absorbed),
            through: count(&self.counters.through),
            drained: count(&self.counters.drained),
            moved: count(&self.counters.moved),
            back: count(&self.counters.back),
            device: self.device().map(|(_, device)| device.status()),
            partner,
            waited: count(&self.counters.waited),
            stuck,
            stuck_files,
        }
    }

    /// Returns what is known of data whose file is not there any more.
    pub(crate) fn unclaimed_file(&self, Unclaimed { held, lost }: &Unclaimed) -> Stuck {
        let tiers: Vec<String> = self
            .tiers
            .iter()
            .enumerate()
            .filter(|(index, _)| held.parts.iter().any(|(_, tier)| tier == *index))
            .map(|(_, tier)| match tier.is_behind() {
                true => "a device's memory".to_owned(),
                false => format!("{}/{:016x}", tier.folder.display(), held.file),
            })
            .collect();
        let why = format!("{}; kept in {}", lost.why, tiers.join(", "));
        let path = String::from_utf8_lossy(&held.identity.path).into_owned();
        Stuck { path, bytes: held.parts.total(), why }
    }
}

/// A daemon that is asked how it stands has an answer sooner, or hangs.
const PROMPT: Duration = Duration::from_secs(5);

/// Returns how each cache stands that this user has on this machine, in the order of their folders;
/// or why that cannot be told, as of one whose daemon was killed.
pub fn all() -> Vec<Result<Status, CacheError>> {
    let status = |under: PathBuf| match ask(&under, Ask::Status)? {
        Answer::Status(status) => Ok(*status),
        Answer::Done | Answer::Left(_) | Answer::Failed(_) => {
            let why = "it did not answer the question".to_owned();
            Err(CacheError::Daemon { under, why })
        }
    };
    home::folders().into_iter().map(status).collect()
}

/// Asks the daemon of a cache.
///
/// # Errors
/// If no daemon runs there, or it could not do what it was asked.
pub fn ask(under: &Path, ask: Ask) -> Result<Answer, CacheError> {
    let stream = match UnixStream::connect(memory_home(under).join(SOCKET)) {
        Ok(stream) => stream,
        Err(_) if home::is_killed(under) => {
            return Err(CacheError::Killed(under.to_owned()));
        }
        Err(_) => return Err(CacheError::NotRunning(under.to_owned())),
    };
    ask_at(stream, under, ask)
}

/// Asks a daemon that is connected.
pub(crate) fn ask_at(mut stream: UnixStream, under: &Path, ask: Ask) -> Result<Answer, CacheError> {
    let failed = |why: String| CacheError::Daemon { under: under.to_owned(), why };
    if ask == Ask::Status {
        stream.set_read_timeout(Some(PROMPT)).map_err(|error| failed(error.to_string()))?;
    }
    write_line(&mut stream, &ask).map_err(|error| failed(error.to_string()))?;
    match read_line(&stream) {
        Ok(Answer::Failed(why)) => Err(failed(why)),
        Ok(answer) => Ok(answer),
        Err(error) => Err(failed(format!("it gave no answer: {error}"))),
    }
}

/// Writes a line of JSON.
pub(crate) fn write_line(stream: &mut UnixStream, value: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    stream.write_all(&line)
}

/// Reads a line of JSON, of a bounded length.
pub(crate) fn read_line<T: for<'a> Deserialize<'a>>(stream: &UnixStream) -> io::Result<T> {
    let mut line = String::new();
    BufReader::new(stream.take(MOST)).read_line(&mut line)?;
    Ok(serde_json::from_str(&line)?)
}
