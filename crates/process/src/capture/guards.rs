//! Guards in a process's memory: pages that fault whoever touches them (MADV_GUARD_INSTALL), of
//! private memory and, since Linux 6.15, of shared memory and files. A clone inherits them all.

use crate::EngineError;
use crate::maps::Mapping;
use crate::pagemap::{self, Scanner, Wanted};
use crate::state::KERNEL_MAPPINGS;
use libc::pid_t;

/// Where there are guards in the memory of `pid`, a stopped process or a clone. None on a kernel
/// that does not tell.
pub(super) fn of(pid: pid_t, mappings: &[Mapping]) -> Result<Vec<(u64, u64)>, EngineError> {
    let its = mappings.iter().filter(|mapping| may_have(mapping));
    let its: Vec<(u64, u64)> = its.map(|mapping| (mapping.start, mapping.end)).collect();
    among(pid, &its)
}

/// Whether there may be guards in the mapping.
pub(super) fn may_have(mapping: &Mapping) -> bool {
    !KERNEL_MAPPINGS.contains(&mapping.name.as_str())
}

/// Refuses guards in memory that only its mappings lead to: what lies under them cannot be read.
pub(super) fn refuse_in(pid: pid_t, nameless: &[(u64, u64)]) -> Result<(), EngineError> {
    match among(pid, nameless)?.first() {
        None => Ok(()),
        Some((start, _)) => Err(EngineError::unsupported(
            pid,
            format!(
                "it has a guard (MADV_GUARD_INSTALL) at {start:#x} in shared memory without a file, and what lies under \
                 it cannot be saved: share a memfd, or guard by mprotect"
            ),
        )),
    }
}

/// Where there are guards in those ranges.
pub(super) fn among(pid: pid_t, ranges: &[(u64, u64)]) -> Result<Vec<(u64, u64)>, EngineError> {
    if ranges.is_empty() {
        return Ok(Vec::new());
    }
    let failed =
        |source| EngineError::System { pid, what: "look for guards in its memory", source };
    let mut pages = Scanner::of(pid).map_err(failed)?;
    let mut guards = Vec::new();
    for range in ranges {
        match pages.runs(*range, &Wanted::GUARDS) {
            // Neither PAGEMAP_SCAN nor guards, or no guards that it knows.
            Err(error) if pagemap::cannot_tell(&error) => break,
            told => guards.extend(told.map_err(failed)?),
        }
    }
    Ok(guards)
}
