//! Which pages a process has touched, told by ranges (PAGEMAP_SCAN, Linux 6.7): a reservation of terabytes
//! costs nothing, where an entry a page would take minutes.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// linux/fs.h: `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::c_ulong = 0xc060_6610;
/// Categories of pages.
const FILE: u64 = 1 << 2;
const PRESENT: u64 = 1 << 3;
const SWAPPED: u64 = 1 << 4;
/// Ranges that are asked for together.
const RANGES: usize = 4096;

/// struct page_region
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// struct pm_scan_arg
#[repr(C)]
#[derive(Default)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    regions: u64,
    regions_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// Which pages are asked for: none of `inverted`, which are of `all` too, all of the rest of `all`, and one of
/// `any`, if it names some.
#[derive(Default)]
pub(crate) struct Wanted {
    pub(crate) inverted: u64,
    pub(crate) all: u64,
    pub(crate) any: u64,
}

/// The ranges of [start, end) whose pages are the process's own: there or swapped out, and not a file's.
/// `None` where the kernel cannot tell.
pub(crate) fn touched(pagemap: &File, start: u64, end: u64) -> io::Result<Option<Vec<(u64, u64)>>> {
    let mut found: Vec<(u64, u64)> = Vec::new();
    let own = Wanted { inverted: FILE, all: FILE, any: PRESENT | SWAPPED };
    let told = ranges(pagemap, start, end, &own, |start, end| match found.last_mut() {
        Some((_, last)) if *last == start => *last = end,
        _ => found.push((start, end)),
    });
    match told {
        Ok(whole) => Ok(whole.then_some(found)),
        Err(error) if cannot_tell(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether the kernel knows no such question.
pub(crate) fn cannot_tell(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOTTY | libc::EINVAL))
}

/// Hands each range of [start, end) with `wanted` pages to `each`; false if the kernel did not get to the
/// end.
pub(crate) fn ranges(
    pagemap: &File,
    start: u64,
    end: u64,
    wanted: &Wanted,
    mut each: impl FnMut(u64, u64),
) -> io::Result<bool> {
    let mut regions = vec![Region::default(); RANGES];
    let mut at = start;
    while at < end {
        let mut scan = Scan {
            size: size_of::<Scan>() as u64,
            start: at,
            end,
            regions: regions.as_mut_ptr() as u64,
            regions_len: RANGES as u64,
            category_inverted: wanted.inverted,
            category_mask: wanted.all,
            category_anyof_mask: wanted.any,
            ..Scan::default()
        };
        // SAFETY: the structure is as the kernel's, and its vector is `regions`, which lives through the
        // call and has room for as many as it says.
        let count = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut scan) };
        let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
        regions.iter().take(count).for_each(|region| each(region.start, region.end));
        // A kernel that does not get on would keep this here for ever.
        if scan.walk_end <= at {
            return Ok(false);
        }
        at = scan.walk_end;
    }
    Ok(true)
}
