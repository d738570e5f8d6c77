//! What has changed in a page of memory that both ends see.

use super::mirror::Page;
use kedge_remote::{PAGE, PagePatch, RUNS};
use kedge_wire::{Bytes, List};

/// Bytes that are compared at once.
const WORD: usize = 8;
/// Bytes of the mask: a run has as many as 32 bits of it.
const MASK: usize = PAGE / 8;

/// What `now` has that `before` has not.
pub(super) fn difference(page: u32, before: &Page, now: &Page) -> PagePatch {
    let runs = runs(before, now);
    let mut bytes = Vec::with_capacity(runs.iter().map(|run| run.1 - run.0).sum());
    runs.iter().for_each(|run| bytes.extend_from_slice(&now[run.0..run.1]));
    let (mut mask, mut list) = (Vec::new(), Vec::new());
    if runs.len() <= RUNS {
        let packed = |run: &(usize, usize)| (run.0 as u32) << 16 | (run.1 - run.0) as u32;
        list = runs.iter().map(packed).collect();
    } else {
        mask.resize(MASK, 0);
        for at in runs.iter().flat_map(|run| run.0..run.1) {
            mask[at / 8] |= 1 << (at % 8);
        }
    }
    // None is longer than its maximum.
    let (runs, mask, bytes) = (List::new(list), Bytes::new(mask), Bytes::new(bytes));
    let (runs, mask) = (runs.unwrap_or_default(), mask.unwrap_or_default());
    PagePatch { page, runs, mask, bytes: bytes.unwrap_or_default() }
}

/// Where bytes differ, from and to.
fn runs(before: &Page, now: &Page) -> Vec<(usize, usize)> {
    let mut found: Vec<(usize, usize)> = Vec::new();
    let mut add = |from: usize, to: usize| match found.last_mut() {
        Some(last) if last.1 == from => last.1 = to,
        _ => found.push((from, to)),
    };
    let words = before.as_chunks::<WORD>().0.iter().zip(now.as_chunks::<WORD>().0);
    for (index, (old, new)) in words.enumerate() {
        let at = index * WORD;
        let differs = u64::from_le_bytes(*old) ^ u64::from_le_bytes(*new);
        if differs == 0 {
            continue;
        }
        if !has_zero_byte(differs) {
            add(at, at + WORD);
            continue;
        }
        for byte in (0..WORD).filter(|byte| old[*byte] != new[*byte]) {
            add(at + byte, at + byte + 1);
        }
    }
    found
}

/// Whether a byte of it is zero, by the carry that taking one from each leaves (Hacker's Delight,
/// 6-1).
fn has_zero_byte(word: u64) -> bool {
    const ONES: u64 = 0x0101_0101_0101_0101;
    word.wrapping_sub(ONES) & !word & ONES << 7 != 0
}

/// Hands over the runs of bytes that a patch has, by their place in the page; `None` where it is
/// nonsense, or `put` returns that.
pub(super) fn apply(
    patch: &PagePatch,
    mut put: impl FnMut(usize, &[u8]) -> Option<()>,
) -> Option<()> {
    let mut left = &patch.bytes[..];
    let mut take = |at: usize, len: usize| {
        let (bytes, rest) = left.split_at_checked(len)?;
        left = rest;
        if at + len > PAGE { None } else { put(at, bytes) }
    };
    match (patch.runs.is_empty(), patch.mask.len()) {
        (false, 0) => {
            for run in patch.runs.iter() {
                take((run >> 16) as usize, (run & 0xffff) as usize)?;
            }
        }
        (true, MASK) => {
            let set = |at: usize| at < PAGE && patch.mask[at / 8] & 1 << (at % 8) != 0;
            let mut at = 0;
            while at < PAGE {
                let end = (at..=PAGE).find(|&end| !set(end))?;
                if end > at {
                    take(at, end - at)?;
                }
                at = end + 1;
            }
        }
        _ => return None,
    }
    left.is_empty().then_some(())
}

#[cfg(test)]
mod tests {
    use super::super::mirror::ZEROS;
    use super::*;

    fn page(fill: impl Fn(usize) -> u8) -> Page {
        std::array::from_fn(fill)
    }

    fn patched(mut page: Page, patch: &PagePatch) -> Option<Page> {
        apply(patch, |at, bytes| {
            page[at..at + bytes.len()].copy_from_slice(bytes);
            Some(())
        })?;
        Some(page)
    }

    #[test]
    fn a_difference_makes_one_page_the_other() {
        let noise = page(|at| ((at * 7919) >> 3) as u8);
        let sparse = page(|at| u8::from(at % 97 == 0));
        let every_other = page(|at| (at % 2) as u8);
        let last = page(|at| u8::from(at == PAGE - 1));
        for (before, now) in [
            (ZEROS, noise),
            (noise, sparse),
            (sparse, every_other),
            (every_other, last),
            (last, ZEROS),
        ] {
            assert_eq!(patched(before, &difference(1, &before, &now)), Some(now));
        }
        let full = difference(1, &ZEROS, &page(|_| 9));
        assert_eq!((&full.runs[..], full.bytes.len()), (&[PAGE as u32][..], PAGE));
        let odd = difference(1, &ZEROS, &every_other);
        assert_eq!((odd.runs.len(), odd.mask.len(), odd.bytes.len()), (0, MASK, PAGE / 2));
    }

    #[test]
    fn bytes_that_are_equal_do_not_cross() {
        let now = page(|at| if at < 9 || at == 13 { 1 } else { 0 });
        let patch = difference(0, &ZEROS, &now);
        assert_eq!(&patch.runs[..], [9, 13 << 16 | 1]);
    }

    #[test]
    fn changes_of_both_ends_in_one_page_are_kept() {
        let (near, far) = (page(|at| u8::from(at == 100)), page(|at| 2 * u8::from(at == 101)));
        let merged = patched(near, &difference(0, &ZEROS, &far)).unwrap();
        assert_eq!((merged[100], merged[101]), (1, 2));
    }

    #[test]
    fn nonsense_is_refused() {
        let patch = |runs: Vec<u32>, mask: Vec<u8>, bytes: Vec<u8>| PagePatch {
            page: 0,
            runs: List::new(runs).unwrap(),
            mask: Bytes::new(mask).unwrap(),
            bytes: Bytes::new(bytes).unwrap(),
        };
        let mut two = vec![0; MASK];
        two[MASK - 1] = 0xc0;
        assert!(patched(ZEROS, &patch(vec![], two.clone(), vec![1, 2])).is_some());
        assert!(patched(ZEROS, &patch(vec![4094 << 16 | 2], vec![], vec![1, 2])).is_some());
        for (runs, mask, bytes) in [
            (vec![], two.clone(), vec![1]),
            (vec![], two.clone(), vec![1, 2, 3]),
            (vec![], vec![1], vec![1]),
            (vec![], vec![], vec![1]),
            (vec![1], two, vec![1]),
            (vec![4095 << 16 | 2], vec![], vec![1, 2]),
            (vec![u32::MAX], vec![], vec![1; 4096]),
            (vec![2], vec![], vec![1]),
            (vec![2], vec![], vec![1, 2, 3]),
        ] {
            assert!(patched(ZEROS, &patch(runs, mask, bytes)).is_none());
        }
    }
}
