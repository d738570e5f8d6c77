//! The messages of a session.

use kedge_protocol::{CtxId, DeviceChoice, DeviceInfo, Hello, Message, Refusal, Welcome};
use kedge_wire::{Bytes, List, Text, Wire, Writer, wire};

/// "kedgefar", little-endian.
pub const MAGIC: u64 = u64::from_le_bytes(*b"kedgefar");
/// Changes with every incompatible change of a message here.
pub const VERSION: u32 = 13;
/// Bytes of memory that travel in one frame.
pub const CHUNK: usize = 1 << 20;
/// Bytes of a page of memory that both ends see.
pub const PAGE: usize = 4096;
/// Pages in one frame of changes.
pub const PATCHES: usize = 256;
/// Bytes of what such a frame says of a page besides what has changed, at most.
pub const PATCH_HEAD: usize = 4 + 2 + PAGE / 8;
/// Bytes of all of it.
const PACKED: usize = PATCHES * (PATCH_HEAD + PAGE);
/// Bytes of a line of text.
pub const LINE: usize = 4096;
/// Bytes of a message that only measures the line.
pub(crate) const ECHO: usize = 64;
/// Files that an image of a client's devices has, with those that it builds on.
pub const FILES: usize = 4096;
/// Bytes of a reply: the ring's own limit.
const REPLY: usize = 64 << 20;

/// What names a session to the server that has it.
pub type SessionKey = [u8; 16];
/// What tells a client's jobs apart.
pub type JobKey = [u8; 16];

wire! {
    /// The first frame of each connection.
    #[derive(Debug, Clone, PartialEq)]
    pub struct Opening {
        pub magic: u64,
        pub version: u32,
        /// `kedge_protocol::PROTOCOL_VERSION`.
        pub protocol: u32,
        pub purpose: Purpose,
    }

    #[derive(Debug, Clone, PartialEq)]
    pub enum Purpose {
        /// A new session on those of the server's devices, by number; none: on all →
        /// `Result<Offer, Refused>`. The near end has drawn its key; one that is there already of
        /// an earlier attempt is ended first. `job` is one for all of a job's processes.
        Session = 1 {
            session: SessionKey,
            attempt: u32,
            job: JobKey,
            devices: List<u32, 16>,
        },
        /// A connection of a session's link, or of one for an image's bytes (what [`ImageAsk`]
        /// says) → `Result<Accepted, Refused>`, by its proxy.
        Join = 2 { session: SessionKey, hand: Handover },
        /// A session's near end is gone → `Result<Offer, Refused>` once its proxy is as well.
        End = 3 { session: SessionKey },
        /// One that measures the line → `Result<Measured, Refused>`, then what [`Measure`] says.
        Measure = 4 {},
        /// A job's questions to NVML, of those devices, as above → `Result<Offer, Refused>`, then
        /// by a proxy that does nothing else a `Result<Welcome, Refusal>`, which tells of no
        /// devices; then each `management::Question` has its `management::Answer`.
        Management = 5 { devices: List<u32, 16> },
        /// A job that is to move here as a whole → `Result<Offer, Refused>`, then by a process
        /// that takes it what [`ToTaker`](crate::ToTaker) says.
        TakeJob = 6 { token: SessionKey },
        /// The streams of a job that has moved here, and nothing of which runs where it was →
        /// `Result<Offer, Refused>` by the process that has taken it; then what the two ends of a
        /// remote shell say to each other.
        JobStreams = 7 { token: SessionKey },
    }

    /// From the near end, on a connection that measures the line.
    #[derive(Debug, Clone, Copy, PartialEq)]
    pub enum Measure {
        /// So many times [`ECHO`] bytes follow → the same bytes, each time.
        Echo = 1 { count: u32 },
        /// So many bytes follow, as they are → `Measured`.
        Take = 2 { bytes: u64 },
        /// → so many bytes, as they are.
        Give = 3 { bytes: u64 },
        /// → `Measured`: nanoseconds for which the proxies of the asker's sessions have run.
        Processors = 4 {},
    }

    #[derive(Debug, Clone, Copy, PartialEq)]
    pub struct Measured { pub number: u64 }

    /// From the server to a session's proxy.
    #[derive(Debug, Clone, PartialEq)]
    pub enum HandedOver {
        /// A connection, which comes with this.
        Link = 1 { hand: Handover },
        /// For the job's log.
        Notice = 2 { text: Text<LINE> },
        /// The session is over.
        End = 3 { why: Text<LINE> },
        /// From here on it tells its account what work its devices have, and heeds the turns that
        /// it has there, or not any more.
        Turns = 4 { on: bool },
    }

    /// From the server to a session's proxy, first: which slot it has of its tenant's account,
    /// whose memory comes with this, and how much device memory and how many bytes a second all
    /// sessions of the tenant may have.
    #[derive(Debug, Clone, Copy, PartialEq)]
    pub struct Terms { pub slot: u32, pub memory: Option<u64>, pub bandwidth: Option<u64> }

    /// A connection that goes on with a link.
    #[derive(Debug, Clone, Copy, PartialEq)]
    pub struct Handover {
        /// `Which::number`; from `FIRST_IMAGE` on one for an image's bytes.
        pub link: u32,
        /// Larger than that of any connection of this link before it.
        pub generation: u32,
        /// Bytes of the link that the near end has got.
        pub arrived: u64,
    }

    /// Bytes of the link that the far end has got.
    #[derive(Debug, Clone, Copy, PartialEq)]
    pub struct Accepted { pub arrived: u64 }

    /// The server's yes.
    #[derive(Debug, Clone, Copy, PartialEq)]
    pub struct Offer {}

    #[derive(Debug, Clone, PartialEq)]
    pub struct Refused { pub why: Text<LINE> }

    /// The near end's next frame, which it sends without waiting for the offer, to the proxy →
    /// `Result<Welcome, Refusal>`.
    #[derive(Debug, Clone, PartialEq)]
    pub struct Start {
        /// The client's program, for logs.
        pub program: Text<4096>,
        pub choice: DeviceChoice,
        /// As which of the job's devices the client counts those that it gets here, rising; none:
        /// as all of them.
        pub windows: List<u32, 16>,
        /// How long the near end tries to go on after a cut, milliseconds.
        pub reconnect_ms: u32,
        /// Whether the client goes on from an image, or from another proxy, by a link of its own;
        /// the line then has `Answer::Yes` or `Answer::Failed` before anything else is in order.
        pub restore: bool,
    }

    /// From the near end, in order.
    #[derive(Debug, Clone, PartialEq)]
    pub enum ToFar {
        /// A client's message; `to` is where a call's reply goes.
        Message = 1 { seq: u64, to: Option<u32>, message: Message },
        /// Bytes of the client's private memory, which the next message has read: a module.
        Staged = 2 { addr: u64, bytes: Bytes<CHUNK> },
        /// The next message reads so many bytes of the client's private memory there, a module's
        /// image, of this SHA-256. The far end has them, or asks for them.
        Named = 5 { addr: u64, len: u64, digest: [u8; 32] },
        /// What follows has been said after so many `Aside::Patches`, and counts on them.
        Patched = 3 { count: u64 },
        /// An order. Each has one answer.
        Ask = 4 { ask: Ask },
    }

    #[derive(Debug, Clone, PartialEq)]
    pub enum Ask {
        /// → `Yes` once all before it is over and told, `No` after `within_ms`.
        Rest = 1 { within_ms: u32 },
        /// What the devices hold is taken. All rests → `Captured` or `Failed`.
        Capture = 2 { capture: Capture },
        /// The devices' memory is taken off them until the next message. All rests → `Captured`, of
        /// no number, or `Failed`.
        SwapOut = 3 {},
        /// What the devices hold is taken for a round of a move; `first`: the proxy that it goes to
        /// has nothing yet. All rests → `Captured` or `Failed`.
        Show = 4 { capture: Capture, first: bool },
    }

    /// What a far end needs for a capture.
    #[derive(Debug, Clone, PartialEq)]
    pub struct Capture {
        pub hello: Hello,
        pub client_memory: bool,
        /// As the client was told of them.
        pub devices: List<DeviceInfo, 16>,
        /// The newest message that was taken from the client's ring.
        pub position: u64,
        /// Whether to find out what has changed.
        pub track: bool,
        /// The checksum of the file that has what has not.
        pub parent: Option<u64>,
    }

    #[derive(Debug, Clone, PartialEq)]
    pub enum Answer {
        Yes = 1 {},
        No = 2 {},
        /// The far end keeps the capture until it is drained or forgotten, or the next is taken.
        Captured = 3 { number: u64, bytes: u64 },
        Failed = 4 { why: Text<LINE> },
    }

    /// From the near end, ahead of what is in order.
    #[derive(Debug, Clone, PartialEq)]
    pub enum Aside {
        /// The bytes that `ToNear::Read` asked for; or a CUresult.
        Bytes = 1 { number: u64, bytes: Result<Bytes<CHUNK>, u32> },
        /// The client has run a host function.
        HostFnDone = 2 { token: u64 },
        /// What the client has changed in memory that both see.
        Patches = 3 { packed: Bytes<PACKED> },
        /// The client has ended: nothing follows.
        Bye = 4 {},
        /// Nobody wants a capture any more.
        Forget = 5 { number: u64 },
        /// A link for an image's bytes is of no more use.
        ImageOver = 6 { link: u32 },
    }

    /// The near end's first word on a link for an image's bytes.
    #[derive(Debug, Clone, PartialEq)]
    pub enum ImageAsk {
        /// A capture is to be written, with this codec → `Drained`, until its last.
        Drain = 1 { number: u64, codec: Text<64> },
        /// Room is made for the next capture → `Drained`'s last.
        Prepare = 2 { track: bool, full: bool },
        /// A client is to be restored. The far end reads these files, the newest first: each of its
        /// `ReadFile` is answered with a `FileBytes`, in order.
        Restore = 3 { files: List<StoredFile, FILES> },
        /// A client arrives from another proxy: what that one says follows, as do the answers.
        Arrive = 4 {},
        /// What was shown goes to another proxy: what this one says follows, as do the answers, and
        /// then `Drained`'s last.
        Cross = 5 { number: u64, last: bool },
    }

    /// From the far end: an image's file as it is written.
    #[derive(Debug, Clone, PartialEq)]
    pub enum Drained {
        Piece = 1 { offset: u64, bytes: Bytes<CHUNK> },
        /// The last: the file has so many bytes, and its footer this checksum.
        Done = 2 {
            bytes: u64,
            checksum: u64,
            builds: bool,
            /// What left the devices for it, and within how long.
            drained: u64,
            drained_us: u64,
        },
        /// The last.
        Failed = 3 { why: Text<LINE> },
    }

    /// A file of an image, as its manifest has it.
    #[derive(Debug, Clone, PartialEq)]
    pub struct StoredFile {
        pub name: Text<255>,
        pub bytes: u64,
        pub checksum: u64,
    }

    /// From the far end: bytes of a file are wanted, `CHUNK` at most → `FileBytes`.
    #[derive(Debug, Clone, Copy, PartialEq)]
    pub struct ReadFile {
        pub file: u32,
        pub offset: u64,
        pub len: u32,
    }

    /// From the far end, in order.
    #[derive(Debug, Clone, PartialEq)]
    pub enum ToNear {
        Reply = 1 { to: u32, bytes: Bytes<REPLY> },
        /// A context is broken; with 0 it is no more.
        Sticky = 2 { ctx: CtxId, error: u32 },
        /// All posts up to this one are complete.
        Completed = 3 { seq: u64 },
        /// Whether device output waits to be taken.
        Output = 4 { pending: bool },
        /// The client is to run a host function → `Aside::HostFnDone`.
        HostFn = 5 { token: u64 },
        /// Bytes of the client's private memory are wanted, `CHUNK` at most → `Aside::Bytes`.
        Read = 6 { number: u64, addr: u64, len: u32 },
        /// Bytes for the client's private memory.
        Write = 7 { addr: u64, bytes: Bytes<CHUNK> },
        /// What devices have changed in memory that both see.
        Patches = 8 { packed: Bytes<PACKED> },
        /// For the job's log.
        Line = 9 { text: Text<LINE> },
        Answer = 10 { answer: Answer },
        /// The devices are about to be gone.
        Closed = 11 { why: Text<LINE> },
        /// What follows counts on so many pieces of a lane, by its number from 0 on.
        Bulk = 12 { lane: u32, count: u64 },
    }
}

/// Encodes `ToFar::Message` without taking the message.
#[inline]
pub fn put_message(seq: u64, to: Option<u32>, message: &Message, w: &mut Writer<'_>) {
    1u32.put(w);
    seq.put(w);
    to.put(w);
    message.put(w);
}

/// Makes a frame of an `Aside::Patches` or, `to_near`, a `ToNear::Patches`, of what `pack` appends
/// to its bytes. Returns whether it has appended anything.
pub fn put_patches(to_near: bool, frame: &mut Vec<u8>, pack: impl FnOnce(&mut Vec<u8>)) -> bool {
    let tag: u32 = if to_near { 8 } else { 3 };
    let begin = frame.len();
    // Both lengths are known afterwards.
    frame.extend_from_slice(&[0; 4]);
    frame.extend_from_slice(&tag.to_le_bytes());
    frame.extend_from_slice(&[0; 4]);
    let packed = frame.len();
    pack(frame);
    for at in [begin, packed - 4] {
        let len = (frame.len() - at - 4) as u32;
        frame[at..at + 4].copy_from_slice(&len.to_le_bytes());
    }
    frame.len() > packed
}

/// What the near end says to `ReadFile`; or why it cannot.
pub type FileBytes = Result<Bytes<CHUNK>, Text<LINE>>;

/// What the far proxy says to `Start`.
pub(crate) type Started = Result<Welcome, Refusal>;

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_protocol::Call;

    #[test]
    fn a_borrowed_message_is_encoded_as_an_owned_one() {
        let message = Message::Call { call: Call::Ping {} };
        let (mut owned, mut borrowed) = (Vec::new(), Vec::new());
        let whole = ToFar::Message { seq: 3, to: Some(9), message: message.clone() };
        kedge_wire::encode(&whole, &mut owned);
        put_message(3, Some(9), &message, &mut Writer::new(&mut borrowed));
        assert_eq!(owned, borrowed);
    }

    #[test]
    fn changes_are_framed_as_a_message_is() {
        let packed = Bytes::new(vec![1, 2, 3]).unwrap();
        for to_near in [false, true] {
            let (mut whole, mut framed) = (Vec::new(), vec![9]);
            match to_near {
                true => kedge_wire::encode(&ToNear::Patches { packed: packed.clone() }, &mut whole),
                false => kedge_wire::encode(&Aside::Patches { packed: packed.clone() }, &mut whole),
            }
            assert!(put_patches(to_near, &mut framed, |out| out.extend_from_slice(&packed)));
            assert_eq!(framed[0], 9);
            assert_eq!(framed[1..5], (whole.len() as u32).to_le_bytes());
            assert_eq!(framed[5..], whole);
            assert!(!put_patches(to_near, &mut framed, |_| ()));
        }
    }
}
