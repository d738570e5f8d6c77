//! Memory that a client and its devices both see, where they are on two machines: the shared arena.
//!
//! Each end has an arena of its own, and remembers of each page the bytes that both ends had last.
//! What differs from them has been changed here, and is told to the other end, byte by byte: bytes
//! of one page that the two ends change at the same time are all kept.

use crate::client_memory;
use kedge_cuda_types::arena::{SHARED_BASE, SHARED_LEN};
use kedge_remote::{PAGE, PATCHES, PagePatch};
use kedge_wire::{Bytes, List};
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};

/// A page of what both ends had last.
type Page = [u8; PAGE];
/// A page of an arena that nobody has touched.
static ZEROS: Page = [0; PAGE];

#[derive(Debug)]
pub(crate) struct Mirror {
    /// The arena, which this process maps.
    shared: OwnedFd,
    /// By page.
    agreed: HashMap<u32, Box<Page>>,
}

impl Mirror {
    /// Of an arena in which nothing has been changed that the other end has not got.
    pub(crate) fn new(shared: OwnedFd) -> Mirror {
        Mirror { shared, agreed: HashMap::new() }
    }

    /// Finds what has been changed here, and hands it to `send`, some pages at a time.
    ///
    /// # Errors
    /// The arena cannot be looked at, or `send` fails: then the other end lacks changes for good.
    pub(crate) fn changes(
        &mut self,
        mut send: impl FnMut(List<PagePatch, PATCHES>) -> io::Result<()>,
    ) -> io::Result<()> {
        let extents = client_memory::extents(self.shared.as_fd())?;
        let mut found = self.gone(&extents);
        for page in extents.into_iter().flat_map(pages) {
            found.extend(self.change(page));
            if found.len() >= PATCHES {
                let rest = found.split_off(PATCHES);
                send(List::new(std::mem::replace(&mut found, rest)).unwrap_or_default())?;
            }
        }
        while !found.is_empty() {
            let rest = found.split_off(found.len().min(PATCHES));
            send(List::new(std::mem::replace(&mut found, rest)).unwrap_or_default())?;
        }
        Ok(())
    }

    /// Pages that held something and have been given back to the kernel: they are zero again, and
    /// looking at one would have it made anew.
    fn gone(&mut self, extents: &[Range<u64>]) -> Vec<PagePatch> {
        let there = |page: u32| {
            let offset = u64::from(page) * PAGE as u64;
            let behind = extents.partition_point(|range| range.start <= offset);
            behind.checked_sub(1).is_some_and(|at| offset < extents[at].end)
        };
        let gone = self.agreed.extract_if(|page, _| !there(*page));
        let patch = |(page, before): (u32, Box<Page>)| {
            (*before != ZEROS).then(|| difference(page, &before, &ZEROS))
        };
        gone.filter_map(patch).collect()
    }

    /// Returns what has been changed in a page; from now on both ends have it.
    fn change(&mut self, page: u32) -> Option<PagePatch> {
        let mut now = ZEROS;
        client_memory::read_shared(address(page), &mut now).ok()?;
        let agreed = self.agreed.get_mut(&page).map(|agreed| &mut **agreed);
        let before = agreed.as_deref().unwrap_or(&ZEROS);
        if now == *before {
            return None;
        }
        let patch = difference(page, before, &now);
        match agreed {
            Some(agreed) => *agreed = now,
            None => drop(self.agreed.insert(page, Box::new(now))),
        }
        Some(patch)
    }

    /// Takes what is here in a part of the arena, by offset, for what the other end has as well.
    pub(crate) fn agree(&mut self, range: Range<u64>) {
        for page in pages(range.start..range.end.min(SHARED_LEN)) {
            let mut now = ZEROS;
            if client_memory::read_shared(address(page), &mut now).is_ok() {
                self.agreed.insert(page, Box::new(now));
            }
        }
    }

    /// Takes over what the other end has changed; `false` where that is nonsense.
    #[must_use]
    pub(crate) fn apply(&mut self, patches: &[PagePatch]) -> bool {
        patches.iter().all(|patch| self.apply_one(patch).is_some())
    }

    fn apply_one(&mut self, patch: &PagePatch) -> Option<()> {
        let start = address(patch.page);
        if u64::from(patch.page) >= SHARED_LEN / PAGE as u64 {
            return None;
        }
        let agreed = self.agreed.entry(patch.page).or_insert_with(|| Box::new(ZEROS));
        for (at, bytes) in runs(patch)? {
            client_memory::write_shared(start + at as u64, bytes).ok()?;
            agreed[at..at + bytes.len()].copy_from_slice(bytes);
        }
        Some(())
    }
}

/// The pages of an extent.
fn pages(Range { start, end }: Range<u64>) -> Range<u32> {
    (start / PAGE as u64) as u32..end.div_ceil(PAGE as u64) as u32
}

fn address(page: u32) -> u64 {
    SHARED_BASE + u64::from(page) * PAGE as u64
}

/// What `now` has that `before` has not.
fn difference(page: u32, before: &Page, now: &Page) -> PagePatch {
    let (mut mask, mut bytes) = (vec![0u8; PAGE / 8], Vec::new());
    for (at, (old, new)) in before.iter().zip(now).enumerate() {
        if old != new {
            mask[at / 8] |= 1 << (at % 8);
            bytes.push(*new);
        }
    }
    if bytes.len() == PAGE {
        mask.clear();
    }
    // Both are as long as a page has bytes, at most.
    let (mask, bytes) = (Bytes::new(mask), Bytes::new(bytes));
    PagePatch { page, mask: mask.unwrap_or_default(), bytes: bytes.unwrap_or_default() }
}

/// The runs of bytes that a patch has, by their place in the page; `None` where it is nonsense.
fn runs(patch: &PagePatch) -> Option<Vec<(usize, &[u8])>> {
    if patch.mask.is_empty() {
        return (patch.bytes.len() == PAGE).then(|| vec![(0, &patch.bytes[..])]);
    }
    if patch.mask.len() != PAGE / 8 {
        return None;
    }
    let set = |at: usize| at < PAGE && patch.mask[at / 8] & 1 << (at % 8) != 0;
    let (mut found, mut at, mut taken) = (Vec::new(), 0, 0);
    while at < PAGE {
        if !set(at) {
            at += 1;
            continue;
        }
        let end = (at..=PAGE).find(|&end| !set(end))?;
        found.push((at, patch.bytes.get(taken..taken + end - at)?));
        taken += end - at;
        at = end;
    }
    (taken == patch.bytes.len()).then_some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(fill: impl Fn(usize) -> u8) -> Page {
        std::array::from_fn(fill)
    }

    fn patched(mut page: Page, patch: &PagePatch) -> Option<Page> {
        for (at, bytes) in runs(patch)? {
            page[at..at + bytes.len()].copy_from_slice(bytes);
        }
        Some(page)
    }

    #[test]
    fn a_difference_makes_one_page_the_other() {
        let noise = page(|at| ((at * 7919) >> 3) as u8);
        let sparse = page(|at| u8::from(at % 97 == 0));
        let last = page(|at| u8::from(at == PAGE - 1));
        for (before, now) in [(ZEROS, noise), (noise, sparse), (sparse, last), (last, ZEROS)] {
            assert_eq!(patched(before, &difference(1, &before, &now)), Some(now));
        }
        let full = difference(1, &ZEROS, &page(|_| 9));
        assert!(full.mask.is_empty() && full.bytes.len() == PAGE);
    }

    #[test]
    fn changes_of_both_ends_in_one_page_are_kept() {
        let (near, far) = (page(|at| u8::from(at == 100)), page(|at| 2 * u8::from(at == 101)));
        let merged = patched(near, &difference(0, &ZEROS, &far)).unwrap();
        assert_eq!((merged[100], merged[101]), (1, 2));
    }

    #[test]
    fn nonsense_is_refused() {
        let patch = |mask: Vec<u8>, bytes: Vec<u8>| PagePatch {
            page: 0,
            mask: Bytes::new(mask).unwrap(),
            bytes: Bytes::new(bytes).unwrap(),
        };
        let mut two = vec![0; PAGE / 8];
        two[PAGE / 8 - 1] = 0xc0;
        assert!(runs(&patch(two.clone(), vec![1, 2])).is_some());
        for (mask, bytes) in
            [(two.clone(), vec![1]), (two, vec![1, 2, 3]), (vec![1], vec![1]), (vec![], vec![1])]
        {
            assert!(runs(&patch(mask, bytes)).is_none());
        }
    }
}
