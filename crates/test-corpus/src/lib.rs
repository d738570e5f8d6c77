//! The committed corpus of a fuzz target (`fuzz/corpus/NAME`), for tests that hold its property
//! without a fuzzer: on what is in the corpus, and on mutations of it that are the same each time.

#![forbid(unsafe_code)]

use std::fs;
use std::path::PathBuf;

/// The corpus of a fuzz target, and the target's property, which panics where it does not hold.
#[derive(Debug)]
pub struct Corpus {
    folder: PathBuf,
    check: fn(&[u8]),
}

impl Corpus {
    pub fn of(name: &str, check: fn(&[u8])) -> Corpus {
        let corpora = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus");
        Corpus { folder: PathBuf::from(corpora).join(name), check }
    }

    /// Returns where the seed of that name lies.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Asserts that each of `samples` is in the corpus, under its name, and has the property. With
    /// `KEDGE_BLESS=1` set, writes them there first.
    ///
    /// # Panics
    /// Where one is not there, or is another one.
    pub fn has<N: AsRef<str>>(&self, samples: impl IntoIterator<Item = (N, Vec<u8>)>) {
        let bless = std::env::var_os("KEDGE_BLESS").is_some();
        for (name, bytes) in samples {
            let name = name.as_ref();
            (self.check)(&bytes);
            let path = self.path(name);
            if bless {
                fs::create_dir_all(&self.folder).expect("the corpus");
                fs::write(&path, &bytes).expect("the corpus");
            }
            let kept = fs::read(&path).unwrap_or_default();
            assert_eq!(kept, bytes, "{name}: the encoding changed; KEDGE_BLESS=1 accepts it");
        }
    }

    /// Returns what is in the corpus: samples, and whatever a fuzzer has found.
    ///
    /// # Panics
    /// Where it cannot be read, or is empty.
    pub fn seeds(&self) -> Vec<Vec<u8>> {
        let files = fs::read_dir(&self.folder).expect("the corpus");
        let read = |file: Result<fs::DirEntry, _>| fs::read(file.expect("a seed").path());
        let seeds: Vec<_> = files.map(|file| read(file).expect("a seed")).collect();
        assert!(!seeds.is_empty(), "{}: no seeds", self.folder.display());
        seeds
    }

    /// Holds the property on each seed, on each with one of the bits of its first `bytes` changed,
    /// and on each that ends within these.
    ///
    /// # Panics
    /// As [`Corpus::seeds`], and where the property does not hold.
    pub fn each_bit(&self, bytes: usize) {
        for seed in self.seeds() {
            (self.check)(&seed);
            for at in 0..seed.len().min(bytes) {
                (self.check)(&seed[..at]);
                for bit in 0..8 {
                    let mut changed = seed.clone();
                    changed[at] ^= 1 << bit;
                    (self.check)(&changed);
                }
            }
        }
    }

    /// Holds the property on mutations of each seed, so many a seed: lengths at their extremes,
    /// bytes that are changed, inserted, doubled or taken out.
    ///
    /// # Panics
    /// As [`Corpus::seeds`], and where the property does not hold.
    pub fn mutated(&self, times: usize) {
        let mut random = Random::default();
        for seed in self.seeds() {
            for _ in 0..times {
                let mut bytes = seed.clone();
                for _ in 0..=random.below(4) {
                    mutate(&mut bytes, &mut random);
                }
                (self.check)(&bytes);
            }
        }
    }
}

fn mutate(bytes: &mut Vec<u8>, random: &mut Random) {
    if bytes.is_empty() {
        return bytes.push(random.byte());
    }
    let at = random.below(bytes.len());
    let end = (at + 4).min(bytes.len());
    match random.below(9) {
        // A whole length at its largest.
        0 => bytes[at..end].fill(0xff),
        1 => bytes[at..end].fill(random.byte()),
        2 => bytes[at] ^= 1 << random.below(8),
        3 => bytes[at] = random.byte(),
        4 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][random.below(5)],
        5 => bytes.insert(at, random.byte()),
        6 => bytes.extend_from_within(at..end),
        7 => drop(bytes.drain(at..end)),
        _ => bytes.truncate(at),
    }
}

/// Numbers that are the same each time (xorshift64*).
#[derive(Debug)]
pub struct Random(u64);

impl Default for Random {
    fn default() -> Random {
        Random(0x9e37_79b9_7f4a_7c15)
    }
}

impl Random {
    /// Returns a number below `end`; 0 where that is 0.
    pub fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16) as usize % end.max(1)
    }

    pub fn byte(&mut self) -> u8 {
        self.below(256) as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn mutations_change_shorten_and_lengthen() {
        let (seed, mut random) = (b"0123456789".to_vec(), Random::default());
        let mutated = |_| {
            let mut bytes = seed.clone();
            mutate(&mut bytes, &mut random);
            bytes
        };
        let all: BTreeSet<Vec<u8>> = (0..1000).map(mutated).collect();
        let lengths: BTreeSet<usize> = all.iter().map(Vec::len).collect();
        assert!(all.len() > 300, "{}", all.len());
        assert!([0, 6, 10, 11, 14].iter().all(|length| lengths.contains(length)), "{lengths:?}");
    }

    #[test]
    #[should_panic(expected = "no seeds")]
    fn an_empty_corpus_is_no_corpus() {
        let folder = std::env::temp_dir().join(format!("kedge-corpus-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let corpus = Corpus { folder: folder.clone(), check: |_| {} };
        let seeds = std::panic::catch_unwind(|| corpus.seeds());
        fs::remove_dir(folder).unwrap();
        seeds.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    }
}
