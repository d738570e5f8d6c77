//! Programs that need memory of the device: they ask its holder for room, which the cache's daemon
//! makes.

use super::memory::Memory;
use super::words::Words;
use kedge_holder::{Answer, Plea, ROOM_LIMIT, VERSION, room_name, rooms_of};
use kedge_socket::{Channel, SocketError, address};
use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// So many ask at once; others are refused.
const ASKING: usize = 32;
/// For a question to come, and an answer to be sent.
const PROMPT: Duration = Duration::from_secs(1);
/// How often it is looked whether there is room.
const NAP: Duration = Duration::from_millis(10);
/// Nothing is put for so long after there was room: whoever asked takes it meanwhile.
const REST: Duration = Duration::from_secs(1);

/// How the name of a socket begins that nobody listens at yet.
const NEW: &str = "new-";

/// Who waits for room.
#[derive(Debug, Default)]
pub(super) struct Rooms {
    waiting: Mutex<Waiting>,
    asking: AtomicUsize,
}

#[derive(Debug, Default)]
struct Waiting {
    /// Bytes that each wants to be free.
    wanted: BTreeMap<u64, u64>,
    next: u64,
    /// When the last one was answered.
    last: Option<Instant>,
}

impl Rooms {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the bytes of the device that are to be free.
    pub(super) fn wanted(&self) -> u64 {
        self.lock().wanted.values().fold(0, |all, bytes| all.saturating_add(*bytes))
    }

    /// Returns whether nothing is put on the device, as others need it.
    pub(super) fn rest(&self) -> bool {
        let waiting = self.lock();
        !waiting.wanted.is_empty() || waiting.last.is_some_and(|last| last.elapsed() < REST)
    }

    fn wait(&self, bytes: u64) -> Waits<'_> {
        let mut waiting = self.lock();
        let number = waiting.next;
        waiting.next += 1;
        waiting.wanted.insert(number, bytes);
        Waits { rooms: self, number }
    }
}

/// One that waits, as long as this is there.
struct Waits<'a> {
    rooms: &'a Rooms,
    number: u64,
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        let mut waiting = self.rooms.lock();
        waiting.wanted.remove(&self.number);
        waiting.last = Some(Instant::now());
    }
}

/// Where a holder is asked, by whoever may use the device. The socket goes with this.
#[derive(Debug)]
pub(super) struct Door(PathBuf);

impl Drop for Door {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Opens a holder's door: `number` is its own, `device` the name of its device.
///
/// # Errors
/// If somebody else has the folder, or the system refuses something.
pub(super) fn open(device: &[u8; 16], number: u64) -> io::Result<(Door, UnixListener)> {
    let folder = rooms_of(rustix::process::geteuid().as_raw());
    match DirBuilder::new().mode(0o755).create(&folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let meta = fs::symlink_metadata(&folder)?;
    if !meta.is_dir() || meta.uid() != rustix::process::geteuid().as_raw() {
        return Err(io::Error::other("it is somebody else's"));
    }
    fs::set_permissions(&folder, Permissions::from_mode(0o755))?;
    remove_left(&folder)?;
    let name = format!("{}{number:016x}", room_name(device));
    // Others would take one for left that nobody listens at yet.
    let mut door = Door(folder.join(format!("{NEW}{name}")));
    let listener = address::listen(&door.0)?;
    // Programs of all users ask: what they may do with the device, its own files say.
    fs::set_permissions(&door.0, Permissions::from_mode(0o666))?;
    let path = folder.join(name);
    fs::rename(&door.0, &path)?;
    door.0 = path;
    Ok((door, listener))
}

/// Removes sockets of holders that were killed.
fn remove_left(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)?.flatten() {
        if entry.file_name().as_bytes().starts_with(NEW.as_bytes()) {
            continue;
        }
        let refused = |error: &io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
        if address::connect(&entry.path()).is_err_and(|error| refused(&error)) {
            let _ = fs::remove_file(entry.path());
        }
    }
    Ok(())
}

/// Answers all who ask for room. `attended` says whether a daemon is there to make it.
pub(super) fn attend(
    listener: &UnixListener,
    rooms: &Arc<Rooms>,
    memory: &Arc<Memory>,
    words: &Words,
    attended: impl Fn() -> bool + Clone + Send + 'static,
) {
    for stream in listener.incoming() {
        // Who came is gone again.
        let Ok(stream) = stream else { continue };
        if rooms.asking.fetch_add(1, Ordering::SeqCst) >= ASKING {
            rooms.asking.fetch_sub(1, Ordering::SeqCst);
            // The end of the line alone would say that the holder has ended.
            let _ = Channel::new(OwnedFd::from(stream)).send(&Answer::Full {}, &[], PROMPT);
            continue;
        }
        let (own, memory, attended) = (rooms.clone(), memory.clone(), attended.clone());
        let words = words.clone();
        let started = thread::Builder::new().name("room".into()).spawn(move || {
            let answered = answer(stream, &own, &memory, attended);
            own.asking.fetch_sub(1, Ordering::SeqCst);
            if let Err(error) = answered
                && !matches!(error, SocketError::Closed)
            {
                words.say(&format!("one that asked for room: {error}"));
            }
        });
        if started.is_err() {
            // Whoever came sees the end of the line, as if the holder had ended.
            rooms.asking.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

fn answer(
    stream: UnixStream,
    rooms: &Rooms,
    memory: &Memory,
    attended: impl Fn() -> bool,
) -> Result<(), SocketError> {
    let channel = Channel::new(OwnedFd::from(stream));
    let (Plea::Room { version, bytes }, _) = channel.receive::<Plea>(PROMPT)?;
    let until = Instant::now() + ROOM_LIMIT;
    let mut waits = None;
    let answer = loop {
        let Ok(stands) = memory.stands() else { break Answer::Full {} };
        if stands.free >= bytes {
            if waits.is_some() {
                break Answer::Done {};
            }
            // It is there again if nothing is put from now on.
            waits = Some(rooms.wait(bytes));
            continue;
        }
        let possible = version == VERSION
            && attended()
            && stands.free.saturating_add(stands.held) >= bytes
            && Instant::now() < until;
        if !possible {
            break Answer::Full {};
        }
        waits.get_or_insert_with(|| rooms.wait(bytes));
        // It says nothing more, and may end.
        match channel.receive::<Plea>(NAP) {
            Err(SocketError::TimedOut { .. }) => {}
            other => return other.map(drop),
        }
    };
    // Nothing is put meanwhile: whoever asked has not taken it yet.
    channel.send(&answer, &[], PROMPT)?;
    drop(waits);
    Ok(())
}
