//! What a checkpoint takes from a backend, and what a restart gives back.
//!
//! The proxy keeps the messages that made the client's objects and hands them to a new backend in
//! their old order; what those messages do not tell is a snapshot: the bytes of memory, of arrays and
//! of variables, and the backend's own notes ([`Snapshot::notes`]). A restart calls, in this order,
//! [`restore_begin`](crate::Backend::restore_begin), what makes the objects,
//! [`restore_notes`](crate::Backend::restore_notes), [`restore`](crate::Backend::restore) for every
//! piece and [`restore_end`](crate::Backend::restore_end). The shared arena is the host's to save.

use kedge_cuda_types::CuError;
use kedge_protocol::{ArrayId, MemHandleId, ModuleId};

/// What a run of bytes belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Object {
    /// Memory by its device address, wherever the client or an exact device has placed it.
    Memory,
    /// Physical memory of the program's own (`cuMemCreate`), mapped or not, from its beginning.
    Handle(MemHandleId),
    /// An array's texels from its beginning: rows, then slices, without padding.
    Array(ArrayId),
    /// A module's variable that the driver has placed, from its beginning.
    Variable { module: ModuleId, name: String },
}

/// A run of bytes: [start, start+bytes) of an object, at most a few GiB.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    pub object: Object,
    pub start: u64,
    pub bytes: u64,
}

/// What the devices held at one moment. It lasts until it is dropped, which gives back the memory that
/// it takes; the devices run on meanwhile.
pub trait Snapshot: Send + Sync {
    /// All that there is to store; no byte twice.
    fn pieces(&self) -> &[Piece];
    /// Copies the bytes from `start` on, all of one piece, into `out`; called by several threads. Blocks
    /// while they travel.
    fn read(&self, piece: &Piece, start: u64, out: &mut [u8]) -> Result<(), CuError>;
    /// Bytes for [`crate::Backend::restore_begin`] and `restore_notes`: what else a new backend must
    /// know (which ranges are valid, when events were recorded), 64 MiB at most.
    fn notes(&self) -> Vec<u8>;
}

/// Why a snapshot cannot be taken or put back: in words, with the object's name and the remedy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotError {
    pub code: CuError,
    pub message: String,
}

impl SnapshotError {
    pub fn new(code: CuError, message: impl Into<String>) -> SnapshotError {
        SnapshotError { code, message: message.into() }
    }
}

impl std::fmt::Display for SnapshotError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({})", self.message, self.code)
    }
}

impl std::error::Error for SnapshotError {}

impl From<CuError> for SnapshotError {
    fn from(code: CuError) -> SnapshotError {
        SnapshotError::new(code, "the device refused")
    }
}
