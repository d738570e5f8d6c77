//! Who coordinates: whoever of the job holds the lock in its folder. The kernel lets go of the lock when that
//! process ends, however it ends.

use crate::server::Server;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

/// The coordinator's socket in the job's folder.
pub const SOCKET: &str = "coordinator";
/// Held by the process that listens there.
pub const LOCK: &str = "coordinator.lock";

/// What it means to have reached the coordinator.
#[derive(Debug)]
pub enum Leader {
    /// Another process.
    Other,
    /// This one, from now on.
    This(Server),
}

/// Connects to the coordinator of the job whose folder that is; there is none where that fails.
pub fn connect(folder: &Path) -> io::Result<UnixStream> {
    // A queue that is full is no reason to wait for ever: the caller tries again.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let address = rustix::net::SocketAddrUnix::new(folder.join(SOCKET))?;
    rustix::net::connect(&socket, &address)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// As [`connect`]; where there is no coordinator, this process becomes it.
pub fn reach(folder: &Path, job: &str) -> io::Result<(UnixStream, Leader)> {
    if let Ok(stream) = connect(folder) {
        return Ok((stream, Leader::Other));
    }
    let path = folder.join(LOCK);
    let lock =
        OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path)?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Err(io::ErrorKind::ConnectionRefused.into()),
        Err(TryLockError::Error(error)) => return Err(error),
    }
    let leader = lead(folder, job, lock)?;
    Ok((connect(folder)?, Leader::This(leader)))
}

/// Listens where the last one did.
fn lead(folder: &Path, job: &str, lock: File) -> io::Result<Server> {
    let path = folder.join(SOCKET);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(&path)?;
    // The folder is private already.
    fs::set_permissions(&path, PermissionsExt::from_mode(0o600))?;
    // As many as may come at once after an election.
    rustix::net::listen(&listener, 4096)?;
    Server::start(listener, job.to_owned(), lock)
}
