//! What neither the client's ids nor the bytes of memory tell of the devices.

use kedge_cuda_types::CuError;
use kedge_device::SnapshotError;
use kedge_protocol::{CtxId, EventId, ModuleId};
use kedge_wire::{List, Reader, Text, Wire, decode, encode, wire};
use std::collections::HashSet;

/// Changes with [`Notes`].
const VERSION: u32 = 3;
/// The version before, whose last field was `foreign`.
const WITHOUT_TENSOR_MAPS: u32 = 2;
/// As [`kedge_device::Snapshot::notes`] promises.
const MAX_BYTES: usize = 64 << 20;
/// Most entries of one list; what all lists hold is bounded by `MAX_BYTES`.
const MAX_ENTRIES: usize = 4 << 20;

/// More than a program can make.
const MAX_TEXTURES: u64 = 1 << 62;

wire! {
    #[derive(Debug, Clone, PartialEq, Eq, Default)]
    pub struct Notes {
        /// The clock of event time stamps, nanoseconds.
        pub clock: u64,
        /// In the order of their addresses.
        pub allocations: List<Allocation, MAX_ENTRIES>,
        pub modules: List<ModuleNote, MAX_ENTRIES>,
        pub heaps: List<HeapNote, MAX_ENTRIES>,
        /// When each event that has been recorded was reached.
        pub events: List<(EventId, u64), MAX_ENTRIES>,
        /// Sticky errors.
        pub faults: List<(CtxId, u32), MAX_ENTRIES>,
        /// Handles of textures and surfaces in the order in which they were made.
        pub textures: List<(CtxId, u64), MAX_ENTRIES>,
        pub last_texture: u64,
        /// What the client was told: see [`kedge_protocol::DeviceInfo::exact`].
        pub exact: bool,
        /// Made of another kind of device's.
        pub foreign: bool,
        /// The program has made tensor maps, in the form that software devices read.
        pub tensor_maps: bool,
    }

    /// Memory that the client has allocated inside of a slab.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct Allocation { pub ctx: CtxId, pub addr: u64, pub size: u64 }

    /// Where a module's variables lie, in the order in which they were placed.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct ModuleNote {
        pub module: ModuleId,
        pub variables: List<Variable, MAX_ENTRIES>,
        /// Why it can go on nowhere but on this kind of device; empty where it can.
        pub bound: Text<256>,
    }

    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct Variable {
        pub name: Text<65536>,
        pub addr: u64,
        pub size: u64,
        /// It lies in the shared arena.
        pub managed: bool,
        /// The client knows its address.
        pub asked: bool,
    }

    /// A context's device heap, and (address, length) of what kernels have allocated there.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct HeapNote { pub ctx: CtxId, pub addr: u64, pub size: u64, pub used: List<(u64, u64), MAX_ENTRIES> }
}

impl Notes {
    pub(in crate::device) fn encode(&self) -> Result<Vec<u8>, SnapshotError> {
        let mut bytes = Vec::new();
        encode(&VERSION, &mut bytes);
        encode(self, &mut bytes);
        if bytes.len() > MAX_BYTES {
            return Err(too_many("allocations, device mallocs, events and textures together"));
        }
        Ok(bytes)
    }

    pub(in crate::device) fn decode(bytes: &[u8]) -> Result<Self, SnapshotError> {
        let damaged = |what: String| SnapshotError::new(CuError::INVALID_VALUE, what);
        if bytes.len() > MAX_BYTES {
            return Err(damaged(format!("notes of {} bytes: at most {MAX_BYTES}", bytes.len())));
        }
        let mut reader = Reader::new(bytes);
        let version = u32::get(&mut reader);
        let rest = bytes.get(bytes.len() - reader.remaining()..).unwrap_or_default();
        let older = [rest, &[0]].concat();
        match version {
            Ok(VERSION | WITHOUT_TENSOR_MAPS) => {
                let fields = if version == Ok(VERSION) { rest } else { &older };
                let notes: Self =
                    decode(fields).map_err(|error| damaged(format!("damaged notes: {error}")))?;
                let wrong = notes.disorder();
                wrong.map_or(Ok(notes), |what| Err(damaged(format!("damaged notes: {what}"))))
            }
            Ok(other) => Err(SnapshotError::new(
                CuError::NOT_SUPPORTED,
                format!(
                    "the notes of the software device have version {other}, not {VERSION}: restart \
                     with the version of kedge that took the checkpoint"
                ),
            )),
            Err(error) => Err(damaged(format!("damaged notes: {error}"))),
        }
    }
}

impl Notes {
    /// What is not in its order.
    fn disorder(&self) -> Option<&'static str> {
        let mut end = 0;
        for at in &*self.allocations {
            if at.addr < end || at.size == 0 {
                return Some("allocations overlap");
            }
            let Some(next) = at.addr.checked_add(at.size) else {
                return Some("an endless allocation");
            };
            end = next;
        }
        let mut handles = HashSet::from([0]);
        if !self.textures.iter().all(|(_, handle)| handles.insert(*handle)) {
            return Some("handles of textures");
        }
        let last = handles.into_iter().max().unwrap_or(0);
        let possible = (last..MAX_TEXTURES).contains(&self.last_texture);
        (!possible).then_some("the number of the last texture")
    }
}

/// A list of the notes, or the refusal that names what it lists.
pub(in crate::device) fn list<T>(
    values: Vec<T>,
    what: &str,
) -> Result<List<T, MAX_ENTRIES>, SnapshotError> {
    List::new(values).map_err(|_| too_many(what))
}

fn too_many(what: &str) -> SnapshotError {
    let message = format!("too many {what} to checkpoint: free some");
    SnapshotError::new(CuError::NOT_SUPPORTED, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disorder_is_refused() {
        let allocations = |all: &[(u64, u64)]| {
            let all = all.iter().map(|&(addr, size)| Allocation { ctx: CtxId(1), addr, size });
            Notes { allocations: list(all.collect(), "").unwrap(), ..Notes::default() }
        };
        let textures = |all: &[u64], last_texture| {
            let all = all.iter().map(|handle| (CtxId(1), *handle)).collect();
            Notes { textures: list(all, "").unwrap(), last_texture, ..Notes::default() }
        };
        let accepted = |notes: Notes| Notes::decode(&notes.encode().unwrap()).is_ok();
        assert!(accepted(allocations(&[(1, 2), (3, 1)])) && accepted(textures(&[3, 1], 3)));
        for all in [&[(1, 3), (3, 1)][..], &[(3, 1), (1, 1)], &[(1, 0)], &[(5, u64::MAX)]] {
            assert!(!accepted(allocations(all)), "{all:?}");
        }
        for (all, last) in [(&[0][..], 1), (&[1, 1], 1), (&[3], 2), (&[], u64::MAX)] {
            assert!(!accepted(textures(all, last)), "{all:?} {last}");
        }
    }

    #[test]
    fn notes_round_trip_and_other_versions_are_refused_by_number() {
        let used = list(vec![(0x1000, 16)], "mallocs").unwrap();
        let heap = HeapNote { ctx: CtxId(1), addr: 0x1000, size: 0x1000, used };
        let notes = Notes { heaps: list(vec![heap], "heaps").unwrap(), ..Notes::default() };
        let mut bytes = notes.encode().unwrap();
        assert_eq!(Notes::decode(&bytes), Ok(notes));
        bytes[0] = 77;
        assert!(Notes::decode(&bytes).unwrap_err().message.contains("version 77"));
        for len in [0, 3, 4, 12, bytes.len() - 1] {
            bytes[0] = VERSION as u8;
            assert!(Notes::decode(&bytes[..len]).is_err(), "{len}");
        }
        bytes.push(0);
        assert!(Notes::decode(&bytes).unwrap_err().message.contains("follow the end"));
    }

    #[test]
    fn notes_of_the_version_before_are_read() {
        let notes = Notes { clock: 7, exact: true, ..Notes::default() };
        let mut bytes = notes.encode().unwrap();
        bytes.pop();
        bytes[0] = WITHOUT_TENSOR_MAPS as u8;
        assert_eq!(Notes::decode(&bytes), Ok(notes));
        bytes.pop();
        assert!(Notes::decode(&bytes).is_err());
    }
}
