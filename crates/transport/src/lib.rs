//! How a client and its proxy talk: one shared-memory ring, bounded, in one global order.
//!
//! A client's threads append messages under one short lock; the proxy consumes them in that order
//! and answers calls through reply slots. A descriptor pair made by the client (ring and shared
//! arena) travels over a unix socket with [`Hello`](kedge_protocol::Hello); after that the socket
//! tells each side when the other has gone, the proxy which host functions have returned, and
//! carries descriptors of shared device memory.

pub mod bench;
mod calls;
mod client;
mod descriptors;
mod error;
mod futex;
mod greeting;
#[cfg(test)]
mod handshake_tests;
mod layout;
mod limits;
pub mod managed;
mod memory;
mod outbox;
mod ring;
#[cfg(test)]
mod ring_tests;
mod server;
mod slots;
mod spin;

pub use calls::{Calls, CallsReader, TracedCall, monotonic};
pub use client::Client;
pub use descriptors::{Announcement, Announcements, TICKET, offer as offer_descriptor};
pub use error::{AcceptError, ConnectError, Dead, RingError, SegmentError};
pub use layout::{MAX_MESSAGE, MAX_REPLY, RING_BYTES, SLOTS};
pub use memory::{check_shared_arena, create_ring, create_shared_arena, map_shared_arena};
pub use outbox::{Outbox, ReplyError};
pub use ring::{Incoming, Meter, Nudge, ReplyTo, RingPlace};
pub use server::{Accepted, Server};
pub use spin::processors_to_spare;

/// Among a device's attributes in the handshake, and no CUdevice_attribute: at which of the job's
/// places it is. Devices of different places do not reach each other's memory. Without it all are
/// of one.
pub const ATTRIBUTE_PLACE: u32 = 0x6b65_0001;
/// Likewise: 1 where the device is on another machine, so that to ask takes a line's round trip.
/// Without it the device is on this one.
pub const ATTRIBUTE_FAR: u32 = 0x6b65_0002;

/// Makes a client and a server in one process, without arenas: for tests and benchmarks.
pub fn pair() -> std::io::Result<(Client, Server)> {
    let (near, far) = std::os::unix::net::UnixStream::pair()?;
    let segment = std::sync::Arc::new(memory::Segment::create()?);
    let shared = memory::sealed_memfd(c"kedge-pair", 4096)?;
    let server = Server::new(far.into(), segment.clone());
    Ok((Client::new(near.into(), shared, segment), server))
}
