//! What has changed in pages of memory that both ends see, as it crosses: of each page its number,
//! how many runs of bytes have changed, where each begins and how long it is, and the bytes. Where
//! there are many runs, a bit for each byte of the page, the lowest first, is in the place of them.

use kedge_remote::PAGE;
use std::num::NonZeroUsize;
use std::ops::Range;

/// A page of what both ends had last.
pub(super) type Page = [u8; PAGE];

/// Bytes that are compared at once.
const WORD: usize = 8;
/// Bytes of the mask: a run has as many as 32 bits of it.
const MASK: usize = PAGE / 8;
/// The mask in words, of which each tells of so many bytes.
const WORDS: usize = PAGE / BITS;
const BITS: usize = u64::BITS as usize;
/// Runs that are told one by one; and what is in the place of their number where there are more.
const RUNS: usize = 128;
const MASKED: u16 = u16::MAX;

/// Appends what `now` has that `before` has not; nothing where they are equal.
pub(super) fn difference(page: u32, before: &Page, now: &Page, out: &mut Vec<u8>) {
    let changed = Changed::between(before, now);
    let Some(count) = NonZeroUsize::new(changed.count()) else { return };
    out.extend_from_slice(&page.to_le_bytes());
    if count.get() <= RUNS {
        out.extend_from_slice(&(count.get() as u16).to_le_bytes());
        for (from, to) in changed.runs() {
            out.extend_from_slice(&(from as u16).to_le_bytes());
            out.extend_from_slice(&((to - from) as u16).to_le_bytes());
        }
        changed.runs().for_each(|(from, to)| out.extend_from_slice(&now[from..to]));
    } else {
        out.extend_from_slice(&MASKED.to_le_bytes());
        changed.0.iter().for_each(|word| out.extend_from_slice(&word.to_le_bytes()));
        changed.pack(now, out);
    }
}

/// Appends that a run of bytes of a page is as it is `now`.
pub(super) fn run_of(page: u32, run: Range<usize>, now: &Page, out: &mut Vec<u8>) {
    out.extend_from_slice(&page.to_le_bytes());
    let [from, len] = [run.start, run.len()].map(|number| (number as u16).to_le_bytes());
    out.extend_from_slice(&1u16.to_le_bytes());
    out.extend_from_slice(&from);
    out.extend_from_slice(&len);
    out.extend_from_slice(&now[run]);
}

/// Which bytes of a page have changed: a bit for each, the lowest first.
struct Changed([u64; WORDS]);

impl Changed {
    fn between(before: &Page, now: &Page) -> Changed {
        let mut all = [0; WORDS];
        let before = before.as_chunks::<BITS>().0.iter();
        for (word, (old, new)) in all.iter_mut().zip(before.zip(now.as_chunks::<BITS>().0)) {
            let words = old.as_chunks::<WORD>().0.iter().zip(new.as_chunks::<WORD>().0);
            for (index, (old, new)) in words.enumerate() {
                let differs = u64::from_le_bytes(*old) ^ u64::from_le_bytes(*new);
                *word |= bytes_that_are_set(differs) << (index * WORD);
            }
        }
        Changed(all)
    }

    /// Reads a patch's mask.
    fn of_mask(mask: &[u8; MASK]) -> Changed {
        let mut all = [0; WORDS];
        for (word, bytes) in all.iter_mut().zip(mask.as_chunks::<WORD>().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        Changed(all)
    }

    /// Returns which bytes of each word of eight have changed, a bit each.
    fn words(&self) -> impl Iterator<Item = u8> {
        self.0.iter().flat_map(|word| word.to_le_bytes())
    }

    /// Appends the bytes that have changed.
    fn pack(&self, now: &Page, out: &mut Vec<u8>) {
        for (word, bits) in now.as_chunks::<WORD>().0.iter().zip(self.words()) {
            match bits {
                0 => {}
                u8::MAX => out.extend_from_slice(word),
                bits => {
                    let (mut some, mut count) = ([0; WORD], 0);
                    for (place, byte) in word.iter().enumerate() {
                        some[count] = *byte;
                        count += usize::from(bits >> place & 1);
                    }
                    out.extend_from_slice(&some[..count]);
                }
            }
        }
    }

    /// Puts bytes in the places of those that have changed; returns the bytes that follow, `None`
    /// where there are too few.
    fn unpack<'a>(&self, mut packed: &'a [u8], page: &mut Page) -> Option<&'a [u8]> {
        for (word, bits) in page.as_chunks_mut::<WORD>().0.iter_mut().zip(self.words()) {
            let (some, rest) = packed.split_at_checked(bits.count_ones() as usize)?;
            packed = rest;
            match <[u8; WORD]>::try_from(some) {
                Ok(all) => *word = all,
                Err(_) => {
                    let places = word.iter_mut().enumerate();
                    let changed = places.filter(|(place, _)| bits >> place & 1 != 0);
                    changed.zip(some).for_each(|((_, byte), new)| *byte = *new);
                }
            }
        }
        Some(packed)
    }

    /// Returns how many runs there are: each begins behind a byte that has not changed.
    fn count(&self) -> usize {
        let before = std::iter::once(0).chain(self.0.iter().map(|word| word >> (BITS - 1)));
        let begin = |(word, before): (&u64, u64)| (word & !(word << 1 | before)).count_ones();
        self.0.iter().zip(before).map(begin).sum::<u32>() as usize
    }

    /// Returns where bytes have changed, from and to.
    fn runs(&self) -> impl Iterator<Item = (usize, usize)> {
        let mut at = 0;
        std::iter::from_fn(move || {
            let from = self.next(at, |word| word)?;
            at = self.next(from, |word| !word).unwrap_or(PAGE);
            Some((from, at))
        })
    }

    /// Returns the first byte from `at` on whose bit is set, as `look` has each word.
    fn next(&self, at: usize, look: impl Fn(u64) -> u64) -> Option<usize> {
        let first = look(*self.0.get(at / BITS)?) & u64::MAX << (at % BITS);
        if first != 0 {
            return Some(at / BITS * BITS + first.trailing_zeros() as usize);
        }
        let later = self.0.iter().enumerate().skip(at / BITS + 1);
        let mut later = later.map(|(index, word)| (index, look(*word)));
        let (index, word) = later.find(|(_, word)| *word != 0)?;
        Some(index * BITS + word.trailing_zeros() as usize)
    }
}

/// Returns a bit for each byte of a word that is not zero, the lowest first.
fn bytes_that_are_set(word: u64) -> u64 {
    const LOW: u64 = 0x7f7f_7f7f_7f7f_7f7f;
    // The highest bit of each byte: it is set, or one below it is, which carries into it.
    let highest = (((word & LOW) + LOW) | word) & !LOW;
    // Moves bit 8 i + 7 to bit 56 + i: each of the factor's bits moves another one there.
    (highest >> 7).wrapping_mul(0x0102_0408_1020_4080) >> 56
}

/// What has changed in a page, as it has crossed.
pub(super) struct Patch<'a> {
    pub(super) page: u32,
    places: Places<'a>,
    /// Begins with its bytes.
    rest: &'a [u8],
}

enum Places<'a> {
    Runs(&'a [[u8; 4]]),
    Mask(&'a [u8; MASK]),
}

impl<'a> Patch<'a> {
    /// Reads the beginning of the first of some patches; `None` where it is nonsense.
    pub(super) fn begin(packed: &'a [u8]) -> Option<Patch<'a>> {
        let (page, rest) = packed.split_first_chunk()?;
        let (count, rest) = rest.split_first_chunk()?;
        let (places, rest) = match u16::from_le_bytes(*count) {
            MASKED => {
                let (mask, rest) = rest.split_first_chunk::<MASK>()?;
                (Places::Mask(mask), rest)
            }
            count => {
                let (runs, rest) = rest.split_at_checked(usize::from(count) * 4)?;
                (Places::Runs(runs.as_chunks().0), rest)
            }
        };
        Some(Patch { page: u32::from_le_bytes(*page), places, rest })
    }

    /// Has the page as both ends have it take over what has changed, and `write` store that of the
    /// page where others see it: runs of bytes, or of many runs the page and which of its bytes.
    /// Returns the patches that follow; `None` where it is nonsense, or `write` returns that.
    pub(super) fn apply(
        self,
        agreed: &mut Page,
        mut write: impl FnMut(Stored<'_>) -> Option<()>,
    ) -> Option<&'a [u8]> {
        let mut left = self.rest;
        match self.places {
            Places::Runs(runs) => {
                for [a, b, c, d] in runs {
                    let [at, len] = [[*a, *b], [*c, *d]].map(|it| u16::from_le_bytes(it).into());
                    let (bytes, rest) = left.split_at_checked(len)?;
                    left = rest;
                    agreed.get_mut(at..at + len)?.copy_from_slice(bytes);
                    write(Stored::Run(at, bytes))?;
                }
            }
            Places::Mask(mask) => {
                let changed = Changed::of_mask(mask);
                left = changed.unpack(left, agreed)?;
                write(Stored::Some(agreed, &changed.0))?;
            }
        }
        Some(left)
    }
}

/// What is to be stored of a page.
pub(super) enum Stored<'a> {
    /// Bytes from a place on.
    Run(usize, &'a [u8]),
    /// Those bytes of the page that have a bit.
    Some(&'a Page, &'a [u64; WORDS]),
}

#[cfg(test)]
mod tests {
    use super::super::mirror::ZEROS;
    use super::*;
    use kedge_remote::PATCH_HEAD;

    fn page(fill: impl Fn(usize) -> u8) -> Page {
        std::array::from_fn(fill)
    }

    fn of(before: &Page, now: &Page) -> Vec<u8> {
        let mut packed = Vec::new();
        difference(1, before, now, &mut packed);
        packed
    }

    /// What is stored of a page is what both ends have, and nothing else.
    fn patched(page: Page, packed: &[u8]) -> Option<Page> {
        let (mut agreed, mut stored) = (page, page);
        let rest = Patch::begin(packed)?.apply(&mut agreed, |what| {
            match what {
                Stored::Run(at, bytes) => stored[at..at + bytes.len()].copy_from_slice(bytes),
                Stored::Some(page, mask) => {
                    for at in (0..PAGE).filter(|at| mask[at / BITS] >> (at % BITS) & 1 != 0) {
                        stored[at] = page[at];
                    }
                }
            }
            Some(())
        })?;
        assert_eq!(stored, agreed);
        rest.is_empty().then_some(agreed)
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
            assert_eq!(patched(before, &of(&before, &now)), Some(now));
        }
        assert_eq!(of(&ZEROS, &page(|_| 9)).len(), 4 + 2 + 4 + PAGE);
        assert_eq!(of(&ZEROS, &every_other).len(), PATCH_HEAD + PAGE / 2);
        assert!(of(&noise, &noise).is_empty());
    }

    /// Patches follow each other.
    #[test]
    fn each_ends_where_the_next_begins() {
        let every_other = page(|at| (at % 2) as u8);
        let mut packed = Vec::new();
        difference(3, &ZEROS, &every_other, &mut packed);
        difference(4, &ZEROS, &page(|at| u8::from(at < 9)), &mut packed);
        let (mut rest, mut pages) = (&packed[..], Vec::new());
        while !rest.is_empty() {
            let patch = Patch::begin(rest).unwrap();
            pages.push(patch.page);
            rest = patch.apply(&mut page(|_| 0), |_| Some(())).unwrap();
        }
        assert_eq!(pages, [3, 4]);
    }

    #[test]
    fn each_byte_of_a_word_is_told_apart() {
        for bits in 0..=255u64 {
            let word = (0..8).map(|byte| ((bits >> byte) & 1) << (8 * byte + 7)).sum();
            let low = (0..8).map(|byte| ((bits >> byte) & 1) << (8 * byte)).sum();
            assert_eq!((bytes_that_are_set(word), bytes_that_are_set(low)), (bits, bits));
        }
        assert_eq!(bytes_that_are_set(0x00ff_0102_0380_7f00), 0b0111_1110);
    }

    /// Beside one byte after the other, over pages of all kinds of runs.
    #[test]
    fn runs_are_those_of_single_bytes() {
        let mut noise = 1u64;
        for round in 0..200 {
            let mut now = ZEROS;
            let mut at = 0;
            while at < PAGE {
                noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(round);
                let len = (noise >> 33) as usize % [2, 9, 70, 700][round as usize % 4] + 1;
                let end = (at + len).min(PAGE);
                now[at..end].fill((noise >> 60 & 1) as u8);
                at = end;
            }
            let changed = Changed::between(&ZEROS, &now);
            let mut single: Vec<(usize, usize)> = Vec::new();
            for at in (0..PAGE).filter(|at| now[*at] != 0) {
                match single.last_mut() {
                    Some(last) if last.1 == at => last.1 = at + 1,
                    _ => single.push((at, at + 1)),
                }
            }
            assert_eq!(changed.runs().collect::<Vec<_>>(), single);
            assert_eq!(changed.count(), single.len());
        }
    }

    #[test]
    fn bytes_that_are_equal_do_not_cross() {
        let now = page(|at| if at < 9 || at == 13 { 1 } else { 0 });
        let packed = of(&ZEROS, &now);
        assert_eq!(packed[4..14], [2, 0, 0, 0, 9, 0, 13, 0, 1, 0]);
        assert_eq!(packed[14..], [1; 10]);
    }

    #[test]
    fn changes_of_both_ends_in_one_page_are_kept() {
        let (near, far) = (page(|at| u8::from(at == 100)), page(|at| 2 * u8::from(at == 101)));
        let merged = patched(near, &of(&ZEROS, &far)).unwrap();
        assert_eq!((merged[100], merged[101]), (1, 2));
    }

    #[test]
    fn nonsense_is_refused() {
        let patch = |count: u16, places: &[u8], bytes: &[u8]| {
            let mut packed = vec![1, 0, 0, 0];
            packed.extend_from_slice(&count.to_le_bytes());
            packed.extend_from_slice(places);
            packed.extend_from_slice(bytes);
            packed
        };
        let mut two = vec![0; MASK];
        two[MASK - 1] = 0xc0;
        assert!(patched(ZEROS, &patch(MASKED, &two, &[1, 2])).is_some());
        assert!(patched(ZEROS, &patch(1, &[0xfe, 0x0f, 2, 0], &[1, 2])).is_some());
        for (count, places, bytes) in [
            (MASKED, &two[..], &[1][..]),
            (MASKED, &two, &[1, 2, 3]),
            (MASKED, &[1], &[1]),
            (0, &[], &[1]),
            (1, &[], &[1]),
            (1, &[0xff, 0x0f, 2, 0], &[1, 2]),
            (1, &[0xff, 0xff, 0xff, 0xff], &[1; 4096]),
            (1, &[0, 0, 2, 0], &[1]),
            (2, &[0, 0, 1, 0], &[1]),
        ] {
            assert!(patched(ZEROS, &patch(count, places, bytes)).is_none(), "{count} {places:?}");
        }
        assert!([0, 3, 4, 5].iter().all(|len| Patch::begin(&vec![0; *len]).is_none()));
    }
}
