//! Guards in a process's memory: pages that fault whoever touches them (MADV_GUARD_INSTALL), of private memory, where a
//! clone inherits them.

use super::memory;
use crate::EngineError;
use crate::maps::Mapping;
use libc::pid_t;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// linux/fs.h: PAGEMAP_SCAN, which knows guards since Linux 6.16.
const PAGEMAP_SCAN: libc::c_ulong = 0xc060_6610;
const PAGE_IS_GUARD: u64 = 1 << 8;
/// Ranges that one call tells.
const TOGETHER: usize = 512;

/// What PAGEMAP_SCAN takes: struct pm_scan_arg.
#[repr(C)]
#[derive(Default)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    regions: u64,
    regions_count: u64,
    max_pages: u64,
    inverted: u64,
    mask: u64,
    any_of: u64,
    returned: u64,
}

/// struct page_region.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// Where there are guards in the memory of `pid`, a stopped process or a clone. None on a kernel that does not tell.
pub(super) fn of(pid: pid_t, mappings: &[Mapping]) -> Result<Vec<(u64, u64)>, EngineError> {
    let failed =
        |source| EngineError::System { pid, what: "look for guards in its memory", source };
    let pagemap = File::open(format!("/proc/{pid}/pagemap")).map_err(failed)?;
    let mut guards = Vec::new();
    for mapping in mappings.iter().filter(|mapping| memory::own(mapping)) {
        match scan(&pagemap, mapping, &mut guards) {
            // Neither PAGEMAP_SCAN nor guards, or no guards that it knows.
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOTTY | libc::EINVAL)) => break,
            other => other.map_err(failed)?,
        }
    }
    Ok(guards)
}

fn scan(pagemap: &File, mapping: &Mapping, guards: &mut Vec<(u64, u64)>) -> io::Result<()> {
    let mut regions = [Region::default(); TOGETHER];
    let mut at = mapping.start;
    while at < mapping.end {
        let mut scan = Scan {
            size: size_of::<Scan>() as u64,
            start: at,
            end: mapping.end,
            regions: regions.as_mut_ptr() as u64,
            regions_count: TOGETHER as u64,
            mask: PAGE_IS_GUARD,
            returned: PAGE_IS_GUARD,
            ..Scan::default()
        };
        // SAFETY: the kernel reads and stores the structure, and stores at most so many regions.
        let found = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut scan) };
        if found < 0 {
            return Err(io::Error::last_os_error());
        }
        let told = regions.iter().take(found as usize);
        guards.extend(told.map(|region| (region.start, region.end)));
        // A kernel that does not come forward is asked no more.
        if scan.walk_end <= at {
            return Ok(());
        }
        at = scan.walk_end;
    }
    Ok(())
}
