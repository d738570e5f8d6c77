//! A client's devices move while it runs: one proxy gives what they hold, in rounds, to another,
//! which takes its place at the ring. docs/design/0036-moves.md has the protocol.
//!
//! - [`line`]: what the two say to each other.
//! - [`source`]: the proxy that has the client.
//! - [`target`]: the one that will; [`taking`]: what a round brings it.
//! - [`relay`]: what is between them where one's devices are on another machine.
//! - [`after`]: what the target makes and ends between two rounds.
//! - [`owner`]: which of them has the client, where nobody is left to ask.

mod after;
mod line;
mod owner;
mod relay;
mod source;
mod taking;
mod target;

pub(crate) use line::{LineError, Message, Reply, receive, receive_saved, send, send_saved};
pub(crate) use owner::Owner;
pub(crate) use relay::{Passed, pass};
pub(crate) use source::{Crossed, Follows, Shown, ShownHere, Source, Way};
pub(crate) use target::{Arrived, Arriving, Devices, arrive};
