//! Reads TCP and UDP sockets: who is connected to whom, and what waits.

use super::tcp::{self, Info, State};
use super::{Message, Role, Socket, fill};
use crate::plugins::error::{Context, PluginError};
use crate::plugins::job::{Capture, state};
use crate::plugins::sockets::diagnosis::Diagnoser;
use crate::plugins::sockets::{Kind, options, queue};
use rustix::fd::OwnedFd;
use rustix::net::{RecvFlags, getpeername, getsockname, recv, sockopt};
use serde_json::Value;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};

/// What is known of one socket.
pub(super) struct Known {
    pub index: usize,
    pub fd: OwnedFd,
    kind: Kind,
    local: Option<SocketAddr>,
    remote: Option<SocketAddr>,
    pub info: Option<Info>,
}

/// Sockets by both addresses, IPv4 as such wherever it is.
type Ends = HashMap<(SocketAddr, SocketAddr), usize>;

fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

pub(super) fn save(capture: &mut Capture, mine: &[usize]) -> Result<Option<Value>, PluginError> {
    let known: Vec<Known> =
        mine.iter().map(|index| look(capture, *index)).collect::<Result<_, _>>()?;
    let ends: Ends = known
        .iter()
        .enumerate()
        .filter(|(_, socket)| socket.info.is_some())
        .filter_map(|(at, socket)| {
            Some(((canonical(socket.local?), canonical(socket.remote?)), at))
        })
        .collect();
    state(known.iter().map(|socket| save_one(capture, socket, &known, &ends)))
}

fn look(capture: &Capture, index: usize) -> Result<Known, PluginError> {
    let file = capture.file(index);
    let what = || format!("look at {}", capture.job.describe(file));
    let fd = capture.duplicate(index)?;
    let local = SocketAddr::try_from(getsockname(&fd).to(what)?).ok();
    let bound = |address: &SocketAddr| address.port() != 0 || !address.ip().is_unspecified();
    let remote = getpeername(&fd).ok().flatten().and_then(|any| SocketAddr::try_from(any).ok());
    let kind = file.socket.ok_or_else(|| PluginError::Refused("not a socket".to_owned()))?;
    let stream = kind.kind == libc::SOCK_STREAM;
    let info = stream.then(|| tcp::info(&fd)).transpose().to(what)?;
    Ok(Known { index, fd, kind, local: local.filter(bound), remote, info })
}

fn save_one(
    capture: &mut Capture,
    socket: &Known,
    all: &[Known],
    ends: &Ends,
) -> Result<Socket, PluginError> {
    let (role, queue) = match socket.info {
        Some(info) => stream(capture, socket, info, all, ends)?,
        None => (datagram_role(socket), datagrams(capture, socket)?),
    };
    let options = options::read(&socket.fd);
    if socket.info.is_some() {
        // The old connections' remains in TIME-WAIT let a restart have the ports at once if, and
        // only if, they had this option; nothing else comes of it. What is saved is as it was.
        sockopt::set_socket_reuseaddr(&socket.fd, true).to(|| "prepare a socket")?;
    }
    Ok(Socket {
        description: socket.index as u32,
        six: socket.kind.domain == libc::AF_INET6,
        kind: socket.kind.kind,
        protocol: socket.kind.protocol,
        options,
        local: socket.local,
        role,
        finished: socket.info.is_some_and(|info| info.state.finished()),
        queue,
    })
}

fn datagram_role(socket: &Known) -> Role {
    socket.remote.map_or(Role::Idle, Role::Toward)
}

fn stream(
    capture: &mut Capture,
    socket: &Known,
    info: Info,
    all: &[Known],
    ends: &Ends,
) -> Result<(Role, Vec<Message>), PluginError> {
    if info.state == State::LISTEN {
        return Ok((Role::Listening { backlog: info.backlog }, Vec::new()));
    }
    let what =
        || format!("read what waits in {}", capture.job.describe(capture.file(socket.index)));
    let (Some(local), Some(remote)) = (socket.local, socket.remote) else {
        let fresh = !matches!(peek_byte(&socket.fd), Ok(()));
        if info.state == State::CLOSED && fresh {
            return Ok((Role::Idle, Vec::new()));
        }
        // Closed by both, and perhaps not read to its end.
        let data = fill::waiting(&socket.fd).to(what)?;
        let queue = message(capture, &data)?;
        return Ok((Role::Abandoned { finished: true }, queue));
    };
    let (local, canonical_remote) = (canonical(local), canonical(remote));
    if let Some(peer) = ends.get(&(canonical_remote, local)).map(|at| &all[*at]) {
        let data = fill::in_flight(capture, peer, socket)?;
        let role = Role::Connected { peer: peer.index as u32, remote };
        return Ok((role, message(capture, &data)?));
    }
    if let Some((0, unread)) =
        other_end(all, canonical_remote, local).filter(|_| !info.state.peer_finished())
    {
        if unread > 0 {
            let what = capture.job.describe(capture.file(socket.index));
            return Err(PluginError::Refused(format!(
                "{what} has sent to a socket that nobody has accepted yet: try again later"
            )));
        }
        return Ok((Role::Waiting { remote }, Vec::new()));
    }
    let data = fill::waiting(&socket.fd).to(what)?;
    let finished = info.state.peer_finished();
    if !finished {
        let what = capture.job.describe(capture.file(socket.index));
        let note = format!(
            "{what} is connected to {remote}, outside of the job: after a restart it finds the connection reset"
        );
        capture.warnings.push(note);
    }
    Ok((Role::Abandoned { finished }, message(capture, &data)?))
}

/// Whether a connection has ended, as opposed to never having been.
fn peek_byte(fd: &OwnedFd) -> Result<(), rustix::io::Errno> {
    recv(fd, &mut [0u8; 1][..], RecvFlags::PEEK | RecvFlags::DONTWAIT).map(drop)
}

/// The other end, at a port where the job listens, as the kernel knows it: inode and bytes unread.
fn other_end(all: &[Known], own: SocketAddr, remote: SocketAddr) -> Option<(u32, u32)> {
    if !all.iter().any(|other| listens_at(other, own)) {
        return None;
    }
    Diagnoser::new().ok()?.tcp(own, remote).ok()
}

fn listens_at(other: &Known, address: SocketAddr) -> bool {
    let listens = other.info.is_some_and(|info| info.state == State::LISTEN);
    let matches = |local: SocketAddr| {
        let local = canonical(local);
        let any = local.ip().is_unspecified() && (local.is_ipv6() || address.is_ipv4());
        local.port() == address.port() && (any || local.ip() == address.ip())
    };
    listens && other.local.is_some_and(matches)
}

fn message(capture: &mut Capture, data: &[u8]) -> Result<Vec<Message>, PluginError> {
    match data.is_empty() {
        true => Ok(Vec::new()),
        false => Ok(vec![Message { data: capture.blob(data)?, from: None }]),
    }
}

fn datagrams(capture: &mut Capture, socket: &Known) -> Result<Vec<Message>, PluginError> {
    let what = capture.job.describe(capture.file(socket.index));
    let pieces =
        queue::peek(&socket.fd, &mut capture.buffer).to(|| format!("read what waits in {what}"))?;
    let mut messages = Vec::new();
    for piece in pieces {
        let from = piece.from.and_then(|any| SocketAddr::try_from(any).ok());
        messages.push(Message { data: capture.blob(&piece.data)?, from });
    }
    Ok(messages)
}

/// The loopback address of the same family.
pub(super) fn loopback(six: bool) -> IpAddr {
    match six {
        true => std::net::Ipv6Addr::LOCALHOST.into(),
        false => std::net::Ipv4Addr::LOCALHOST.into(),
    }
}
