//! What a tier has of a file: a file of its own with the same offsets, or places of a device.

use crate::device::Place;
use crate::extents::Freed;
use crate::journal::Places;
use crate::tier::{lock, punch};
use kedge_holder::PART;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};

/// Returns the part of a file that `at` is in.
pub(crate) fn part_of(at: u64) -> Range<u64> {
    let start = at / PART * PART;
    start..start.saturating_add(PART)
}

/// Places with parts of a file, by where each part begins.
type Parts = BTreeMap<u64, Arc<Place>>;

/// What a tier has of a file.
#[derive(Debug, Clone)]
pub(crate) enum Shadow {
    /// A sparse file.
    File(Arc<File>),
    /// Parts in places, which are read as long as this is there: a place is not used for anything
    /// else before.
    Device(Arc<Mutex<Parts>>),
}

impl Shadow {
    /// Begins with no places.
    pub(crate) fn device() -> Shadow {
        Shadow::Device(Arc::default())
    }

    /// Returns the sparse file; a device has none.
    pub(crate) fn file(&self) -> Option<&Arc<File>> {
        match self {
            Shadow::File(file) => Some(file),
            Shadow::Device(_) => None,
        }
    }

    /// Returns the same of `range` alone, as it is now.
    pub(crate) fn pin(&self, range: &Range<u64>) -> Shadow {
        let Shadow::Device(parts) = self else { return self.clone() };
        let first = part_of(range.start).start;
        let parts = lock(parts);
        let pinned = parts.range(first..range.end.max(first));
        let pinned = pinned.map(|(start, place)| (*start, place.clone())).collect();
        Shadow::Device(Arc::new(Mutex::new(pinned)))
    }

    /// Notes which place has a part.
    pub(crate) fn place(&self, start: u64, place: Arc<Place>) {
        if let Shadow::Device(parts) = self {
            lock(parts).insert(start, place);
        }
    }

    /// Returns the place that has the part at `start`.
    pub(crate) fn place_of(&self, start: u64) -> Option<Arc<Place>> {
        let Shadow::Device(parts) = self else { return None };
        lock(parts).get(&start).cloned()
    }

    /// Returns the numbers of all places.
    pub(crate) fn places(&self) -> Places {
        let Shadow::Device(parts) = self else { return Places::new() };
        lock(parts).iter().map(|(start, place)| (*start, place.number)).collect()
    }

    /// Reads all of `buffer`.
    pub(crate) fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let parts = match self {
            Shadow::File(file) => return file.read_exact_at(buffer, offset),
            Shadow::Device(parts) => parts,
        };
        let (mut done, length) = (0, buffer.len());
        while done < length {
            let at = offset + done as u64;
            let part = part_of(at);
            let end = length.min(done + (part.end - at) as usize);
            let place = lock(parts).get(&part.start).cloned();
            let place = place.ok_or_else(|| io::Error::other("no place of the device has it"))?;
            place.read(&mut buffer[done..end], at - part.start)?;
            done = end;
        }
        Ok(())
    }

    /// Gives blocks back that nothing needs; a place once `holds` is true of nothing in its part.
    pub(crate) fn give_back(&self, freed: &Freed, holds: impl Fn(Range<u64>) -> bool) {
        match self {
            Shadow::File(file) => punch(file, freed),
            Shadow::Device(parts) => {
                let first = part_of(freed.range.start).start;
                let mut parts = lock(parts);
                let within: Vec<u64> =
                    parts.range(first..freed.range.end).map(|(s, _)| *s).collect();
                for start in within.into_iter().filter(|start| !holds(part_of(*start))) {
                    parts.remove(&start);
                }
            }
        }
    }

    /// Has the places stay taken: the journal could not be told that they are free.
    pub(crate) fn keep_places(&self) {
        if let Shadow::Device(parts) = self {
            lock(parts).values().for_each(|place| place.keep());
        }
    }
}
