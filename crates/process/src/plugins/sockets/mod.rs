//! What all sockets have: their kind, their options, what is queued in them.

pub(crate) mod diagnosis;
pub(crate) mod filter;
pub(crate) mod options;
pub(crate) mod queue;

use crate::plugins::job::{Found, Job};
use crate::plugins::sys;
use rustix::fd::OwnedFd;
use std::io;

/// Domain, type and protocol, as socket(2) takes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kind {
    pub domain: i32,
    pub kind: i32,
    pub protocol: i32,
}

impl Kind {
    pub(crate) fn of(fd: &OwnedFd) -> io::Result<Kind> {
        let option = |name| sys::socket_number(fd, libc::SOL_SOCKET, name);
        let (domain, kind) = (option(libc::SO_DOMAIN)?, option(libc::SO_TYPE)?);
        Ok(Kind { domain, kind, protocol: option(libc::SO_PROTOCOL)? })
    }

    /// For a person.
    pub fn name(&self) -> String {
        let domain = match self.domain {
            libc::AF_UNIX => "Unix",
            libc::AF_INET => "IPv4",
            libc::AF_INET6 => "IPv6",
            libc::AF_NETLINK => "netlink",
            libc::AF_PACKET => "packet",
            libc::AF_VSOCK => "vsock",
            other => return format!("sockets of family {other}"),
        };
        let kind = match self.kind {
            libc::SOCK_STREAM => "stream",
            libc::SOCK_DGRAM => "datagram",
            libc::SOCK_SEQPACKET => "sequenced packet",
            libc::SOCK_RAW => "raw",
            _ => "other",
        };
        format!("{domain} {kind} sockets (protocol {})", self.protocol)
    }
}

/// The inode of the socket to which the Unix socket with this inode is connected; `None` if it is
/// to none that a process has.
pub fn unix_peer(inode: u64) -> io::Result<Option<u64>> {
    let found = diagnosis::Diagnoser::new()?.unix(inode)?;
    Ok(found.peer.filter(|peer| *peer != 0).map(u64::from))
}

/// Tells each socket's kind, which /proc does not.
pub(crate) fn recognise(job: &mut Job) {
    for index in 0..job.files.len() {
        job.files[index].socket = kind(&job.files[index], job);
    }
}

/// The kind of socket that it is, if it is one.
pub(crate) fn kind(file: &Found, job: &Job) -> Option<Kind> {
    let socket = file.stat.kind() == libc::S_IFSOCK && !file.is_path_only();
    socket.then(|| Kind::of(&job.duplicate(file).ok()?).ok()).flatten()
}
