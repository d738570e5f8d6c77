//! What the near end of a session, a proxy beside a client, and its far end, a proxy beside devices
//! on another machine, say to each other.
//!
//! A session has two [links](Links): [`ToFar`] and [`ToNear`] go on the line, in order, and
//! [`Aside`] on the other, from the near end alone: answers that the far end waits for while it may
//! not read the line. Many bytes of the client's memory cross by [lanes](Lane), and those of an
//! image by a link each time ([`ImageAsk`]), so that they hold up nothing. Each connection begins
//! with an [`Opening`], which the server reads, and which tells it whom to hand the connection to.
#![forbid(unsafe_code)]

mod check;
mod connect;
mod drain;
mod files;
mod frame;
mod inlet;
mod jobs;
mod kept;
mod lane;
mod link;
mod measure;
mod messages;

pub use check::check_bytes;
pub use connect::{
    ConnectError, Connected, Dialer, MAX_MANAGEMENT, Management, Wanted, connect, draw_session_key,
    end_session, is_here, tune,
};
pub use drain::{Arrived, DrainSink, ImageLineError, receive_file};
pub use files::{far_layers, named, serve_files};
pub use frame::{FrameError, Frames, Sending, read_one, write_one};
pub use inlet::{Connections, Inlet, Receiver};
pub use jobs::{JobLine, JobLineError, SessionSecret, ToTaker, answer, hear, job_streams};
pub use lane::{Bulk, LANE_BYTES, Lane, LaneReader, lanes};
pub use link::{FIRST_IMAGE, FIRST_LANE, Links, MAX_LANES, Meter, Sender, Which};
pub use measure::{MeasureError, Measuring, be_measured};
pub use messages::{
    Accepted, Answer, Aside, Ask, CHUNK, Capture, Drained, FILES, FileBytes, HandedOver, Handover,
    ImageAsk, JobKey, LINE, MAGIC, Offer, Opening, PAGE, PATCH_HEAD, PATCHES, Purpose, ReadFile,
    Refused, SessionKey, Start, StoredFile, Terms, ToFar, ToNear, VERSION, put_message,
    put_patches,
};
