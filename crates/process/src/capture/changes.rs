//! What a stopped process has changed since its last image, and copying it while nothing moves.

use super::early::Early;
use super::guards;
use super::memory::{self, Chunk, Reader, Unmapped};
use crate::EngineError;
use crate::maps::Mapping;
use crate::sys;
use crate::track::{Pages, Run, common, watchable, without};
use kedge_image::{Encoded, ImageWriter, Packer};
use libc::pid_t;
use std::thread;

/// Threads that copy at most: memory is what is slow.
const COPIERS: usize = 4;
/// Less than that is copied by one thread.
const SHARE: usize = 4 << 20;

/// What has changed, and what has not.
#[derive(Debug, Default)]
pub(super) struct Changes {
    /// To be copied in the pause, or from a clone.
    pub(super) chunks: Vec<Chunk>,
    /// Copied before the pause, and not changed since.
    kept: Vec<Chunk>,
    early: Early,
    /// Where there may be other guards than before the pause.
    unsure: Vec<Run>,
    /// Guards that there were before the pause, and still are.
    guards: Vec<Run>,
    /// Memory that is as in the image before, where that has any.
    pub(super) unchanged: Vec<Run>,
}

impl Changes {
    /// Finds them, and begins to watch for the next; `watch` has a mapping watched that was not so
    /// far.
    pub(super) fn find(
        pid: pid_t,
        mappings: &[Mapping],
        early: Early,
        watch: impl Fn(&Mapping) -> bool,
    ) -> Result<Changes, EngineError> {
        let failed = |source| EngineError::System { pid, what: "see what it has changed", source };
        let mut pages = Pages::of(pid).map_err(failed)?;
        let mut changes = Changes { early, ..Changes::default() };
        for mapping in mappings.iter().filter(|mapping| memory::own(mapping)) {
            let whole = (mapping.start, mapping.end);
            let mut since = None;
            if watchable(mapping) {
                since = pages.since(whole, true).map_err(failed)?;
                // Counts as written as a whole: what was moved there keeps its marks (before Linux
                // 6.13).
                if since.is_none() && watch(mapping) {
                    pages.since(whole, true).map_err(failed)?;
                }
            }
            let runs = match since {
                Some(since) => {
                    let [same, kept, rest] = changes.early.divide(whole, &since.unchanged);
                    changes.unchanged.extend(same);
                    memory::split(mapping, &kept, &mut changes.kept);
                    memory::split(mapping, &rest, &mut changes.chunks);
                    changes.guards.extend(changes.early.guards(whole, &since.unchanged));
                    changes.unsure.extend(near([&since.absent[..], &since.written].concat()));
                    since.written
                }
                None => {
                    changes.unsure.push(whole);
                    memory::runs(pid, pages.scanner(), mapping)?
                }
            };
            memory::split(mapping, &runs, &mut changes.chunks);
        }
        let shared = mappings.iter().filter(|mapping| mapping.shared && guards::may_have(mapping));
        changes.unsure.extend(shared.map(|mapping| (mapping.start, mapping.end)));
        changes.chunks.sort_unstable_by_key(Chunk::address);
        Ok(changes)
    }

    /// Those of a shared object, by offsets in it: mappings show `shown` of it, and `written` has
    /// been written since `early`; both in order.
    pub(super) fn of_object(shown: &[Run], written: &[Run], early: Early) -> Changes {
        let unchanged = without(shown, written);
        let mut changes = Changes { early, ..Changes::default() };
        let [same, kept, rest] = changes.early.divide((0, u64::MAX), &unchanged);
        changes.unchanged = same;
        memory::split_runs(false, &kept, &mut changes.kept);
        let mut late = [common(written, shown), rest].concat();
        late.sort_unstable();
        memory::split_runs(false, &late, &mut changes.chunks);
        changes
    }

    /// Where there are guards in the memory of the process.
    pub(super) fn guards(&self, pid: pid_t) -> Result<Vec<Run>, EngineError> {
        let mut found = guards::among(pid, &self.unsure)?;
        found.sort_unstable();
        let mut guards = without(&self.guards, &found);
        guards.extend(found);
        Ok(guards)
    }

    /// Whether there is room to copy what was not copied before the pause.
    pub(super) fn fit(&self) -> bool {
        self.early.has_room(self.bytes())
    }

    /// The same, all to be read from a clone.
    pub(super) fn of_clone(mut self) -> Changes {
        self.chunks.append(&mut self.kept);
        self.chunks.sort_unstable_by_key(Chunk::address);
        self.early = Early::default();
        self
    }

    pub(super) fn bytes(&self) -> u64 {
        self.chunks.iter().map(Chunk::length).sum()
    }

    /// Notes what is as it was of `object`, but for what lies in the mappings `except`.
    pub(super) fn refer(
        &self,
        object: u64,
        except: &[Run],
        writer: &ImageWriter,
    ) -> Result<(), EngineError> {
        let mut packer = Packer::new(writer);
        for (start, end) in self.unchanged.iter().filter(|(start, _)| !lies_in(*start, except)) {
            packer.memory(object, *start, end - start, &Encoded::parent())?;
        }
        Ok(packer.flush()?)
    }

    /// Has `copy` copy the bytes of all chunks that were not copied before; they fit.
    pub(super) fn copy_by(
        &mut self,
        copy: impl FnOnce(&[Chunk], &mut [u8]) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let bytes = self.bytes();
        self.early.late(bytes).map_or(Ok(()), |room| copy(&self.chunks, room))
    }

    /// What was not copied before, which is somebody else's to store.
    pub(super) fn take_late(&mut self) -> Vec<Chunk> {
        std::mem::take(&mut self.chunks)
    }

    /// Has `store` store what was copied.
    pub(super) fn store(
        &mut self,
        writer: &ImageWriter,
        store: impl Fn(&Chunk, &[u8], &mut Packer<'_>) -> Result<(), EngineError> + Sync,
    ) -> Result<(), EngineError> {
        let places = self.early.bytes(&self.kept, &self.chunks);
        writer.expect(places.iter().map(|(chunk, _)| chunk.length()).sum());
        memory::share_out(&places, writer, |(chunk, bytes), packer| store(chunk, bytes, packer))
    }
}

/// Copies the bytes of all `chunks` into `rest`, which has room for them and no more, one after the
/// other.
pub(super) fn copy(
    pid: pid_t,
    chunks: &[Chunk],
    rest: &mut [u8],
    unmapped: Unmapped,
) -> Result<(), EngineError> {
    let threads = thread::available_parallelism().map_or(1, usize::from).min(COPIERS);
    let share = rest.len().div_ceil(threads).max(SHARE) as u64;
    let (mut chunks, mut rest) = (chunks, rest);
    thread::scope(|scope| {
        let mut copying = Vec::new();
        while !chunks.is_empty() {
            let (count, bytes) = first_share(chunks, share);
            let (some, others) = chunks.split_at(count);
            let (part, left) = rest.split_at_mut(bytes as usize);
            (chunks, rest) = (others, left);
            if chunks.is_empty() {
                copy_part(pid, some, part, unmapped)?;
            } else {
                copying.push(scope.spawn(move || copy_part(pid, some, part, unmapped)));
            }
        }
        let mut joined = copying.into_iter().map(|one| one.join());
        joined.try_for_each(|done| done.unwrap_or(Err(EngineError::Ended { pid })))
    })
}

/// The runs of one mapping, those that lie close together as one: each is a question to the kernel.
pub(super) fn near(mut runs: Vec<Run>) -> Vec<Run> {
    const CLOSE: u64 = 1 << 20;
    runs.sort_unstable();
    let mut near: Vec<Run> = Vec::new();
    for (start, end) in runs {
        match near.last_mut() {
            Some((_, last)) if start <= last.saturating_add(CLOSE) => *last = end.max(*last),
            _ => near.push((start, end)),
        }
    }
    near
}

/// Whether `at` lies in one of those mappings.
pub(super) fn lies_in(at: u64, mappings: &[Run]) -> bool {
    mappings.iter().any(|(start, end)| (*start..*end).contains(&at))
}

/// As many of the first chunks as have `share` bytes: how many, and their bytes.
fn first_share(chunks: &[Chunk], share: u64) -> (usize, u64) {
    let mut bytes = 0;
    for (index, chunk) in chunks.iter().enumerate() {
        if bytes >= share {
            return (index, bytes);
        }
        bytes += chunk.length();
    }
    (chunks.len(), bytes)
}

fn copy_part(
    pid: pid_t,
    chunks: &[Chunk],
    mut into: &mut [u8],
    unmapped: Unmapped,
) -> Result<(), EngineError> {
    for some in chunks.chunks(sys::MAX_RANGES) {
        let bytes: u64 = some.iter().map(Chunk::length).sum();
        let (part, rest) = into.split_at_mut(bytes as usize);
        into = rest;
        let ranges: Vec<Run> = some.iter().map(|c| (c.address(), c.length())).collect();
        // All at once where all can be read; what cannot is what makes it slow.
        if some.iter().any(Chunk::hidden) || !sys::gather(pid, &ranges, part) {
            let (reader, mut part) = (Reader::that(unmapped, pid)?, part);
            for chunk in some {
                let (one, rest) = part.split_at_mut(chunk.length() as usize);
                part = rest;
                reader.read(chunk, one)?;
            }
        }
    }
    Ok(())
}
