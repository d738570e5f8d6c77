//! Reads TCP and UDP sockets: who is connected to whom, and what waits.

use super::tcp::{self, Info, State};
use super::wires::{self, Told};
use super::{Message, Role, Socket, fill, waiting};
use crate::plugins::error::{Context, PluginError};
use crate::plugins::job::{Capture, state};
use crate::plugins::sockets::diagnosis::Diagnoser;
use crate::plugins::sockets::{Kind, filter, options, queue};
use crate::plugins::sys;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::io::retry_on_intr;
use rustix::net::{getpeername, getsockname};
use serde_json::Value;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};

/// What is known of one socket.
pub(super) struct Known {
    pub index: usize,
    pub fd: OwnedFd,
    kind: Kind,
    pub local: Option<SocketAddr>,
    pub remote: Option<SocketAddr>,
    pub info: Option<Info>,
}

impl Known {
    fn ended(&self) -> bool {
        self.info.is_some_and(|info| info.state == State::CLOSED)
    }
}

/// Sockets by both addresses, IPv4 as such wherever it is.
/// A connection that has ended may have had the addresses of one that is there now.
type Ends = HashMap<(SocketAddr, SocketAddr, bool), usize>;

pub(super) fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

pub(super) fn save(capture: &mut Capture, mine: &[usize]) -> Result<Option<Value>, PluginError> {
    let known: Vec<Known> =
        mine.iter().map(|index| look(capture, *index)).collect::<Result<_, _>>()?;
    let ends: Ends = known
        .iter()
        .enumerate()
        .filter(|(_, socket)| socket.info.is_some_and(|info| info.state != State::SYN_SENT))
        .filter_map(|(at, socket)| {
            let (local, remote) = (canonical(socket.local?), canonical(socket.remote?));
            Some(((local, remote, socket.ended()), at))
        })
        .collect();
    let loose: Vec<usize> = (0..known.len()).filter(|at| is_loose(*at, &known, &ends)).collect();
    let told = wires::settle(capture, &known, &loose)?;
    let all = All { known: &known, ends: &ends, told: &told };
    let saved =
        (0..known.len()).map(|at| save_one(capture, at, &all)).collect::<Result<Vec<_>, _>>()?;
    state(saved.into_iter().map(Ok))
}

/// What all sockets are to each other.
struct All<'a> {
    known: &'a [Known],
    ends: &'a Ends,
    told: &'a Told,
}

/// Whether it is one end of a connection whose other end is not in this part.
fn is_loose(at: usize, all: &[Known], ends: &Ends) -> bool {
    let socket = &all[at];
    let open = |state| state != State::LISTEN && state != State::SYN_SENT && state != State::CLOSED;
    socket.info.is_some_and(|info| open(info.state)) && peer_of(socket, all, ends).is_none()
}

/// The socket at the other end: each must be the other's.
fn peer_of<'a>(socket: &Known, all: &'a [Known], ends: &Ends) -> Option<&'a Known> {
    let other = |one: &Known| other_of(one, ends).map(|at| &all[at]);
    let peer =
        other(socket).filter(|peer| other(peer).is_some_and(|back| back.index == socket.index));
    peer.filter(|peer| !has_error(socket) && !has_error(peer))
}

/// The address that the socket has or had at its other end, also while it connects and when the
/// connection has ended.
fn remote(fd: &OwnedFd, six: bool) -> Option<SocketAddr> {
    let mut bytes = [0; 28];
    // The kernel wants no more room than it needs.
    let room = if six { 28 } else { 16 };
    let name = libc::SO_PEERNAME;
    sys::socket_option(fd, libc::SOL_SOCKET, name, &mut bytes[..room]).ok()?;
    let port = u16::from_be_bytes([bytes[2], bytes[3]]);
    match i32::from(u16::from_ne_bytes([bytes[0], bytes[1]])) {
        libc::AF_INET => {
            let four: [u8; 4] = bytes[4..8].try_into().ok()?;
            Some(SocketAddr::from((four, port)))
        }
        libc::AF_INET6 if six => {
            let six: [u8; 16] = bytes[8..24].try_into().ok()?;
            let scope = u32::from_ne_bytes(bytes[24..].try_into().ok()?);
            Some(SocketAddrV6::new(six.into(), port, 0, scope).into())
        }
        _ => None,
    }
}

fn look(capture: &Capture, index: usize) -> Result<Known, PluginError> {
    let file = capture.file(index);
    let what = || format!("look at {}", capture.job.describe(file));
    let fd = capture.duplicate(index)?;
    let local = SocketAddr::try_from(getsockname(&fd).to(what)?).ok();
    let bound = |address: &SocketAddr| address.port() != 0 || !address.ip().is_unspecified();
    let peer = getpeername(&fd).ok().flatten().and_then(|any| SocketAddr::try_from(any).ok());
    let kind = file.socket.ok_or_else(|| PluginError::Refused("not a socket".to_owned()))?;
    let stream = kind.kind == libc::SOCK_STREAM;
    let info = stream.then(|| tcp::info(&fd)).transpose().to(what)?;
    let remote = peer.or_else(|| remote(&fd, kind.domain == libc::AF_INET6).filter(|_| stream));
    Ok(Known { index, fd, kind, local: local.filter(bound), remote, info })
}

fn save_one(capture: &mut Capture, at: usize, all: &All) -> Result<Socket, PluginError> {
    let socket = &all.known[at];
    let (role, queue) = match socket.info {
        Some(info) => stream(capture, at, info, all)?,
        None => (datagram_role(socket), datagrams(capture, socket)?),
    };
    let options = options::read(&socket.fd);
    let filter = filter::read(&socket.fd).map_err(|_| {
        let what = capture.job.describe(capture.file(socket.index));
        PluginError::Refused(format!("{what} has an eBPF program as its filter (SO_ATTACH_BPF)"))
    })?;
    let shutdown = shut_down(capture, socket)?;
    Ok(Socket {
        description: socket.index as u32,
        six: socket.kind.domain == libc::AF_INET6,
        kind: socket.kind.kind,
        protocol: socket.kind.protocol,
        options,
        local: socket.local,
        role,
        finished: socket.info.is_some_and(|info| info.state.finished()) || told_end(socket),
        shutdown,
        foreign: socket.local.is_some_and(is_foreign),
        filter,
        queue,
        host: all.told.host(socket.local),
    })
}

/// A connection that has ended by itself; the program has been told of any error.
fn told_end(socket: &Known) -> bool {
    socket.ended() && socket.remote.is_some() && !has_error(socket)
}

/// Whether the connection has ended by an error, which whoever asks next is told, and nobody else.
fn has_error(socket: &Known) -> bool {
    socket.ended() && polled(&socket.fd, PollFlags::empty()).contains(PollFlags::ERR)
}

fn polled(fd: &OwnedFd, of: PollFlags) -> PollFlags {
    let mut fds = [PollFd::new(fd, of)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    match retry_on_intr(|| poll(&mut fds, Some(&now))) {
        Ok(_) => fds[0].revents(),
        Err(_) => PollFlags::empty(),
    }
}

/// What of it has been shut down but for the end of a stream that it sends.
fn shut_down(capture: &Capture, socket: &Known) -> Result<u8, PluginError> {
    const RECEIVING: u8 = 1;
    match (socket.info, socket.local) {
        (Some(info), _) => {
            let open = [State::ESTABLISHED, State::FIN_WAIT_1, State::FIN_WAIT_2];
            let deaf = open.contains(&info.state)
                && polled(&socket.fd, PollFlags::RDHUP).contains(PollFlags::RDHUP);
            Ok(if deaf { RECEIVING } else { 0 })
        }
        (None, None) => Ok(0),
        (None, Some(local)) => {
            let inode = capture.file(socket.index).stat.inode;
            let mut kernel = Diagnoser::new().to(|| "ask the kernel about sockets")?;
            // Where others have the same address, the kernel tells of one of them alone.
            Ok(kernel.udp_shutdown(local, socket.remote, inode).unwrap_or(0))
        }
    }
}

/// Whether this machine does not have the address: nobody else could have it without `IP_FREEBIND`.
fn is_foreign(address: SocketAddr) -> bool {
    let ip = address.ip();
    if ip.is_unspecified() || ip.is_loopback() {
        return false;
    }
    let bound = std::net::UdpSocket::bind(SocketAddr::new(ip, 0));
    bound.is_err_and(|error| error.kind() == std::io::ErrorKind::AddrNotAvailable)
}

fn datagram_role(socket: &Known) -> Role {
    socket.remote.map_or(Role::Idle, Role::Toward)
}

/// The socket at the other end; one that has ended in the same way first.
fn other_of(socket: &Known, ends: &Ends) -> Option<usize> {
    let (local, remote) = (canonical(socket.local?), canonical(socket.remote?));
    let at = |ended| ends.get(&(remote, local, ended)).copied();
    at(socket.ended()).or_else(|| at(!socket.ended()))
}

fn stream(
    capture: &mut Capture,
    at: usize,
    info: Info,
    all: &All,
) -> Result<(Role, Vec<Message>), PluginError> {
    let socket = &all.known[at];
    if info.state == State::LISTEN {
        let gone = waiting::gone(capture, socket, all.known, all.told)?;
        return Ok((Role::Listening { backlog: info.backlog, gone }, Vec::new()));
    }
    let what =
        || format!("read what waits in {}", capture.job.describe(capture.file(socket.index)));
    let (Some(local), Some(remote)) = (socket.local, socket.remote) else {
        return Ok((Role::Idle, Vec::new()));
    };
    // One that was refused, and whom nobody has asked yet, is refused once more.
    let refused = !info.answered && has_error(socket);
    if info.state == State::SYN_SENT || refused {
        return Ok((Role::Connecting { remote }, Vec::new()));
    }
    let (local, canonical_remote) = (canonical(local), canonical(remote));
    let peer = peer_of(socket, all.known, all.ends);
    if peer.is_some_and(|peer| peer.index == socket.index) {
        let what = capture.job.describe(capture.file(socket.index));
        return Err(PluginError::Refused(format!("{what} is connected to itself")));
    }
    if let Some(peer) = peer {
        let data = fill::in_flight(capture, peer, socket)?;
        let role = Role::Connected { peer: peer.index as u32, remote };
        return Ok((role, message(capture, &data)?));
    }
    if socket.ended() {
        let data = fill::waiting(&socket.fd).to(what)?;
        let finished = !has_error(socket);
        return Ok((Role::Abandoned { finished }, message(capture, &data)?));
    }
    if let Some(wire) = all.told.wires.get(&at) {
        let data = fill::waiting(&socket.fd).to(what)?;
        return Ok((Role::Wire { wire: wire.clone(), remote }, message(capture, &data)?));
    }
    if all.told.queued.contains(&at) {
        return Ok((Role::Waiting { remote }, Vec::new()));
    }
    if let Some((0, unread)) =
        other_end(all.known, canonical_remote, local).filter(|_| !info.state.peer_finished())
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
    let finished = info.state.peer_finished() || all.told.closed.contains(&at);
    if !finished {
        let what = capture.job.describe(capture.file(socket.index));
        let note = format!(
            "{what} is connected to {remote}, outside of the job: after a restart it finds the connection reset"
        );
        capture.warnings.push(note);
    }
    Ok((Role::Abandoned { finished }, message(capture, &data)?))
}

/// The other end, at a port where the job listens, as the kernel knows it: inode and bytes unread.
fn other_end(all: &[Known], own: SocketAddr, remote: SocketAddr) -> Option<(u32, u32)> {
    if !all.iter().any(|other| listens_at(other, own)) {
        return None;
    }
    Diagnoser::new().ok()?.tcp(own, remote).ok()
}

pub(super) fn listens_at(other: &Known, address: SocketAddr) -> bool {
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
