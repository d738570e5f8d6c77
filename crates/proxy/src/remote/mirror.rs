//! Memory that a client and its devices both see, where they are on two machines: the shared arena.
//!
//! Each end has an arena of its own, and remembers of each page the bytes that both ends had last.
//! What differs from them has been changed here, and is told to the other end, byte by byte: bytes
//! of one page that the two ends change at the same time are all kept.

use super::Part;
use super::patch::{Page, Patch, Stored, difference, run_of};
use crate::client_memory;
use kedge_cuda_types::arena::{SHARED_BASE, SHARED_LEN};
use kedge_remote::{PAGE, PATCHES};
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};

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
    Parts(&'a [Part]),
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
    /// Bytes of the arena that cross as they are where a page of theirs has changed, and not only
    /// those that have: the other end does not change them meanwhile.
    whole: Range<u64>,
}

impl Mirror {
    /// Of an arena in which nothing has been changed that the other end has not got.
    pub(crate) fn new(shared: OwnedFd) -> Mirror {
        Mirror { shared, agreed: HashMap::new() }
    }

    /// Begins to look for what has been changed here; `alone`: the other end changes nothing, and
    /// has told all that it has changed.
    ///
    /// # Errors
    /// The arena cannot be looked at.
    pub(crate) fn look(&self, scope: Scope<'_>, alone: bool) -> io::Result<Look> {
        let shared = self.shared.as_fd();
        let mut runs = Vec::new();
        let everything = if alone { 0..SHARED_LEN } else { 0..0 };
        match scope {
            Scope::All => {
                let extents = client_memory::extents(shared)?;
                for region in self.agreed.keys().map(|region| region * REGION) {
                    split(region..region + REGION, &extents, |pages, there| {
                        if !there {
                            runs.push(Run { pages, there, whole: everything.clone() });
                        }
                    });
                }
                let whole = || everything.clone();
                let run = |it| Run { pages: pages(it), there: true, whole: whole() };
                runs.extend(extents.into_iter().map(run));
            }
            Scope::Parts(parts) => {
                for Part { range, whole } in parts {
                    let range = range.start..range.end.min(SHARED_LEN);
                    let whole = if *whole && !alone { &range } else { &everything };
                    let extents = client_memory::extents_within(shared, range.clone())?;
                    split(pages(range.clone()), &extents, |pages, there| {
                        runs.push(Run { pages, there, whole: whole.clone() });
                    });
                }
            }
        }
        Ok(Look(runs))
    }

    /// Appends what has been changed in the next pages of a look, as much as one frame holds;
    /// nothing at its end. What is found must be sent before anybody looks again.
    pub(crate) fn next(&mut self, look: &mut Look, out: &mut Vec<u8>) {
        let mut found = 0;
        while found < PATCHES
            && let Some(run) = look.0.last_mut()
        {
            let Some(page) = run.pages.next() else {
                look.0.pop();
                continue;
            };
            let (before, there, whole) = (out.len(), run.there, within(&run.whole, page));
            let _ = self.change(page, there, whole, out);
            found += usize::from(out.len() > before);
        }
    }

    /// Appends what has been changed in a page; from now on both ends have it. One that held
    /// something and is not `there` has been given back to the kernel: it is zero again.
    fn change(
        &mut self,
        page: u32,
        there: bool,
        whole: Range<usize>,
        out: &mut Vec<u8>,
    ) -> Option<()> {
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
        let (before, behind) = (whole.start, whole.end);
        if now[..before] == agreed[..before] && now[behind..] == agreed[behind..] {
            run_of(page, whole, &now, out);
        } else {
            difference(page, agreed, &now, out);
        }
        *agreed = now;
        Some(())
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
    pub(crate) fn apply(&mut self, packed: &[u8]) -> bool {
        let mut rest = Some(packed);
        while let Some(some) = rest.filter(|rest| !rest.is_empty()) {
            rest = self.apply_one(some);
        }
        rest.is_some()
    }

    /// Takes over the first patch; returns the others.
    fn apply_one<'a>(&mut self, packed: &'a [u8]) -> Option<&'a [u8]> {
        let patch = Patch::begin(packed)?;
        if u64::from(patch.page) >= SHARED_LEN / PAGE as u64 {
            return None;
        }
        let (start, agreed) = (address(patch.page), self.agreed_page(patch.page));
        patch.apply(agreed, |stored| {
            let written = match stored {
                Stored::Run(at, bytes) => client_memory::write_shared(start + at as u64, bytes),
                Stored::Some(page, mask) => client_memory::write_shared_some(start, page, mask),
            };
            written.ok()
        })
    }
}

/// Returns which part of a page some bytes of the arena are.
fn within(bytes: &Range<u64>, page: u32) -> Range<usize> {
    let start = u64::from(page) * PAGE as u64;
    let place = |offset: u64| offset.saturating_sub(start).min(PAGE as u64) as usize;
    place(bytes.start)..place(bytes.end)
}

/// Splits pages into those that the extents have, which are in order, and those between.
fn split(range: Range<u32>, extents: &[Range<u64>], mut put: impl FnMut(Range<u32>, bool)) {
    let mut at = range.start;
    let first = extents.partition_point(|it| it.end <= u64::from(at) * PAGE as u64);
    for extent in extents[first..].iter().cloned().map(pages) {
        if extent.start >= range.end {
            break;
        }
        let (start, end) = (extent.start.max(at), extent.end.min(range.end));
        put(at..start, false);
        put(start..end, true);
        at = end;
    }
    put(at..range.end, false);
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
        let sent = |before: u8, now: u8| {
            let mut packed = Vec::new();
            difference(page, &[before; PAGE], &[now; PAGE], &mut packed);
            packed
        };
        let next = |mirror: &mut Mirror, look: &mut Look| {
            let mut found = Vec::new();
            mirror.next(look, &mut found);
            found.len()
        };
        assert!(mirror.apply(&sent(0, 7)));
        let hole = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: this part is this test's, which holds no reference to what it contains.
        let punched =
            unsafe { libc::fallocate(arena.as_raw_fd(), hole, PART.start as i64, PAGE as i64) };
        assert_eq!(punched, 0);
        let parts = [Part { range: PART, whole: false }];
        let mut early = mirror.look(Scope::Parts(&parts), false).unwrap();
        assert!(mirror.apply(&sent(7, 9)));
        assert_eq!(next(&mut mirror, &mut early), 0, "it is told as zeros");
        let mut now = ZEROS;
        client_memory::read_shared(address(page), &mut now).unwrap();
        assert_eq!(now, [9; PAGE]);
        // What is still not there is zero, and told once.
        // SAFETY: as above.
        let punched =
            unsafe { libc::fallocate(arena.as_raw_fd(), hole, PART.start as i64, PAGE as i64) };
        assert_eq!(punched, 0);
        for len in [4 + 2 + 4 + PAGE, 0] {
            let mut look = mirror.look(Scope::Parts(&parts), false).unwrap();
            assert_eq!(next(&mut mirror, &mut look), len);
        }
    }

    /// Of what a copy has written all crosses as it is, and so does a page where nobody else
    /// writes; elsewhere only the bytes that have changed.
    #[test]
    fn what_one_end_alone_changes_crosses_whole() {
        const PART: Range<u64> = (300 << 30) + (1 << 20)..(300 << 30) + (2 << 20);
        let mut mirror = Mirror::new(client_memory::arena_of_tests().try_clone().unwrap());
        let mut at = PART.start;
        let mut found = |part: Part, alone: bool, written: &[(u64, u8)]| {
            // A page of its own for each.
            let moved = at..at + (part.range.end - part.range.start);
            let (start, whole) = (part.range.start, part.whole);
            for (offset, byte) in written {
                client_memory::write_shared(SHARED_BASE + at + offset, &[*byte]).unwrap();
            }
            let parts = [Part { range: moved.start + start..moved.end + start, whole }];
            let mut packed = Vec::new();
            let mut look = mirror.look(Scope::Parts(&parts), alone).unwrap();
            mirror.next(&mut look, &mut packed);
            at += PAGE as u64;
            let mut runs = Vec::new();
            let put = |stored: Stored<'_>| match stored {
                Stored::Run(from, bytes) => {
                    runs.push((from, bytes.len()));
                    Some(())
                }
                Stored::Some(..) => None,
            };
            if !packed.is_empty() {
                let patch = Patch::begin(&packed).unwrap();
                assert!(patch.apply(&mut ZEROS.clone(), put).unwrap().is_empty());
            }
            runs
        };
        let part = |range, whole| Part { range, whole };
        assert_eq!(found(part(100..200, true), false, &[(150, 1)]), [(100, 100)]);
        assert_eq!(found(part(100..200, false), false, &[(150, 1)]), [(150, 1)]);
        assert_eq!(found(part(100..200, true), false, &[]), []);
        // Somebody has changed what is beside it.
        assert_eq!(found(part(100..200, true), false, &[(150, 1), (9, 1)]), [(9, 1), (150, 1)]);
        assert_eq!(found(part(100..200, false), true, &[(150, 1), (9, 1)]), [(0, PAGE)]);
    }

    #[test]
    fn pages_are_there_or_between() {
        let kib = |from: u64, to: u64| from << 10..to << 10;
        let split_of = |range: Range<u32>, extents: &[Range<u64>]| {
            let mut runs = Vec::new();
            split(range, extents, |pages, there| {
                if !pages.is_empty() {
                    runs.push((pages, there));
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
