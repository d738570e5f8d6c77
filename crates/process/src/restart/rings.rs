//! Maps a process's io_uring rings at the addresses they had.
//!
//! Since Linux 6.4 the kernel alone chooses where a ring is mapped (io_uring_get_unmapped_area). So
//! every other free range is reserved first, and the ring's old address is the only one left.

use super::files::Inherited;
use crate::inject::{Batch, Parasite};
use crate::maps::{self, TOP};
use crate::state::{Backing, ProcessState, Saved};
use crate::track::Run;
use crate::{EngineError, Thread};
use std::fs;

/// Has the kernel look above 4 GiB only (since Linux 6.6). Without it the kernel could choose a
/// range that an ordinary user may not reserve.
const MAP_ABOVE4G: i32 = 0x80;

/// Returns the descriptor of the ring that `saved` maps, or `None` if it maps something else.
pub(super) fn of(saved: &Saved, inherited: &Inherited) -> Result<Option<u64>, EngineError> {
    let Backing::Description(index) = saved.backing else { return Ok(None) };
    let fd = inherited.description(index)?;
    let link = fs::read_link(format!("/proc/self/fd/{fd}"));
    Ok(link.is_ok_and(|link| link.as_os_str() == "anon_inode:[io_uring]").then_some(fd as u64))
}

/// Reserves the address range of a mapping that is made later.
pub(super) fn keep_place(saved: &Saved, batch: &mut Batch<'_>) -> Result<(), EngineError> {
    reserve((saved.start, saved.end), libc::MAP_FIXED, batch)
}

/// Reserves an address range; `fixed` is MAP_FIXED or MAP_FIXED_NOREPLACE.
fn reserve((start, end): Run, fixed: i32, batch: &mut Batch<'_>) -> Result<(), EngineError> {
    let flags = fixed | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let arguments = [start, end - start, libc::PROT_NONE as u64, flags as u64, u64::MAX, 0];
    batch.call("keep a place in its memory", libc::SYS_mmap, &arguments)
}

/// Maps the process's rings; everything else must be mapped by then.
///
/// # Errors
/// A system call fails, or the kernel does not choose a ring's old address.
pub(super) fn map(
    state: &ProcessState,
    inherited: &Inherited,
    thread: &mut Thread,
    parasite: Parasite,
) -> Result<(), EngineError> {
    let mut rings = Vec::new();
    for saved in &state.mappings {
        if let Some(fd) = of(saved, inherited)? {
            rings.push((saved, fd));
        }
    }
    // Kernels before 6.4 map a ring where they are told to.
    rings.retain(|(saved, fd)| {
        let flags = (libc::MAP_SHARED | libc::MAP_FIXED) as u64;
        let arguments = arguments(saved, saved.start, flags, *fd);
        parasite.call(thread, WHAT, libc::SYS_mmap, &arguments).is_err()
    });
    if rings.is_empty() {
        return Ok(());
    }
    let free = free_ranges(thread)?;
    let mut batch = parasite.batch(thread);
    free.iter().try_for_each(|run| reserve(*run, libc::MAP_FIXED_NOREPLACE, &mut batch))?;
    batch.run()?;
    drop(batch);
    for (saved, fd) in rings {
        map_one(saved, fd, thread, parasite)?;
    }
    let mut batch = parasite.batch(thread);
    for (start, end) in free {
        batch.call("let go of a place", libc::SYS_munmap, &[start, end - start])?;
    }
    batch.run().map(drop)
}

const WHAT: &str = "map a ring of io_uring";

/// Returns the arguments of the mmap that maps a ring at `place`; 0 lets the kernel choose.
fn arguments(saved: &Saved, place: u64, flags: u64, fd: u64) -> [u64; 6] {
    [place, saved.len(), saved.protection as u64, flags, fd, saved.offset]
}

/// Maps one ring, whose own range must be the only free one above 4 GiB.
fn map_one(
    saved: &Saved,
    fd: u64,
    thread: &mut Thread,
    parasite: Parasite,
) -> Result<(), EngineError> {
    let place = [saved.start, saved.len()];
    parasite.call(thread, "let go of a place", libc::SYS_munmap, &place)?;
    let flags = (libc::MAP_SHARED | MAP_ABOVE4G) as u64;
    let arguments = arguments(saved, 0, flags, fd);
    let at = parasite.call(thread, WHAT, libc::SYS_mmap, &arguments)?;
    match at as u64 == saved.start {
        true => Ok(()),
        false => Err(EngineError::unsupported(
            thread.pid(),
            format!("a ring of io_uring cannot be mapped at {:#x} again", saved.start),
        )),
    }
}

/// Returns the address ranges above 4 GiB where the process has nothing mapped.
fn free_ranges(thread: &Thread) -> Result<Vec<Run>, EngineError> {
    /// The kernel does not look below this ([`MAP_ABOVE4G`]).
    const MIN_ADDRESS: u64 = 1 << 32;
    let (mut free, mut from) = (Vec::new(), MIN_ADDRESS);
    for mapping in maps::of(thread.pid())? {
        let (start, end) = (mapping.start.min(TOP), mapping.end.min(TOP));
        if start > from {
            free.push((from, start));
        }
        from = from.max(end);
    }
    if from < TOP {
        free.push((from, TOP));
    }
    Ok(free)
}
