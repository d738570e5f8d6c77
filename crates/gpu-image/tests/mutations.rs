//! The fuzz target's property on the committed corpus, sections of images of this version and of
//! the one before, and on mutations of it, the same each time.
#![forbid(unsafe_code)]

use kedge_gpu_image::{SECTION, check_bytes};
use kedge_image::ImageFile;
use kedge_test_corpus::Corpus;
use std::path::PathBuf;

/// Bytes of a section of which each bit is changed.
const MAX_BYTES: usize = 400;

fn corpus() -> Corpus {
    Corpus::of("gpu_image", check_bytes)
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
    corpus().has(samples());
}

#[test]
fn mutated_messages_are_refused_or_have_one_encoding() {
    corpus().each_bit(MAX_BYTES);
    corpus().mutated(1000);
}
