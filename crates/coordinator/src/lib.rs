//! The coordinator of a job: barriers, and publish and subscribe, between its members.
//!
//! Members are the supervisors of a job's parts, and plugins of others. [`State`] is a pure state
//! machine;
//! [`Server`] gives it sockets, [`Client`] is the asking side, [`reach`] finds the coordinator or
//! becomes it. It holds nothing that its members cannot tell again: when it is lost, any of them
//! takes over, the others join that one and repeat what they were asking.
//!
//! docs/design/0008-coordinator.md has the decisions.
#![forbid(unsafe_code)]

mod client;
mod elect;
mod frame;
mod link;
mod message;
mod remote;
mod server;
mod simulated;
mod state;

pub use client::{Client, ClientError, Find, Found, Member};
pub use elect::{LOCK, Leader, Place, SOCKET, connect, reach};
pub use link::Link;
pub use message::{
    Broken, Hello, Key, Name, Notice, Passed, Reply, Request, Scope, Series, Value, Who, Why,
};
pub use remote::{Far, FarError, JobKey};
pub use server::Server;
pub use simulated::Simulated;
pub use state::{Conn, State, Violation};

/// Checks what the fuzz target and its test hold a codec to: whatever decodes is encoded again as
/// it was.
pub fn check_bytes(bytes: &[u8]) {
    kedge_wire::decode_canonical::<Request>(bytes);
    kedge_wire::decode_canonical::<Reply>(bytes);
}
