//! What the near end of a session, a proxy beside a client, and its far end, a proxy beside devices
//! on another machine, say to each other.
//!
//! A session has two [links](Links): [`ToFar`] and [`ToNear`] go on the line, in order, and
//! [`Aside`] on the other, from the near end alone: answers that the far end waits for while it may
//! not read the line. Each connection begins with an [`Opening`], which the server reads, and which
//! tells it whom to hand the connection to.
#![forbid(unsafe_code)]

mod connect;
mod frame;
mod link;
mod messages;

pub use connect::{ConnectError, Connected, Dialer, connect, is_here, tune};
pub use frame::{FrameError, Frames, Sending, read_one, write_one};
pub use link::{Connections, Inlet, Links, Receiver, Sender, Which};
pub use messages::{
    Accepted, Answer, Aside, Ask, CHUNK, Handover, LINE, MAGIC, Offer, Opening, PAGE, PATCHES,
    PagePatch, Purpose, Refused, SessionKey, Start, ToFar, ToNear, VERSION, put_message,
};
