//! Local sockets: messages with descriptors, each bounded in length and time, between processes of
//! one user on one host.
//!
//! A [`Channel`] sends and receives [`kedge_wire`] messages in frames; [`frame`] has the same for
//! sockets that carry other bytes as well. [`address`] reaches sockets at paths of any length.

pub mod address;
mod channel;
mod error;
pub mod frame;

pub use channel::Channel;
pub use error::SocketError;
pub use frame::{is_own_user, peer_pid};
