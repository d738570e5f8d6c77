//! What a job and the keeper of warm proxies say to each other. One question a connection.

use kedge_socket::{Channel, SocketError};
use kedge_wire::{Text, wire};
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

/// How long a request may take to arrive, or a reply that need not be waited for.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

wire! {
    #[derive(Debug, Clone, PartialEq)]
    pub enum Ask {
        /// A proxy of this kind (JSON); one that is just being made ready is waited for → `Ready`,
        /// with its socket and its process descriptor; `No`.
        Take = 1 { kind: Text<65536>, wait_ms: u32 },
        /// → `Status`
        Status = 2 {},
        /// End, and let go of all → `Yes`
        Stop = 3 {},
    }

    #[derive(Debug, Clone, PartialEq)]
    pub enum Reply {
        Ready = 1 { pid: u32 },
        No = 2 { why: Text<4096> },
        /// A list of [`PoolStatus`] (JSON).
        Status = 3 { pools: Text<65536> },
        Yes = 4 {},
    }
}

/// What is kept of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolStatus {
    pub gpu: String,
    /// Process ids of those that are ready.
    pub ready: Vec<u32>,
    pub starting: usize,
    /// So many are to be ready.
    pub count: usize,
    /// So many were given to jobs.
    pub given: u64,
    /// Why the last one that was to be made ready was not.
    pub failure: Option<String>,
}

/// Asks at `socket`, where only this user may answer.
pub fn ask(
    socket: &Path,
    ask: &Ask,
    limit: Duration,
) -> Result<(Reply, Vec<OwnedFd>), SocketError> {
    let stream = kedge_socket::address::connect(socket)?;
    if !kedge_socket::is_own_user(stream.as_fd())? {
        return Err(io::Error::from(io::ErrorKind::PermissionDenied).into());
    }
    let channel = Channel::new(stream.into());
    channel.send(ask, &[], REQUEST_TIMEOUT)?;
    channel.receive(limit)
}
