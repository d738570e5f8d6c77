//! What `TCP_INFO` tells of a connection.

use crate::plugins::sys;
use rustix::fd::AsFd;
use std::io;

/// A state of RFC 9293, as linux/tcp.h numbers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct State(u8);

impl State {
    pub(super) const LISTEN: State = State(10);
    pub(super) const CLOSED: State = State(7);

    /// It has sent a FIN: FIN-WAIT-1, FIN-WAIT-2, TIME-WAIT, LAST-ACK, CLOSING.
    pub(super) fn finished(self) -> bool {
        matches!(self.0, 4 | 5 | 6 | 9 | 11)
    }

    /// It has got a FIN: TIME-WAIT, CLOSE-WAIT, LAST-ACK, CLOSING.
    pub(super) fn peer_finished(self) -> bool {
        matches!(self.0, 6 | 8 | 9 | 11)
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Info {
    pub state: State,
    /// Of a socket that listens.
    pub backlog: u32,
}

pub(super) fn info(fd: impl AsFd) -> io::Result<Info> {
    /// The offset of tcpi_sacked in struct tcp_info, which is the backlog where somebody listens.
    const BACKLOG: usize = 28;
    let mut bytes = [0; 256];
    let length = sys::socket_option(fd, libc::IPPROTO_TCP, libc::TCP_INFO, &mut bytes)?;
    let mut backlog = [0; 4];
    if length < BACKLOG + backlog.len() {
        return Err(io::Error::other("the kernel tells too little of a connection"));
    }
    backlog.copy_from_slice(&bytes[BACKLOG..BACKLOG + 4]);
    Ok(Info { state: State(bytes[0]), backlog: u32::from_ne_bytes(backlog) })
}
