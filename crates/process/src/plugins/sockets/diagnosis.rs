//! What the kernel tells of sockets through sock_diag(7).

use rustix::fd::OwnedFd;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with,
};
use std::io;
use std::net::{IpAddr, SocketAddr};

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Diagnosis {
    /// As TCP has them: 1 established, 10 listening.
    pub state: u8,
    /// The inode that the socket's name made, and its device in the kernel's form.
    pub file: Option<u32>,
    /// The peer's inode; 0: it has no process any more, or not yet.
    pub peer: Option<u32>,
    /// Inodes of those who wait to be accepted.
    pub waiting: Vec<u32>,
    /// Most that may wait.
    pub backlog: u32,
    /// 1: nothing can be received any more; 2: nothing sent.
    pub shutdown: u8,
}

pub(crate) const ESTABLISHED: u8 = 1;
pub(crate) const LISTENING: u8 = 10;
const CLOSE_WAIT: u8 = 8;

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLMSG_ERROR: u16 = 2;
/// Of the answer's header, and of what precedes its attributes.
const HEADER: usize = 16;
const FIXED: usize = 16;
/// Enough for the longest list of waiting sockets: `net.core.somaxconn` is 4096.
const ANSWER: usize = 1 << 20;

/// A connection to the kernel.
#[derive(Debug)]
pub(crate) struct Diagnoser {
    kernel: OwnedFd,
    answer: Vec<u8>,
}

impl Diagnoser {
    pub(crate) fn new() -> io::Result<Diagnoser> {
        let (family, kind) = (AddressFamily::NETLINK, SocketType::RAW);
        let protocol = Some(netlink::SOCK_DIAG);
        let kernel = socket_with(family, kind, SocketFlags::CLOEXEC, protocol)?;
        Ok(Diagnoser { kernel, answer: vec![0; ANSWER] })
    }

    /// Of the Unix socket with this inode.
    pub(crate) fn unix(&mut self, inode: u64) -> io::Result<Diagnosis> {
        parse(self.ask(&unix_request(inode as u32))?)
    }

    /// The TCP socket of this machine with these addresses: its inode, 0 if no process has it yet
    /// or any more, and how many bytes wait in it.
    pub(crate) fn tcp(&mut self, local: SocketAddr, remote: SocketAddr) -> io::Result<(u32, u32)> {
        let answer = self.ask(&inet_request(libc::IPPROTO_TCP, 0, local, remote))?;
        expect(answer)?;
        let (inode, waiting) = InetAnswer(answer).waiting(local.is_ipv6()).ok_or_else(strange)?;
        Ok((inode, waiting.unread))
    }

    /// What of the UDP socket with these addresses and this inode is shut down, as
    /// [`Diagnosis::shutdown`] has it.
    pub(crate) fn udp_shutdown(
        &mut self,
        local: SocketAddr,
        remote: Option<SocketAddr>,
        inode: u64,
    ) -> io::Result<u8> {
        const SHUTDOWN: u16 = 8;
        let nobody = match local {
            SocketAddr::V4(_) => SocketAddr::from(([0; 4], 0)),
            SocketAddr::V6(_) => SocketAddr::from(([0; 16], 0)),
        };
        // The kernel has both ends of UDP the other way round.
        let answer =
            self.ask(&inet_request(libc::IPPROTO_UDP, 0, remote.unwrap_or(nobody), local))?;
        expect(answer)?;
        if word(answer, HEADER + InetAnswer::INODE) != Some(inode as u32) {
            return Err(io::Error::other("it tells of another socket with the same address"));
        }
        let length = (word(answer, 0).ok_or_else(strange)? as usize).min(answer.len());
        let found = attributes(&answer[..length], HEADER + InetAnswer::LENGTH)?;
        let shutdown = found.into_iter().find(|(kind, _)| *kind == SHUTDOWN);
        Ok(shutdown.and_then(|(_, value)| value.first().copied()).unwrap_or(0))
    }

    /// The TCP sockets at this port, at any if it is 0, that no process has: who waits to be
    /// accepted, among others.
    pub(crate) fn tcp_without_process(&mut self, port: u16, six: bool) -> io::Result<Vec<Waiting>> {
        let any = if six { IpAddr::from([0; 16]) } else { IpAddr::from([0; 4]) };
        let (local, remote) = (SocketAddr::new(any, port), SocketAddr::new(any, 0));
        let mut found = Vec::new();
        self.all(&inet_request(libc::IPPROTO_TCP, DUMP, local, remote), |answer| {
            let (inode, waiting) = InetAnswer(answer).waiting(six).ok_or_else(strange)?;
            found.extend((inode == 0).then_some(waiting));
            Ok(())
        })?;
        Ok(found)
    }

    /// Asks for all sockets of a kind, and hands each answer to `each`.
    fn all(
        &mut self,
        request: &[u8],
        mut each: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        send(&self.kernel, request, SendFlags::empty())?;
        loop {
            let (length, _) = recv(&self.kernel, &mut self.answer[..], RecvFlags::empty())?;
            let mut rest = &self.answer[..length];
            while rest.len() >= HEADER {
                if half(rest, 4) == Some(NLMSG_DONE) {
                    return Ok(());
                }
                expect(rest)?;
                let one = (word(rest, 0).ok_or_else(strange)? as usize).max(HEADER);
                each(rest.get(..one).ok_or_else(strange)?)?;
                rest = rest.get(one.next_multiple_of(4)..).unwrap_or(&[]);
            }
        }
    }

    fn ask(&mut self, request: &[u8]) -> io::Result<&[u8]> {
        send(&self.kernel, request, SendFlags::empty())?;
        let (length, _) = recv(&self.kernel, &mut self.answer[..], RecvFlags::empty())?;
        Ok(&self.answer[..length])
    }
}

/// A connection that no process has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Waiting {
    /// As TCP has it.
    pub state: u8,
    pub local: IpAddr,
    pub port: u16,
    pub remote: SocketAddr,
    /// Bytes that wait in it.
    pub unread: u32,
    /// Bytes that the other end has not acknowledged; an end counts as one.
    pub unsent: u32,
}

/// A message with a struct inet_diag_msg.
struct InetAnswer<'a>(&'a [u8]);

impl InetAnswer<'_> {
    /// Offsets in the structure: idiag_inode, idiag_rqueue, idiag_wqueue.
    const INODE: usize = 68;
    const UNREAD: usize = 56;
    const UNSENT: usize = 60;
    const LENGTH: usize = 72;

    /// The inode, and the rest.
    fn waiting(&self, six: bool) -> Option<(u32, Waiting)> {
        /// Of idiag_state, idiag_sport, idiag_dport, idiag_src and idiag_dst.
        const STATE: usize = 1;
        const OWN_PORT: usize = 4;
        const PORT: usize = 6;
        const SOURCE: usize = 8;
        const TARGET: usize = 24;
        let body = self.0.get(HEADER..)?;
        let address = |at: usize| {
            let bytes: [u8; 16] = body.get(at..at + 16)?.try_into().ok()?;
            Some(match six {
                true => IpAddr::from(bytes),
                false => IpAddr::from([bytes[0], bytes[1], bytes[2], bytes[3]]),
            })
        };
        let port = |at: usize| Some(u16::from_be_bytes(body.get(at..at + 2)?.try_into().ok()?));
        let state = *body.get(STATE)?;
        // The end that the other one has sent counts as one.
        let end = u32::from(state == CLOSE_WAIT);
        let waiting = Waiting {
            state,
            local: address(SOURCE)?,
            port: port(OWN_PORT)?,
            remote: SocketAddr::new(address(TARGET)?, port(PORT)?),
            unread: word(body, Self::UNREAD)?.saturating_sub(end),
            unsent: word(body, Self::UNSENT)?,
        };
        Some((word(body, Self::INODE)?, waiting))
    }
}

const DUMP: u16 = 0x300;
const NLMSG_DONE: u16 = 3;

fn header(length: u32, flags: u16) -> Vec<u8> {
    const REQUEST: u16 = 1;
    let mut bytes = length.to_ne_bytes().to_vec();
    bytes.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    bytes.extend((REQUEST | flags).to_ne_bytes());
    bytes.extend([0; 8]);
    bytes
}

/// struct unix_diag_req
fn unix_request(inode: u32) -> Vec<u8> {
    /// File, peer, who waits, queue lengths.
    const SHOW: u32 = 0x2 | 0x4 | 0x8 | 0x10;
    let mut bytes = header(40, 0);
    bytes.extend([libc::AF_UNIX as u8, 0, 0, 0]);
    // All states; this inode; and no cookie.
    for word in [u32::MAX, inode, SHOW, u32::MAX, u32::MAX] {
        bytes.extend(word.to_ne_bytes());
    }
    bytes
}

/// struct inet_diag_req_v2
fn inet_request(protocol: i32, flags: u16, local: SocketAddr, remote: SocketAddr) -> Vec<u8> {
    let family = if local.is_ipv6() { libc::AF_INET6 } else { libc::AF_INET };
    let address = |ip: IpAddr| match ip {
        IpAddr::V6(six) => six.octets(),
        IpAddr::V4(four) => {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&four.octets());
            bytes
        }
    };
    let mut bytes = header(72, flags);
    bytes.extend([family as u8, protocol as u8, 0, 0]);
    bytes.extend(u32::MAX.to_ne_bytes());
    bytes.extend(local.port().to_be_bytes());
    bytes.extend(remote.port().to_be_bytes());
    bytes.extend(address(local.ip()));
    bytes.extend(address(remote.ip()));
    // Any interface; and no cookie.
    for word in [0, u32::MAX, u32::MAX] {
        bytes.extend(word.to_ne_bytes());
    }
    bytes
}

fn strange() -> io::Error {
    io::Error::other("an answer of unknown form")
}

/// Refuses all but the answer that was asked for.
fn expect(answer: &[u8]) -> io::Result<()> {
    match half(answer, 4).ok_or_else(strange)? {
        SOCK_DIAG_BY_FAMILY => Ok(()),
        NLMSG_ERROR => {
            let error = word(answer, HEADER).ok_or_else(strange)? as i32;
            Err(io::Error::from_raw_os_error(error.saturating_neg()))
        }
        _ => Err(strange()),
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn parse(answer: &[u8]) -> io::Result<Diagnosis> {
    expect(answer)?;
    let length = (word(answer, 0).ok_or_else(strange)? as usize).min(answer.len());
    let state = *answer.get(HEADER + 2).ok_or_else(strange)?;
    let mut found = Diagnosis { state, ..Diagnosis::default() };
    for (kind, value) in attributes(&answer[..length], HEADER + FIXED)? {
        match kind {
            1 => found.file = word(value, 0),
            2 => found.peer = word(value, 0),
            3 => found.waiting = value.chunks_exact(4).filter_map(|one| word(one, 0)).collect(),
            4 => found.backlog = word(value, 4).unwrap_or(0),
            6 => found.shutdown = value.first().copied().unwrap_or(0),
            _ => {}
        }
    }
    Ok(found)
}

/// Kinds and values of the attributes from `at` on.
fn attributes(answer: &[u8], mut at: usize) -> io::Result<Vec<(u16, &[u8])>> {
    let mut found = Vec::new();
    while at + 4 <= answer.len() {
        let size = usize::from(half(answer, at).ok_or_else(strange)?);
        let value = answer.get(at + 4..at + size.max(4)).ok_or_else(strange)?;
        found.push((half(answer, at + 2).ok_or_else(strange)?, value));
        at += size.max(4).next_multiple_of(4);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_answer_is_read_or_refused(mut answer in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&answer);
            if answer.len() > 6 {
                answer[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
                let _ = parse(&answer);
            }
        }
    }
}
