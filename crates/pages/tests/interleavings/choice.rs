//! What a step's number chooses: words of managed memory.

use kedge_pages::{PAGE, Pages};
use std::collections::BTreeSet;
use std::ops::Range;

/// Words of a page.
pub(crate) const WORDS: usize = 4;
/// Bytes of a word.
const WORD: u64 = PAGE / WORDS as u64;

/// A page, and which of its words.
pub(crate) type Word = (u64, usize);

/// A small generator: choices that one number makes.
pub(crate) struct Choice(pub(crate) u32);

impl Choice {
    pub(crate) fn next(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        u64::from(self.0 >> 8) % below.max(1)
    }
}

/// Pages at which something can go wrong.
pub(crate) fn interesting(pages: &Pages) -> Vec<u64> {
    let edge = (pages.start / 512 + 1) * 512;
    let all = [0, 1, 2, 3, 30].map(|at| pages.start + at).into_iter();
    let all = all.chain([edge - 1, edge, edge + 1, edge + 512, pages.end - 1]);
    let all: BTreeSet<u64> = all.filter(|page| pages.contains(page)).collect();
    all.into_iter().collect()
}

/// Chooses a word of some regions.
pub(crate) fn pick(regions: &[Pages], choice: &mut Choice) -> Option<Word> {
    let region = regions.get(choice.next(regions.len() as u64) as usize)?;
    let pages = interesting(region);
    let page = pages[choice.next(pages.len() as u64) as usize];
    Some((page, choice.next(WORDS as u64) as usize))
}

/// Words from one on, within its region.
pub(crate) fn words(regions: &[Pages], from: Word, count: usize) -> Vec<Word> {
    let end = regions.iter().find(|it| it.contains(&from.0)).map_or(0, |it| it.end);
    let first = from.0 * WORDS as u64 + from.1 as u64;
    let all = first..(first + count as u64).min(end * WORDS as u64);
    all.map(|at| (at / WORDS as u64, (at % WORDS as u64) as usize)).collect()
}

/// Returns the bytes of words that follow each other.
pub(crate) fn bytes(words: &[Word]) -> Range<u64> {
    let at = |(page, word): Word| page * PAGE + word as u64 * WORD;
    match (words.first(), words.last()) {
        (Some(first), Some(last)) => at(*first)..at(*last) + WORD,
        _ => 0..0,
    }
}

/// Returns the pages that hold bytes.
pub(crate) fn pages(bytes: &Range<u64>) -> Pages {
    bytes.start / PAGE..bytes.end.div_ceil(PAGE)
}
