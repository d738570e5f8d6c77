//! The fuzz target's property on the committed corpus, sections of images of this version and of
//! the one before, and on mutations of it, the same each time.
#![forbid(unsafe_code)]

use kedge_gpu_image::{SECTION, check_bytes};
use kedge_image::ImageFile;
use std::path::PathBuf;

/// Bytes of a section of which each bit is changed.
const MOST: usize = 400;

fn corpus() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/gpu_image")
}

/// What the goldens have.
fn samples() -> Vec<(String, Vec<u8>)> {
    let golden = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let files = std::fs::read_dir(golden).unwrap().map(|entry| entry.unwrap().path());
    let section = |path: PathBuf| {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        (name, ImageFile::open(&path, None).unwrap().section(SECTION).unwrap())
    };
    files.map(section).collect()
}

#[test]
fn the_corpus_is_what_the_messages_encode_to() {
    let bless = std::env::var_os("KEDGE_BLESS").is_some();
    for (name, bytes) in samples() {
        check_bytes(&bytes);
        let path = corpus().join(&name);
        if bless {
            std::fs::create_dir_all(corpus()).unwrap();
            std::fs::write(&path, &bytes).unwrap();
        }
        let kept = std::fs::read(&path).unwrap_or_default();
        assert_eq!(kept, bytes, "{name}: the encoding changed; KEDGE_BLESS=1 accepts it");
    }
}

#[test]
fn mutated_messages_are_refused_or_have_one_encoding() {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move |below: usize| {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16) as usize % below.max(1)
    };
    for file in std::fs::read_dir(corpus()).unwrap() {
        let seed = std::fs::read(file.unwrap().path()).unwrap();
        for at in 0..seed.len().min(MOST) * 8 {
            let mut bytes = seed.clone();
            bytes[at / 8] ^= 1 << (at % 8);
            check_bytes(&bytes);
            check_bytes(&seed[..at / 8]);
        }
        for _ in 0..1000 {
            let mut bytes = seed.clone();
            for _ in 0..=random(4) {
                let at = random(bytes.len());
                let end = (at + 4).min(bytes.len());
                match random(4) {
                    0 => bytes[at..end].fill(0xff),
                    1 => bytes.insert(at, random(256) as u8),
                    2 => bytes.extend_from_within(at..end),
                    _ => bytes[at..end].fill(random(256) as u8),
                }
            }
            check_bytes(&bytes);
        }
    }
}
