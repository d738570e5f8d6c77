//! Who coordinates: whoever of the job holds the lock in its folder. The kernel lets go of the lock
//! when that process ends, however it ends.

use crate::link::Link;
use crate::remote::Far;
use crate::server::Server;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

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
pub fn connect(folder: &Path) -> io::Result<Link> {
    // A queue that is full is no reason to wait for ever: the caller tries again.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let (_held, path) = socket_in(folder)?;
    let address = rustix::net::SocketAddrUnix::new(path)?;
    rustix::net::connect(&socket, &address)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream.into())
}

/// Returns the socket's path, as an address may have it: one of more than 107 bytes (unix(7)) leads
/// by way of the folder's descriptor, which comes with it.
fn socket_in(folder: &Path) -> io::Result<(Option<File>, PathBuf)> {
    const MAX_PATH_LEN: usize = 107;
    let path = folder.join(SOCKET);
    if path.as_os_str().len() <= MAX_PATH_LEN {
        return Ok((None, path));
    }
    let held = File::open(folder)?;
    let path = PathBuf::from(format!("/proc/self/fd/{}", held.as_raw_fd())).join(SOCKET);
    Ok((Some(held), path))
}

/// Does what [`connect`] does; where there is no coordinator, this process becomes it.
pub fn reach(folder: &Path, job: &str) -> io::Result<(Link, Leader)> {
    Place::here(folder.to_owned()).reach(job)
}

/// Where the parts of a job find their coordinator.
#[derive(Debug, Clone)]
pub struct Place {
    /// Of those on this host.
    pub folder: PathBuf,
    /// Of those on all hosts, if there are several.
    pub far: Option<Far>,
}

impl Place {
    /// Makes a place for the coordinator on this host alone.
    pub fn here(folder: PathBuf) -> Place {
        Place { folder, far: None }
    }

    /// Connects to the coordinator.
    pub fn connect(&self) -> io::Result<Link> {
        connect(&self.folder)
            .or_else(|error| self.far.as_ref().ok_or(error)?.connect().map(Link::Remote))
    }

    /// Connects to the coordinator. Where there is none, this process becomes it, if it is on the
    /// host for that.
    pub fn reach(&self, job: &str) -> io::Result<(Link, Leader)> {
        if let Ok(stream) = connect(&self.folder) {
            return Ok((stream, Leader::Other));
        }
        if let Some(far) = self.far.as_ref().filter(|far| !far.is_here()) {
            return Ok((Link::Remote(far.connect()?), Leader::Other));
        }
        let path = self.folder.join(LOCK);
        let lock =
            OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(io::ErrorKind::ConnectionRefused.into()),
            Err(TryLockError::Error(error)) => return Err(error),
        }
        match self.lead(job, lock) {
            Ok(leader) => Ok((connect(&self.folder)?, Leader::This(leader))),
            // Somebody else of this host has the port: the job's coordinator, if it knows the key.
            Err(error) => match &self.far {
                Some(far) if error.kind() == io::ErrorKind::AddrInUse => {
                    Ok((Link::Remote(far.connect()?), Leader::Other))
                }
                _ => Err(error),
            },
        }
    }

    /// Listens where the last one did.
    fn lead(&self, job: &str, lock: File) -> io::Result<Server> {
        let far = match &self.far {
            Some(far) => Some((far.listen()?, far.key().clone())),
            None => None,
        };
        let path = self.folder.join(SOCKET);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let (_held, short) = socket_in(&self.folder)?;
        let listener = UnixListener::bind(short)?;
        // The folder is private already.
        fs::set_permissions(&path, PermissionsExt::from_mode(0o600))?;
        // As many as may come at once after an election.
        rustix::net::listen(&listener, 4096)?;
        Server::start(listener, far, job.to_owned(), lock)
    }
}
