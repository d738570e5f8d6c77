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
    #[error("{what}: {source}")]
    System { what: &'static str, source: io::Error },
    #[error(
        "the address range {start:#x}..{end:#x}, where {what} must lie, is taken in this process"
    )]
    AddressTaken { what: &'static str, start: u64, end: u64 },
    #[error("the proxy closed the connection during the handshake; `kedge logs` tells why")]
    Refused,
    #[error("the proxy did not answer within {seconds} s")]
    TimedOut { seconds: u64 },
    #[error(
        "the proxy speaks protocol {proxy}, this client {client}: install matching parts of kedge"
    )]
    Version { client: u32, proxy: u32 },
    #[error("the proxy's greeting is malformed: {0}")]
    Malformed(String),
}
