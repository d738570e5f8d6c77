//! netlink sockets that are idle: protocol, port id, groups, options and filter. glibc's
//! getifaddrs, MPI and GLib hold some. What waits in one is about the machine as it was.

use crate::plugins::error::{Context, PluginError, damaged};
use crate::plugins::job::{Capture, Found, Job, state};
use crate::plugins::sockets::filter;
use crate::plugins::sockets::options::{self, SocketOption};
use crate::plugins::sys;
use crate::plugins::world::World;
use crate::plugins::{Claim, Plugin, Saved};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{
    AddressFamily, Protocol, SocketFlags, SocketType, bind, connect, getpeername, getsockname,
    socket_with,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::io;
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

/// Protocols whose sockets the kernel keeps nothing of but what is saved here: route, usersock,
/// sock_diag, xfrm, kobject_uevent, generic, rdma and crypto (linux/netlink.h).
const STATELESS: [i32; 8] = [0, 2, 4, 6, 15, 16, 20, 21];
/// Numbers its groups as its families come: another kernel, or this one after another start, gives
/// a number to another family.
const GENERIC: i32 = 16;
/// Options of `SOL_NETLINK`.
const ADD_MEMBERSHIP: i32 = 1;
const LIST_MEMBERSHIPS: i32 = 9;
/// Longest list of groups, in bytes, a bit each.
const MAX_GROUPS_LEN: usize = 4096;
/// Between two looks at whether something waits.
const TICK: Duration = Duration::from_millis(5);

/// The plugin's.
const NAME: &str = "netlink";

#[derive(Debug)]
pub(crate) struct Netlink;

#[derive(Debug, Serialize, Deserialize)]
struct Socket {
    description: u32,
    kind: i32,
    protocol: i32,
    /// The port id that it is bound to; 0: it is not bound.
    port: u32,
    /// The multicast groups that it has joined.
    groups: Vec<u32>,
    /// Port id and groups that it sends to; 0: the kernel.
    peer: (u32, u32),
    options: Vec<SocketOption>,
    /// The instructions of its filter.
    filter: Option<Vec<u8>>,
}

impl Plugin for Netlink {
    fn name(&self) -> &'static str {
        NAME
    }

    fn claim(&self, file: &Found, job: &Job) -> Claim {
        let Some(kind) = file.socket.filter(|kind| kind.domain == libc::AF_NETLINK) else {
            return Claim::No;
        };
        if !STATELESS.contains(&kind.protocol) {
            return Claim::Refused(format!(
                "the kernel keeps more of {} than it tells: close it before",
                kind.name()
            ));
        }
        let fd = match job.duplicate(file) {
            Ok(fd) => fd,
            // What cannot be asked now is asked again when all is stopped.
            Err(_) => return Claim::Yes,
        };
        if kind.protocol == GENERIC && has_groups(&fd) {
            return Claim::Refused(generic());
        }
        let begin = Instant::now();
        while !matches!(is_idle(&fd), Ok(true)) {
            if begin.elapsed() >= job.patience {
                return Claim::Refused(waits());
            }
            std::thread::sleep(TICK);
        }
        Claim::Yes
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

/// The descriptions that are netlink sockets.
pub(crate) fn descriptions(saved: &Saved) -> Result<Vec<u32>, PluginError> {
    let Some(state) = saved.states.iter().find(|state| state.plugin == NAME) else {
        return Ok(Vec::new());
    };
    let sockets: Vec<Socket> =
        serde_json::from_value(state.state.clone()).map_err(|error| damaged(error.to_string()))?;
    Ok(sockets.iter().map(|socket| socket.description).collect())
}

fn waits() -> String {
    "something waits in this netlink socket, about the machine as it is: try again when the program \
     has read it"
        .to_owned()
}

fn generic() -> String {
    "it has joined groups of generic netlink, whose numbers another kernel gives to others: have the \
     program leave them before"
        .to_owned()
}

/// Whether it has joined a group; so it is held to be where that cannot be told.
fn has_groups(fd: &OwnedFd) -> bool {
    groups(fd).map_or(true, |groups| !groups.is_empty())
}

/// Whether nothing waits in it, be it an answer or an error.
fn is_idle(fd: &OwnedFd) -> io::Result<bool> {
    let mut one = [PollFd::new(fd, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    Ok(poll(&mut one, Some(&now))? == 0)
}

fn save(capture: &mut Capture, index: usize) -> Result<Socket, PluginError> {
    let fd = capture.duplicate(index)?;
    let file = capture.file(index);
    let what = || format!("look at {}", capture.job.describe(file));
    let kind = file.socket.ok_or_else(|| damaged("a socket of no kind"))?;
    if !is_idle(&fd).to(what)? {
        return Err(PluginError::Refused(format!("{}: {}", capture.job.describe(file), waits())));
    }
    if kind.protocol == GENERIC && has_groups(&fd) {
        return Err(PluginError::Refused(format!("{}: {}", capture.job.describe(file), generic())));
    }
    let local = SocketAddrNetlink::try_from(getsockname(&fd).to(what)?).to(what)?;
    let peer = getpeername(&fd).to(what)?;
    let peer = peer.and_then(|peer| SocketAddrNetlink::try_from(peer).ok());
    Ok(Socket {
        description: index as u32,
        kind: kind.kind,
        protocol: kind.protocol,
        port: local.pid(),
        groups: groups(&fd).to(what)?,
        peer: peer.map_or((0, 0), |peer| (peer.pid(), peer.groups())),
        options: options::read(&fd),
        filter: filter::read(&fd).to(what)?,
    })
}

/// The groups that it has joined, by their numbers.
fn groups(fd: &OwnedFd) -> io::Result<Vec<u32>> {
    let mut bits = vec![0; MAX_GROUPS_LEN];
    let length = sys::socket_option(fd, libc::SOL_NETLINK, LIST_MEMBERSHIPS, &mut bits)?;
    let words = bits[..length].as_chunks::<4>().0.iter().map(|word| u32::from_ne_bytes(*word));
    let joined = |(at, word): (usize, u32)| {
        let bits = (0..32).filter(move |bit| word & 1 << bit != 0);
        bits.map(move |bit| at as u32 * 32 + bit + 1)
    };
    Ok(words.enumerate().flat_map(joined).collect())
}

fn make(socket: &Socket, world: &mut World) -> Result<(), PluginError> {
    let Socket { description, protocol, port, peer, .. } = socket;
    let kind = match socket.kind {
        libc::SOCK_RAW => SocketType::RAW,
        libc::SOCK_DGRAM => SocketType::DGRAM,
        other => return Err(damaged(format!("a netlink socket of type {other}"))),
    };
    if !STATELESS.contains(protocol) || socket.groups.len() > MAX_GROUPS_LEN * 8 {
        return Err(damaged(format!("a netlink socket of protocol {protocol}")));
    }
    // 0, NETLINK_ROUTE, is what a socket without a protocol has.
    let known = NonZeroU32::new(*protocol as u32).map(Protocol::from_raw);
    let fd = socket_with(AddressFamily::NETLINK, kind, SocketFlags::CLOEXEC, known)
        .to(|| format!("make a netlink socket of protocol {protocol}"))?;
    for note in options::apply(&fd, &socket.options) {
        world.note(format!("a netlink socket of protocol {protocol}: {note}"));
    }
    if let Some(program) = &socket.filter {
        filter::attach(&fd, program).to(|| "give a netlink socket its filter")?;
    }
    if *port != 0 {
        // Programs compare it with that of each answer.
        bind(&fd, &SocketAddrNetlink::new(*port, 0))
            .to(|| format!("bind a netlink socket of protocol {protocol} to its port id {port}"))?;
    }
    let generic = *protocol == GENERIC && !socket.groups.is_empty();
    if generic {
        // Of an older image.
        let why = "another kernel gives their numbers to others";
        world.note(format!("a generic netlink socket is in none of its groups: {why}"));
    }
    for group in socket.groups.iter().filter(|_| !generic) {
        let (level, number) = (libc::SOL_NETLINK, group.to_ne_bytes());
        sys::set_socket_option(&fd, level, ADD_MEMBERSHIP, &number)
            .to(|| format!("join group {group} of the netlink protocol {protocol}"))?;
    }
    if *peer != (0, 0) {
        connect(&fd, &SocketAddrNetlink::new(peer.0, peer.1))
            .to(|| format!("connect a netlink socket to port id {}", peer.0))?;
    }
    world.made(*description, fd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_told_by_number() {
        let made = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None);
        let fd = made.unwrap();
        assert!(groups(&fd).unwrap().is_empty());
        // Links, and neighbours' discovery: a number beyond those that bind(2) knows.
        for group in [1u32, 33] {
            let (level, number) = (libc::SOL_NETLINK, group.to_ne_bytes());
            sys::set_socket_option(&fd, level, ADD_MEMBERSHIP, &number).unwrap();
        }
        assert_eq!(groups(&fd).unwrap(), [1, 33]);
        assert!(is_idle(&fd).unwrap());
    }
}
