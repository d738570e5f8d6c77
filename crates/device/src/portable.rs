//! What of a backend's notes means something to a backend of another kind. A proxy that brings a
//! client back on devices of another kind reads the former's notes into this, and has the new one's
//! made of it.

use kedge_protocol::{CtxId, EventId, ModuleId};

/// The client's objects, as far as neither its messages nor the bytes of memory tell of them.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Portable {
    /// As [`kedge_protocol::DeviceInfo::exact`] told the client.
    pub exact: bool,
    /// Context, address and size of what a client has allocated that was told so, in the order of
    /// their addresses.
    pub allocations: Vec<(CtxId, u64, u64)>,
    pub variables: Vec<PlacedVariable>,
    /// Handles of texture and surface objects, in the order in which they were made.
    pub textures: Vec<(CtxId, u64)>,
    /// Milliseconds from the checkpoint to when each event was recorded: negative.
    pub events: Vec<(EventId, f64)>,
    /// Why the former devices' own forms lie in the client's memory, in words: nothing else can
    /// read those.
    pub bound: Vec<String>,
}

/// A module's variable, where the former device had placed it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacedVariable {
    pub module: ModuleId,
    pub name: String,
    pub addr: u64,
    pub bytes: u64,
    /// The client knows the address.
    pub asked: bool,
    /// It lies in the arena that client and proxy share.
    pub shared: bool,
}
