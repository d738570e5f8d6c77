//! Makes connections between the job's own sockets, at their old addresses where that can be.

use super::save::loopback;
use super::{MPTCP, Socket};
use crate::plugins::error::{Context, PluginError};
use crate::plugins::sys;
use crate::plugins::world::World;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    AddressFamily, Protocol, SocketFlags, SocketType, accept_with, bind, connect, getpeername,
    getsockname, listen, socket_with, sockopt,
};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

/// How long an old connection may stand in the way: after a second in TIME-WAIT the kernel lets
/// another one have its addresses (net.ipv4.tcp_tw_reuse).
const CONNECT_TIMEOUT: Duration = Duration::from_millis(2500);

/// Most connections that wait at one socket: far above `net.core.somaxconn`'s default.
const MAX_BACKLOG: u32 = 1 << 16;

/// Linux 6.3.
const IP_LOCAL_PORT_RANGE: i32 = 51;

pub(super) fn new(socket: &Socket) -> Result<OwnedFd, PluginError> {
    plain(socket.six, socket.kind, socket.protocol).to(|| "make an internet socket")
}

fn plain(six: bool, kind: i32, protocol: i32) -> io::Result<OwnedFd> {
    let family = if six { AddressFamily::INET6 } else { AddressFamily::INET };
    let make = |protocol: i32| {
        let protocol = u32::try_from(protocol).ok().and_then(std::num::NonZeroU32::new);
        let protocol = protocol.map(Protocol::from_raw);
        socket_with(family, SocketType::from_raw(kind as u32), SocketFlags::CLOEXEC, protocol)
    };
    match make(protocol) {
        // It is TCP to everybody else.
        Err(_) if protocol == MPTCP => Ok(make(libc::IPPROTO_TCP)?),
        made => Ok(made?),
    }
}

fn tcp(six: bool) -> io::Result<OwnedFd> {
    let fd = plain(six, libc::SOCK_STREAM, libc::IPPROTO_TCP)?;
    sockopt::set_socket_reuseaddr(&fd, true)?;
    Ok(fd)
}

/// Binds; waits a moment for whoever has the port: a process that was killed gives its memory back
/// before its sockets.
pub(super) fn bind_soon(fd: &OwnedFd, address: SocketAddr) -> io::Result<()> {
    const DYING: Duration = Duration::from_secs(2);
    let begin = Instant::now();
    loop {
        match bind(fd, &address) {
            Err(Errno::ADDRINUSE) if begin.elapsed() < DYING => {
                std::thread::sleep(Duration::from_millis(5));
            }
            other => return Ok(other?),
        }
    }
}

/// As [`bind_soon`], and waits while nothing but old connections in TIME-WAIT has the port.
pub(super) fn patient_bind(fd: &OwnedFd, address: SocketAddr, world: &World) -> io::Result<()> {
    /// TCP_TIMEWAIT_LEN is 60 s.
    const TIME_WAIT: Duration = Duration::from_secs(65);
    let (begin, mut told) = (Instant::now(), false);
    loop {
        match bind_soon(fd, address) {
            Err(error)
                if Errno::from_io_error(&error) == Some(Errno::ADDRINUSE)
                    && begin.elapsed() < TIME_WAIT
                    && !answers(address) =>
            {
                if !told {
                    told = true;
                    world.tell(&format!(
                        "waiting for {address}: connections that were closed before the checkpoint still have it \
                         (TIME-WAIT, a minute at most)"
                    ));
                }
            }
            other => return other,
        }
    }
}

/// Whether somebody listens there.
fn answers(address: SocketAddr) -> bool {
    let six = address.is_ipv6();
    let ip = if address.ip().is_unspecified() { loopback(six) } else { address.ip() };
    let probe = tcp(six);
    probe.is_ok_and(|probe| bounded(&probe, SocketAddr::new(ip, address.port())).is_ok())
}

/// Who listens for a moment, at `address` or anywhere on this machine.
fn listener(
    six: bool,
    address: Option<SocketAddr>,
    world: &World,
) -> io::Result<(OwnedFd, SocketAddr)> {
    let fd = tcp(six)?;
    patient_bind(&fd, address.unwrap_or_else(|| SocketAddr::new(loopback(six), 0)), world)?;
    listen(&fd, 1)?;
    let address = SocketAddr::try_from(getsockname(&fd)?)?;
    Ok((fd, address))
}

/// Listens at `address` for as many as may come at once.
pub(super) fn door(six: bool, address: SocketAddr, world: &World) -> io::Result<OwnedFd> {
    let fd = tcp(six)?;
    // Whoever listens at the same port of IPv4 is another one.
    if six && !matches!(address.ip().to_canonical(), IpAddr::V4(_)) {
        sockopt::set_ipv6_v6only(&fd, true)?;
    }
    patient_bind(&fd, address, world)?;
    listen(&fd, 4096)?;
    rustix::io::ioctl_fionbio(&fd, true)?;
    Ok(fd)
}

/// Connects to `to`, from `from` if that can be had.
pub(super) fn dial(six: bool, from: Option<SocketAddr>, to: SocketAddr) -> io::Result<OwnedFd> {
    let begin = Instant::now();
    loop {
        let client = tcp(six)?;
        let own = from.filter(|from| {
            begin.elapsed() < CONNECT_TIMEOUT && bind_client(&client, *from).is_ok()
        });
        match bounded(&client, to) {
            Err(error) if own.is_some() && in_the_way(&error) => {
                std::thread::sleep(Duration::from_millis(20));
            }
            other => return other.map(|()| client),
        }
    }
}

fn connected(
    listener: &OwnedFd,
    six: bool,
    from: Option<SocketAddr>,
    to: SocketAddr,
) -> io::Result<(OwnedFd, OwnedFd)> {
    let client = tcp(six)?;
    if let Some(from) = from {
        bind_client(&client, from)?;
    }
    bounded(&client, to)?;
    rustix::io::ioctl_fionbio(&client, false)?;
    let own = SocketAddr::try_from(getsockname(&client)?)?;
    // The kernel passes over a range outside of its own (net.ipv4.ip_local_port_range).
    if from.is_some_and(|from| from.port() != own.port()) {
        return Err(Errno::ADDRINUSE.into());
    }
    loop {
        let accepted = accept_with(listener, SocketFlags::CLOEXEC)?;
        // Anybody may connect meanwhile.
        let peer = getpeername(&accepted)?.and_then(|any| SocketAddr::try_from(any).ok());
        if peer.is_some_and(|peer| same(peer, own)) {
            return Ok((accepted, client));
        }
    }
}

/// Gives a client's end its address. A port that connections to others have by now, or had lately,
/// can still be chosen for it when it connects, as it was at first, where the kernel lets a socket
/// say from which (Linux 6.3).
fn bind_client(client: &OwnedFd, from: SocketAddr) -> io::Result<()> {
    match bind(client, &from) {
        Err(Errno::ADDRINUSE) => {
            let port = u32::from(from.port());
            let range = (port | port << 16).to_ne_bytes();
            sys::set_socket_option(client, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE, &range)
                .map_err(|_| Errno::ADDRINUSE)?;
            let late = 1i32.to_ne_bytes();
            sys::set_socket_option(client, libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, &late)?;
            Ok(bind(client, &SocketAddr::new(from.ip(), 0))?)
        }
        other => Ok(other?),
    }
}

/// The same address, IPv4 as such wherever it is.
fn same(a: SocketAddr, b: SocketAddr) -> bool {
    (a.ip().to_canonical(), a.port()) == (b.ip().to_canonical(), b.port())
}

/// Connects within seconds or fails; leaves `fd` not waiting.
pub(super) fn bounded(fd: &OwnedFd, to: SocketAddr) -> io::Result<()> {
    rustix::io::ioctl_fionbio(fd, true)?;
    match connect(fd, &to) {
        Err(Errno::INPROGRESS) => {}
        other => return Ok(other?),
    }
    let wait = Timespec { tv_sec: CONNECT_TIMEOUT.as_secs() as i64, tv_nsec: 0 };
    let mut fds = [PollFd::new(fd, PollFlags::OUT)];
    if retry_on_intr(|| poll(&mut fds, Some(&wait)))? == 0 {
        return Err(io::Error::from(io::ErrorKind::TimedOut));
    }
    Ok(sockopt::socket_error(fd)??)
}

/// As [`connected`], while an old connection may stand in the way.
fn patiently(
    listener: &OwnedFd,
    six: bool,
    from: SocketAddr,
    to: SocketAddr,
) -> io::Result<(OwnedFd, OwnedFd)> {
    let begin = Instant::now();
    loop {
        match connected(listener, six, Some(from), to) {
            Err(e) if in_the_way(&e) && begin.elapsed() < CONNECT_TIMEOUT => {
                std::thread::sleep(Duration::from_millis(20));
            }
            other => return other,
        }
    }
}

fn in_the_way(error: &io::Error) -> bool {
    let way = [Errno::ADDRNOTAVAIL, Errno::ADDRINUSE].map(Errno::raw_os_error);
    error.raw_os_error().is_some_and(|error| way.contains(&error))
}

/// Connects `client` to `server`, which was accepted: both descriptors.
pub(super) fn pair(
    server: &Socket,
    client: &Socket,
    to: SocketAddr,
    world: &mut World,
) -> Result<(OwnedFd, OwnedFd), PluginError> {
    let at_home = || {
        let from = client.local.ok_or(Errno::ADDRNOTAVAIL)?;
        // Never to another machine.
        if !server.local.is_some_and(|local| same(local, to)) {
            return Err(io::Error::other("it was not connected to its other end's address"));
        }
        let (listener, _) = listener(server.six, server.local, world)?;
        patiently(&listener, client.six, from, to)
    };
    at_home().or_else(|e| {
        let (from, to) = (client.local, server.local);
        let text = |address: Option<SocketAddr>| address.map_or("?".to_owned(), |a| a.to_string());
        world.note(format!(
            "the connection from {} to {} has other addresses now: {e}",
            text(from),
            text(to)
        ));
        anywhere(client.six || server.six, world)
    })
}

/// A connection on this machine, between any ports.
pub(super) fn anywhere(six: bool, world: &World) -> Result<(OwnedFd, OwnedFd), PluginError> {
    let made = || {
        let (listener, address) = listener(six, None, world)?;
        connected(&listener, six, None, address)
    };
    made().to(|| "make a connection on this machine")
}

/// Begins to connect, without waiting. Where it is refused at once, the program, which was to be
/// told later, is.
pub(super) fn begin(fd: &OwnedFd, to: SocketAddr, world: &mut World) -> Result<(), PluginError> {
    rustix::io::ioctl_fionbio(fd, true).to(|| "set a socket's flags")?;
    match connect(fd, &to) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(()),
        Err(error) => {
            world.note(format!("a connection to {to}, which was under way, fails: {error}"));
            be_refused(fd, to.is_ipv6()).to(|| "begin a connection")
        }
    }
}

/// Has the kernel tell `fd` in a moment that it was refused: it asks where nobody listens any more
/// when it asks again.
fn be_refused(fd: &OwnedFd, six: bool) -> io::Result<()> {
    let listener = tcp(six)?;
    bind(&listener, &SocketAddr::new(loopback(six), 0))?;
    listen(&listener, 0)?;
    let address = SocketAddr::try_from(getsockname(&listener)?)?;
    // One waits already, and there is no room for another.
    let first = tcp(six)?;
    bounded(&first, address)?;
    match connect(fd, &address) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Connects to who listens at `local` so many times, and closes the connection each time.
pub(super) fn come_and_go(
    socket: &Socket,
    local: SocketAddr,
    times: u32,
) -> Result<(), PluginError> {
    let local = super::moved::here(local).unwrap_or(local);
    let ip = if local.ip().is_unspecified() { loopback(socket.six) } else { local.ip() };
    let to = SocketAddr::new(ip, local.port());
    let once = || bounded(&tcp(socket.six)?, to);
    (0..times.min(MAX_BACKLOG)).try_for_each(|_| once()).to(|| format!("connect to {to} again"))
}

/// Closes `fd` so that the other end sees a reset.
pub(super) fn reset(fd: OwnedFd) -> Result<(), PluginError> {
    sockopt::set_socket_linger(fd.as_fd(), Some(Duration::ZERO)).to(|| "reset a connection")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, UdpSocket};
    use std::thread;

    /// It is not the connection's alone: its first owner did not have it alone either.
    #[test]
    fn a_clients_port_that_others_use_for_other_connections_is_had_again() {
        let probe = plain(false, libc::SOCK_STREAM, 0).unwrap();
        let told = sys::set_socket_option(&probe, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE, &[0; 4]);
        if told.is_err() {
            let why = "this kernel has no IP_LOCAL_PORT_RANGE (Linux 6.3)";
            return kedge_left_out::left_out("ports of clients", why);
        }
        for home in ["127.0.0.1:0", "[::1]:0"] {
            let [one, two] = [(); 2].map(|()| TcpListener::bind(home).unwrap());
            let other = std::net::TcpStream::connect(one.local_addr().unwrap()).unwrap();
            let (from, to) = (other.local_addr().unwrap(), two.local_addr().unwrap());
            let (server, client) = connected(&two.into(), from.is_ipv6(), Some(from), to).unwrap();
            assert_eq!(SocketAddr::try_from(getsockname(&client).unwrap()).unwrap(), from);
            let peer = getpeername(&server).unwrap().unwrap();
            assert_eq!(SocketAddr::try_from(peer).unwrap(), from);
        }
    }

    /// The kernel chooses none outside of its range: another one would be no better than none.
    #[test]
    fn no_other_port_is_taken_for_one_that_cannot_be_chosen() {
        let [one, two] = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let taken = |port: &u16| {
            let other = plain(false, libc::SOCK_STREAM, 0).unwrap();
            bind(&other, &SocketAddr::new(loopback(false), *port)).ok()?;
            bounded(&other, one.local_addr().unwrap()).ok().map(|()| other)
        };
        let other = (20_000..30_000).find_map(|port| taken(&port)).expect("a free port");
        let from = SocketAddr::try_from(getsockname(&other).unwrap()).unwrap();
        let to = two.local_addr().unwrap();
        let failed = connected(&two.into(), false, Some(from), to);
        assert_eq!(Errno::from_io_error(&failed.unwrap_err()), Some(Errno::ADDRINUSE));
    }

    /// Those of a process that dies are there for a moment.
    #[test]
    fn a_port_that_is_given_back_soon_is_waited_for() {
        let listener = TcpListener::bind("[::1]:0").unwrap();
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let (stream, datagram) = (listener.local_addr().unwrap(), socket.local_addr().unwrap());
        let ends = thread::spawn(move || {
            thread::sleep(Duration::from_millis(100));
            drop((listener, socket));
        });
        bind_soon(&tcp(true).unwrap(), stream).unwrap();
        let udp = plain(false, libc::SOCK_DGRAM, libc::IPPROTO_UDP).unwrap();
        bind_soon(&udp, datagram).unwrap();
        ends.join().unwrap();
    }
}
