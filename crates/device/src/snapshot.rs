//! What a checkpoint takes from a backend, and what a restart gives back.
//!
//! The proxy keeps the messages that made the client's objects and hands them to a new backend in
//! their old order; what those messages do not tell is a snapshot: the bytes of memory, of arrays
//! and of variables, and the backend's own notes ([`Snapshot::notes`]). A restart goes from a
//! [`NewBackend`](crate::NewBackend) by [`Restoring`](crate::Restoring), which makes the objects,
//! and [`Filling`](crate::Filling), which takes the bytes of every piece, to a backend for use. The
//! shared arena is the host's to save.

use crate::digest::{BLOCK, Digest, Keys};
use kedge_cuda_types::CuError;
use kedge_protocol::{ArrayId, MemHandleId, ModuleId};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

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
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Piece {
    pub object: Object,
    pub start: u64,
    pub bytes: u64,
}

/// The digests of a piece's blocks, of [`BLOCK`] bytes from its beginning; `None` of one that has
/// none.
pub type Digests = Arc<[Option<Digest>]>;

/// What an earlier snapshot held, and is stored: of which a new one needs no copy.
#[derive(Clone)]
pub struct Known {
    pub keys: Keys,
    /// Which snapshot that was ([`Snapshot::number`]); 0: of none.
    pub snapshot: u64,
    pub pieces: HashMap<Piece, Digests>,
    /// Room is left on the devices for as much as they hold: another process is about to take it.
    pub leave: bool,
}

impl Known {
    /// Makes a list of nothing as yet.
    pub fn nothing(keys: Keys) -> Known {
        Known { keys, snapshot: 0, pieces: HashMap::new(), leave: false }
    }

    /// Returns the runs of blocks in a piece that now has these digests: [from, to) from its
    /// beginning, and whether its bytes are known. Side by side and all of it.
    pub fn compare(&self, piece: &Piece, now: &[Option<Digest>]) -> Vec<(u64, u64, bool)> {
        let before = self.pieces.get(piece);
        let known = |index: usize| {
            let before = before.and_then(|digests| *digests.get(index)?);
            before.is_some() && before == now.get(index).copied().flatten()
        };
        let mut runs: Vec<(u64, u64, bool)> = Vec::new();
        for index in 0..piece.bytes.div_ceil(BLOCK) {
            let (from, to) = (index * BLOCK, ((index + 1) * BLOCK).min(piece.bytes));
            let known = known(index as usize);
            match runs.last_mut() {
                Some(last) if last.2 == known => last.1 = to,
                _ => runs.push((from, to, known)),
            }
        }
        runs
    }
}

/// What the devices held at one moment. It lasts until it is dropped, which gives back the memory
/// that it takes; the devices run on meanwhile.
pub trait Snapshot: Send + Sync {
    /// Returns all that there is to store; no byte twice. What is in none of them reads as zero.
    fn pieces(&self) -> &[Piece];
    /// Copies the bytes from `start` on, all of one piece, into `out`; called by several threads.
    /// Blocks while they travel.
    fn read(&self, piece: &Piece, start: u64, out: &mut [u8]) -> Result<(), CuError>;
    /// Shows the bytes from `start` on, all of one piece, to `see`, where they are or where they
    /// arrive: what need not be copied once more. `false` where there is no such way for as many,
    /// and `see` was not called; by default there is none.
    fn look(
        &self,
        _piece: &Piece,
        _start: u64,
        _bytes: usize,
        _see: &mut dyn FnMut(&[u8]),
    ) -> Result<bool, CuError> {
        Ok(false)
    }
    /// Returns the digests of one of the pieces; `None` where the device has computed none. Of a
    /// snapshot that was taken with something [`Known`], bytes that this shows to be known cannot
    /// be read: there is no copy.
    fn digests(&self, _piece: &Piece) -> Option<Digests> {
        None
    }
    /// Returns what names it where writes are followed, greater than that of each before it; 0, by
    /// default, where they are not.
    fn number(&self) -> u64 {
        0
    }
    /// Returns which of a piece's blocks may have been written since the snapshot of that number;
    /// `None` where nobody knows.
    fn written_since(&self, _piece: &Piece, _number: u64) -> Option<Vec<bool>> {
        None
    }
    /// Returns the bytes for [`crate::NewBackend::begin_restore`]: what else a new backend must
    /// know (which ranges are valid, when events were recorded), 64 MiB at most.
    fn notes(&self) -> Vec<u8>;
    /// Returns what has left the devices' memory since the snapshot was taken; by default nothing
    /// does.
    fn drained(&self) -> Drained {
        Drained::default()
    }
    /// Gives another process of this machine the devices' memory that it lies in, which that has
    /// for as long as it wants; by default it lies in none.
    fn lend(&self) -> Result<Vec<HeldPart>, CuError> {
        Ok(Vec::new())
    }
    /// Returns where so many bytes from `start` on, all of one piece, lie in the memory that it
    /// lends; `None` where they do not, or not in one place.
    fn lent(&self, _piece: &Piece, _start: u64, _bytes: u64) -> Option<HeldPlace> {
        None
    }
    /// Returns what of it lies in memory of the devices that can outlive this process; by default
    /// nothing.
    fn export(&self) -> Result<Held, CuError> {
        Ok(Held::default())
    }
}

/// Bytes that were in memory of the devices when the pause ended and have left it since, and for
/// how long any of them were under way.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Drained {
    pub bytes: u64,
    pub time: Duration,
}

/// Memory of devices that outlives the process that has made it, for as long as anybody has its
/// descriptors.
#[derive(Debug, Default)]
pub struct Held {
    pub parts: Vec<HeldPart>,
    /// Where each of the snapshot's pieces lies, by its number; `None` where that is not on a
    /// device. Empty: none does.
    pub places: Vec<Option<HeldPlace>>,
}

/// A run of one device's memory. A device's parts follow each other, in this order.
#[derive(Debug)]
pub struct HeldPart {
    /// As the client counts.
    pub device: u32,
    pub bytes: u64,
    pub fd: OwnedFd,
}

/// A place in the memory that is held on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeldPlace {
    pub device: u32,
    /// From the beginning of the first of its parts.
    pub offset: u64,
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
        let failed = [
            CuError::ILLEGAL_ADDRESS,
            CuError::ILLEGAL_INSTRUCTION,
            CuError::MISALIGNED_ADDRESS,
            CuError::LAUNCH_FAILED,
            CuError::ASSERT,
        ];
        let what = match failed.contains(&code) {
            true => {
                "a kernel of the program has failed, after which nobody can read what the context holds"
            }
            false => "the device refused",
        };
        SnapshotError::new(code, what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_blocks_are_told_from_changed_ones() {
        let mut known = Known::nothing(Keys::draw().unwrap());
        let piece = Piece { object: Object::Memory, start: 4096, bytes: 4 * BLOCK + 16 };
        let digest = |n| Some([n, 0, 0, 0]);
        let was = [digest(1), digest(2), None, digest(4), digest(5)];
        let all = piece.bytes;
        assert_eq!(known.compare(&piece, &was), [(0, all, false)]);
        known.pieces.insert(piece.clone(), Arc::from(was));
        let now = [digest(1), digest(2), None, digest(9), digest(5)];
        let runs = [(0, 2 * BLOCK, true), (2 * BLOCK, 4 * BLOCK, false), (4 * BLOCK, all, true)];
        assert_eq!(known.compare(&piece, &now), runs);
        assert_eq!(known.compare(&piece, &[]), [(0, all, false)]);
        let longer = Piece { bytes: piece.bytes + 1, ..piece };
        assert_eq!(known.compare(&longer, &now), [(0, all + 1, false)], "another piece");
    }
}
