//! Socket options: those that can be read are kept, and set where a fresh socket has others.

use crate::plugins::sys;
use rustix::fd::AsFd;
use serde::{Deserialize, Serialize};

/// An option's level, name and value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SocketOption {
    level: i32,
    name: i32,
    value: Vec<u8>,
}

/// Longest value: the name of a congestion control is 16 bytes.
const MAX_VALUE: usize = 64;

/// Which of a socket's buffers have a size that the program has chosen (`SO_BUF_LOCK`).
pub(crate) const SO_BUF_LOCK: i32 = 72;
pub(crate) const SO_PASSPIDFD: i32 = 76;
/// Whether descriptors may be sent to a Unix socket: they may, until a program takes that away
/// (Linux 6.16). It is kept where it is off.
const SO_PASSRIGHTS: i32 = 83;

const SOCKET: i32 = libc::SOL_SOCKET;
const IP: i32 = libc::IPPROTO_IP;
const IP6: i32 = libc::IPPROTO_IPV6;
const TCP: i32 = libc::IPPROTO_TCP;
const NETLINK: i32 = libc::SOL_NETLINK;
const RAW: i32 = libc::IPPROTO_RAW;
const ICMP6: i32 = libc::IPPROTO_ICMPV6;
const UDPLITE: i32 = libc::IPPROTO_UDPLITE;

/// Of raw sockets and of UDP-Lite's (linux/icmp.h, linux/in6.h, linux/icmpv6.h, linux/udp.h).
const ICMP_FILTER: i32 = 1;
const IPV6_CHECKSUM: i32 = 7;
const ICMP6_FILTER: i32 = 1;
const UDPLITE_SEND_CSCOV: i32 = 10;
const UDPLITE_RECV_CSCOV: i32 = 11;

/// Every option that is kept. Read where the socket has it.
const KEPT: [(i32, i32); 75] = [
    (SOCKET, libc::SO_REUSEADDR),
    (SOCKET, libc::SO_REUSEPORT),
    (SOCKET, libc::SO_BROADCAST),
    (SOCKET, libc::SO_KEEPALIVE),
    (SOCKET, libc::SO_OOBINLINE),
    (SOCKET, libc::SO_PRIORITY),
    (SOCKET, libc::SO_LINGER),
    (SOCKET, libc::SO_PASSCRED),
    (SOCKET, libc::SO_PASSSEC),
    (SOCKET, SO_PASSPIDFD),
    (SOCKET, libc::SO_RCVLOWAT),
    (SOCKET, libc::SO_RCVTIMEO),
    (SOCKET, libc::SO_SNDTIMEO),
    (SOCKET, libc::SO_TIMESTAMP),
    (SOCKET, libc::SO_TIMESTAMPNS),
    (SOCKET, libc::SO_MARK),
    (SOCKET, libc::SO_BINDTODEVICE),
    (SOCKET, libc::SO_RXQ_OVFL),
    (SOCKET, libc::SO_DONTROUTE),
    (SOCKET, libc::SO_NO_CHECK),
    (SOCKET, libc::SO_PEEK_OFF),
    (SOCKET, libc::SO_TIMESTAMPING),
    (SOCKET, libc::SO_ZEROCOPY),
    (IP, libc::IP_TOS),
    (IP, libc::IP_TTL),
    (IP, libc::IP_PKTINFO),
    (IP, libc::IP_RECVTTL),
    (IP, libc::IP_RECVTOS),
    (IP, libc::IP_RECVERR),
    (IP, libc::IP_MTU_DISCOVER),
    (IP, libc::IP_FREEBIND),
    (IP, libc::IP_TRANSPARENT),
    (IP, libc::IP_MULTICAST_TTL),
    (IP, libc::IP_MULTICAST_LOOP),
    (IP, libc::IP_BIND_ADDRESS_NO_PORT),
    (IP, libc::IP_MULTICAST_ALL),
    (IP, libc::IP_HDRINCL),
    (IP6, libc::IPV6_V6ONLY),
    (IP6, libc::IPV6_UNICAST_HOPS),
    (IP6, libc::IPV6_MULTICAST_HOPS),
    (IP6, libc::IPV6_MULTICAST_LOOP),
    (IP6, libc::IPV6_RECVPKTINFO),
    (IP6, libc::IPV6_RECVHOPLIMIT),
    (IP6, libc::IPV6_RECVTCLASS),
    (IP6, libc::IPV6_RECVERR),
    (IP6, libc::IPV6_TCLASS),
    (IP6, libc::IPV6_FREEBIND),
    (IP6, libc::IPV6_TRANSPARENT),
    (IP6, libc::IPV6_MTU_DISCOVER),
    (IP6, libc::IPV6_HDRINCL),
    (RAW, ICMP_FILTER),
    (RAW, IPV6_CHECKSUM),
    (ICMP6, ICMP6_FILTER),
    (UDPLITE, UDPLITE_SEND_CSCOV),
    (UDPLITE, UDPLITE_RECV_CSCOV),
    (TCP, libc::TCP_NODELAY),
    (TCP, libc::TCP_CORK),
    (TCP, libc::TCP_KEEPIDLE),
    (TCP, libc::TCP_KEEPINTVL),
    (TCP, libc::TCP_KEEPCNT),
    (TCP, libc::TCP_SYNCNT),
    (TCP, libc::TCP_LINGER2),
    (TCP, libc::TCP_DEFER_ACCEPT),
    (TCP, libc::TCP_CONGESTION),
    (TCP, libc::TCP_USER_TIMEOUT),
    (TCP, libc::TCP_NOTSENT_LOWAT),
    (TCP, libc::TCP_FASTOPEN),
    (TCP, libc::TCP_INQ),
    (NETLINK, libc::NETLINK_PKTINFO),
    (NETLINK, libc::NETLINK_BROADCAST_ERROR),
    (NETLINK, libc::NETLINK_NO_ENOBUFS),
    (NETLINK, libc::NETLINK_LISTEN_ALL_NSID),
    (NETLINK, libc::NETLINK_CAP_ACK),
    (NETLINK, libc::NETLINK_EXT_ACK),
    (NETLINK, libc::NETLINK_GET_STRICT_CHK),
];

/// Sizes are read doubled (socket(7)), and setting one fixes it.
const SIZES: [(i32, i32); 2] = [(1, libc::SO_SNDBUF), (2, libc::SO_RCVBUF)];

fn value(fd: impl AsFd, level: i32, name: i32) -> Option<Vec<u8>> {
    let mut value = [0; MAX_VALUE];
    let length = sys::socket_option(fd, level, name, &mut value).ok()?;
    (length > 0).then(|| value[..length].to_vec())
}

/// Whether a socket of this domain and protocol can have options of `level`.
fn has((domain, protocol): (i32, i32), level: i32) -> bool {
    let ip = domain == libc::AF_INET || domain == libc::AF_INET6;
    match level {
        RAW => ip && protocol != TCP,
        ICMP6 | UDPLITE => ip && protocol == level,
        IP | TCP => ip,
        IP6 => domain == libc::AF_INET6,
        NETLINK => domain == libc::AF_NETLINK,
        _ => true,
    }
}

pub(crate) fn read(fd: impl AsFd) -> Vec<SocketOption> {
    let number = |name| sys::socket_number(&fd, SOCKET, name).unwrap_or(0);
    let kind = (number(libc::SO_DOMAIN), number(libc::SO_PROTOCOL));
    let kept = KEPT.iter().filter(|(level, _)| has(kind, *level));
    let kept = kept.filter_map(|&(level, name)| {
        Some(SocketOption { level, name, value: value(&fd, level, name)? })
    });
    // The kernel has it since 5.14.
    let lock = sys::socket_number(&fd, SOCKET, SO_BUF_LOCK).ok();
    let locked = lock.unwrap_or(0);
    let sizes = SIZES.iter().filter(|(bit, _)| locked & bit != 0).filter_map(|&(_, name)| {
        let size = sys::socket_number(&fd, SOCKET, name).ok()? / 2;
        Some(SocketOption { level: SOCKET, name, value: size.to_ne_bytes().to_vec() })
    });
    let refuses = value(&fd, SOCKET, SO_PASSRIGHTS).filter(|on| on.iter().all(|byte| *byte == 0));
    let refuses = refuses.map(|value| SocketOption { level: SOCKET, name: SO_PASSRIGHTS, value });
    // Setting a size sets this, so it comes last.
    let lock = lock.map(|lock| SocketOption {
        level: SOCKET,
        name: SO_BUF_LOCK,
        value: lock.to_ne_bytes().into(),
    });
    kept.chain(refuses).chain(sizes).chain(lock).collect()
}

/// Whether `options` have this one, and not as 0.
pub(crate) fn are_on(options: &[SocketOption], level: i32, name: i32) -> bool {
    let is = |option: &&SocketOption| (option.level, option.name) == (level, name);
    options.iter().find(is).is_some_and(|option| option.value.iter().any(|byte| *byte != 0))
}

/// Sets what differs; names what cannot be set here.
pub(crate) fn apply(fd: impl AsFd, options: &[SocketOption]) -> Vec<String> {
    set(fd, options.iter().filter(|option| !option.is_late()))
}

/// The same of those that would keep out what waited in a socket, once that is there again.
pub(crate) fn apply_late(fd: impl AsFd, options: &[SocketOption]) -> Vec<String> {
    set(fd, options.iter().filter(|option| option.is_late()))
}

impl SocketOption {
    fn is_late(&self) -> bool {
        (self.level, self.name) == (SOCKET, SO_PASSRIGHTS)
    }
}

fn set<'a>(fd: impl AsFd, options: impl Iterator<Item = &'a SocketOption>) -> Vec<String> {
    let mut notes = Vec::new();
    for option in options {
        let SocketOption { level, name, value: wanted } = option;
        let size = *level == SOCKET && SIZES.iter().any(|(_, size)| size == name);
        let lock = (*level, *name) == (SOCKET, SO_BUF_LOCK);
        let known = size || lock || option.is_late() || KEPT.contains(&(*level, *name));
        if !known || wanted.len() > MAX_VALUE || value(&fd, *level, *name).as_ref() == Some(wanted)
        {
            continue;
        }
        if let Err(e) = sys::set_socket_option(&fd, *level, *name, wanted) {
            notes.push(format!("socket option {level}/{name} cannot be set here: {e}"));
        }
    }
    notes
}
