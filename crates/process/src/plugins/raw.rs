//! IP's sockets without connections but for UDP: raw ones, ICMP's for programs like ping, UDP-Lite.
//! They come back with their addresses, options and filters. What waits in one is about the network
//! as it was, and no such socket promises that a packet arrives: it is lost, with a warning.

use crate::plugins::error::{Context, PluginError, damaged};
use crate::plugins::job::{Capture, Found, Job, state};
use crate::plugins::sockets::options::{self, SocketOption};
use crate::plugins::sockets::{Kind, filter};
use crate::plugins::world::World;
use crate::plugins::{Claim, Plugin};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, Protocol, SocketFlags, SocketType, bind, connect, getpeername, getsockname,
    socket_with,
};
use rustix::process::geteuid;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::num::NonZeroU32;

#[derive(Debug)]
pub(crate) struct Raw;

#[derive(Debug, Serialize, Deserialize)]
struct Socket {
    description: u32,
    six: bool,
    kind: i32,
    protocol: i32,
    /// Of ICMP's the port is the number in what is sent, of raw ones the protocol.
    local: Option<SocketAddr>,
    remote: Option<SocketAddr>,
    options: Vec<SocketOption>,
    /// The instructions of its filter.
    filter: Option<Vec<u8>>,
}

fn is_one(kind: Kind) -> bool {
    const DATAGRAMS: [i32; 3] = [libc::IPPROTO_ICMP, libc::IPPROTO_ICMPV6, libc::IPPROTO_UDPLITE];
    let datagrams = kind.kind == libc::SOCK_DGRAM && DATAGRAMS.contains(&kind.protocol);
    let known = datagrams || kind.kind == libc::SOCK_RAW && kind.protocol > 0;
    matches!(kind.domain, libc::AF_INET | libc::AF_INET6) && known
}

impl Plugin for Raw {
    fn name(&self) -> &'static str {
        "raw"
    }

    fn claim(&self, file: &Found, job: &Job) -> Claim {
        match file.socket.filter(|kind| is_one(*kind)) {
            None => Claim::No,
            Some(kind) if kind.kind == libc::SOCK_RAW && !geteuid().is_root() => {
                Claim::Refused("only root can make a raw socket again: close it before".to_owned())
            }
            Some(_) => filter::refusal(file, job).map_or(Claim::Yes, Claim::Refused),
        }
    }

    fn saves_under_way(&self, _file: &Found) -> bool {
        true
    }

    fn checkpoint(
        &self,
        capture: &mut Capture,
        mine: &[usize],
    ) -> Result<Option<Value>, PluginError> {
        state(mine.iter().map(|index| save(capture, *index)))
    }

    fn restart(&self, state: Value, world: &mut World) -> Result<(), PluginError> {
        world.parse::<Vec<Socket>>(state)?.iter().try_for_each(|socket| make(socket, world))
    }
}

fn save(capture: &mut Capture, index: usize) -> Result<Socket, PluginError> {
    let fd = capture.duplicate(index)?;
    let file = capture.file(index);
    let (who, inode, at) = (capture.job.describe(file), file.stat.inode, capture.job.at(file));
    let what = || format!("look at {who}");
    let kind = file.socket.ok_or_else(|| damaged("a socket of no kind"))?;
    let filter = filter::read(&fd).map_err(|_| {
        PluginError::Refused(format!("{who} has an eBPF program as its filter (SO_ATTACH_BPF)"))
    })?;
    if waits(&fd).to(what)? {
        capture.warnings.push(format!("{who} has packets that wait: a restart loses them"));
    }
    let bound = |address: &SocketAddr| match kind.kind {
        libc::SOCK_RAW => !address.ip().is_unspecified(),
        _ => address.port() != 0 || !address.ip().is_unspecified(),
    };
    let local = SocketAddr::try_from(getsockname(&fd).to(what)?).ok();
    let peer = getpeername(&fd).ok().flatten().and_then(|any| SocketAddr::try_from(any).ok());
    Ok(Socket {
        description: index as u32,
        six: kind.domain == libc::AF_INET6,
        kind: kind.kind,
        protocol: kind.protocol,
        local: local.filter(bound),
        remote: peer.or_else(|| told_remote(kind, inode, at)),
        options: options::read(&fd),
        filter,
    })
}

/// Whether something waits to be received.
fn waits(fd: &OwnedFd) -> io::Result<bool> {
    let mut one = [PollFd::new(fd, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    Ok(poll(&mut one, Some(&now))? != 0)
}

/// The address that a socket sends to whose port there is 0: no call tells that, but a table of
/// process `at`.
fn told_remote(kind: Kind, inode: u64, at: i32) -> Option<SocketAddr> {
    let name = match (kind.kind, kind.protocol) {
        (libc::SOCK_RAW, _) => "raw",
        (_, libc::IPPROTO_UDPLITE) => "udplite",
        _ => "icmp",
    };
    let six = if kind.domain == libc::AF_INET6 { "6" } else { "" };
    let table = fs::read_to_string(format!("/proc/{at}/net/{name}{six}")).ok()?;
    table.lines().skip(1).find_map(|line| remote_in(line, inode)).flatten()
}

/// The remote address in this line of the table, if that is of the socket: `None` within, if it has
/// none.
fn remote_in(line: &str, inode: u64) -> Option<Option<SocketAddr>> {
    let words: Vec<&str> = line.split_whitespace().collect();
    // Number, local and remote address, state, queues, timer, retries, user, timeout, inode.
    if words.get(9)?.parse() != Ok(inode) {
        return None;
    }
    let (ip, port) = words.get(2)?.split_once(':')?;
    let word = |at: usize| u32::from_str_radix(ip.get(at * 8..at * 8 + 8)?, 16).ok();
    // Each word is as it lies in memory, read as a number of this machine.
    let ip = match ip.len() {
        8 => IpAddr::from(Ipv4Addr::from(word(0)?.to_ne_bytes())),
        _ => {
            let words = [word(0)?, word(1)?, word(2)?, word(3)?].map(u32::to_ne_bytes);
            let bytes: [u8; 16] = words.concat().try_into().ok()?;
            IpAddr::from(Ipv6Addr::from(bytes))
        }
    };
    let port = u16::from_str_radix(port, 16).ok()?;
    Some((!ip.is_unspecified()).then(|| SocketAddr::new(ip, port)))
}

fn make(socket: &Socket, world: &mut World) -> Result<(), PluginError> {
    let domain = if socket.six { libc::AF_INET6 } else { libc::AF_INET };
    let kind = Kind { domain, kind: socket.kind, protocol: socket.protocol };
    let protocol = NonZeroU32::new(socket.protocol as u32).filter(|_| is_one(kind));
    let protocol = protocol.ok_or_else(|| damaged(format!("no such socket: {kind:?}")))?;
    let (family, of) = match (socket.six, socket.kind) {
        (true, libc::SOCK_RAW) => (AddressFamily::INET6, SocketType::RAW),
        (true, _) => (AddressFamily::INET6, SocketType::DGRAM),
        (false, libc::SOCK_RAW) => (AddressFamily::INET, SocketType::RAW),
        (false, _) => (AddressFamily::INET, SocketType::DGRAM),
    };
    let name = kind.name();
    let protocol = Some(Protocol::from_raw(protocol));
    let fd = socket_with(family, of, SocketFlags::CLOEXEC, protocol)
        .to(|| format!("make one of {name}"))?;
    for note in options::apply(&fd, &socket.options) {
        world.note(format!("{name}: {note}"));
    }
    if let Some(local) = socket.local {
        bind_again(&fd, local, &name, world)?;
    }
    if let Some(remote) = socket.remote
        && let Err(error) = connect(&fd, &remote)
    {
        world.note(format!("{name}: one cannot reach {remote} any more: {error}"));
    }
    if let Some(program) = &socket.filter {
        filter::attach(&fd, program).to(|| "attach a socket's filter")?;
    }
    world.made(socket.description, fd)
}

/// Binds it as it was; where somebody else has the number of an ICMP socket, under another one.
fn bind_again(
    fd: &OwnedFd,
    local: SocketAddr,
    name: &str,
    world: &mut World,
) -> Result<(), PluginError> {
    let what = || format!("bind one of {name} to {local}");
    match bind(fd, &local) {
        Err(Errno::ADDRINUSE) => {
            bind(fd, &SocketAddr::new(local.ip(), 0)).to(what)?;
            let port = local.port();
            world.note(format!("{name}: another one than {port} is used, which somebody else has"));
        }
        Err(Errno::ADDRNOTAVAIL) => {
            world.note(format!("{name}: one is not bound to {local}, which this host lacks"));
        }
        other => other.to(what)?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_out_of_tables() {
        let four = "   1: 0100007F:0001 0200007F:0000 01 00000000:00000000 00:00000000 00000000     0        0 4711 2 0000 0";
        assert_eq!(remote_in(four, 4711), Some(Some("127.0.0.2:0".parse().unwrap())));
        assert_eq!(remote_in(four, 4712), None);
        assert_eq!(remote_in(&four.replace("0200007F", "00000000"), 4711), Some(None));
        let six = "  58: 00000000000000000000000001000000:003A 00000000000000000000000002000000:0010 01 0:0 00:0 0 0 0 7 2 0 0";
        assert_eq!(remote_in(six, 7), Some(Some("[::2]:16".parse().unwrap())));
        for odd in ["", "1: x y z", "1: a:1 zz:0 07 0:0 0:0 0 0 0 7", "1: a:1 0 07 0:0 0:0 0 0 0 7"]
        {
            assert_eq!(remote_in(odd, 7), None, "{odd}");
        }
    }
}
