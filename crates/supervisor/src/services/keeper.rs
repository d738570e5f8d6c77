//! Holds what brings a job's devices back when its proxies are gone: descriptors that they have
//! handed over, of their newest image. No code of this process touches what is behind them, and the
//! kernel lets go of it when this process ends, however that ends.

use crate::base::sockets::listen;
use crate::job::held::HeldImage;
use crate::job::jobs::{self, JobDir, JobName, Jobs};
use kedge_control::joblog::JobLog;
use kedge_control::keeper::{self, Ask, Handed, KeeperError, Reply};
use kedge_control::service::{Asker, Limits, Service};
use kedge_control::{note, warn};
use kedge_image::FileEntry;
use kedge_wire::Text;
use rustix::io::FdFlags;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How long a request may take to arrive, or a reply to be taken.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(20);
/// Each of a job's proxies hands over.
const LIMITS: Limits =
    Limits { connections: 1024, request: REQUEST_TIMEOUT, reply: REQUEST_TIMEOUT };
/// Longest time that anything is held.
const MAX_TTL: Duration = Duration::from_secs(30 * 24 * 3600);

/// What brings the devices of an image's clients back.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) image: PathBuf,
    pub(crate) clients: Vec<Handed>,
    until: Instant,
}

impl Held {
    fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    fn on_devices(&self) -> u64 {
        self.clients.iter().map(|client| client.on_devices).sum()
    }

    fn in_memory(&self) -> u64 {
        self.clients.iter().map(|client| client.file.bytes).sum()
    }

    fn fds(&self) -> impl Iterator<Item = &OwnedFd> {
        self.clients.iter().flat_map(|client| client.parts.iter().chain([&client.memory]))
    }

    /// The numbers of all descriptors.
    pub(crate) fn numbers(&self) -> Vec<RawFd> {
        self.fds().map(AsRawFd::as_raw_fd).collect()
    }

    /// What is held for a client's file of the image.
    pub(crate) fn client(&self, file: &str) -> Option<&Handed> {
        self.clients.iter().find(|client| client.file.name == file)
    }

    /// Whether a process that takes this one's place has it too.
    pub(crate) fn stays_open(&self) -> io::Result<()> {
        self.fds().try_for_each(|fd| Ok(rustix::io::fcntl_setfd(fd, FdFlags::empty())?))
    }

    pub(crate) fn note(&self) -> HeldNote {
        let client = |client: &Handed| ClientNote {
            file: client.file.clone(),
            on_devices: client.on_devices,
            memory: client.memory.as_raw_fd(),
            parts: client.parts.iter().map(AsRawFd::as_raw_fd).collect(),
        };
        let clients = self.clients.iter().map(client).collect();
        let left_ms = self.left().as_millis() as u64;
        HeldNote { image: self.image.clone(), left_ms, clients }
    }
}

/// What the process that takes this one's place is to know: descriptors by their numbers.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct HeldNote {
    image: PathBuf,
    left_ms: u64,
    clients: Vec<ClientNote>,
}

#[derive(Debug, Serialize, Deserialize)]
struct ClientNote {
    file: FileEntry,
    on_devices: u64,
    memory: RawFd,
    parts: Vec<RawFd>,
}

impl HeldNote {
    /// Takes the descriptors that this process was started with. Nothing else of it has them.
    pub(crate) fn take(self) -> io::Result<Held> {
        let mut numbers: Vec<RawFd> =
            self.clients.iter().flat_map(|c| c.parts.iter().copied().chain([c.memory])).collect();
        let count = numbers.len();
        numbers.sort_unstable();
        numbers.dedup();
        let open = |fd: &RawFd| *fd > 2 && fs::read_link(format!("/proc/self/fd/{fd}")).is_ok();
        if numbers.len() != count || !numbers.iter().all(open) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let image = self.image;
        let name = image.to_string_lossy().into_owned();
        let client = |client: ClientNote| {
            let parts = client.parts.into_iter().map(own).collect::<io::Result<_>>()?;
            let (file, on_devices) = (client.file, client.on_devices);
            Ok(Handed { image: name.clone(), file, on_devices, memory: own(client.memory)?, parts })
        };
        let clients = self.clients.into_iter().map(client).collect::<io::Result<_>>()?;
        let left = Duration::from_millis(self.left_ms).min(MAX_TTL);
        Ok(Held { image, clients, until: Instant::now() + left })
    }
}

/// A descriptor by a number that was found open, once.
fn own(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: `take` has seen that the number is open, above the standard ones, and named once; it
    // was handed to this process under that number, before anything here was opened.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    rustix::io::fcntl_setfd(&fd, FdFlags::CLOEXEC)?;
    Ok(fd)
}

/// The job's keeper.
#[derive(Debug, Clone)]
pub(crate) struct Keeper(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    state: Mutex<State>,
    changed: Condvar,
    log: JobLog,
    socket: PathBuf,
    note: PathBuf,
}

#[derive(Debug, Default)]
struct State {
    /// Handed over for an image that does not count yet.
    pending: Vec<Handed>,
    held: Option<Held>,
}

impl Keeper {
    pub(crate) fn of(dir: &JobDir) -> Keeper {
        let log = JobLog::open(&dir.log(), format!("kedge[{}]", std::process::id()));
        Keeper(Arc::new(Inner {
            state: Mutex::default(),
            changed: Condvar::new(),
            log: log.unwrap_or_else(|_| JobLog::none()),
            socket: dir.keeper(),
            note: dir.held(),
        }))
    }

    /// Answers, on threads of its own, for as long as the process lives.
    pub(crate) fn serve(&self) -> io::Result<()> {
        let listener = listen(&self.0.socket)?;
        let (answers, watches) = (self.clone(), self.clone());
        let accept = move || {
            Service::new("answer", LIMITS).serve(&listener, move |asker| {
                // An asker that has gone needs no answer.
                let _ = answers.answer(asker);
            })
        };
        thread::Builder::new().name("keeper".into()).spawn(accept)?;
        thread::Builder::new().name("held".into()).spawn(move || watches.watch()).map(drop)
    }

    /// Holds what was taken before.
    pub(crate) fn adopt(&self, held: Held) {
        self.hold(&mut self.lock(), held);
    }

    /// What is held, for somebody else to hold.
    pub(crate) fn take(&self) -> Option<Held> {
        let mut state = self.lock();
        state.pending.clear();
        state.held.take()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hold(&self, state: &mut State, held: Held) {
        let until = jobs::now() + held.left().as_secs();
        let (on_devices, in_memory) = (held.on_devices(), held.in_memory());
        let note = HeldImage { image: held.image.clone(), on_devices, in_memory, until };
        state.held = Some(held);
        if let Err(error) = jobs::replace(&self.0.note, &note) {
            warn!(self.0.log, "{error}");
        }
        self.0.changed.notify_all();
    }

    /// Lets go of what is held: how much that was.
    fn release(&self, state: &mut State, why: &str) -> (u64, u64) {
        let Some(held) = state.held.take() else { return (0, 0) };
        let _ = fs::remove_file(&self.0.note);
        let (on_devices, in_memory) = (held.on_devices(), held.in_memory());
        let image = held.image.display();
        note!(self.0.log, "{image} is no longer held in memory: {why}");
        (on_devices, in_memory)
    }

    /// Lets go when the time is over.
    fn watch(&self) {
        let mut state = self.lock();
        loop {
            let left = state.held.as_ref().map_or(MAX_TTL, Held::left);
            if left.is_zero() {
                self.release(&mut state, "its time is over");
                continue;
            }
            let waited = self.0.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn answer(&self, asker: &Asker) -> Result<(), KeeperError> {
        let (order, _) = asker.request::<Ask>()?;
        let agreed = match order {
            Ask::For { image, file } => {
                keeper::take_over(asker, image, file).and_then(|handed| self.add(handed))
            }
            Ask::Commit { image, clients, ttl_ms } => {
                let ttl = Duration::from_millis(ttl_ms).min(MAX_TTL);
                self.commit(&image, clients as usize, ttl)
            }
            Ask::Discard { image } => {
                self.lock().pending.retain(|handed| *handed.image != *image);
                Ok(())
            }
            Ask::Release {} => {
                let (on_devices, in_memory) =
                    self.release(&mut self.lock(), "its memory was asked back");
                let reply = Reply::Released { on_devices, in_memory };
                return Ok(asker.reply(&reply, &[])?);
            }
            Ask::Hold { .. } | Ask::Parts {} => Err(KeeperError::Nonsense),
        };
        let reply = match agreed {
            Ok(()) => Reply::Yes {},
            Err(error) => Reply::No { why: Text::truncated(error.to_string()) },
        };
        Ok(asker.reply(&reply, &[])?)
    }

    fn add(&self, handed: Handed) -> Result<(), KeeperError> {
        let mut state = self.lock();
        // One image is made at a time.
        state.pending.retain(|p| p.image == handed.image && p.file.name != handed.file.name);
        if state.pending.len() >= LIMITS.connections {
            return Err(KeeperError::No("it holds too much already".to_owned()));
        }
        state.pending.push(handed);
        Ok(())
    }

    fn commit(&self, image: &str, clients: usize, ttl: Duration) -> Result<(), KeeperError> {
        let mut state = self.lock();
        let mut handed = std::mem::take(&mut state.pending);
        handed.retain(|handed| handed.image == image);
        let files: BTreeSet<&str> = handed.iter().map(|handed| &*handed.file.name).collect();
        if files.len() != clients || clients == 0 {
            let why = format!("{} of {clients} processes have handed anything over", files.len());
            return Err(KeeperError::No(why));
        }
        self.release(&mut state, "a newer one is");
        let held =
            Held { image: PathBuf::from(image), clients: handed, until: Instant::now() + ttl };
        self.hold(&mut state, held);
        Ok(())
    }
}

/// Lets go of what is held of the job `name`: bytes on devices, and in host memory.
pub fn release(jobs: &Jobs, name: &JobName) -> Result<(u64, u64), KeeperError> {
    keeper::release(&jobs.keeper_path(name))
}

/// Where a job's keeper answers, and tells what it holds.
#[derive(Debug, Clone)]
pub(crate) struct At {
    socket: PathBuf,
    note: PathBuf,
}

impl At {
    pub(crate) fn of(dir: &JobDir) -> At {
        At { socket: dir.keeper(), note: dir.held() }
    }

    /// An image has become durable: `held`, so many of its clients are to be held for so long. What
    /// was held before is not needed any longer.
    pub(crate) fn durable(&self, image: &Path, held: Option<(u32, Duration)>, log: &JobLog) {
        let done = match held {
            Some((clients, ttl)) => keeper::commit(&self.socket, image, clients, ttl),
            None if self.note.exists() => keeper::release(&self.socket).map(drop),
            None => return,
        };
        match (done, held) {
            (Err(error), _) => warn!(log, "{} is not held: {error}", image.display()),
            (Ok(()), Some((_, ttl))) => {
                note!(log, "{} is held in memory for {ttl:?}", image.display());
            }
            (Ok(()), None) => {}
        }
    }

    /// Returns a connection by which a proxy hands over what is to be held for `file` of `image`.
    pub(crate) fn connection(&self, image: &Path, file: &str) -> Result<OwnedFd, KeeperError> {
        keeper::connection(&self.socket, image, file)
    }

    /// There is no such image after all.
    pub(crate) fn discard(&self, image: &Path) {
        // Where nobody answers, nothing is held.
        let _ = keeper::discard(&self.socket, image);
    }
}
