use kedge_cuda_types::CuError;
use kedge_socket::SocketError;
use kedge_wire::WireError;
use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// The proxy is gone, or spoke nonsense: no call of this client will succeed any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the proxy is gone")]
pub struct Dead;

/// Why a client has no proxy.
#[derive(Debug, Error)]
pub enum ConnectError {
    #[error("cannot connect to {path}: {source}; is the program running under `kedge run`?")]
    Socket { path: PathBuf, source: io::Error },
    #[error("cannot {what}: {source}{}", crate::limits::hint(source))]
    System { what: &'static str, source: io::Error },
    #[error("cannot {what}: the address range {start:#x}..{end:#x} is taken in this process")]
    AddressTaken { what: &'static str, start: u64, end: u64 },
    #[error("the handshake with the proxy failed: {0}; `kedge logs` tells why")]
    Handshake(#[from] SocketError),
    #[error("the proxy speaks protocol {proxy}, this client {client}: install matching parts")]
    Version { client: u32, proxy: u32 },
    #[error("{reason}")]
    Refused { code: CuError, reason: String },
}

/// Why a proxy refused a client.
#[derive(Debug, Error)]
pub enum AcceptError {
    #[error("handshake: {0}")]
    Handshake(#[from] SocketError),
    #[error("the client speaks protocol {client}, this proxy {proxy}")]
    Version { client: u32, proxy: u32 },
    #[error("expected two descriptors with the hello, got {count}")]
    Descriptors { count: usize },
    #[error("the client says that it is process {said}, the kernel says {is}")]
    WrongPid { said: u32, is: u32 },
    #[error("{what} descriptor: {source}")]
    Segment { what: &'static str, source: SegmentError },
}

/// Why a peer's descriptor cannot be shared memory.
#[derive(Debug, Error)]
pub enum SegmentError {
    #[error("not sealed against resizing")]
    NotSealed,
    #[error("{size} bytes long, expected {expected}")]
    WrongSize { size: u64, expected: u64 },
    #[error("not a ring (wrong magic)")]
    NotARing,
    #[error("mmap: {0}")]
    Map(io::Error),
}

/// What a proxy found wrong in a client's ring. The client is hostile or broken; the proxy ends.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum RingError {
    #[error("the client closed the ring")]
    Closed,
    #[error("ring positions are impossible: consumed {head}, appended {tail}")]
    Positions { head: u64, tail: u64 },
    #[error(
        "entry of {len} bytes at {head}, where {available} bytes are there and the maximum is {max}"
    )]
    Length { head: u64, len: u64, available: u64, max: u64 },
    #[error("entry {got} follows entry {last}")]
    Sequence { last: u64, got: u64 },
    #[error("reply slot {slot} does not exist")]
    NoSuchSlot { slot: u32 },
    #[error("entry {seq} is a {kind} with the wrong kind of reply slot")]
    WrongSlot { seq: u64, kind: &'static str },
    #[error("entry {seq}: {source}")]
    Message { seq: u64, source: WireError },
}
