//! Published values. They go with the member that has published them.

use super::{Conn, Place};
use crate::message::{Name, Reply, Value, Why};
use std::collections::BTreeMap;

/// Values at a time.
const MAX_ENTRIES: usize = 65_536;
/// Bytes of them all, keys included.
const MAX_BYTES: usize = 64 << 20;

/// A space, and the key in it.
pub(super) type Slot = (Place, Vec<u8>);

#[derive(Debug)]
struct Entry {
    owner: Conn,
    by: Name,
    revision: u64,
    value: Value,
    alone: bool,
}

#[derive(Debug, Default)]
pub(super) struct Board {
    entries: BTreeMap<Slot, Entry>,
    /// Of the latest publication.
    revision: u64,
    bytes: usize,
}

fn size(slot: &Slot, value: &Value) -> usize {
    let node = slot.0.0.as_ref().map_or(0, String::len);
    node + slot.0.1.len() + slot.1.len() + value.len()
}

impl Board {
    pub(super) fn new(revision: u64) -> Board {
        Board { revision, ..Board::default() }
    }

    pub(super) fn revision(&self) -> u64 {
        self.revision
    }

    pub(super) fn publish(
        &mut self,
        owner: Conn,
        by: Name,
        slot: Slot,
        value: Value,
        alone: bool,
    ) -> Reply {
        let there = self.entries.get(&slot);
        // A member that has come back is itself, though its former connection may not be gone yet.
        if let Some(there) = there
            && (alone || there.alone)
            && there.by != by
        {
            return Reply::Taken { by: there.by.clone() };
        }
        let before = there.map_or(0, |there| size(&slot, &there.value));
        let bytes = self.bytes - before + size(&slot, &value);
        if bytes > MAX_BYTES || there.is_none() && self.entries.len() >= MAX_ENTRIES {
            let why = format!("the job has published {MAX_ENTRIES} values or {MAX_BYTES} bytes");
            return Reply::Refused { why: Why::truncated(why) };
        }
        self.bytes = bytes;
        self.revision += 1;
        let revision = self.revision;
        self.entries.insert(slot, Entry { owner, by, revision, value, alone });
        Reply::Published { revision }
    }

    pub(super) fn withdraw(&mut self, owner: Conn, slot: &Slot) {
        if self.entries.get(slot).is_some_and(|entry| entry.owner == owner)
            && let Some(entry) = self.entries.remove(slot)
        {
            self.bytes -= size(slot, &entry.value);
        }
    }

    pub(super) fn look(&self, slot: &Slot, after: u64) -> Option<Reply> {
        let entry = self.entries.get(slot).filter(|entry| entry.revision > after)?;
        let (by, revision, value) = (entry.by.clone(), entry.revision, entry.value.clone());
        Some(Reply::Found { by, revision, value })
    }

    /// Withdraws all that `owner` has published.
    pub(super) fn forget(&mut self, owner: Conn) {
        let mut freed = 0;
        self.entries.retain(|slot, entry| {
            let stays = entry.owner != owner;
            freed += if stays { 0 } else { size(slot, &entry.value) };
            stays
        });
        self.bytes -= freed;
    }
}
