//! Writing memory out of an image, by several threads.

use super::files::Inherited;
use super::{Plan, forked, standby};
use crate::EngineError;
use crate::huge;
use crate::state::{Backing, ProcessState, Saved, SharedObject};
use crate::sys;
use crate::track::{Run, common};
use kedge_image::{Codec, Extent, ImageFile, Layers, Source};
use std::collections::BTreeSet;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::panic::resume_unwind;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Threads that write at most.
const MAX_WRITERS: usize = 8;
/// So many bytes are worth another one.
const WORTH: u64 = 1 << 20;
/// Zeros are written in pieces of this many bytes.
const PIECE: u64 = 1 << 20;

/// What there is to be written into the memory of a process. Fresh memory is zero by itself; a
/// file's page that was zeroed is not.
pub(super) fn sources(state: &ProcessState, layers: &Layers) -> Result<Vec<Source>, EngineError> {
    let mut sources = Vec::new();
    for mut source in layers.sources(0) {
        let extent = &source.extent;
        if source.layer == 0 {
            mapping_of(&state.mappings, (extent.address, extent.address + extent.decoded))?;
        }
        let zero = extent.codec == Codec::Zero;
        let mut parts = Vec::with_capacity(source.parts.len());
        for part in source.parts {
            let divided = divide(&state.mappings, part)?.into_iter();
            let there = divided.filter(|(m, _)| !(zero && m.backing == Backing::Anonymous));
            parts.extend(there.map(|(_, part)| part));
        }
        source.parts = parts;
        if !source.parts.is_empty() {
            sources.push(source);
        }
    }
    Ok(sources)
}

/// What of that is written before the last image of a job is there.
pub(super) fn early_sources(state: &ProcessState, layers: &Layers) -> Vec<Source> {
    let early = state.mappings.iter().filter(|saved| standby::is_early(saved));
    let early: Vec<Run> = early.map(|saved| (saved.start, saved.end)).collect();
    let mut sources = layers.sources(0);
    // Fresh memory is zero by itself.
    sources.retain(|source| source.extent.codec != Codec::Zero);
    forked::limit(&mut sources, |parts| common(parts, forked::around(&early, parts)));
    sources
}

/// The mappings that something is to be written into, by their first address.
pub(super) fn filled(
    state: &ProcessState,
    sources: &[Source],
) -> Result<BTreeSet<u64>, EngineError> {
    let mut filled = BTreeSet::new();
    for part in sources.iter().flat_map(|source| &source.parts) {
        filled.extend(divide(&state.mappings, *part)?.iter().map(|(mapping, _)| mapping.start));
    }
    Ok(filled)
}

/// Most bytes between filled mappings that are made with them: they count as the process's own
/// while it is filled.
const MAX_BETWEEN: u64 = 16 << 20;

/// Adds to `filled` what lies between such mappings and differs from them in nothing but what it
/// allows. The program may have forbidden a part of its memory for a moment: all of it becomes one
/// mapping again when that is allowed again, but only if it was one when it was first written
/// (anon_vma).
pub(super) fn add_between(mappings: &[Saved], filled: &mut BTreeSet<u64>) {
    let mut last: Option<usize> = None;
    for (index, saved) in mappings.iter().enumerate() {
        if !is_anonymous(saved) {
            last = None;
        } else if filled.contains(&saved.start) {
            let between = last.map_or(&[][..], |last| &mappings[last + 1..index]);
            if between.iter().map(Saved::len).sum::<u64>() <= MAX_BETWEEN {
                filled.extend(between.iter().map(|saved| saved.start));
            }
            last = Some(index);
        }
        let next = mappings.get(index + 1);
        if next.is_none_or(|next| !adjoin(saved, next)) {
            last = None;
        }
    }
}

fn is_anonymous(saved: &Saved) -> bool {
    saved.backing == Backing::Anonymous && !saved.shared && saved.huge == 0
}

/// Whether the kernel makes one mapping of both if they allow the same.
fn adjoin(one: &Saved, next: &Saved) -> bool {
    let made_with = |saved: &Saved| {
        let flag = |name: &str| saved.flags.iter().any(|flag| flag == name);
        (saved.protection & libc::PROT_EXEC, [flag("gd"), flag("nr"), flag("dp")])
    };
    one.end == next.start && made_with(one) == made_with(next) && one.policy == next.policy
}

/// Writes the memory of a process, whose mappings are there and writable where something is to be
/// written; whether that is all that there is of it.
pub(super) fn fill(
    state: &ProcessState,
    layers: &Layers,
    sources: &[Source],
    all: bool,
) -> Result<(), EngineError> {
    if all {
        layers.read_ahead();
    }
    let pid = state.ids.pid;
    each(sources, |source, scratch, bytes| {
        let (file, extent) = (layers.file(source.layer), &source.extent);
        let mut parts = source.parts.as_slice();
        pieces(file, extent, scratch, bytes, |address, piece| {
            parts = write_parts(address, piece, parts, |at, bytes| sys::write(pid, at, bytes))?;
            Ok(())
        })
    })
}

/// Has `write` write those `parts` that lie in `piece`, which belongs at `address`; the ones that
/// are left.
fn write_parts<'a>(
    address: u64,
    piece: &[u8],
    mut parts: &'a [(u64, u64)],
    mut write: impl FnMut(u64, &[u8]) -> Result<(), EngineError>,
) -> Result<&'a [(u64, u64)], EngineError> {
    let end = address + piece.len() as u64;
    while let Some(((from, to), rest)) = parts.split_first() {
        let (first, last) = ((*from).max(address), (*to).min(end));
        if first < last {
            let bytes = &piece[(first - address) as usize..(last - address) as usize];
            write(first, bytes)?;
        }
        if *to > end {
            break;
        }
        parts = rest;
    }
    Ok(parts)
}

/// The mappings that this memory lies in, and what of it lies in each: what is in another file, or
/// another process's as well, may go on in the mapping behind.
fn divide(mappings: &[Saved], part: Run) -> Result<Vec<(&Saved, Run)>, EngineError> {
    let ((mut start, end), mut divided) = (part, Vec::new());
    while start < end {
        let mapping = mapping_of(mappings, (start, start))?;
        let last = end.min(mapping.end);
        divided.push((mapping, (start, last)));
        start = last;
    }
    Ok(divided)
}

/// The mapping that this memory lies in: the process's own.
fn mapping_of(mappings: &[Saved], (start, end): Run) -> Result<&Saved, EngineError> {
    let after = mappings.partition_point(|saved| saved.start <= start);
    let saved = after.checked_sub(1).map(|index| &mappings[index]);
    saved
        .filter(|saved| start < saved.end && end <= saved.end && !saved.shared)
        .ok_or(EngineError::Nonsense("memory outside of the process's own mappings"))
}

/// Writes the objects that mappings share.
pub(super) fn fill_objects(plan: &Plan, inherited: &Inherited) -> Result<(), EngineError> {
    let layers = plan.shared()?;
    check_objects(&layers, &plan.job.objects)?;
    for object in &plan.job.objects {
        let fd = inherited.object(object.number)?;
        // SAFETY: `inherited` keeps it open for as long as this runs.
        let target = unsafe { BorrowedFd::borrow_raw(fd) };
        let target = std::fs::File::from(target.try_clone_to_owned().map_err(failed)?);
        let path = format!("/proc/self/fd/{fd}");
        let window = match huge::pages_of_file(Path::new(&path)).map_err(failed)? {
            Some(_) => Some(huge::Window::of(&target).map_err(failed)?),
            None => None,
        };
        let mut sources = layers.sources(object.number);
        // It is zero already.
        sources.retain(|source| source.extent.codec != Codec::Zero);
        each(&sources, |source, scratch, bytes| {
            let (file, mut parts) = (layers.file(source.layer), source.parts.as_slice());
            pieces(file, &source.extent, scratch, bytes, |offset, piece| {
                parts = write_parts(offset, piece, parts, |at, bytes| {
                    let written = match &window {
                        Some(window) => window.write_all_at(bytes, at),
                        None => target.write_all_at(bytes, at),
                    };
                    written.map_err(failed)
                })?;
                Ok(())
            })
        })?;
    }
    Ok(())
}

/// Fails if there is memory past the end of its object.
pub(super) fn check_objects(layers: &Layers, objects: &[SharedObject]) -> Result<(), EngineError> {
    for object in objects {
        let sources = layers.sources(object.number);
        if sources.iter().flat_map(|source| &source.parts).any(|(_, end)| *end > object.bytes) {
            return Err(EngineError::Nonsense("shared memory past its object's end"));
        }
    }
    Ok(())
}

fn failed(source: std::io::Error) -> EngineError {
    EngineError::System { pid: 0, what: "write shared memory", source }
}

/// Hands the bytes of an extent to `write`, with their addresses.
fn pieces(
    file: &ImageFile,
    extent: &Extent,
    scratch: &mut Vec<u8>,
    bytes: &mut Vec<u8>,
    mut write: impl FnMut(u64, &[u8]) -> Result<(), EngineError>,
) -> Result<(), EngineError> {
    if extent.codec == Codec::Zero {
        // However long the run is: the extent lies inside of a mapping.
        bytes.clear();
        bytes.resize(PIECE.min(extent.decoded) as usize, 0);
        for at in (0..extent.decoded).step_by(PIECE as usize) {
            let length = PIECE.min(extent.decoded - at) as usize;
            write(extent.address + at, &bytes[..length])?;
        }
        return Ok(());
    }
    // Bounded by MAX_EXTENT, which the table was checked against.
    bytes.resize(extent.decoded as usize, 0);
    file.read(extent, scratch, bytes)?;
    write(extent.address, bytes)
}

/// Does `job` for each source, with buffers of the working thread's.
fn each(
    sources: &[Source],
    job: impl Fn(&Source, &mut Vec<u8>, &mut Vec<u8>) -> Result<(), EngineError> + Sync,
) -> Result<(), EngineError> {
    let next = AtomicUsize::new(0);
    let failure = Mutex::new(None);
    let work = || {
        let (mut scratch, mut bytes) = (Vec::new(), Vec::new());
        while let Some(source) = sources.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(error) = job(source, &mut scratch, &mut bytes) {
                // The first failure ends the work of all.
                next.store(sources.len(), Ordering::Relaxed);
                failure.lock().unwrap_or_else(|poison| poison.into_inner()).get_or_insert(error);
            }
        }
    };
    thread::scope(|scope| {
        let others: Vec<_> = (1..writers(sources)).map(|_| scope.spawn(work)).collect();
        work();
        // A scope waits for what they do, and not for their end, which setns() needs.
        for other in others {
            other.join().unwrap_or_else(|panic| resume_unwind(panic));
        }
    });
    failure.into_inner().unwrap_or_else(|poison| poison.into_inner()).map_or(Ok(()), Err)
}

/// How many threads are to write that.
fn writers(sources: &[Source]) -> usize {
    let parts = sources.iter().flat_map(|source| &source.parts);
    let bytes: u64 = parts.map(|(start, end)| end - start).sum();
    let worth = ((bytes / WORTH) as usize).min(sources.len() / 4).min(MAX_WRITERS);
    // The kernel is asked only then: of many processes each has little.
    if worth < 2 { 1 } else { thread::available_parallelism().map_or(1, usize::from).min(worth) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(start: u64, end: u64, shared: bool) -> Saved {
        Saved {
            start,
            end,
            protection: 3,
            shared,
            offset: 0,
            backing: Backing::Anonymous,
            flags: Vec::new(),
            name: None,
            huge: 0,
            policy: None,
        }
    }

    #[test]
    fn what_lies_between_filled_mappings_is_made_with_them() {
        let of = |start, end, protection| Saved { protection, ..mapping(start, end, false) };
        let large = 100 + MAX_BETWEEN + 1;
        let mappings = [
            of(10, 20, 3),
            of(20, 30, 0),
            of(30, 40, 3),
            of(40, 50, 0),
            of(60, 70, 3),
            of(70, 80, 0),
            mapping(80, 90, true),
            of(90, 100, 3),
            of(100, large, 0),
            of(large, large + 10, 3),
            of(large + 10, large + 20, 7),
            of(large + 20, large + 30, 3),
        ];
        let full = [10, 30, 60, 90, large, large + 20];
        let mut filled = BTreeSet::from(full);
        add_between(&mappings, &mut filled);
        let added: Vec<u64> = filled.difference(&BTreeSet::from(full)).copied().collect();
        assert_eq!(added, [20]);
    }

    #[test]
    fn memory_goes_on_in_the_mapping_behind() {
        let mappings = [
            mapping(10, 20, false),
            mapping(20, 30, false),
            mapping(40, 50, false),
            mapping(50, 60, true),
        ];
        let divided = |part| {
            let divided = divide(&mappings, part).ok()?;
            Some(divided.iter().map(|(m, part)| (m.start, *part)).collect::<Vec<_>>())
        };
        assert_eq!(divided((12, 28)), Some(vec![(10, (12, 20)), (20, (20, 28))]));
        assert_eq!(divided((40, 50)), Some(vec![(40, (40, 50))]));
        for outside in [(5, 12), (25, 35), (30, 31), (45, 55), (60, 61)] {
            assert_eq!(divided(outside), None, "{outside:?}");
        }
    }
}
