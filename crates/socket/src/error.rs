use kedge_wire::WireError;
use std::io;
use thiserror::Error;

/// Why a frame did not come through the socket.
#[derive(Debug, Error)]
pub enum SocketError {
    #[error("the peer closed the connection")]
    Closed,
    #[error("no answer within {seconds} s")]
    TimedOut { seconds: u64 },
    #[error(transparent)]
    System(#[from] io::Error),
    #[error("a frame of {len} bytes exceeds the maximum {max}")]
    TooLong { len: u32, max: u32 },
    #[error("malformed frame: {0}")]
    Malformed(#[from] WireError),
    #[error("the peer is no kedge proxy")]
    NotKedge,
}
