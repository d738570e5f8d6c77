//! The process that keeps warm proxies for one job. It is started before the job and is none of its
//! processes: what ends, captures or counts those does not find it. It ends when the job's
//! supervisor does, whatever that is by then: a connection tells it, of which the supervisor keeps
//! the other end.

use super::Kind;
use crate::base::again::kedge_again;
use crate::base::apart::leave;
use crate::base::sockets::{hand_over, listen};
use crate::job::jobs::JobDir;
use std::fs::{self, File};
use std::io;
use std::num::NonZeroU32;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// The supervisor's end.
#[derive(Debug)]
pub(crate) struct Own {
    connection: OwnedFd,
    socket: PathBuf,
}

impl Own {
    /// Starts to keep `count` proxies of this kind for the job of this folder.
    pub(crate) fn start(dir: &JobDir, kind: &Kind, count: NonZeroU32) -> io::Result<Own> {
        let socket = dir.warm();
        let _ = fs::remove_file(&socket);
        let listener = listen(&socket)?;
        let (connection, far) = UnixStream::pair()?;
        let log = || File::options().append(true).create(true).open(dir.log());
        let mut command = kedge_again();
        command
            .args(["warm", "start", "--handed", "3", "--gpu", &*kind.gpu])
            .args(["--count", &count.to_string()])
            .args(kind.soft_memory.iter().flat_map(|b| ["--soft-memory".into(), b.to_string()]))
            .args(kind.gpu_memory.iter().flat_map(|b| ["--gpu-memory".into(), b.to_string()]))
            .stdin(Stdio::null())
            .stdout(log()?)
            .stderr(log()?);
        let fds = [far.as_raw_fd(), listener.as_raw_fd()];
        // SAFETY: the closure runs in the child between fork and exec and only makes system calls;
        // both descriptors outlive the spawn.
        unsafe {
            command.pre_exec(move || {
                leave()?;
                hand_over(fds)
            });
        }
        // What was spawned ends at once: what it has forked goes on, as nobody's child.
        command.spawn()?.wait()?;
        Ok(Own { connection: connection.into(), socket })
    }

    /// What the process before this one has left: a descriptor.
    pub(crate) fn take_over(dir: &JobDir, connection: RawFd) -> Option<Own> {
        let link = fs::read_link(format!("/proc/self/fd/{connection}")).ok()?;
        if connection < 3 || !link.to_string_lossy().starts_with("socket:") {
            return None;
        }
        // SAFETY: it is open, above the standard ones, and handed to this process under that
        // number, before anything here was opened.
        let connection = unsafe { OwnedFd::from_raw_fd(connection) };
        rustix::io::fcntl_setfd(&connection, rustix::io::FdFlags::CLOEXEC).ok()?;
        Some(Own { connection, socket: dir.warm() })
    }

    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// The connection stays open for the process that takes this one's place: its number there.
    pub(crate) fn stays_open(&self) -> Option<RawFd> {
        rustix::io::fcntl_setfd(&self.connection, rustix::io::FdFlags::empty()).ok()?;
        Some(self.connection.as_raw_fd())
    }
}
