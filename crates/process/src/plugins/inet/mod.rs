//! TCP and UDP: who listens, connections inside of the job, and what waits in them. TCP_REPAIR is
//! refused to ordinary users, so connections are made anew between the job's own sockets.

mod connect;
mod fill;
mod make;
mod moved;
mod ports;
mod room;
mod save;
mod tcp;
mod waiting;
mod wires;

pub use ports::release_ports;
pub(crate) use wires::meet;

use crate::plugins::error::PluginError;
use crate::plugins::job::{Capture, Found, Job};
use crate::plugins::sockets::options::SocketOption;
use crate::plugins::sockets::{Kind, filter};
use crate::plugins::world::World;
use crate::plugins::{Blob, Claim, Plugin};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::net::SocketAddr;

/// Multipath TCP: Go's listeners have it.
const MPTCP: i32 = 262;

#[derive(Debug)]
pub(crate) struct Inet;

#[derive(Debug, Serialize, Deserialize)]
struct Socket {
    description: u32,
    /// `AF_INET6` and not `AF_INET`.
    six: bool,
    kind: i32,
    protocol: i32,
    options: Vec<SocketOption>,
    /// `None`: it is not bound.
    local: Option<SocketAddr>,
    role: Role,
    /// It has said that it sends no more.
    finished: bool,
    /// What else it has shut down: 1 receiving, 2 (of a datagram socket) sending.
    #[serde(default)]
    shutdown: u8,
    /// It has an address that this machine did not have (`IP_FREEBIND`).
    #[serde(default)]
    foreign: bool,
    /// The instructions of its filter.
    #[serde(default)]
    filter: Option<Vec<u8>>,
    queue: Vec<Message>,
    /// Where its host was, for sockets that other parts of the job may reach or be reached from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    host: Option<wires::Host>,
}

#[derive(Debug, Serialize, Deserialize)]
enum Role {
    Idle,
    Listening {
        backlog: u32,
        /// So many who wait to be accepted have closed their ends, and sent nothing.
        #[serde(default)]
        gone: u32,
    },
    /// Has begun to connect.
    Connecting {
        remote: SocketAddr,
    },
    /// Waits to be accepted.
    Waiting {
        remote: SocketAddr,
    },
    Connected {
        peer: u32,
        remote: SocketAddr,
    },
    /// Its other end is another part's.
    Wire {
        wire: wires::Wire,
        remote: SocketAddr,
    },
    /// Nobody of the job is at the other end, which has said that it sends no more, or not.
    Abandoned {
        finished: bool,
    },
    /// A datagram socket that sends to this address.
    Toward(SocketAddr),
}

#[derive(Debug, Serialize, Deserialize)]
struct Message {
    data: Blob,
    /// Of a datagram.
    from: Option<SocketAddr>,
}

impl Socket {
    fn is_stream(&self) -> bool {
        self.kind == libc::SOCK_STREAM
    }
}

fn is_one(kind: Kind) -> bool {
    let tcp = kind.kind == libc::SOCK_STREAM && matches!(kind.protocol, libc::IPPROTO_TCP | MPTCP);
    let udp = kind.kind == libc::SOCK_DGRAM && kind.protocol == libc::IPPROTO_UDP;
    matches!(kind.domain, libc::AF_INET | libc::AF_INET6) && (tcp || udp)
}

impl Plugin for Inet {
    fn name(&self) -> &'static str {
        "inet"
    }

    fn claim(&self, file: &Found, job: &Job) -> Claim {
        match file.socket.is_some_and(is_one) {
            true => {
                filter::refusal(file, job).map_or_else(|| waiting::claim(file, job), Claim::Refused)
            }
            false => Claim::No,
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
        save::save(capture, mine)
    }

    fn restart(&self, state: Value, world: &mut World) -> Result<(), PluginError> {
        make::make(world.parse(state)?, world)
    }
}
