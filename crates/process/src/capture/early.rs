//! What a process has changed since its last image, copied while it still runs. What it changes
//! from then on is told, and copied once more while it stands still; that is little.

use super::changes::copy;
use super::guards;
use super::memory::{self, Chunk, Unmapped};
use crate::EngineError;
use crate::maps::{self, Mapping};
use crate::proc;
use crate::track::{Pages, Run, common, watchable, without};
use kedge_image::{PageBuffer, Spare};
use libc::pid_t;
use std::io;

/// Rooms of checkpoints before.
static SPARE: Spare = Spare::new();
/// Most bytes that these may take: memory of the supervisor's, beside programs with much more.
const MAX_SPARE: usize = 96 << 20;

/// Room for what changes between this and the pause, beside a quarter of what had changed.
const MARGIN: u64 = 4 << 20;

#[derive(Debug, Default)]
pub(crate) struct Early {
    /// What had changed: it is protected since, so nobody else knows. In order.
    changed: Vec<Run>,
    /// Where there are guards, in what is watched.
    guards: Vec<Run>,
    /// That of it whose bytes are in `rooms`, one run after the other.
    copied: Vec<Run>,
    rooms: Option<Rooms>,
    /// What it mapped, with flags.
    mappings: Vec<Mapping>,
}

#[derive(Debug)]
struct Rooms {
    early: PageBuffer,
    late: PageBuffer,
}

impl Rooms {
    fn of(early: usize, late: usize) -> Rooms {
        // What is fresh has to be there in the pause, and is made a little larger, for the next
        // time.
        let room = |bytes: usize| match PageBuffer::out_of(&SPARE, bytes) {
            spare if spare.room() > 0 => spare,
            _ => PageBuffer::touched(bytes + bytes / 8),
        };
        Rooms { early: room(early), late: room(late) }
    }
}

impl Drop for Rooms {
    fn drop(&mut self) {
        for room in [&mut self.early, &mut self.late] {
            SPARE.keep(std::mem::take(room), MAX_SPARE);
        }
    }
}

impl Early {
    /// Finds what `pid` has changed, and begins to watch for more; copies it if that takes `most`
    /// bytes at most. After an error nobody knows what it has changed.
    pub(crate) fn of(pid: pid_t, most: u64) -> io::Result<Early> {
        let pid = proc::reach(pid);
        let mappings = maps::of(pid).map_err(io::Error::other)?;
        let mut early = Early::among(pid, &mappings, most)?;
        early.mappings = maps::with_flags(pid).map_err(io::Error::other)?;
        Ok(early)
    }

    /// What the process mapped when this was made, with the flags of all mappings.
    pub(super) fn take_mappings(&mut self) -> Vec<Mapping> {
        std::mem::take(&mut self.mappings)
    }

    /// The same of a process that had those `mappings` a moment ago.
    fn among(pid: pid_t, mappings: &[Mapping], most: u64) -> io::Result<Early> {
        let mut pages = Pages::of(pid)?;
        let (mut early, mut chunks, mut watched) = (Early::default(), Vec::new(), Vec::new());
        for mapping in mappings.iter().filter(|mapping| watchable(mapping)) {
            let whole = (mapping.start, mapping.end);
            // Where there is another mapping by now, what was told of the rest is lost.
            let Ok(Some(since)) = pages.since(whole, true) else {
                early.changed.push(whole);
                continue;
            };
            // A page that was not there when it was looked for may have come before it was
            // protected.
            early.changed.extend(since.marked);
            memory::split(mapping, &since.written, &mut chunks);
            early.copied.extend(since.written);
            watched.push(whole);
        }
        early.guards = guards::among(pid, &watched).map_err(io::Error::other)?;
        early.take(&chunks, most, |chunks, room| copy(pid, chunks, room, Unmapped::Zeros));
        Ok(early)
    }

    /// The same of a shared object, by offsets in it: `changed` has been written, in order, and is
    /// copied by `copy`.
    pub(crate) fn of_object(
        changed: Vec<Run>,
        most: u64,
        copy: impl FnOnce(&[Chunk], &mut [u8]) -> Result<(), EngineError>,
    ) -> Early {
        let mut chunks = Vec::new();
        memory::split_runs(false, &changed, &mut chunks);
        let mut early = Early { copied: changed.clone(), changed, ..Early::default() };
        early.take(&chunks, most, copy);
        early
    }

    /// Copies `chunks`, which are `copied`, if there is room for them.
    fn take(
        &mut self,
        chunks: &[Chunk],
        most: u64,
        copy: impl FnOnce(&[Chunk], &mut [u8]) -> Result<(), EngineError>,
    ) {
        let bytes = chunks.iter().map(Chunk::length).sum::<u64>();
        let late = bytes / 4 + MARGIN;
        if bytes + late <= most {
            let mut rooms = Rooms::of(bytes as usize, late as usize);
            // It runs, so what there was may be gone.
            if copy(chunks, rooms.early.bytes(bytes as usize)).is_ok() {
                self.rooms = Some(rooms);
            }
        }
        if self.rooms.is_none() {
            self.copied.clear();
        }
    }

    /// Has these count as changed, too.
    pub(crate) fn add(&mut self, gaps: &[Run]) {
        self.changed.extend_from_slice(gaps);
        self.changed.sort_unstable();
        self.changed.dedup_by(|next, last| {
            let reaches = next.0 <= last.1;
            last.1 = if reaches { last.1.max(next.1) } else { last.1 };
            reaches
        });
    }

    /// Has all of it be copied in the pause: devices may write there that no page table tells of.
    pub(crate) fn drop_copies(&mut self) {
        self.rooms = None;
        self.copied.clear();
    }

    /// What had changed, for who asks the kernel another time.
    pub(crate) fn told(self) -> Vec<Run> {
        self.changed
    }

    /// Bytes that it takes until the image is written.
    pub(crate) fn room(&self) -> u64 {
        self.rooms.as_ref().map_or(0, |rooms| (rooms.early.room() + rooms.late.room()) as u64)
    }

    /// Of `unchanged`, what has not changed since this: what is as in the image before, what is
    /// copied here, and what had changed and is not copied.
    pub(super) fn divide(&self, mapping: Run, unchanged: &[Run]) -> [Vec<Run>; 3] {
        let (changed, copied) = (within(&self.changed, mapping), within(&self.copied, mapping));
        let same = without(unchanged, changed);
        let kept = common(unchanged, copied);
        let rest = without(&without(unchanged, &same), &kept);
        [same, kept, rest]
    }

    /// The guards in what has not changed since this.
    pub(super) fn guards(&self, mapping: Run, unchanged: &[Run]) -> Vec<Run> {
        common(unchanged, within(&self.guards, mapping))
    }

    /// Whether `late` bytes more fit beside what was copied.
    pub(super) fn has_room(&self, late: u64) -> bool {
        self.rooms.as_ref().is_some_and(|rooms| late <= rooms.late.room() as u64)
    }

    /// Where `late` bytes more are copied to; they fit.
    pub(super) fn late(&mut self, late: u64) -> Option<&mut [u8]> {
        self.rooms.as_mut().map(|rooms| rooms.late.bytes(late as usize))
    }

    /// The bytes of the chunks `kept`, which were copied before the pause, and of those copied
    /// `late`.
    pub(super) fn bytes<'a>(
        &'a mut self,
        kept: &'a [Chunk],
        late: &'a [Chunk],
    ) -> Vec<(&'a Chunk, &'a [u8])> {
        let Some(Rooms { early, late: room }) = &mut self.rooms else { return Vec::new() };
        let mut total = 0;
        let mut offsets = Vec::with_capacity(self.copied.len());
        for (start, end) in &self.copied {
            offsets.push(total);
            total += (end - start) as usize;
        }
        let early: &[u8] = early.bytes(total);
        let copied = &self.copied;
        let place = |chunk: &'a Chunk| {
            let index = copied.partition_point(|(start, _)| *start <= chunk.address());
            let index = index.checked_sub(1)?;
            let offset = offsets[index] + (chunk.address() - copied[index].0) as usize;
            Some((chunk, early.get(offset..offset + chunk.length() as usize)?))
        };
        let mut places: Vec<_> = kept.iter().filter_map(place).collect();
        let mut rest: &[u8] = room.bytes(late.iter().map(Chunk::length).sum::<u64>() as usize);
        for chunk in late {
            let (bytes, left) = rest.split_at(chunk.length() as usize);
            rest = left;
            places.push((chunk, bytes));
        }
        places.sort_unstable_by_key(|(chunk, _)| chunk.address());
        places
    }
}

/// Those of `runs` that lie in the mapping or reach into it; in order, as they are.
fn within(runs: &[Run], (start, end): Run) -> &[Run] {
    let first = runs.partition_point(|(_, last)| *last <= start);
    let last = runs.partition_point(|(first, _)| *first < end);
    runs.get(first..last).unwrap_or(&[])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pagemap::tests::{PAGE, PAGES, Room, scans};

    #[test]
    fn what_was_unchanged_is_divided() {
        let early = Early {
            changed: vec![(2, 6), (8, 9), (20, 30)],
            copied: vec![(3, 6)],
            ..Early::default()
        };
        let [same, kept, rest] = early.divide((0, 12), &[(0, 4), (5, 12)]);
        assert_eq!(same, [(0, 2), (6, 8), (9, 12)]);
        assert_eq!(kept, [(3, 4), (5, 6)]);
        assert_eq!(rest, [(2, 3), (8, 9)]);
        assert_eq!(early.divide((12, 18), &[(13, 14)]), [vec![(13, 14)], vec![], vec![]]);
    }

    /// It runs: what it maps is not what it was when that was looked for.
    #[test]
    fn what_was_changed_beside_a_new_mapping_is_told() {
        if !scans() {
            return;
        }
        let room = Room::new();
        let _watch = room.watch();
        let (start, end) = room.range();
        let own = std::process::id() as pid_t;
        let mapping = maps::of(own).unwrap().into_iter().find(|m| m.end > start).unwrap();
        assert_eq!((mapping.start, mapping.end), (start, end));
        room.touch(3);
        room.map_anew(PAGES / 2);
        let early = Early::among(own, &[mapping], 1 << 30).unwrap();
        let page = (start + 3 * PAGE, start + 4 * PAGE);
        let [same, kept, rest] = early.divide((start, end), &[page]);
        assert_eq!((same, kept, rest), (vec![], vec![], vec![page]));
    }

    #[test]
    fn gaps_join_what_has_changed() {
        let mut early = Early { changed: vec![(2, 6), (8, 9)], ..Early::default() };
        early.add(&[(1, 3), (9, 10), (20, 21)]);
        assert_eq!(early.changed, [(1, 6), (8, 10), (20, 21)]);
    }

    #[test]
    fn bytes_are_found_by_their_addresses() {
        let (one, two) = ((PAGE, 3 * PAGE), (8 * PAGE, 9 * PAGE));
        let mut rooms = Rooms { early: PageBuffer::default(), late: PageBuffer::default() };
        rooms.early.bytes(3 * 4096).chunks_mut(4096).zip(1..).for_each(|(page, n)| page.fill(n));
        rooms.late.bytes(4096).fill(9);
        let (copied, rooms) = (vec![one, two], Some(rooms));
        let mut early = Early { copied, rooms, ..Early::default() };
        let chunk = |page: u64| Chunk::of(page * PAGE, PAGE);
        let (kept, late) = ([chunk(2), chunk(8)], [chunk(5)]);
        let places = early.bytes(&kept, &late);
        let found: Vec<_> =
            places.iter().map(|(chunk, b)| (chunk.address() / PAGE, b[0])).collect();
        assert_eq!(found, [(2, 2), (5, 9), (8, 3)]);
    }
}
