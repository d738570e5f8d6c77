//! What is looked for in programs that are checked (`kedge check`), and what was found.
//!
//! Nothing of it is there for other programs: a checked program's kernels are lowered with further
//! instructions, and a block has a [`watch`] only where its program has a [`Checker`].

mod clocks;
mod shadow;
mod watch;

use crate::fault::{Fault, FaultKind};
use crate::origin::Source;
use kedge_cuda_types::CuError;
use kedge_device::{Finding, FindingKind, FindingPlace, Findings, Host};
use std::collections::HashMap;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

pub(crate) use clocks::Follow;
pub(crate) use shadow::Shadow;
pub(crate) use watch::{Touch, Watch};

/// What is looked for beyond memory errors.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Check {
    /// Races in shared memory.
    pub races: bool,
    /// Reads of memory that nobody has written.
    pub init: bool,
    /// Allocations that nobody uses.
    pub unused: bool,
}

/// Most findings that are kept; further ones are only counted.
const MAX_FINDINGS: usize = 1000;

/// The findings of one client.
#[derive(Debug)]
pub struct Checker {
    pub(crate) check: Check,
    /// What is remembered of device memory.
    pub(crate) memory: Shadow,
    found: Mutex<Found>,
    /// Whose turn it is to tell the host.
    telling: Mutex<()>,
}

#[derive(Debug, Default)]
struct Found {
    findings: Findings,
    /// Where the finding of a place is in the list.
    places: HashMap<Key, usize>,
    /// There is something that nobody was told.
    news: bool,
}

/// What makes two findings one.
type Key = (FindingKind, String, Where, Option<Where>);
type Where = (Line, Line, u32);

fn place_of(place: &FindingPlace) -> Where {
    // Instructions of one line that were made several times, by unrolling, are one place.
    let ptx_line = if place.source.is_some() { 0 } else { place.ptx_line };
    (place.source.clone(), place.inlined_at.clone(), ptx_line)
}

impl Checker {
    /// For the programs of so many devices.
    ///
    /// # Errors
    /// There is no address space for what is to be remembered.
    pub fn new(check: Check, devices: u32) -> io::Result<Checker> {
        let memory = Shadow::new(devices, check.init || check.unused)?;
        Ok(Checker { check, memory, found: Mutex::default(), telling: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Found> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a finding, or counts it where there is one of the same place.
    pub(crate) fn add(&self, finding: Finding) {
        let what = if finding.kernel.is_empty() { &finding.message } else { &finding.kernel };
        let (mut one, mut other) = (place_of(&finding.place), finding.other.as_ref().map(place_of));
        // Which of two comes first counts for nothing.
        if let Some(other) = &mut other
            && *other > one
        {
            std::mem::swap(&mut one, other);
        }
        let key = (finding.kind, what.clone(), one, other);
        let mut found = self.lock();
        let Found { findings, places, news } = &mut *found;
        *news = true;
        match places.get(&key) {
            Some(&at) => {
                let count = &mut findings.list[at].count;
                *count = count.saturating_add(finding.count);
            }
            None if findings.list.len() >= MAX_FINDINGS => findings.more += 1,
            None => {
                places.insert(key, findings.list.len());
                findings.list.push(finding);
            }
        }
    }

    /// Keeps what has ended a kernel.
    pub(crate) fn add_fault(&self, fault: &Fault) {
        let kind = match fault.kind {
            FaultKind::IllegalAddress
            | FaultKind::Misaligned
            | FaultKind::AddressSpace
            | FaultKind::StackOverflow => FindingKind::Memory,
            FaultKind::Deadlock => FindingKind::Barrier,
            _ => FindingKind::Fault,
        };
        let site = fault.site.as_deref();
        let action = site.and_then(|site| site.accessed).map(|accessed| accessed.action());
        let (source, inlined_at) = parts(site.and_then(|site| site.source.clone()));
        self.add(Finding {
            kind,
            message: fault.to_string(),
            kernel: fault.kernel_name(),
            block: fault.block,
            place: FindingPlace {
                action: action.unwrap_or_default(),
                source,
                inlined_at,
                ptx_line: fault.line,
                thread: fault.thread,
            },
            other: None,
            address: fault.address,
            count: 1,
        });
    }

    /// Keeps what has failed a stream operation that is no kernel.
    pub(crate) fn add_error(&self, error: CuError, what: &str) {
        let kind = match error {
            CuError::ILLEGAL_ADDRESS | CuError::MISALIGNED_ADDRESS => FindingKind::Memory,
            _ => FindingKind::Fault,
        };
        self.add(plain(kind, format!("{error}: {what}"), None));
    }

    /// An allocation ends.
    pub(crate) fn freed(&self, addr: u64) {
        if let Some(bytes) = self.memory.free(addr).filter(|_| self.check.unused) {
            self.add_unused(addr, bytes);
        }
    }

    /// Keeps what can only be said at the program's end.
    pub(crate) fn conclude(&self) {
        if self.check.unused {
            self.memory.unused().iter().for_each(|(addr, bytes)| self.add_unused(*addr, *bytes));
        }
    }

    fn add_unused(&self, addr: u64, bytes: u64) {
        let message =
            format!("unused device memory: nothing was written to {bytes} bytes at {addr:#x}");
        self.add(plain(FindingKind::Unused, message, Some(addr)));
    }

    /// Tells the host all findings, where there is one of which it does not know.
    pub(crate) fn tell(&self, host: &dyn Host) {
        // What is told later is newer.
        let _turn = self.telling.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = self.news() {
            host.found(&found);
        }
    }

    /// Returns all findings, where there is one of which nobody was told.
    fn news(&self) -> Option<Findings> {
        let mut found = self.lock();
        std::mem::take(&mut found.news).then(|| found.findings.clone())
    }
}

/// A line of a file.
type Line = Option<(String, u32)>;

/// A place's line, and the one into which it was inlined.
fn parts(source: Option<Source>) -> (Line, Line) {
    match source {
        Some(Source { file, line, inlined_at }) => (Some((file, line)), inlined_at),
        None => (None, None),
    }
}

/// A finding that is in no kernel.
fn plain(kind: FindingKind, message: String, address: Option<u64>) -> Finding {
    let (action, thread) = (String::new(), [0; 3]);
    let place = FindingPlace { action, source: None, inlined_at: None, ptx_line: 0, thread };
    let (kernel, block) = (String::new(), [0; 3]);
    Finding { kind, message, kernel, block, place, other: None, address, count: 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn race(line: u32, ptx_line: u32, has_source: bool) -> Finding {
        let place = FindingPlace {
            action: "read of 4 bytes".into(),
            source: has_source.then(|| ("a.cu".to_owned(), line)),
            inlined_at: None,
            ptx_line,
            thread: [1, 0, 0],
        };
        Finding {
            kind: FindingKind::Race,
            message: "a race".into(),
            kernel: "k()".into(),
            block: [0; 3],
            other: Some(place.clone()),
            place,
            address: Some(4),
            count: 2,
        }
    }

    #[test]
    fn findings_of_one_place_are_one() {
        let checker = Checker::new(Check::default(), 1).unwrap();
        assert_eq!(checker.news(), None);
        for finding in [race(1, 10, true), race(1, 11, true), race(0, 10, false)] {
            checker.add(finding);
        }
        checker.add(race(0, 11, false));
        let counts = |found: Findings| found.list.iter().map(|one| one.count).collect::<Vec<_>>();
        assert_eq!(checker.news().map(counts), Some(vec![4, 2, 2]));
        assert_eq!(checker.news(), None);
    }

    #[test]
    fn findings_are_bounded() {
        let checker = Checker::new(Check::default(), 1).unwrap();
        (0..MAX_FINDINGS as u32 + 5).for_each(|line| checker.add(race(line, 1, true)));
        let found = checker.news().unwrap();
        assert_eq!((found.list.len(), found.more), (MAX_FINDINGS, 5));
    }
}
