//! PAGEMAP_SCAN (Linux 6.7): the kernel tells runs of pages of some kind, so that a reservation of
//! terabytes costs nothing, where an entry a page would take minutes. This is the only place that
//! walks its answers.

use libc::pid_t;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

/// `_IOWR('f', 16, struct pm_scan_arg)`, linux/fs.h.
const PAGEMAP_SCAN: libc::c_ulong = 0xc060_6610;
/// Flags of a request.
const WP_MATCHING: u64 = 1;
const CHECK_WPASYNC: u64 = 2;

/// Categories of pages.
const WATCHED: u64 = 1;
const WRITTEN: u64 = 1 << 1;
const FILE: u64 = 1 << 2;
const PRESENT: u64 = 1 << 3;
const SWAPPED: u64 = 1 << 4;
const ZERO: u64 = 1 << 5;
/// Since Linux 6.16.
const GUARD: u64 = 1 << 8;

/// Runs that the kernel tells at a time, where there are many.
const TOGETHER: usize = 16 << 10;
/// Runs that it tells the first time: most processes have no more in a mapping, and room for many
/// takes longer to make than to ask.
const FIRST: usize = 128;

const PAGE: u64 = 4096;

/// From address to address.
pub type Run = (u64, u64);

/// struct page_region.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// struct pm_scan_arg.
#[repr(C)]
#[derive(Debug, Default)]
struct Request {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    regions: u64,
    regions_len: u64,
    max_pages: u64,
    inverted: u64,
    all_of: u64,
    any_of: u64,
    told: u64,
}

/// Which pages are asked for.
#[derive(Debug, Clone, Copy, Default)]
pub struct Wanted {
    /// Categories whose absence counts, in `all` and `any`.
    inverted: u64,
    /// A page has all of these.
    all: u64,
    /// A page has one of these, if there are any.
    any: u64,
    /// The categories by which runs are told apart.
    told: u64,
    flags: u64,
}

impl Wanted {
    /// Pages that are the process's own: there or swapped out, and not a file's.
    pub const OWN: Wanted =
        Wanted { inverted: FILE, all: FILE, any: PRESENT | SWAPPED, told: 0, flags: 0 };

    /// The same without those that are the kernel's page of zeros.
    pub const WRITTEN_TO: Wanted = Wanted {
        inverted: FILE | ZERO,
        all: FILE | ZERO,
        any: PRESENT | SWAPPED,
        told: 0,
        flags: 0,
    };

    /// Pages that are not there.
    pub const ABSENT: Wanted = Wanted {
        inverted: PRESENT | SWAPPED,
        all: PRESENT | SWAPPED,
        any: 0,
        told: PRESENT | SWAPPED,
        flags: 0,
    };

    /// Guards (MADV_GUARD_INSTALL).
    pub const GUARDS: Wanted = Wanted { inverted: 0, all: GUARD, any: 0, told: 0, flags: 0 };

    /// Places in mappings that are watched, whatever is there.
    pub const WATCHED: Wanted =
        Wanted { inverted: 0, all: WATCHED, any: 0, told: WATCHED, flags: 0 };

    /// Pages that were written since they were protected, in mappings that are watched; they are
    /// protected again if `protect`. The kernel answers exactly this question quickly.
    pub const fn written(protect: bool) -> Wanted {
        let flags = CHECK_WPASYNC | if protect { WP_MATCHING } else { 0 };
        Wanted { inverted: 0, all: WRITTEN, any: 0, told: WRITTEN, flags }
    }
}

/// Asks about the pages of one process.
#[derive(Debug)]
pub struct Scanner {
    file: File,
    regions: Vec<Region>,
}

impl Scanner {
    pub fn of(pid: pid_t) -> io::Result<Scanner> {
        let file = File::open(format!("/proc/{pid}/pagemap"))?;
        Ok(Scanner { file, regions: vec![Region::default(); FIRST] })
    }

    /// Returns the runs of wanted pages in `range`: in order, disjoint, neighbours joined.
    ///
    /// # Errors
    ///
    /// EPERM if memory is asked for that must be watched and is not; what [`cannot_tell`] knows, on
    /// kernels without the request; InvalidData for an answer that is not in order.
    pub fn runs(&mut self, (start, end): Run, wanted: &Wanted) -> io::Result<Vec<Run>> {
        let mut runs: Vec<Run> = Vec::new();
        let mut at = start;
        while at < end {
            let told = self.ask((at, end), wanted)?;
            let count = told.len();
            for region in told {
                if region.start < at || region.start >= region.end || region.end > end {
                    let what = format!("the kernel told pages {region:x?} out of order at {at:#x}");
                    return Err(io::Error::new(io::ErrorKind::InvalidData, what));
                }
                match runs.last_mut() {
                    Some((_, last)) if *last == region.start => *last = region.end,
                    _ => runs.push((region.start, region.end)),
                }
                at = region.end;
            }
            // The kernel fills its own buffer of 512 several times for one answer, and `walk_end`
            // says where it stopped at the first of them: it tells nothing. Where there was room
            // for more, that was all.
            if count < self.regions.len() {
                break;
            }
            if count == FIRST {
                self.regions.resize(TOGETHER, Region::default());
            }
        }
        Ok(runs)
    }

    /// Returns as many regions as there is room for; if there are fewer, there are no more.
    fn ask(&mut self, (start, end): Run, wanted: &Wanted) -> io::Result<&[Region]> {
        self.ask_for((start, end), wanted, 0)
    }

    /// Returns whether one page of `range` is wanted.
    ///
    /// # Errors
    ///
    /// As [`Scanner::runs`].
    pub fn has(&mut self, range: Run, wanted: &Wanted) -> io::Result<bool> {
        self.ask_for(range, wanted, 1).map(|regions| !regions.is_empty())
    }

    /// Returns whether one page of `range` is there or swapped out, by its entry, which all kernels
    /// have.
    pub fn has_entry(&self, (start, end): Run) -> io::Result<bool> {
        /// Bits of an entry.
        const THERE: u64 = 1 << 63 | 1 << 62;
        let mut entries = vec![0; ((end - start) / PAGE) as usize * 8];
        self.file.read_exact_at(&mut entries, start / PAGE * 8)?;
        let mut entries = entries.as_chunks::<8>().0.iter();
        Ok(entries.any(|entry| u64::from_le_bytes(*entry) & THERE != 0))
    }

    /// Returns what is found until there are `most` pages, if that is not 0.
    fn ask_for(&mut self, (start, end): Run, wanted: &Wanted, most: u64) -> io::Result<&[Region]> {
        let mut request = Request {
            size: size_of::<Request>() as u64,
            flags: wanted.flags,
            start,
            end,
            regions: self.regions.as_mut_ptr() as u64,
            regions_len: self.regions.len() as u64,
            max_pages: most,
            inverted: wanted.inverted,
            all_of: wanted.all,
            any_of: wanted.any,
            told: wanted.told,
            ..Request::default()
        };
        // SAFETY: the structure is the kernel's struct pm_scan_arg, whose size it is told, and its
        // vector is `regions`, which outlives the call and has room for `regions_len`.
        let count = unsafe { libc::ioctl(self.file.as_raw_fd(), PAGEMAP_SCAN, &raw mut request) };
        let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
        Ok(&self.regions[..count.min(self.regions.len())])
    }
}

/// Whether the kernel knows no such question.
pub fn cannot_tell(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOTTY | libc::EINVAL))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_test_memory::{PAGES, Room, scans};
    use proptest::prelude::*;

    fn scanner(room: usize) -> Scanner {
        let file = File::open("/proc/self/pagemap").unwrap();
        Scanner { file, regions: vec![Region::default(); room] }
    }

    /// What the entries of /proc/PID/pagemap say: the runs whose entries are `wanted`.
    fn model((start, end): Run, wanted: impl Fn(u64) -> bool) -> Vec<Run> {
        let file = File::open("/proc/self/pagemap").unwrap();
        let mut entries = vec![0; ((end - start) / PAGE * 8) as usize];
        file.read_exact_at(&mut entries, start / PAGE * 8).unwrap();
        let mut runs: Vec<Run> = Vec::new();
        for (entry, at) in entries.as_chunks::<8>().0.iter().zip((start..).step_by(PAGE as usize)) {
            if !wanted(u64::from_le_bytes(*entry)) {
                continue;
            }
            match runs.last_mut() {
                Some((_, last)) if *last == at => *last += PAGE,
                _ => runs.push((at, at + PAGE)),
            }
        }
        runs
    }

    fn there(entry: u64) -> bool {
        entry >> 62 != 0
    }

    #[test]
    fn the_request_is_laid_out_as_the_kernel_reads_it() {
        assert_eq!(size_of::<Request>() as u64, PAGEMAP_SCAN >> 16 & 0x3fff);
        assert_eq!(size_of::<Region>(), 24);
    }

    #[test]
    fn memory_that_nobody_watches_is_told_apart() {
        if !scans() {
            return;
        }
        let room = Room::new();
        let error = scanner(8).runs(room.range(), &Wanted::written(false)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EPERM));
    }

    /// Every other page, so as many runs as there can be.
    #[test]
    fn thousands_of_runs_are_told_once_each() {
        if !scans() {
            return;
        }
        let room = Room::new();
        (0..PAGES).step_by(2).for_each(|page| room.touch(page));
        for vector in [1, 2, FIRST, 511, 512, 513, 600, 1024, 2047, 2048, 2049, TOGETHER] {
            let runs = scanner(vector).runs(room.range(), &Wanted::OWN).unwrap();
            assert_eq!(runs.len() as u64, PAGES / 2, "room for {vector}");
            assert_eq!(runs, model(room.range(), there), "room for {vector}");
        }
    }

    fn pages() -> impl Strategy<Value = Vec<u64>> {
        // Steps of one to a few pages: some make thousands of runs, some few long ones.
        (1u64..6, 0u64..3000).prop_flat_map(|(step, most)| {
            prop::collection::vec(1..=step, 0..=most as usize).prop_map(|steps| {
                let mut at = 0;
                let pages = steps.into_iter().map(|step| {
                    at += step;
                    at
                });
                pages.filter(|page| *page < PAGES).collect()
            })
        })
    }

    #[test]
    fn a_page_is_known_by_its_entry() {
        let room = Room::new();
        assert!(!scanner(8).has_entry(room.range()).unwrap());
        room.touch(PAGES - 1);
        assert!(scanner(8).has_entry(room.range()).unwrap());
        let (start, end) = room.range();
        assert!(!scanner(8).has_entry((start, end - PAGE)).unwrap());
    }

    #[test]
    fn what_is_told_is_what_the_entries_say() {
        if scans() {
            told_as_the_entries_say();
        }
    }

    #[test]
    fn each_write_is_told_once() {
        if scans() {
            told_once();
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: 60, failure_persistence: None, ..ProptestConfig::default()
        })]

        fn told_as_the_entries_say(
            touched in pages(), vector in 1usize..1200, from in 0u64..PAGES, to in 0u64..PAGES,
        ) {
            let room = Room::new();
            touched.iter().for_each(|page| room.touch(*page));
            let part = (room.range().0 + from.min(to) * PAGE, room.range().0 + from.max(to) * PAGE);
            for range in [room.range(), part] {
                let own = scanner(vector).runs(range, &Wanted::OWN).unwrap();
                prop_assert_eq!(own, model(range, there));
                let absent = scanner(vector).runs(range, &Wanted::ABSENT).unwrap();
                prop_assert_eq!(absent, model(range, |entry| !there(entry)));
            }
        }

        fn told_once(
            touched in pages(), written in pages(), vector in 1usize..1200,
        ) {
            let room = Room::new();
            touched.iter().for_each(|page| room.touch(*page));
            let _watch = room.watch();
            let unprotected = |entry: u64| entry >> 57 & 1 == 0;
            let all = scanner(vector).runs(room.range(), &Wanted::written(true)).unwrap();
            prop_assert_eq!(all, vec![room.range()]);
            prop_assert_eq!(model(room.range(), unprotected), vec![]);
            written.iter().for_each(|page| room.touch(*page));
            let expected = model(room.range(), unprotected);
            prop_assert_eq!(expected.iter().map(|(s, e)| (e - s) / PAGE).sum::<u64>(), written.len() as u64);
            let looked = scanner(vector).runs(room.range(), &Wanted::written(false)).unwrap();
            prop_assert_eq!(&looked, &expected);
            let told = scanner(vector).runs(room.range(), &Wanted::written(true)).unwrap();
            prop_assert_eq!(&told, &expected);
            prop_assert_eq!(scanner(vector).runs(room.range(), &Wanted::written(true)).unwrap(), vec![]);
        }
    }
}
