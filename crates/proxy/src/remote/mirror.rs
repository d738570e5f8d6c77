//! Memory that a client and its devices both see, where they are on two machines: the shared arena.
//!
//! Each end has an arena of its own, and remembers of each page the bytes that both ends had last.
//! What differs from them has been changed here, and is told to the other end, byte by byte: bytes
//! of one page that the two ends change at the same time are all kept.

use super::patch::{apply, difference};
use crate::client_memory;
use kedge_cuda_types::arena::{SHARED_BASE, SHARED_LEN};
use kedge_remote::{PAGE, PATCHES, PagePatch};
use kedge_wire::List;
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};

/// A page of what both ends had last.
pub(super) type Page = [u8; PAGE];
/// A page of an arena that nobody has touched.
pub(super) static ZEROS: Page = [0; PAGE];
/// Pages of a region, whose bytes are kept together.
const REGION: u32 = 256;

#[derive(Debug)]
pub(crate) struct Mirror {
    /// The arena, which this process maps.
    shared: OwnedFd,
    /// The bytes that both ends had last, by region; zeros where there is none.
    agreed: HashMap<u32, Box<[Page]>>,
}

/// What is to be looked at of an arena.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Scope<'a> {
    All,
    /// These parts, by offset.
    Parts(&'a [Range<u64>]),
}

/// Pages that are still to be looked at, the last first.
#[derive(Debug)]
pub(crate) struct Look(Vec<Run>);

#[derive(Debug)]
struct Run {
    pages: Range<u32>,
    /// Whether the arena held anything there when the look began. Looking at a page that it does
    /// not hold would have the kernel make one.
    there: bool,
}

impl Mirror {
    /// Of an arena in which nothing has been changed that the other end has not got.
    pub(crate) fn new(shared: OwnedFd) -> Mirror {
        Mirror { shared, agreed: HashMap::new() }
    }

    /// Begins to look for what has been changed here.
    ///
    /// # Errors
    /// The arena cannot be looked at.
    pub(crate) fn look(&self, scope: Scope<'_>) -> io::Result<Look> {
        let shared = self.shared.as_fd();
        let mut runs = Vec::new();
        match scope {
            Scope::All => {
                let extents = client_memory::extents(shared)?;
                for region in self.agreed.keys().map(|region| region * REGION) {
                    split(region..region + REGION, &extents, |run| {
                        if !run.there {
                            runs.push(run);
                        }
                    });
                }
                let all = extents.into_iter().map(|it| Run { pages: pages(it), there: true });
                runs.extend(all);
            }
            Scope::Parts(parts) => {
                for part in parts {
                    let part = part.start..part.end.min(SHARED_LEN);
                    let extents = client_memory::extents_within(shared, part.clone())?;
                    split(pages(part), &extents, |run| runs.push(run));
                }
            }
        }
        Ok(Look(runs))
    }

    /// Finds what has been changed in the next pages of a look, as much as one frame holds;
    /// nothing at its end. What is found must be sent before anybody looks again.
    pub(crate) fn next(&mut self, look: &mut Look) -> List<PagePatch, PATCHES> {
        let mut found = Vec::new();
        while let Some(run) = look.0.last_mut() {
            let Some(page) = run.pages.next() else {
                look.0.pop();
                continue;
            };
            found.extend(self.change(page, run.there));
            if found.len() == PATCHES {
                break;
            }
        }
        List::new(found).unwrap_or_default()
    }

    /// Returns what has been changed in a page; from now on both ends have it. One that held
    /// something and is not `there` has been given back to the kernel: it is zero again.
    fn change(&mut self, page: u32, there: bool) -> Option<PagePatch> {
        let mut now = ZEROS;
        if !there && self.agreed_if_any(page).is_none_or(|agreed| *agreed == ZEROS) {
            return None;
        }
        // It may have come to be since the look began: as zeros it would undo what somebody has
        // written, or what the other end has sent, meanwhile.
        if there || self.is_there(page) {
            client_memory::read_shared(address(page), &mut now).ok()?;
        }
        let agreed = self.agreed_page(page);
        if now == *agreed {
            return None;
        }
        let patch = difference(page, agreed, &now);
        *agreed = now;
        Some(patch)
    }

    fn is_there(&self, page: u32) -> bool {
        let start = u64::from(page) * PAGE as u64;
        let found = client_memory::extents_within(self.shared.as_fd(), start..start + PAGE as u64);
        found.map_or(true, |extents| !extents.is_empty())
    }

    fn agreed_if_any(&self, page: u32) -> Option<&Page> {
        Some(&self.agreed.get(&(page / REGION))?[(page % REGION) as usize])
    }

    fn agreed_page(&mut self, page: u32) -> &mut Page {
        let zeros = || vec![ZEROS; REGION as usize].into_boxed_slice();
        &mut self.agreed.entry(page / REGION).or_insert_with(zeros)[(page % REGION) as usize]
    }

    /// Takes what is here in a part of the arena, by offset, for what the other end has as well.
    pub(crate) fn agree(&mut self, range: Range<u64>) {
        for page in pages(range.start..range.end.min(SHARED_LEN)) {
            let mut now = ZEROS;
            if client_memory::read_shared(address(page), &mut now).is_ok() {
                *self.agreed_page(page) = now;
            }
        }
    }

    /// Takes over what the other end has changed; `false` where that is nonsense.
    #[must_use]
    pub(crate) fn apply(&mut self, patches: &[PagePatch]) -> bool {
        patches.iter().all(|patch| self.apply_one(patch).is_some())
    }

    fn apply_one(&mut self, patch: &PagePatch) -> Option<()> {
        if u64::from(patch.page) >= SHARED_LEN / PAGE as u64 {
            return None;
        }
        let (start, agreed) = (address(patch.page), self.agreed_page(patch.page));
        apply(patch, |at, bytes| {
            client_memory::write_shared(start + at as u64, bytes).ok()?;
            agreed[at..at + bytes.len()].copy_from_slice(bytes);
            Some(())
        })
    }
}

/// Splits pages into those that the extents have, which are in order, and those between.
fn split(range: Range<u32>, extents: &[Range<u64>], mut put: impl FnMut(Run)) {
    let mut at = range.start;
    let first = extents.partition_point(|it| it.end <= u64::from(at) * PAGE as u64);
    for extent in extents[first..].iter().cloned().map(pages) {
        if extent.start >= range.end {
            break;
        }
        let (start, end) = (extent.start.max(at), extent.end.min(range.end));
        put(Run { pages: at..start, there: false });
        put(Run { pages: start..end, there: true });
        at = end;
    }
    put(Run { pages: at..range.end, there: false });
}

/// The pages of an extent.
fn pages(Range { start, end }: Range<u64>) -> Range<u32> {
    (start / PAGE as u64) as u32..end.div_ceil(PAGE as u64) as u32
}

fn address(page: u32) -> u64 {
    SHARED_BASE + u64::from(page) * PAGE as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    /// A part of the arena that no other test of this process uses.
    const PART: Range<u64> = 300 << 30..(300 << 30) + (1 << 20);

    /// The other end sends a page while a look is under way that has found nothing there.
    #[test]
    fn what_comes_during_a_look_is_not_undone() {
        let arena = client_memory::arena_of_tests();
        let mut mirror = Mirror::new(arena.try_clone().unwrap());
        let page = (PART.start / PAGE as u64) as u32;
        let sent = |before: u8, now: u8| [difference(page, &[before; PAGE], &[now; PAGE])];
        assert!(mirror.apply(&sent(0, 7)));
        let hole = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: this part is this test's, which holds no reference to what it contains.
        let punched =
            unsafe { libc::fallocate(arena.as_raw_fd(), hole, PART.start as i64, PAGE as i64) };
        assert_eq!(punched, 0);
        let parts = [PART];
        let mut early = mirror.look(Scope::Parts(&parts)).unwrap();
        assert!(mirror.apply(&sent(7, 9)));
        assert!(mirror.next(&mut early).is_empty(), "it is told as zeros");
        let mut now = ZEROS;
        client_memory::read_shared(address(page), &mut now).unwrap();
        assert_eq!(now, [9; PAGE]);
        // What is still not there is zero, and told once.
        // SAFETY: as above.
        let punched =
            unsafe { libc::fallocate(arena.as_raw_fd(), hole, PART.start as i64, PAGE as i64) };
        assert_eq!(punched, 0);
        for count in [1, 0] {
            let mut look = mirror.look(Scope::Parts(&parts)).unwrap();
            assert_eq!(mirror.next(&mut look).len(), count);
        }
    }

    #[test]
    fn pages_are_there_or_between() {
        let kib = |from: u64, to: u64| from << 10..to << 10;
        let split_of = |range: Range<u32>, extents: &[Range<u64>]| {
            let mut runs = Vec::new();
            split(range, extents, |run| {
                if !run.pages.is_empty() {
                    runs.push((run.pages, run.there));
                }
            });
            runs
        };
        let extents = [kib(0, 8), kib(16, 20), kib(40, 80)];
        let expected = [(1..2, true), (2..4, false), (4..5, true), (5..10, false), (10..12, true)];
        assert_eq!(split_of(1..12, &extents), expected);
        assert_eq!(split_of(5..10, &extents), [(5..10, false)]);
        assert_eq!(split_of(20..22, &extents), [(20..22, false)]);
        assert_eq!(split_of(11..12, &extents), [(11..12, true)]);
    }
}
