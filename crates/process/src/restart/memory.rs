//! Writing memory out of an image, by several threads.

use super::Plan;
use super::files::Inherited;
use crate::EngineError;
use crate::capture::JOB_FILE;
use crate::state::{Backing, ProcessState, Saved};
use crate::sys;
use kedge_image::{Codec, Extent, ImageFile};
use std::os::fd::BorrowedFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Threads that write at most.
const MAX_WRITERS: usize = 8;
/// Zeros are written in pieces of this many bytes.
const PIECE: u64 = 1 << 20;

/// Writes the memory of a process, whose mappings are there and writable where something is to be
/// written.
pub(super) fn fill(state: &ProcessState, file: &ImageFile) -> Result<(), EngineError> {
    file.read_ahead();
    let pid = state.ids.pid;
    let mut work = Vec::new();
    for extent in file.memory().filter(|extent| extent.object == 0) {
        // Fresh memory is zero by itself; a file's page that was zeroed is not.
        let anonymous = matches!(mapping_of(state, extent)?.backing, Backing::Anonymous);
        if extent.codec != Codec::Zero || !anonymous {
            work.push(*extent);
        }
    }
    each(&work, |extent, scratch, bytes| {
        pieces(file, extent, scratch, bytes, |address, piece| sys::write(pid, address, piece))
    })
}

/// The mapping that an extent lies in: the process's own memory.
pub(super) fn mapping_of<'a>(
    state: &'a ProcessState,
    extent: &Extent,
) -> Result<&'a Saved, EngineError> {
    let after = state.mappings.partition_point(|saved| saved.start <= extent.address);
    let saved = after.checked_sub(1).map(|index| &state.mappings[index]);
    saved
        .filter(|saved| extent.address + extent.decoded <= saved.end && !saved.shared)
        .ok_or(EngineError::Nonsense("memory outside of the process's own mappings"))
}

/// Writes the objects that mappings share.
pub(super) fn fill_objects(plan: &Plan, inherited: &Inherited) -> Result<(), EngineError> {
    let file = plan.open(JOB_FILE)?;
    for object in &plan.job.objects {
        let fd = inherited.object(object.number)?;
        // SAFETY: `inherited` keeps it open for as long as this runs.
        let target = unsafe { BorrowedFd::borrow_raw(fd) };
        let target = std::fs::File::from(target.try_clone_to_owned().map_err(failed)?);
        let (mut scratch, mut bytes) = (Vec::new(), Vec::new());
        let own = |extent: &&Extent| extent.object == object.number && extent.codec != Codec::Zero;
        for extent in file.memory().filter(own) {
            if extent.address + extent.decoded > object.bytes {
                return Err(EngineError::Nonsense("shared memory past its object's end"));
            }
            pieces(&file, extent, &mut scratch, &mut bytes, |offset, piece| {
                std::os::unix::fs::FileExt::write_all_at(&target, piece, offset).map_err(failed)
            })?;
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
    write: impl Fn(u64, &[u8]) -> Result<(), EngineError>,
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

/// Does `job` for each extent, with buffers of the working thread's.
fn each(
    extents: &[Extent],
    job: impl Fn(&Extent, &mut Vec<u8>, &mut Vec<u8>) -> Result<(), EngineError> + Sync,
) -> Result<(), EngineError> {
    let next = AtomicUsize::new(0);
    let failure = Mutex::new(None);
    let work = || {
        let (mut scratch, mut bytes) = (Vec::new(), Vec::new());
        while let Some(extent) = extents.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(error) = job(extent, &mut scratch, &mut bytes) {
                // The first failure ends the work of all.
                next.store(extents.len(), Ordering::Relaxed);
                failure.lock().unwrap_or_else(|poison| poison.into_inner()).get_or_insert(error);
            }
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from).min(MAX_WRITERS);
    thread::scope(|scope| {
        for _ in 1..threads.min(extents.len() / 4) {
            scope.spawn(work);
        }
        work();
    });
    failure.into_inner().unwrap_or_else(|poison| poison.into_inner()).map_or(Ok(()), Err)
}
