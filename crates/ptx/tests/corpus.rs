//! Replays the fuzz targets' corpus, then mutations of it: damaged input gives errors, never
//! panics, endless loops or memory without bound.

use std::fs;
use std::path::Path;

use kedge_ptx::check::{check_fatbin, check_text};

/// Mutations of each file. `KEDGE_FUZZ_ROUNDS` sets another number.
const ROUNDS: u32 = 2000;

/// A repeatable source of numbers (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound.max(1) as u64) as usize
    }

    /// A range of `bytes`, up to `longest`.
    fn range(&mut self, bytes: &[u8], longest: usize) -> std::ops::Range<usize> {
        let start = self.below(bytes.len() + 1);
        start..(start + self.below(longest)).min(bytes.len())
    }
}

fn corpus(name: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(name);
    let mut paths: Vec<_> = fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.unwrap().path())
        .collect();
    paths.sort();
    assert!(!paths.is_empty(), "{} is empty", folder.display());
    paths.iter().map(|path| fs::read(path).unwrap()).collect()
}

/// One change: bytes replaced, removed, doubled, or taken from another file.
fn mutate(bytes: &mut Vec<u8>, all: &[Vec<u8>], random: &mut Random) {
    const SMALL: usize = 24;
    match random.below(6) {
        0 if !bytes.is_empty() => {
            let at = random.below(bytes.len());
            bytes[at] ^= 1 << random.below(8);
        }
        1 if !bytes.is_empty() => {
            let at = random.below(bytes.len());
            let tokens = b"{}[]()<>,;:|!-+%$._0x9\"/*@=?~\0\xff";
            bytes[at] = tokens[random.below(tokens.len())];
        }
        2 => {
            let range = random.range(bytes, SMALL);
            bytes.drain(range);
        }
        3 => {
            let copy = bytes[random.range(bytes, SMALL)].to_vec();
            let at = random.below(bytes.len() + 1);
            bytes.splice(at..at, copy);
        }
        4 => {
            let other = &all[random.below(all.len())];
            let copy = other[random.range(other, 4 * SMALL)].to_vec();
            let range = random.range(bytes, SMALL);
            bytes.splice(range, copy);
        }
        _ => bytes.truncate(random.below(bytes.len() + 1)),
    }
}

fn replay(name: &str, check: fn(&[u8])) {
    let rounds = std::env::var("KEDGE_FUZZ_ROUNDS").ok().and_then(|rounds| rounds.parse().ok());
    let all = corpus(name);
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for file in &all {
        check(file);
        for _ in 0..rounds.unwrap_or(ROUNDS) {
            let mut bytes = file.clone();
            for _ in 0..=random.below(4) {
                mutate(&mut bytes, &all, &mut random);
            }
            check(&bytes);
        }
    }
}

#[test]
fn texts() {
    replay("ptx_parse", check_text);
}

#[test]
fn fatbins() {
    replay("fatbin", check_fatbin);
}

#[test]
fn the_corpus_itself_is_sound() {
    for text in corpus("ptx_parse") {
        let text = String::from_utf8(text).unwrap();
        let module = kedge_ptx::parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        kedge_ptx::link(vec![module]).unwrap();
    }
    for container in corpus("fatbin") {
        let images = kedge_ptx::fatbin::images(&container).unwrap();
        let image = kedge_ptx::fatbin::select_ptx(&images, 90).unwrap();
        kedge_ptx::parse(&image.text().unwrap()).unwrap();
    }
}
