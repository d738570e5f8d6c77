//! Makes TCP and UDP sockets again: connections first, then who listens at the same ports.

use super::connect::{self, anywhere, new, pair, reset};
use super::save::loopback;
use super::wires::{self, Here};
use super::{Role, Socket, fill, moved};
use crate::plugins::error::{Context, PluginError, damaged};
use crate::plugins::sockets::{Kind, filter, options};
use crate::plugins::sys;
use crate::plugins::world::World;
use crate::plugins::{Rendezvous, Stage};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{
    SendFlags, Shutdown, bind, connect as connect_to, getsockname, listen, sendto, shutdown,
    sockopt,
};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

type Sockets = BTreeMap<u32, Socket>;

pub(super) fn make(sockets: Vec<Socket>, world: &mut World) -> Result<(), PluginError> {
    let sockets: Sockets = sockets.into_iter().map(|one| (one.description, one)).collect();
    for socket in sockets.values() {
        check(socket)?;
    }
    let (here, others) = (Here::look(), world.options.others.clone());
    // First, because it needs the ports of those who listen.
    if let Some(others) = &others {
        wires::tell_host(&sockets, &**others, &here)?;
        wires::tie(&sockets, &**others, &here, world)?;
    }
    for socket in sockets.values() {
        match socket.role {
            Role::Connected { peer, remote } => connection(socket, peer, remote, &sockets, world)?,
            Role::Abandoned { finished } => abandoned(socket, finished, world)?,
            Role::Wire { remote, .. } if others.is_none() => {
                world.note(format!("the part that was at {remote} is not restarted with this one"));
                abandoned(socket, false, world)?;
            }
            _ => {}
        }
    }
    for socket in sockets.values() {
        alone(socket, shares_port(socket, &sockets), world)?;
    }
    // Not before: who listens may bind beside others at the same port that allow it.
    for socket in sockets.values().filter(|one| !matches!(one.role, Role::Abandoned { .. })) {
        set_options(own(socket, world)?, socket, world);
    }
    let links = others.map(|others| Links { others, here });
    if let Some(links) = &links {
        links.offer(&sockets, world)?;
        world.addresses = wires::read_hosts(&*links.others, &links.here)?;
    }
    for socket in sockets.values() {
        reach(socket, &sockets, links.as_ref(), world)?;
    }
    for socket in sockets.values().filter(|socket| !socket.is_stream()) {
        datagrams(socket, &sockets, world)?;
    }
    // What it keeps out waits in it already.
    for socket in sockets.values() {
        close_down(socket, world)?;
    }
    Ok(())
}

/// What the parts say to each other of sockets that are bound.
struct Links {
    others: Arc<dyn Rendezvous>,
    here: Here,
}

impl Links {
    /// Tells the other parts where sockets are, and waits until all have.
    fn offer(&self, sockets: &Sockets, world: &World) -> Result<(), PluginError> {
        for socket in sockets.values() {
            let listens = matches!(socket.role, Role::Listening { .. });
            let bound = socket.local.zip(socket.host.as_ref());
            let Some((local, host)) = bound.filter(|_| listens || !socket.is_stream()) else {
                continue;
            };
            let what = || format!("look at the socket of {local}");
            let now = getsockname(world.get(socket.description)?).to(what)?;
            let now = SocketAddr::try_from(now).to(what)?;
            wires::publish(&*self.others, kind(socket), (host, local), now, &self.here)?;
        }
        wires::meet(&*self.others, Stage::Bound)
    }

    /// Where that is by now what was at `remote`, if a part of the job was.
    fn now(&self, socket: &Socket, remote: SocketAddr) -> Result<Vec<SocketAddr>, PluginError> {
        let Some(host) = &socket.host else { return Ok(Vec::new()) };
        let found = wires::elsewhere(&*self.others, kind(socket), (host, remote), &self.here)?;
        Ok(found.into_iter().map(|one| wires::for_family(one, socket.six)).collect())
    }
}

fn kind(socket: &Socket) -> &'static str {
    if socket.is_stream() { "tcp" } else { "udp" }
}

fn own(socket: &Socket, world: &World) -> Result<OwnedFd, PluginError> {
    world.get(socket.description)?.try_clone_to_owned().to(|| "duplicate a socket")
}

/// Whether others of the job have its port, by `SO_REUSEPORT`, which they may have let go of since.
fn shares_port(socket: &Socket, sockets: &Sockets) -> bool {
    let port = |one: &Socket| one.local.map(|address| address.port());
    let bound = |one: &Socket| !is_connection(one);
    let same = |one: &&Socket| {
        bound(one) && port(one) == port(socket) && one.is_stream() == socket.is_stream()
    };
    let reuses = |one: &Socket| options::are_on(&one.options, libc::SOL_SOCKET, libc::SO_REUSEPORT);
    let sharers: Vec<&Socket> = sockets.values().filter(same).collect();
    socket.local.is_some() && sharers.len() > 1 && sharers.into_iter().any(reuses)
}

/// Whether it is bound by being connected.
fn is_connection(socket: &Socket) -> bool {
    matches!(socket.role, Role::Connected { .. } | Role::Abandoned { .. } | Role::Wire { .. })
}

/// Shuts down what was, and attaches the filter.
fn close_down(socket: &Socket, world: &mut World) -> Result<(), PluginError> {
    let fd = own(socket, world)?;
    let how = match socket.shutdown {
        0 => None,
        1 => Some(Shutdown::Read),
        2 => Some(Shutdown::Write),
        _ => Some(Shutdown::Both),
    };
    if let Some(how) = how {
        // One that is not connected is told so, and shut down all the same.
        let _ = shutdown(&fd, how);
    }
    match &socket.filter {
        Some(program) => filter::attach(&fd, program).to(|| "attach a socket's filter"),
        None => Ok(()),
    }
}

fn check(socket: &Socket) -> Result<(), PluginError> {
    let domain = if socket.six { libc::AF_INET6 } else { libc::AF_INET };
    let kind = Kind { domain, kind: socket.kind, protocol: socket.protocol };
    let streams = matches!(socket.role, Role::Idle | Role::Toward(_)) || socket.is_stream();
    match super::is_one(kind) && streams {
        true => Ok(()),
        false => Err(damaged(format!("an internet socket {kind:?}, {:?}", socket.role))),
    }
}

fn set_options(fd: impl AsFd, socket: &Socket, world: &mut World) {
    options::apply(fd, &socket.options).into_iter().for_each(|note| world.note(note));
}

/// Both ends, with what was under way, by the end that comes first.
fn connection(
    socket: &Socket,
    peer: u32,
    remote: SocketAddr,
    sockets: &Sockets,
    world: &mut World,
) -> Result<(), PluginError> {
    let other = sockets.get(&peer).ok_or_else(|| damaged("a connection with one end"))?;
    let back = match other.role {
        Role::Connected { peer, remote } if peer == socket.description => Some(remote),
        _ => None,
    };
    let back = back.filter(|_| peer != socket.description);
    let back = back.ok_or_else(|| damaged("a connection with one end"))?;
    if peer < socket.description {
        return Ok(());
    }
    // Who connects to the port that somebody listens at.
    let port = |socket: &Socket| socket.local.map(|address| address.port());
    let listens = |port: Option<u16>| {
        let listening = |one: &&Socket| matches!(one.role, Role::Listening { .. });
        sockets.values().filter(listening).any(|one| one.local.map(|a| a.port()) == port)
    };
    let (one, two) = match listens(port(socket)) {
        true => pair(socket, other, back, world)?,
        false => pair(other, socket, remote, world).map(|(other, one)| (one, other))?,
    };
    carry(&two, socket, &one, world)?;
    carry(&one, other, &two, world)?;
    finish(&one, socket)?;
    finish(&two, other)?;
    world.made(socket.description, one)?;
    world.made(peer, two)
}

/// Sends what waited at `to`.
fn carry(
    sender: &OwnedFd,
    to: &Socket,
    receiver: &OwnedFd,
    world: &World,
) -> Result<(), PluginError> {
    for message in &to.queue {
        fill::refill(sender, receiver, &world.blob(&message.data)?)?;
    }
    Ok(())
}

pub(super) fn finish(fd: &OwnedFd, socket: &Socket) -> Result<(), PluginError> {
    match socket.finished {
        true => shutdown(fd, Shutdown::Write).to(|| "finish a connection"),
        false => Ok(()),
    }
}

/// An end without its other end: it reads what waited, and then the end or a reset.
fn abandoned(socket: &Socket, finished: bool, world: &mut World) -> Result<(), PluginError> {
    /// How long what is sent may take to arrive.
    const ARRIVAL: Duration = Duration::from_secs(2);
    let (own, other) = anywhere(socket.six, world)?;
    carry(&other, socket, &own, world)?;
    set_options(&own, socket, world);
    finish(&own, socket)?;
    if !finished {
        let begin = Instant::now();
        // A reset takes back what has not arrived.
        while sys::unsent(&other).to(|| "look at a connection")? > 0 && begin.elapsed() < ARRIVAL {
            std::thread::sleep(Duration::from_millis(1));
        }
        reset(other)?;
    }
    world.made(socket.description, own)
}

/// What is not connected.
fn alone(socket: &Socket, shares: bool, world: &mut World) -> Result<(), PluginError> {
    if is_connection(socket) {
        return Ok(());
    }
    let fd = new(socket)?;
    set_options(&fd, socket, world);
    // For bind and listen only.
    if shares {
        sockopt::set_socket_reuseport(&fd, true).to(|| "bind a socket")?;
    }
    if socket.foreign {
        sockopt::set_ip_freebind(&fd, true).to(|| "bind a socket")?;
    }
    if let Some(local) = socket.local {
        bind_at(&fd, socket, local, world)?;
    }
    if let Role::Listening { backlog, .. } = socket.role {
        listen(&fd, backlog.min(i32::MAX as u32) as i32).to(|| "listen")?;
    }
    world.made(socket.description, fd)
}

/// Also where connections of the same port are already; and, if nobody can know the port, at
/// another one.
fn bind_at(
    fd: &OwnedFd,
    socket: &Socket,
    local: SocketAddr,
    world: &mut World,
) -> Result<(), PluginError> {
    if socket.is_stream() {
        sockopt::set_socket_reuseaddr(fd, true).to(|| "bind a socket")?;
    }
    // A client's own address was chosen by the kernel.
    let chosen =
        matches!(socket.role, Role::Waiting { .. } | Role::Connecting { .. } | Role::Toward(_));
    let bound = match (chosen, socket.is_stream()) {
        (true, _) => bind(fd, &local).map_err(Into::into),
        (false, true) => connect::patient_bind(fd, local, world),
        (false, false) => connect::bind_soon(fd, local),
    };
    let bound = bound.or_else(|e| {
        let moved = moved::here(local).filter(|moved| *moved != local);
        if let (Some(Errno::ADDRNOTAVAIL), Some(moved)) = (Errno::from_io_error(&e), moved) {
            world.note(format!("a socket at {local} is at {moved} now"));
            return Ok(bind(fd, &moved)?);
        }
        if !chosen {
            return Err(e);
        }
        world.note(format!("a socket could not have its address {local} again: {e}"));
        Ok(())
    });
    bound.map_err(|e| {
        PluginError::Refused(format!(
            "{local} cannot be had again ({e}): end what has it, or restart on a machine with this address, or with one alone"
        ))
    })
}

/// Who waits to be accepted, and datagram sockets that send to one address.
fn reach(
    socket: &Socket,
    sockets: &Sockets,
    links: Option<&Links>,
    world: &mut World,
) -> Result<(), PluginError> {
    let now = |remote| links.map_or_else(|| Ok(Vec::new()), |links| links.now(socket, remote));
    match socket.role {
        Role::Waiting { remote } if !now(remote)?.is_empty() => {
            let fd = own(socket, world)?;
            let mut left = now(remote)?.into_iter();
            let connected = left.find_map(|to| connect::bounded(&fd, to).ok());
            connected.ok_or(Errno::HOSTUNREACH).to(|| format!("connect to {remote} again"))?;
            finish(&fd, socket)
        }
        Role::Waiting { remote } => {
            let port = |one: &Socket| one.local.map(|address| address.port());
            let listens = |one: &&Socket| matches!(one.role, Role::Listening { .. });
            let listener = sockets.values().filter(listens);
            if !listener.into_iter().any(|one| port(one) == Some(remote.port())) {
                return Err(damaged(format!("nobody of the job listens at {remote}")));
            }
            let fd = own(socket, world)?;
            // Never to another machine.
            let remote = moved::here(remote).unwrap_or(remote);
            connect::bounded(&fd, remote).to(|| format!("connect to {remote} again"))?;
            finish(&fd, socket)
        }
        Role::Listening { gone, .. } => {
            let local = socket.local.ok_or_else(|| damaged("it listens nowhere"))?;
            connect::come_and_go(socket, local, gone)
        }
        Role::Connecting { remote } => {
            let to = now(remote)?.first().copied().unwrap_or(remote);
            connect::begin(&own(socket, world)?, to, world)
        }
        Role::Toward(remote) => {
            let inside = sockets.values().any(|one| !one.is_stream() && one.local == Some(remote));
            let moved = moved::here(remote).filter(|_| inside);
            let remote = now(remote)?.first().copied().or(moved).unwrap_or(remote);
            let connected = connect_to(world.get(socket.description)?, &remote);
            if let Err(e) = connected {
                world.note(format!("a datagram socket cannot reach {remote} any more: {e}"));
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Sends what waited once more, from its sender's address. Datagrams may get lost; a sender
/// elsewhere has lost them.
fn datagrams(socket: &Socket, sockets: &Sockets, world: &mut World) -> Result<(), PluginError> {
    let Some(local) = socket.local else { return Ok(()) };
    let local = moved::here(local).unwrap_or(local);
    let ip = if local.ip().is_unspecified() { loopback(socket.six) } else { local.ip() };
    let to = SocketAddr::new(ip, local.port());
    let mut lost = 0;
    for message in &socket.queue {
        let data = world.blob(&message.data)?;
        let own = sockets.values().find(|one| {
            let same = |own: SocketAddr, from: SocketAddr| {
                own.port() == from.port() && (own.ip() == from.ip() || own.ip().is_unspecified())
            };
            let from = message.from.zip(one.local);
            !one.is_stream() && from.is_some_and(|(from, own)| same(own, from))
        });
        let flags = SendFlags::DONTWAIT;
        let sent = match (own, message.from) {
            (Some(own), _) => sendto(world.get(own.description)?, &data, flags, &to).is_ok(),
            (None, Some(from)) => {
                stranger(socket, from).is_some_and(|fd| sendto(&fd, &data, flags, &to).is_ok())
            }
            (None, None) => false,
        };
        lost += u32::from(!sent);
    }
    if lost > 0 {
        world.note(format!("{lost} datagrams that waited at {local} are lost"));
    }
    Ok(())
}

/// A socket with the address of a sender that is gone.
fn stranger(socket: &Socket, from: SocketAddr) -> Option<OwnedFd> {
    let fd = connect::new(socket).ok()?;
    bind(&fd, &from).ok()?;
    Some(fd)
}
