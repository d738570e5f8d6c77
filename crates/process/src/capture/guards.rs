//! Guards in a process's memory: pages that fault whoever touches them (MADV_GUARD_INSTALL), of private memory, where a
//! clone inherits them.

use super::memory;
use crate::EngineError;
use crate::maps::Mapping;
use crate::pagemap::{self, Wanted};
use libc::pid_t;
use std::fs::File;

/// A category of PAGEMAP_SCAN, since Linux 6.16.
const PAGE_IS_GUARD: u64 = 1 << 8;

/// Where there are guards in the memory of `pid`, a stopped process or a clone. None on a kernel that does not tell.
pub(super) fn of(pid: pid_t, mappings: &[Mapping]) -> Result<Vec<(u64, u64)>, EngineError> {
    let own = mappings.iter().filter(|mapping| memory::own(mapping));
    let own: Vec<(u64, u64)> = own.map(|mapping| (mapping.start, mapping.end)).collect();
    among(pid, &own)
}

/// The same in those ranges.
pub(super) fn among(pid: pid_t, ranges: &[(u64, u64)]) -> Result<Vec<(u64, u64)>, EngineError> {
    let failed =
        |source| EngineError::System { pid, what: "look for guards in its memory", source };
    let pagemap = File::open(format!("/proc/{pid}/pagemap")).map_err(failed)?;
    let mut guards = Vec::new();
    let wanted = Wanted { all: PAGE_IS_GUARD, ..Wanted::default() };
    for (first, last) in ranges {
        let guard = |start, end| guards.push((start, end));
        match pagemap::ranges(&pagemap, *first, *last, &wanted, guard) {
            // Neither PAGEMAP_SCAN nor guards, or no guards that it knows.
            Err(error) if pagemap::cannot_tell(&error) => break,
            told => drop(told.map_err(failed)?),
        }
    }
    Ok(guards)
}
