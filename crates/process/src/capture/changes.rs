//! What a stopped process has changed since its last image, and copying it while nothing moves.

use super::memory::{self, Chunk, Reader};
use crate::EngineError;
use crate::maps::Mapping;
use crate::sys;
use crate::track::{Pages, Run, watchable};
use kedge_image::{Choice, Encoded, ImageWriter, Packer, PageBuffer};
use libc::pid_t;
use std::thread;

/// Threads that copy at most: memory is what is slow.
const COPIERS: usize = 4;
/// Less than that is copied by one thread.
const SHARE: usize = 4 << 20;

/// What has changed, and what has not.
#[derive(Debug, Default)]
pub(super) struct Changes {
    pub(super) chunks: Vec<Chunk>,
    /// Memory that is as in the image before, where that has any.
    pub(super) unchanged: Vec<Run>,
}

impl Changes {
    /// Finds them, and begins to watch for the next.
    pub(super) fn find(pid: pid_t, mappings: &[Mapping]) -> Result<Changes, EngineError> {
        let failed = |source| EngineError::System { pid, what: "see what it has changed", source };
        let mut pages = Pages::of(pid).map_err(failed)?;
        let mut changes = Changes::default();
        for mapping in mappings.iter().filter(|mapping| memory::own(mapping)) {
            let whole = (mapping.start, mapping.end);
            let since = watchable(mapping).then(|| pages.since(whole, true)).transpose();
            let runs = match since.map_err(failed)?.flatten() {
                Some(since) => {
                    changes.unchanged.extend(since.unchanged);
                    since.written
                }
                None => memory::runs(pid, mapping)?,
            };
            memory::split(mapping, &runs, &mut changes.chunks);
        }
        Ok(changes)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.chunks.iter().map(Chunk::length).sum()
    }

    /// Notes what is as it was, but for what lies in the mappings `except`.
    pub(super) fn refer(&self, except: &[Run], writer: &ImageWriter) -> Result<(), EngineError> {
        let mut packer = Packer::new(writer);
        for (start, end) in self.unchanged.iter().filter(|(start, _)| !lies_in(*start, except)) {
            packer.memory(0, *start, end - start, &Encoded::parent())?;
        }
        Ok(packer.flush()?)
    }

    /// Copies the bytes of all chunks into `room`, one after the other.
    pub(super) fn copy(&self, pid: pid_t, room: &mut PageBuffer) -> Result<(), EngineError> {
        let total = self.bytes() as usize;
        let threads = thread::available_parallelism().map_or(1, usize::from).min(COPIERS);
        let share = total.div_ceil(threads).max(SHARE) as u64;
        let mut rest = room.bytes(total);
        let mut chunks = &self.chunks[..];
        thread::scope(|scope| {
            let mut copying = Vec::new();
            while !chunks.is_empty() {
                let (count, bytes) = first_share(chunks, share);
                let (some, others) = chunks.split_at(count);
                let (part, left) = rest.split_at_mut(bytes as usize);
                (chunks, rest) = (others, left);
                if chunks.is_empty() {
                    copy_part(pid, some, part)?;
                } else {
                    copying.push(scope.spawn(move || copy_part(pid, some, part)));
                }
            }
            let mut joined = copying.into_iter().map(|one| one.join());
            joined.try_for_each(|done| done.unwrap_or(Err(EngineError::Ended { pid })))
        })
    }

    /// Stores what was copied into `room`, but for what lies in the mappings `except`.
    pub(super) fn store(
        &self,
        room: &mut PageBuffer,
        except: &[Run],
        writer: &ImageWriter,
        codec: Choice,
    ) -> Result<(), EngineError> {
        let mut rest: &[u8] = room.bytes(self.bytes() as usize);
        let mut places = Vec::with_capacity(self.chunks.len());
        for chunk in &self.chunks {
            let (bytes, left) = rest.split_at(chunk.length() as usize);
            rest = left;
            if !lies_in(chunk.address(), except) {
                places.push((chunk, bytes));
            }
        }
        memory::share_out(&places, writer, |(chunk, bytes), packer| {
            let encoded = kedge_image::encode(bytes, codec);
            Ok(packer.memory(0, chunk.address(), chunk.length(), &encoded)?)
        })
    }
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

fn copy_part(pid: pid_t, chunks: &[Chunk], mut into: &mut [u8]) -> Result<(), EngineError> {
    for some in chunks.chunks(sys::MOST_RANGES) {
        let bytes: u64 = some.iter().map(Chunk::length).sum();
        let (part, rest) = into.split_at_mut(bytes as usize);
        into = rest;
        let ranges: Vec<Run> = some.iter().map(|c| (c.address(), c.length())).collect();
        // All at once where all can be read; what cannot is what makes it slow.
        if some.iter().any(Chunk::hidden) || !sys::gather(pid, &ranges, part) {
            let (reader, mut part) = (Reader::of(pid)?, part);
            for chunk in some {
                let (one, rest) = part.split_at_mut(chunk.length() as usize);
                part = rest;
                reader.read(chunk, one)?;
            }
        }
    }
    Ok(())
}
