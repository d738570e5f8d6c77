//! A holder: device memory for a write-back cache, in a process that outlives the cache's daemon.
//!
//! Whoever reaches its socket, in a private folder of one user, has it put and get whole parts. It
//! keeps no list of what is where: the daemon's journal has that.

mod memory;
mod rooms;
mod slots;
mod waiting;
mod words;

use crate::backend::{self, BackendConfig, BuildError};
use crate::options::Hold;
use kedge_control::gpu::GpuSpec;
use kedge_cuda_types::CuError;
use kedge_holder::{Answer, Order, PART, VERSION};
use kedge_protocol::DeviceChoice;
use kedge_socket::{Channel, SocketError, address, is_own_user};
use kedge_wire::Text;
use memory::{Memory, MemoryHost, Stands};
use rooms::Door;
use slots::Slots;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use thiserror::Error;
use waiting::Rooms;

pub use words::Words;

/// Beside places, what a software device keeps to itself.
const SOFT_MARGIN: u64 = 64 << 20;
/// Connections at once: more than its daemon has.
const CONNECTIONS: usize = 32;
/// It waits for orders for as long as its daemon may come.
const FOREVER: Duration = Duration::from_secs(u32::MAX as u64);
/// For what a daemon before has asked to be over: it was killed, and a copy takes less.
const BEFORE: Duration = Duration::from_secs(10);
/// For an answer to be sent.
const SEND_LIMIT: Duration = Duration::from_secs(10);

/// Why there is no holder.
#[derive(Debug, Error)]
pub enum HoldError {
    /// The device cannot be had.
    #[error("no device to hold memory of: {0}")]
    Device(#[from] BuildError),
    /// It does not do what it is to.
    #[error("the device cannot be used: {0}")]
    Use(CuError),
    /// A cache's memory is one device's.
    #[error("a holder has one device, and --gpu names {0}")]
    Several(usize),
    /// The size is none.
    #[error("a holder has from 4 MiB to 768 GiB, and --hold-bytes says {0}")]
    Size(u64),
    /// Another holder listens at the socket, or is about to.
    #[error("another holder listens at {}, or is about to: try again", .0.display())]
    Held(PathBuf),
    /// The system refused something.
    #[error("cannot {what} {}: {source}", path.display())]
    System {
        /// What was tried.
        what: &'static str,
        /// On what.
        path: PathBuf,
        /// The system's word.
        source: io::Error,
    },
}

/// What all connections share.
#[derive(Debug)]
struct Holder {
    number: u64,
    places: u32,
    slots: Slots,
    memory: Arc<Memory>,
    /// The name of the device, where other programs have memory of it.
    device: Option<[u8; 16]>,
    rooms: Arc<Rooms>,
    /// Bytes of the device that stay free for other programs.
    keep: AtomicU64,
    socket: PathBuf,
    /// Locked as long as the socket is this holder's.
    lock: File,
    connections: AtomicUsize,
    daemon: Daemon,
    /// Where it is asked for room.
    door: Mutex<Option<Door>>,
    words: Words,
}

/// Whose orders are at work: one daemon's at a time, as slots are used by one.
#[derive(Debug, Default)]
struct Daemon {
    /// Its number, and how many connections it has.
    now: Mutex<(u64, usize)>,
    left: Condvar,
}

impl Daemon {
    /// Returns whether a daemon is there.
    fn is_there(&self) -> bool {
        self.now.lock().unwrap_or_else(PoisonError::into_inner).1 > 0
    }

    /// Lets a connection of a daemon in, once those of other daemons have ended. `None` if they do
    /// not within [`BEFORE`].
    fn enter(&self, daemon: u64) -> Option<Attended<'_>> {
        let until = Instant::now() + BEFORE;
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        while now.1 > 0 && now.0 != daemon {
            let left = until.checked_duration_since(Instant::now())?;
            now = self.left.wait_timeout(now, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        *now = (daemon, now.1 + 1);
        Some(Attended(self))
    }
}

/// A daemon's connection, as long as this is there.
struct Attended<'a>(&'a Daemon);

impl Drop for Attended<'_> {
    fn drop(&mut self) {
        self.0.now.lock().unwrap_or_else(PoisonError::into_inner).1 -= 1;
        self.0.left.notify_all();
    }
}

/// Has a socket be this holder's alone. Its lock is a file beside it.
fn take(socket: &Path) -> Result<File, HoldError> {
    let mut path = socket.as_os_str().to_owned();
    path.push(".lock");
    let path = PathBuf::from(path);
    let opened = OpenOptions::new().create(true).append(true).mode(0o600).open(&path);
    let locked = opened.map_err(TryLockError::Error).and_then(|file| {
        file.try_lock()?;
        Ok(file)
    });
    locked.map_err(|error| match error {
        TryLockError::WouldBlock => HoldError::Held(socket.to_owned()),
        TryLockError::Error(source) => HoldError::System { what: "lock", path, source },
    })
}

/// Holds memory until a cache ends it. `words` go where its starter's do; `ready` is called when
/// caches can reach it.
///
/// # Errors
/// If the device or the socket cannot be had, or what waits for it cannot be told.
pub fn serve(
    hold: &Hold,
    config: &BackendConfig,
    words: Words,
    ready: impl FnOnce() -> io::Result<()>,
) -> Result<(), HoldError> {
    let holder = Arc::new(open(hold, config, words)?);
    let failed =
        |source| HoldError::System { what: "listen at", path: hold.socket.clone(), source };
    // One before it may have left it, which has ended: the lock says so.
    let _ = fs::remove_file(&hold.socket);
    let listener = address::listen(&hold.socket).map_err(failed)?;
    holder.open_door();
    if let Err(source) = ready() {
        // Whoever started it has gone, and nobody would know of it.
        let _ = fs::remove_file(&hold.socket);
        holder.close_door();
        return Err(HoldError::System {
            what: "tell who waits for",
            path: hold.socket.clone(),
            source,
        });
    }
    for stream in listener.incoming() {
        // Who came is gone again.
        let Ok(stream) = stream else { continue };
        if !is_own_user(stream.as_fd()).unwrap_or(false) {
            continue;
        }
        if holder.connections.fetch_add(1, Ordering::SeqCst) >= CONNECTIONS {
            holder.connections.fetch_sub(1, Ordering::SeqCst);
            continue;
        }
        let own = holder.clone();
        let started = thread::Builder::new().name("orders".into()).spawn(move || {
            own.attend(stream);
            own.connections.fetch_sub(1, Ordering::SeqCst);
        });
        if started.is_err() {
            // Whoever came is told by the end of the line.
            holder.connections.fetch_sub(1, Ordering::SeqCst);
        }
    }
    Ok(())
}

fn open(hold: &Hold, config: &BackendConfig, words: Words) -> Result<Holder, HoldError> {
    let places = u32::try_from(hold.bytes / PART).ok();
    let most = kedge_cuda_types::arena::DEVICE_CLIENT_LEN / PART;
    let fits = |places: &u32| *places > 0 && u64::from(*places) <= most;
    let places = places.filter(fits).ok_or(HoldError::Size(hold.bytes))?;
    let mut config = config.clone();
    if let GpuSpec::Soft { .. } = config.gpu {
        config.soft_memory = Some(u64::from(places) * PART + SOFT_MARGIN);
        config.workers = Some(1);
    }
    let host = Arc::new(MemoryHost(words.clone()));
    let backend = backend::build(&config, &DeviceChoice::default(), host, None)?;
    let devices = backend.devices();
    let [device] = &devices[..] else { return Err(HoldError::Several(devices.len())) };
    let exact = device.exact;
    let failed = |source| HoldError::System { what: "map", path: "slots".into(), source };
    let slots = Slots::new().map_err(failed)?;
    let backend = backend.start();
    let name = backend.shared_as(0);
    let rooms = Arc::<Rooms>::default();
    let memory = Memory::start(backend, exact, rooms.clone()).map_err(HoldError::Use)?;
    let number = RandomState::new().build_hasher().finish();
    let (socket, connections) = (hold.socket.clone(), AtomicUsize::new(0));
    let (lock, daemon) = (take(&hold.socket)?, Daemon::default());
    Ok(Holder {
        number,
        places,
        slots,
        memory: Arc::new(memory),
        device: name,
        rooms,
        keep: AtomicU64::new(0),
        socket,
        lock,
        connections,
        daemon,
        door: Mutex::default(),
        words,
    })
}

impl Holder {
    /// Has other programs ask for room of the device. Without that it only keeps what is to stay
    /// free.
    fn open_door(self: &Arc<Holder>) {
        let Some(device) = self.device else { return };
        let opened = rooms::open(&device, self.number).and_then(|(door, listener)| {
            *self.door.lock().unwrap_or_else(PoisonError::into_inner) = Some(door);
            let own = self.clone();
            thread::Builder::new().name("rooms".into()).spawn(move || {
                let there = own.clone();
                let attended = move || there.daemon.is_there();
                rooms::attend(&listener, &own.rooms, &own.memory, &own.words, attended);
            })
        });
        if let Err(error) = opened {
            self.words.say(&format!("programs cannot ask for room: {error}"));
            self.close_door();
        }
    }

    fn close_door(&self) {
        drop(self.door.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    /// Does what comes by one connection, until that ends.
    fn attend(&self, stream: UnixStream) {
        let channel = Channel::new(OwnedFd::from(stream));
        if let Err(error) = self.orders(&channel)
            && !matches!(error, SocketError::Closed)
        {
            self.words.say(&format!("a cache's connection: {error}"));
        }
    }

    fn orders(&self, channel: &Channel) -> Result<(), SocketError> {
        let mut attended = None;
        loop {
            let (order, _) = channel.receive::<Order>(FOREVER)?;
            let greeted = attended.is_some();
            match order {
                Order::Hello { version: VERSION, daemon, keep } if !greeted => {
                    attended = self.daemon.enter(daemon);
                    if attended.is_none() {
                        let why = "what another daemon has asked is not over".to_owned();
                        let answer = Answer::Failed { why: Text::truncated(why) };
                        channel.send(&answer, &[], SEND_LIMIT)?;
                        continue;
                    }
                    self.keep.store(keep, Ordering::Relaxed);
                    let answer = Answer::Holder { number: self.number, places: self.places };
                    channel.send(&answer, &[self.slots.file()], SEND_LIMIT)?;
                    continue;
                }
                Order::End {} if greeted => {
                    let _ = fs::remove_file(&self.socket);
                    self.close_door();
                    // The next one may come before this process has ended.
                    let _ = self.lock.unlock();
                    let _ = channel.send(&Answer::Done {}, &[], SEND_LIMIT);
                    // The driver takes back what this process has.
                    std::process::exit(0);
                }
                _ => {}
            }
            let answer = match greeted && order.fits(self.places) {
                true => self.done(&order),
                false => Answer::Failed { why: Text::truncated(format!("no order: {order:?}")) },
            };
            channel.send(&answer, &[], SEND_LIMIT)?;
        }
    }

    /// Does what an order that fits asks for.
    fn done(&self, order: &Order) -> Answer {
        let result = match *order {
            Order::Put { slot, place } => {
                self.memory.put(self.slots.address(slot), place, self.keep.load(Ordering::Relaxed))
            }
            Order::Look {} => match self.memory.stands() {
                Ok(Stands { free, .. }) => {
                    return Answer::Stands { free, wanted: self.rooms.wanted() };
                }
                Err(error) => Err(error),
            },
            Order::Get { place, slot, offset, length } => {
                self.memory.get(place, offset.into(), self.slots.address(slot), length.into())
            }
            Order::Free { place } => self.memory.free(place),
            Order::Hello { .. } | Order::End {} => Err(CuError::INVALID_VALUE),
        };
        match result {
            Ok(()) => Answer::Done {},
            Err(CuError::OUT_OF_MEMORY) => Answer::Full {},
            Err(error) => Answer::Failed { why: Text::truncated(error.to_string()) },
        }
    }
}
