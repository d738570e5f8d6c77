//! Memory that several mappings share. What can be told of it is written before the pause, and what
//! has changed since is copied in it, once; all else is stored while all is stopped.

use super::changes::{self, Changes};
use super::memory::{self, Chunk, Reader, Unmapped};
use crate::EngineError;
use crate::huge;
use crate::maps::Mapping;
use crate::plugins::Ipc;
use crate::state::{Hex, SharedObject};
use crate::track::{Key, Run, Shared, View, cover};
use kedge_image::{Choice, ImageWriter, PageBuffer};
use libc::pid_t;
use std::cell::RefCell;
use std::collections::BTreeMap;

#[derive(Debug)]
pub(super) struct Objects {
    pub(super) ipc: Ipc,
    found: BTreeMap<Key, Object>,
    /// Code of vDSOs, by its checksum.
    vdsos: BTreeMap<u64, Vec<u8>>,
}

#[derive(Debug)]
struct Object {
    number: u64,
    name: String,
    bytes: u64,
    /// Bytes of its huge pages, or 0.
    huge: u64,
    /// Who maps which part of it.
    views: Vec<View>,
}

/// What is to be stored of an object when the job runs again.
#[derive(Debug)]
pub(super) struct HeldObject {
    number: u64,
    changes: Changes,
}

/// A part of an object, as a process maps it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    pid: pid_t,
    /// In the process.
    pub(super) chunk: Chunk,
    /// Where it begins in the object.
    at: u64,
}

impl Piece {
    /// Which part of the object it is.
    pub(super) fn place(&self) -> Run {
        (self.at, self.at + self.chunk.length())
    }
}

impl Objects {
    pub(super) fn new(ipc: Ipc) -> Objects {
        Objects { ipc, found: BTreeMap::new(), vdsos: BTreeMap::new() }
    }

    /// The id of the System V segment that is mapped, if it is one.
    pub(super) fn segment(&self, mapping: &Mapping) -> Option<i32> {
        let id = i32::try_from(mapping.inode).ok()?;
        let named = mapping.shared && mapping.name.starts_with("/SYSV");
        (named && self.ipc.segments.contains(&id)).then_some(id)
    }

    /// Notes the code of a vDSO, which has that checksum.
    pub(super) fn note_vdso(&mut self, checksum: u64, code: Vec<u8>) {
        self.vdsos.entry(checksum).or_insert(code);
    }

    pub(super) fn vdsos(&self) -> Vec<Hex> {
        self.vdsos.values().cloned().map(Hex).collect()
    }

    /// Notes a mapping of shared memory of `pid`; the number of its object.
    pub(super) fn note(&mut self, pid: pid_t, mapping: &Mapping, shared: &mut Shared) -> u64 {
        let key = (mapping.device.clone(), mapping.inode);
        let number = shared.number(&key);
        let name = mapping.name.trim_end_matches(" (deleted)").to_owned();
        let object = self.found.entry(key).or_insert_with(|| Object {
            number,
            name,
            bytes: 0,
            huge: huge::pages_of(mapping).unwrap_or(0),
            views: Vec::new(),
        });
        object.bytes = object.bytes.max(mapping.offset.saturating_add(mapping.len()));
        object.views.push(View { pid, mapping: mapping.clone() });
        object.number
    }

    /// Copies what has changed of the objects that are known, and stores all of the others. Their
    /// processes must be stopped: a clone shares them.
    pub(super) fn hold(
        &self,
        shared: &mut Shared,
        writer: &ImageWriter,
        codec: Choice,
    ) -> Result<Vec<HeldObject>, EngineError> {
        let (mut held, mut now) = (Vec::new(), Vec::new());
        for (key, Object { number, views, .. }) in &self.found {
            let store_now = |runs: &[Run]| pieces(views, runs).into_iter().map(|p| (*number, p));
            let Some((written, early)) = shared.changes(key, views)? else {
                now.extend(store_now(&shown(views)));
                continue;
            };
            let mut changes = Changes::of_object(&shown(views), &written, early);
            if changes.fit() {
                changes.copy_by(|chunks, room| copy(views, chunks, room, Unmapped::Zeros))?;
            } else {
                let late: Vec<Run> = changes.take_late().iter().map(Chunk::run).collect();
                now.extend(store_now(&late));
            }
            held.push(HeldObject { number: *number, changes });
        }
        write(&now, writer, (codec, Unmapped::Zeros), |_, _, error| Err(error))?;
        Ok(held)
    }

    pub(super) fn described(&self) -> Vec<SharedObject> {
        let describe = |object: &Object| SharedObject {
            number: object.number,
            name: object.name.clone(),
            bytes: object.bytes,
            huge: object.huge,
        };
        self.found.values().map(describe).collect()
    }
}

impl HeldObject {
    pub(super) fn builds_on_another(&self) -> bool {
        !self.changes.unchanged.is_empty()
    }

    /// Stores what was copied, and notes what is as it was.
    pub(super) fn finish(mut self, writer: &ImageWriter, codec: Choice) -> Result<(), EngineError> {
        let number = self.number;
        self.changes.store(writer, |chunk, bytes, packer| {
            let encoded = kedge_image::encode(bytes, codec);
            Ok(packer.memory(number, chunk.address(), chunk.length(), &encoded)?)
        })?;
        self.changes.refer(self.number, &[], writer)
    }
}

/// What the views show of their object, in order.
pub(crate) fn shown(views: &[View]) -> Vec<Run> {
    let mut shown: Vec<Run> = Vec::new();
    for ((start, end), _) in cover(views) {
        match shown.last_mut() {
            Some((_, last)) if *last == start => *last = end,
            _ => shown.push((start, end)),
        }
    }
    shown
}

/// The parts `runs` of an object, which `views` show: in order, as they are mapped.
pub(super) fn pieces(views: &[View], runs: &[Run]) -> Vec<Piece> {
    let cover = cover(views);
    let mut pieces = Vec::new();
    for (start, end) in runs {
        let first = cover.partition_point(|((_, last), _)| last <= start);
        for ((from, to), view) in cover[first..].iter().take_while(|((from, _), _)| from < end) {
            let (from, to) = (*from.max(start), *to.min(end));
            let mut chunks = Vec::new();
            // The last byte is mapped, what comes behind it may be something else.
            let run = (view.address(from), view.address(to - 1) + 1);
            memory::split(&view.mapping, &[run], &mut chunks);
            let at = |chunk: &Chunk| from + (chunk.address() - run.0);
            let pid = view.pid;
            pieces.extend(chunks.into_iter().map(|chunk| Piece { pid, at: at(&chunk), chunk }));
        }
    }
    pieces
}

/// Copies `chunks` of an object into `into`, one after the other.
pub(crate) fn copy(
    views: &[View],
    chunks: &[Chunk],
    mut into: &mut [u8],
    unmapped: Unmapped,
) -> Result<(), EngineError> {
    let runs: Vec<Run> = chunks.iter().map(Chunk::run).collect();
    for some in pieces(views, &runs).chunk_by(|a, b| a.pid == b.pid) {
        let pid = crate::proc::reach(some[0].pid);
        let chunks: Vec<Chunk> = some.iter().map(|piece| piece.chunk).collect();
        let bytes = chunks.iter().map(Chunk::length).sum::<u64>() as usize;
        // What was shown before the pause may be shown no more.
        let Some((part, rest)) = into.split_at_mut_checked(bytes) else {
            return Err(EngineError::Ended { pid });
        };
        into = rest;
        changes::copy(pid, &chunks, part, unmapped)?;
    }
    if into.is_empty() { Ok(()) } else { Err(EngineError::Ended { pid: 0 }) }
}

/// Stores pieces of objects, by number, with several threads. `fails` says whether one that cannot
/// be read is an error.
pub(super) fn write(
    pieces: &[(u64, Piece)],
    writer: &ImageWriter,
    (codec, unmapped): (Choice, Unmapped),
    fails: impl Fn(u64, &Piece, EngineError) -> Result<(), EngineError> + Sync,
) -> Result<(), EngineError> {
    thread_local! {
        static BUFFER: RefCell<PageBuffer> = RefCell::default();
    }
    let mut readers = BTreeMap::new();
    for (_, piece) in pieces {
        readers
            .entry(piece.pid)
            .or_insert_with(|| Reader::that(unmapped, crate::proc::reach(piece.pid)));
    }
    memory::share_out(pieces, writer, |(number, piece), packer| {
        let stored = BUFFER.with_borrow_mut(|buffer| match readers.get(&piece.pid) {
            Some(Ok(reader)) => {
                memory::store(reader, *number, &piece.chunk, piece.at, packer, codec, buffer)
            }
            _ => Err(EngineError::Ended { pid: piece.pid }),
        });
        stored.or_else(|error| fails(*number, piece, error))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_lie_where_they_are_mapped() {
        let view = |pid, start, offset, pages: u64| View {
            pid,
            mapping: Mapping {
                start,
                end: start + pages * 4096,
                protection: libc::PROT_READ,
                shared: true,
                offset,
                device: "00:01".into(),
                inode: 5,
                name: String::new(),
                flags: Vec::new(),
                comes_back: false,
                emptied: false,
            },
        };
        let views = [view(1, 0x10000, 0, 4), view(2, 0x80000, 0x2000, 8)];
        assert_eq!(shown(&views), [(0, 0xa000)]);
        let found = pieces(&views, &[(0x1000, 0x6000), (0x9000, 0xa000)]);
        let found: Vec<_> = found.iter().map(|p| (p.pid, p.chunk.address(), p.place())).collect();
        let expected = [
            (1, 0x11000, (0x1000, 0x4000)),
            (2, 0x82000, (0x4000, 0x6000)),
            (2, 0x87000, (0x9000, 0xa000)),
        ];
        assert_eq!(found, expected);
    }

    /// A process that runs may have unmapped what it showed, and others still show it.
    #[test]
    fn what_is_mapped_no_more_is_not_read_as_zeros() {
        let room = crate::pagemap::tests::Room::new();
        room.touch(3);
        let (start, end) = room.range();
        let mapping = crate::maps::of(std::process::id() as pid_t).unwrap();
        let mapping = mapping.into_iter().find(|mapping| mapping.end > start).unwrap();
        let mapping = Mapping { offset: 0, start, end, ..mapping };
        let views = [View { pid: std::process::id() as pid_t, mapping }];
        let page = 3 * kedge_image::PAGE;
        let chunks = [Chunk::of(page, kedge_image::PAGE)];
        let mut bytes = vec![7; 4096];
        for unmapped in [Unmapped::Fails, Unmapped::Zeros] {
            copy(&views, &chunks, &mut bytes, unmapped).unwrap();
            assert_eq!(bytes[..2], [1, 0]);
        }
        drop(room);
        assert!(copy(&views, &chunks, &mut bytes, Unmapped::Fails).is_err());
        copy(&views, &chunks, &mut bytes, Unmapped::Zeros).unwrap();
        assert_eq!(bytes, [0; 4096]);
    }
}
