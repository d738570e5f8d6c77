//! Requests of `kedge cache` to a daemon and their answers: a line of JSON each, over a local
//! socket.

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
/// The longest line, in bytes.
const MAX_LINE: u64 = 16 << 20;

/// A request to a daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ask {
    /// Tell the cache's state.
    Status,
    /// Write all dirty bytes below, and answer when that is done.
    Drain,
    /// Drain, unmount and end.
    Stop,
    /// Drain, unmount and end, and leave in the tiers what cannot be drained.
    Leave,
}

/// A daemon's answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Answer {
    /// The cache's state.
    Status(Box<Status>),
    /// The request is carried out.
    Done,
    /// The daemon has ended; the text names what is left in the tiers.
    Left(String),
    /// The request failed; the text says why.
    Failed(String),
}

/// The state of a tier.
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

/// The state of a device whose memory is a tier.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceStatus {
    /// Whether the process that holds its memory has ended.
    pub gone: bool,
    /// Free bytes of the device; `None` if no other program can allocate them.
    pub free: Option<u64>,
    /// Bytes of the device that the tier leaves free.
    pub keep: u64,
    /// Bytes that programs are waiting for.
    pub wanted: u64,
    /// Requests to the holder that were not answered in time.
    pub late: u64,
}

/// A file that cannot be drained.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stuck {
    /// Its path, relative to the cached folder.
    pub path: String,
    /// Bytes that the tiers hold of it.
    pub bytes: u64,
    /// Why it cannot be drained, and where the bytes are.
    pub why: String,
}

/// The state of a cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The cached folder.
    pub under: PathBuf,
    /// The daemon's process id.
    pub pid: u32,
    /// Where the data is when fsync returns.
    pub fsync: Fsync,
    /// The tiers, in the order in which they are filled.
    pub tiers: Vec<TierStatus>,
    /// Dirty bytes: not yet written below.
    pub dirty: u64,
    /// Files with dirty bytes.
    pub files: u64,
    /// Seconds for which the file that has been dirty for longest has been so.
    #[serde(default)]
    pub oldest: Option<u64>,
    /// Writes that are waiting for room in a tier.
    pub waiting: u64,
    /// Programs' requests that are waiting for the file system below.
    pub below: u64,
    /// Each user and the bytes that their files take.
    pub users: Vec<(u32, u64)>,
    /// Bytes that programs have written into tiers since the daemon started.
    pub absorbed: u64,
    /// Of these, bytes that programs wrote under leases.
    #[serde(default)]
    pub leased: u64,
    /// Bytes that programs wrote through to the file system below, as no tier could take them.
    pub through: u64,
    /// Bytes that were drained.
    pub drained: u64,
    /// Bytes that moved from host memory to a device.
    #[serde(default)]
    pub moved: u64,
    /// Bytes that moved from a device back to host memory.
    #[serde(default)]
    pub back: u64,
    /// The device whose memory is a tier.
    #[serde(default)]
    pub device: Option<DeviceStatus>,
    /// The partner.
    #[serde(default)]
    pub partner: Option<PartnerStatus>,
    /// Writes that had to wait for room.
    pub waited: u64,
    /// The first 100 files that cannot be drained, or whose file below is gone.
    pub stuck: Vec<Stuck>,
    /// How many such files there are.
    pub stuck_files: u64,
}

/// Most files that a status or an error names.
pub(crate) const NAMED: usize = 100;

impl Engine {
    /// Returns the state of the cache.
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
        // Those of which something was lost alone are among the broken ones.
        let unclaimed = || self.unclaimed.iter().filter(|one| one.holds_bytes());
        stuck_files += unclaimed().count() as u64;
        let broken = lock(&self.broken);
        stuck_files += broken.files;
        stuck.extend(broken.named.iter().cloned());
        drop(broken);
        stuck.extend(unclaimed().take(NAMED).map(|lost| self.unclaimed_file(lost)));
        let partner = self.partner_status();
        let scheduler = self.scheduler();
        let tiers = self.tiers.iter().zip(scheduler.limits.rooms());
        let count = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        let mut users: Vec<_> =
            scheduler.limits.users().iter().map(|(u, bytes)| (*u, *bytes)).collect();
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
            oldest: scheduler.order.longest(self.now()).map(|age| age / 1000),
            waiting: scheduler.waiting.len() as u64,
            below: self.pool.len() as u64,
            users,
            absorbed: count(&self.counters.absorbed),
            leased: count(&self.counters.leased),
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

    /// Describes data whose file below is gone.
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

/// How long a daemon may take to tell its state: one that takes longer hangs.
const STATUS_TIMEOUT: Duration = Duration::from_secs(5);

/// Returns the state of each of this user's caches on this machine, in the order of their folders.
///
/// # Errors
/// Each on its own: the daemon was killed, or does not answer.
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

/// Sends a request to the daemon of the cache at `under`, and returns its answer.
///
/// # Errors
/// No daemon runs there, or the request failed.
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

/// Sends a request over a connection to a daemon, and returns its answer.
///
/// # Errors
/// The request failed, or the connection.
pub(crate) fn ask_at(mut stream: UnixStream, under: &Path, ask: Ask) -> Result<Answer, CacheError> {
    let failed = |why: String| CacheError::Daemon { under: under.to_owned(), why };
    if ask == Ask::Status {
        stream.set_read_timeout(Some(STATUS_TIMEOUT)).map_err(|error| failed(error.to_string()))?;
    }
    write_line(&mut stream, &ask).map_err(|error| failed(error.to_string()))?;
    match read_line(&stream) {
        Ok(Answer::Failed(why)) => Err(failed(why)),
        Ok(answer) => Ok(answer),
        Err(error) => Err(failed(format!("it gave no answer: {error}"))),
    }
}

/// Writes `value` as a line of JSON.
///
/// # Errors
/// The stream's.
pub(crate) fn write_line(stream: &mut UnixStream, value: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    stream.write_all(&line)
}

/// Reads a line of JSON, of at most [`MAX_LINE`] bytes.
///
/// # Errors
/// The stream's, or what is wrong with the JSON.
pub(crate) fn read_line<T: for<'a> Deserialize<'a>>(stream: &UnixStream) -> io::Result<T> {
    let mut line = String::new();
    BufReader::new(stream.take(MAX_LINE)).read_line(&mut line)?;
    Ok(serde_json::from_str(&line)?)
}
