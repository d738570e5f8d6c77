//! What the proxy says before anything else.

use kedge_wire::wire;

pub(crate) const GREETING_MAGIC: u64 = u64::from_le_bytes(*b"kedge-px");

wire! {
    /// The proxy's first word, before the client says anything: so the client knows that a proxy
    /// is there, which one to let read its memory, and whether they speak the same protocol.
    #[derive(Debug, Clone, PartialEq)]
    pub struct Greeting { pub magic: u64, pub version: u32, pub pid: u32 }
}
