//! What the kernel tells of Unix sockets through sock_diag(7).

use rustix::fd::OwnedFd;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with,
};
use std::io;

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

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLMSG_ERROR: u16 = 2;
/// Of the answer's header, and of what precedes its attributes.
const HEADER: usize = 16;
const FIXED: usize = 16;
/// Enough for the longest list of waiting sockets: `net.core.somaxconn` is 4096.
const ANSWER: usize = 1 << 20;

/// A connection to the kernel.
#[derive(Debug)]
pub(crate) struct Diagnoser(OwnedFd);

impl Diagnoser {
    pub(crate) fn new() -> io::Result<Diagnoser> {
        let (family, kind) = (AddressFamily::NETLINK, SocketType::RAW);
        let protocol = Some(netlink::SOCK_DIAG);
        Ok(Diagnoser(socket_with(family, kind, SocketFlags::CLOEXEC, protocol)?))
    }

    /// Of the Unix socket with this inode.
    pub(crate) fn unix(&self, inode: u64) -> io::Result<Diagnosis> {
        send(&self.0, &request(inode as u32), SendFlags::empty())?;
        let mut answer = vec![0; ANSWER];
        let (length, _) = recv(&self.0, &mut answer[..], RecvFlags::empty())?;
        parse(&answer[..length])
    }
}

fn request(inode: u32) -> Vec<u8> {
    /// File, peer, who waits, queue lengths.
    const SHOW: u32 = 0x2 | 0x4 | 0x8 | 0x10;
    const REQUEST: u16 = 1;
    let mut bytes = Vec::with_capacity(40);
    bytes.extend(40u32.to_ne_bytes());
    bytes.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    bytes.extend(REQUEST.to_ne_bytes());
    bytes.extend([0; 8]);
    bytes.extend([libc::AF_UNIX as u8, 0, 0, 0]);
    // All states; this inode; and no cookie.
    for word in [u32::MAX, inode, SHOW, u32::MAX, u32::MAX] {
        bytes.extend(word.to_ne_bytes());
    }
    bytes
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn parse(answer: &[u8]) -> io::Result<Diagnosis> {
    let strange = || io::Error::other("an answer of unknown form");
    match half(answer, 4).ok_or_else(strange)? {
        SOCK_DIAG_BY_FAMILY => {}
        NLMSG_ERROR => {
            let error = word(answer, HEADER).ok_or_else(strange)? as i32;
            return Err(io::Error::from_raw_os_error(error.saturating_neg()));
        }
        _ => return Err(strange()),
    }
    let length = (word(answer, 0).ok_or_else(strange)? as usize).min(answer.len());
    let state = *answer.get(HEADER + 2).ok_or_else(strange)?;
    let mut found = Diagnosis { state, ..Diagnosis::default() };
    let mut at = HEADER + FIXED;
    while at + 4 <= length {
        let size = usize::from(half(answer, at).ok_or_else(strange)?);
        let value = answer.get(at + 4..at + size.max(4)).ok_or_else(strange)?;
        match half(answer, at + 2) {
            Some(1) => found.file = word(value, 0),
            Some(2) => found.peer = word(value, 0),
            Some(3) => {
                found.waiting = value.chunks_exact(4).filter_map(|one| word(one, 0)).collect();
            }
            Some(4) => found.backlog = word(value, 4).unwrap_or(0),
            Some(6) => found.shutdown = value.first().copied().unwrap_or(0),
            _ => {}
        }
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
