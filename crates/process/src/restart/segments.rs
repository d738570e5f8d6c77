//! System V shared memory, attached again.

use crate::inject::Parasite;
use crate::plugins::segment_bytes;
use crate::state::{Backing, ProcessState, Saved};
use crate::{EngineError, Thread};
use kedge_image::PAGE;

/// Attaches all that the process had, when its other mappings are there.
pub(super) fn attach(
    state: &ProcessState,
    thread: &mut Thread,
    parasite: Parasite,
) -> Result<(), EngineError> {
    for saved in &state.mappings {
        if let Backing::Segment(id) = saved.backing {
            attach_one(saved, id, thread, parasite)?;
        }
    }
    Ok(())
}

/// Where there is room; then the part that the program had is moved to its place, and the rest let
/// go.
fn attach_one(
    saved: &Saved,
    id: i32,
    thread: &mut Thread,
    parasite: Parasite,
) -> Result<(), EngineError> {
    let what = "attach its System V shared memory";
    let failed = |source| EngineError::System { pid: thread.pid(), what, source };
    // One of huge pages that came back with ordinary ones has as many of them.
    let page = if saved.huge == 0 { PAGE } else { saved.huge };
    let whole = segment_bytes(id).map_err(failed)?;
    let whole = whole.checked_next_multiple_of(page).unwrap_or(u64::MAX);
    if saved.offset.saturating_add(saved.len()) > whole {
        return Err(EngineError::Nonsense("shared memory past its segment's end"));
    }
    let has = |flag: &str| saved.flags.iter().any(|own| own == flag);
    let (write, execute) = (libc::PROT_WRITE, libc::PROT_EXEC);
    // Whether it may ever be written follows from how it was attached.
    let writable = saved.protection & write != 0 || has("mw");
    let flags = if writable { 0 } else { libc::SHM_RDONLY }
        | if saved.protection & execute != 0 { libc::SHM_EXEC } else { 0 };
    // Huge pages are not moved by all kernels.
    let all = saved.offset == 0 && saved.len() == whole;
    let place = if saved.huge != 0 && all { saved.start } else { 0 };
    let arguments = [id as u64, place, flags as u64];
    let at = parasite.call(thread, what, libc::SYS_shmat, &arguments)? as u64;
    if at != saved.start {
        let (from, length) = (at + saved.offset, saved.len());
        let moves = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as u64;
        let arguments = [from, length, length, moves, saved.start];
        parasite.call(thread, what, libc::SYS_mremap, &arguments)?;
        for (start, end) in [(at, from), (from + length, at + whole)] {
            if start < end {
                parasite.call(thread, what, libc::SYS_munmap, &[start, end - start])?;
            }
        }
    }
    let arguments = [saved.start, saved.len(), saved.protection as u64];
    parasite.call(thread, what, libc::SYS_mprotect, &arguments).map(drop)
}
