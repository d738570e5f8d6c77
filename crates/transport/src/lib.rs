//! How a client and its proxy talk: one shared-memory ring, bounded, in one global order.
//!
//! A client's threads append messages under one short lock; the proxy consumes them in that order
//! and answers calls through reply slots. A descriptor pair made by the client (ring and shared
//! arena) travels over a unix socket with [`Hello`](kedge_protocol::Hello); after that the socket
//! only tells each side when the other has gone.

mod client;
mod error;

pub use client::Client;
pub use error::{ConnectError, Dead};
