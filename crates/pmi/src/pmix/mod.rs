//! PMIx, as its library's processes speak it over a socket: a server for one rank, and what a rank
//! asks the server of its step.
//!
//! The library packs values in a form for each of its versions. Both sides here use version 3's,
//! which the library has read since (bfrops "v3", not described). Each message has a header with a
//! tag, and its answer has the same tag. [`Server`] and [`Client`] have no socket.
//!
//! No supervisor uses it yet: docs/design/0069-pmix.md has the decisions, and what is open. What is
//! on the wire was read in OpenPMIx 4.2.2.

mod client;
mod job;
mod member;
mod message;
mod pack;
mod server;

pub use client::{Client, Step};
pub use member::Member;
pub use message::{Hello, MAX_HELLO_LEN, MAX_MESSAGE_LEN, Message};
pub use server::{MAX_COMMITTED, MAX_RANKS, Server};

use thiserror::Error;

/// How values are packed, as the library calls it.
pub const PACKING: &str = "v3";
/// The version that both sides give: the first with that packing whose job has nodes.
pub const VERSION: &str = "3.2.3";
/// How a rank keeps what it has got: in its own memory, and none that is shared with its server.
pub const STORE: &str = "hash";
/// How a rank shows who it is.
pub const SECURITY: &str = "native";
/// Buffers in which values' types are not told.
pub const BUFFER: u8 = 1;

/// What a request asks for (`PMIX_*_CMD`).
mod command {
    pub(crate) const JOB: u8 = 0;
    pub(crate) const ABORT: u8 = 1;
    pub(crate) const COMMIT: u8 = 2;
    pub(crate) const FENCE: u8 = 3;
    pub(crate) const GET: u8 = 4;
    pub(crate) const FINALIZE: u8 = 5;
    pub(crate) const NOTIFY: u8 = 12;
    pub(crate) const REGISTER_EVENTS: u8 = 13;
    pub(crate) const DEREGISTER_EVENTS: u8 = 14;
}

/// How it went (`PMIX_SUCCESS`, `PMIX_ERR_*`).
mod status {
    pub(crate) const SUCCESS: i32 = 0;
    pub(crate) const BAD_PARAM: i32 = -27;
    pub(crate) const NOT_FOUND: i32 = -46;
    pub(crate) const NOT_SUPPORTED: i32 = -47;
}

/// Whom a value is for (`PMIX_LOCAL` …).
mod scope {
    pub(crate) const LOCAL: u8 = 1;
    pub(crate) const REMOTE: u8 = 2;
    pub(crate) const GLOBAL: u8 = 3;
}

/// All ranks of a job (`PMIX_RANK_WILDCARD`).
const ALL: u32 = u32::MAX - 1;

/// Why bytes are no PMIx, or say what the server cannot do.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PmixError {
    #[error("a message ends too early")]
    Short,
    #[error("a message has {bytes} bytes, and may have {most}")]
    Long { bytes: usize, most: usize },
    #[error("a text is not UTF-8, or has no end")]
    Text,
    #[error("a value of type {0} is not known here")]
    Type(u16),
    #[error("{given} is no number of values here")]
    Count { given: i64 },
    #[error("values are nested too deep")]
    Deep,
    #[error("the rank is {found}, and not {expected}")]
    Who { found: String, expected: String },
    #[error(
        "the rank packs values as PMIx {version} does ({packing}, {kind}): {PACKING}, which PMIx \
         has from 3.1 on, is known"
    )]
    Packing { version: String, packing: String, kind: u8 },
    #[error("the rank keeps values in {0}: {STORE} is known")]
    Store(String),
    #[error("the rank shows who it is by {0}, which is not known here")]
    Security(String),
    #[error("the ranks have told each other more than {most} bytes")]
    Told { most: usize },
    #[error("the other ranks' values are none: {0}")]
    Gathered(&'static str),
    #[error("the image's PMIx session is none: {0}")]
    Image(&'static str),
    #[error("the step's server answers {request} with status {status}")]
    Refused { request: &'static str, status: i32 },
}

/// What the fuzz target and its test hold these to: no bytes bring them to anything but an error.
pub fn check_bytes(bytes: &[u8]) {
    let member = Member { namespace: "n".to_owned(), rank: 1, size: 2, host: "h".to_owned() };
    let mut greeted = Server::new(member.clone());
    let hello = Hello::of("n", 1, 0, 0).encode();
    let _ = greeted.from_rank(&hello).and_then(|()| {
        greeted.gathered(0, vec![b"h".to_vec(), b"h".to_vec()])?;
        greeted.from_rank(bytes)?;
        greeted.gathered(1, vec![bytes.to_vec(), bytes.to_vec()])
    });
    assert!(greeted.saved().restored().is_ok(), "what has been saved is restored");
    let mut new = Server::new(member);
    let _ = new.from_rank(bytes);
    let _ = Server::split(bytes);
    let _ = client::values(bytes);
    let _ = client::status_of(bytes, "it");
    let _ = Client::welcomed(&mut bytes.to_vec());
}
