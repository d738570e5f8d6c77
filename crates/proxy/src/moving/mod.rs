//! A client's devices move while it runs: one proxy gives what they hold, in rounds, to another,
//! which takes its place at the ring. docs/design/0036-moves.md has the protocol. Here is what all
//! have in common who take part:
//!
//! - [`line`]: what the two say to each other.
//! - [`shown`]: what is shown in a round.
//! - [`relay`]: what is between them where one's devices are on another machine.
//! - [`after`]: what the target makes and ends between two rounds.
//!
//! [`crate::source`] is the proxy that has the client, [`crate::arriving`] and [`crate::arrive`]
//! are the one that will; [`crate::taking`]: what a round brings it. [`crate::owner`] says which of
//! them has the client, where nobody is left to ask.

mod after;
mod line;
mod relay;
mod shown;

pub(crate) use after::steps_between;
pub(crate) use line::{
    MAX_PARTS, Message, Reply, receive, receive_bytes, receive_saved, send, send_saved,
};
pub(crate) use relay::{Passed, pass};
pub(crate) use shown::{Crossed, Follows, Shown, Way};
