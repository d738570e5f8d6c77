//! Local sockets between processes of one user on one host. They carry messages with descriptors,
//! each bounded in length and time.
//!
//! A [`Channel`] sends and receives [`kedge_wire`] messages in frames. [`frame`] does so on sockets
//! that carry other bytes too. [`address`] listens and connects at paths of any length.

pub mod address;
mod channel;
mod error;
pub mod frame;

pub use channel::Channel;
pub use error::SocketError;
pub use frame::{is_own_user, peer_pid};
