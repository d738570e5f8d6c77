//! Which pages of a mapping were written since they were write-protected, and protecting them in
//! the same step.

use crate::pagemap::{Run, Scanner, Wanted};
use libc::pid_t;
use std::io;

/// The pages of a mapping that are there.
#[derive(Debug)]
pub(crate) struct Since {
    /// Since it was protected.
    pub(crate) written: Vec<Run>,
    /// Not written since then.
    pub(crate) unchanged: Vec<Run>,
    /// What is not there.
    pub(crate) absent: Vec<Run>,
    /// What the kernel told as written: also some places where nothing was when it was looked for.
    pub(crate) marked: Vec<Run>,
}

/// The page tables of a process.
#[derive(Debug)]
pub(crate) struct Pages(Scanner);

impl Pages {
    pub(crate) fn of(pid: pid_t) -> io::Result<Pages> {
        Scanner::of(pid).map(Pages)
    }

    /// For other questions about the same process.
    pub(crate) fn scanner(&mut self) -> &mut Scanner {
        &mut self.0
    }

    /// What there is in the mapping `range`. From here on it is protected again if `protect`.
    ///
    /// `None`, or an error, if not all of it is watched: a part may be protected all the same, of
    /// which nobody knows any more what was written.
    pub(crate) fn since(&mut self, range: Run, protect: bool) -> io::Result<Option<Since>> {
        // First what is not there: protecting leaves marks in its place.
        let absent = self.absent(range)?;
        let present = without(&[range], &absent);
        let mut marked = Vec::new();
        for tables in tables_of(&present, range) {
            match self.written(tables, protect) {
                Err(e) if e.raw_os_error() == Some(libc::EPERM) => return Ok(None),
                runs => marked.extend(runs?),
            }
        }
        let written = without(&marked, &absent);
        let unchanged = without(&present, &written);
        Ok(Some(Since { written, unchanged, absent, marked }))
    }

    /// The pages in `range` that the process has for itself.
    pub(crate) fn there(&mut self, range: Run) -> io::Result<Vec<Run>> {
        self.0.runs(range, &Wanted::OWN)
    }

    /// Whether a mapping that somebody watches lies in `range`.
    pub(crate) fn is_watched(&mut self, range: Run) -> bool {
        self.0.has(range, &Wanted::WATCHED).unwrap_or(false)
    }

    /// The pages in `range` that were written since they were protected, and places where there is
    /// none and was not then; EPERM if it does not lie in watched mappings.
    pub(crate) fn written(&mut self, range: Run, protect: bool) -> io::Result<Vec<Run>> {
        self.0.runs(range, &Wanted::written(protect))
    }

    /// The pages in `range` that there are not.
    pub(crate) fn absent(&mut self, range: Run) -> io::Result<Vec<Run>> {
        self.0.runs(range, &Wanted::ABSENT)
    }
}

/// `present` and what shares page tables with it: where there are none, protecting would make them,
/// however large the hole is.
fn tables_of(present: &[Run], (first, last): Run) -> Vec<Run> {
    /// Memory that one page table maps.
    const TABLE: u64 = 2 << 20;
    let mut tables: Vec<Run> = Vec::new();
    for (start, end) in present {
        let start = (start / TABLE * TABLE).max(first);
        let end = end.next_multiple_of(TABLE).min(last);
        match tables.last_mut() {
            Some((_, before)) if *before >= start => *before = end,
            _ => tables.push((start, end)),
        }
    }
    tables
}

/// What of `runs` does not lie in `others`; both in order.
pub(crate) fn without(runs: &[Run], others: &[Run]) -> Vec<Run> {
    let mut rest = Vec::new();
    let mut others = others.iter().peekable();
    for (start, end) in runs {
        let mut at = *start;
        while others.next_if(|(_, last)| *last <= at).is_some() {}
        while let Some((first, last)) = others.peek().filter(|(first, _)| first < end) {
            if *first > at {
                rest.push((at, *first));
            }
            at = at.max(*last);
            if last > end {
                break;
            }
            others.next();
        }
        if at < *end {
            rest.push((at, *end));
        }
    }
    rest
}

/// What lies in both, each in order.
pub(crate) fn common(runs: &[Run], others: &[Run]) -> Vec<Run> {
    without(runs, &without(runs, others))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pagemap::tests::Room;

    #[test]
    fn only_page_tables_that_are_there_are_protected() {
        let m = |number: u64| number << 20;
        let present = [(m(3), m(3) + 4096), (m(5), m(5) + 4096), (m(17), m(20))];
        let expected = [(m(3), m(6)), (m(16), m(19))];
        assert_eq!(tables_of(&present[..2], (m(3), m(19))), expected[..1]);
        assert_eq!(tables_of(&[present[0], present[1], (m(17), m(19))], (m(3), m(19))), expected);
    }

    #[test]
    fn runs_are_taken_out_of_runs() {
        let cases: [(&[Run], &[Run], &[Run]); 6] = [
            (&[(1, 9)], &[], &[(1, 9)]),
            (&[(1, 9)], &[(0, 10)], &[]),
            (&[(1, 9)], &[(3, 4), (5, 6)], &[(1, 3), (4, 5), (6, 9)]),
            (&[(1, 4), (6, 9)], &[(3, 7)], &[(1, 3), (7, 9)]),
            (&[(1, 4), (6, 9), (10, 12)], &[(0, 2), (3, 11)], &[(2, 3), (11, 12)]),
            (&[(5, 6)], &[(1, 2), (8, 9)], &[(5, 6)]),
        ];
        for (runs, others, rest) in cases {
            assert_eq!(without(runs, others), rest, "{runs:?} without {others:?}");
        }
    }

    #[test]
    fn pages_that_are_not_there_are_told() {
        let mut room = vec![0u8; 64 * 4096];
        let start = (room.as_ptr() as u64).next_multiple_of(4096);
        let skip = (start - room.as_ptr() as u64) as usize;
        room[skip + 8 * 4096] = 1;
        let Ok(mut pages) = Pages::of(std::process::id() as pid_t) else { return };
        let range = (start, start + 16 * 4096);
        let touched = (start + 8 * 4096, start + 9 * 4096);
        // A kernel without it says so.
        if let Ok(absent) = pages.absent(range) {
            assert!(without(&[touched], &absent) == [touched], "{absent:?}");
            assert!(pages.since(range, true).unwrap().is_none(), "nobody watches it");
            assert!(!pages.is_watched(range));
            let watched = Room::new();
            let watch = watched.watch();
            assert!(pages.is_watched(watched.range()));
            drop(watch);
            assert!(!pages.is_watched(watched.range()));
            // Nothing is there at all.
            let gone = watched.range();
            drop(watched);
            assert!(!pages.is_watched(gone));
        }
        assert_eq!(room[skip + 8 * 4096], 1);
    }
}
