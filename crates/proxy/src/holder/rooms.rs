//! Answers programs that need device memory: they ask the holder for room, and the cache's daemon
//! makes it.

use super::memory::Memory;
use super::waiting::Rooms;
use super::words::Words;
use kedge_holder::{Answer, Plea, ROOM_LIMIT, VERSION, room_name, rooms_of};
use kedge_socket::{Channel, SocketError, address};
use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

/// Most programs that ask at a time; others are refused.
const MAX_REQUESTS: usize = 32;
/// How long a request may take to arrive, and an answer to be sent.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(1);
/// The interval at which a request looks for room.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The prefix of a socket's name until its holder listens there.
const NEW: &str = "new-";

/// The path of the socket at which programs ask a holder. Dropping it removes the socket.
#[derive(Debug)]
pub(super) struct Door(PathBuf);

impl Drop for Door {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Opens the socket of holder `number` of the device that `device` names.
///
/// # Errors
/// Another user owns the folder, or the system refuses something.
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
    // Under its final name, another holder would remove the socket before anybody listens there.
    let mut door = Door(folder.join(format!("{NEW}{name}")));
    let listener = address::listen(&door.0)?;
    // All users may ask; the device's own files say who may use it.
    fs::set_permissions(&door.0, Permissions::from_mode(0o666))?;
    let path = folder.join(name);
    fs::rename(&door.0, &path)?;
    door.0 = path;
    Ok((door, listener))
}

/// Removes the sockets of holders that were killed.
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

/// Answers all programs that ask for room. `attended` returns whether a daemon is there to make it.
pub(super) fn attend(
    listener: &UnixListener,
    rooms: &Arc<Rooms>,
    memory: &Arc<Memory>,
    words: &Words,
    attended: impl Fn() -> bool + Clone + Send + 'static,
) {
    for stream in listener.incoming() {
        // On an error the program has gone.
        let Ok(stream) = stream else { continue };
        if rooms.asking.fetch_add(1, Ordering::SeqCst) >= MAX_REQUESTS {
            rooms.asking.fetch_sub(1, Ordering::SeqCst);
            // Without an answer, the program would think that the holder has ended.
            let _ =
                Channel::new(OwnedFd::from(stream)).send(&Answer::Full {}, &[], MESSAGE_TIMEOUT);
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
            // The connection ends, as if the holder had.
            rooms.asking.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// Answers one program, once there is room or none can be made.
fn answer(
    stream: UnixStream,
    rooms: &Rooms,
    memory: &Memory,
    attended: impl Fn() -> bool,
) -> Result<(), SocketError> {
    let channel = Channel::new(OwnedFd::from(stream));
    let (Plea::Room { version, bytes }, _) = channel.receive::<Plea>(MESSAGE_TIMEOUT)?;
    let until = Instant::now() + ROOM_LIMIT;
    let mut request = None;
    let answer = loop {
        let Ok(stands) = memory.stands() else { break Answer::Full {} };
        if stands.free >= bytes {
            if request.is_some() {
                break Answer::Done {};
            }
            // Look once more: only from now on does the cache put nothing there.
            request = Some(rooms.wait(bytes));
            continue;
        }
        let possible = version == VERSION
            && attended()
            && stands.free.saturating_add(stands.held) >= bytes
            && Instant::now() < until;
        if !possible {
            break Answer::Full {};
        }
        request.get_or_insert_with(|| rooms.wait(bytes));
        // The program sends nothing more; the connection ends if it does.
        match channel.receive::<Plea>(POLL_INTERVAL) {
            Err(SocketError::TimedOut { .. }) => {}
            other => return other.map(drop),
        }
    };
    // The request stands until here, so that the cache does not take the room first.
    channel.send(&answer, &[], MESSAGE_TIMEOUT)?;
    drop(request);
    Ok(())
}
