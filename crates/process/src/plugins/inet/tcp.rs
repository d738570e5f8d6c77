//! What `TCP_INFO` tells of a connection.

use crate::plugins::sys;
use rustix::fd::AsFd;
use std::io;
use std::time::Duration;

/// A state of RFC 9293, as linux/tcp.h numbers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct State(u8);

impl State {
    pub(super) const ESTABLISHED: State = State(1);
    pub(super) const SYN_SENT: State = State(2);
    pub(super) const FIN_WAIT_1: State = State(4);
    pub(super) const FIN_WAIT_2: State = State(5);
    pub(super) const CLOSED: State = State(7);
    pub(super) const CLOSE_WAIT: State = State(8);
    pub(super) const LISTEN: State = State(10);

    pub(super) fn of(number: u8) -> State {
        State(number)
    }

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
    /// Of a socket that listens: how many may wait to be accepted, and how many do.
    pub backlog: u32,
    pub waiting: u32,
    /// The other end has answered once.
    pub answered: bool,
    /// How long a sender without room waits at most until it asks for some again, or sends once
    /// more. It doubles each time that there is none.
    pub probe: Duration,
}

pub(super) fn info(fd: impl AsFd) -> io::Result<Info> {
    /// Offsets in struct tcp_info: tcpi_backoff, tcpi_options, tcpi_rto (microseconds),
    /// tcpi_unacked and tcpi_sacked; where somebody listens, the latter are who waits, and the
    /// backlog.
    const BACKOFF: usize = 4;
    const TIMEOUT: usize = 8;
    const OPTIONS: usize = 5;
    const WAITING: usize = 24;
    const BACKLOG: usize = 28;
    let mut bytes = [0; 256];
    let length = sys::socket_option(fd, libc::IPPROTO_TCP, libc::TCP_INFO, &mut bytes)?;
    let word = |at: usize| {
        let mut word = [0; 4];
        word.copy_from_slice(&bytes[at..at + 4]);
        u32::from_ne_bytes(word)
    };
    if length < BACKLOG + 4 {
        return Err(io::Error::other("the kernel tells too little of a connection"));
    }
    let state = State(bytes[0]);
    let answered = bytes[OPTIONS] != 0 || state == State::ESTABLISHED;
    let (backlog, waiting) = (word(BACKLOG), word(WAITING));
    // Where something is to be sent once more, the time for that is told doubled already.
    let doubled = if waiting > 0 { 0 } else { bytes[BACKOFF].min(16) };
    let probe = u64::from(word(TIMEOUT)) << doubled;
    Ok(Info { state, backlog, waiting, answered, probe: Duration::from_micros(probe) })
}
