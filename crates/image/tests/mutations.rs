//! The fuzz target's property on the committed corpus and on mutations of it, the same each time.
#![forbid(unsafe_code)]

use kedge_image::check::check_bytes;
use kedge_image::{Choice, ImageFile, ImageWriter, MANIFEST, Manifest, PAGE, Parent, Part, encode};
use kedge_test_corpus::{Corpus, Random};
use std::fs;
use std::path::{Path, PathBuf};

fn corpus() -> Corpus {
    Corpus::of("image", check_bytes)
}

/// A folder that is removed with this.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let folder = std::env::temp_dir().join(format!("kedge-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        Folder(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Writes an image: a file with an extent of each kind and codec, and a manifest with all that one
/// may have.
fn write(folder: &Path) {
    let writer = ImageWriter::create(&folder.join("7.kimg")).unwrap();
    writer.section(7, b"state").unwrap();
    let page: Vec<u8> = (0..PAGE).map(|at| (at >> 6) as u8).collect();
    let choices = [Choice::Raw, Choice::Lz4, Choice::Zstd, Choice::Gzip, Choice::Auto];
    for (at, choice) in choices.into_iter().enumerate() {
        let bytes = if choice == Choice::Auto { vec![0; PAGE as usize] } else { page.clone() };
        writer.memory(0, at as u64 * PAGE, PAGE, &encode(&bytes, choice)).unwrap();
    }
    let mut manifest = Manifest::new("sim".into(), vec!["./sim".into(), "3".into()], 1);
    let part = Manifest::new("sim.0".into(), vec!["./sim".into()], 1);
    manifest.files.push(writer.finish().unwrap());
    manifest.parts.push(Part::of("sim.0-0001", &part));
    manifest.parent = Some(Parent { name: "sim-0000".into(), whole: None, checksum: 5 });
    manifest.write(folder).unwrap();
}

/// What a codec makes of a page may be another one's tomorrow: that the seeds are read counts.
#[test]
fn the_corpus_is_an_image() {
    if std::env::var_os("KEDGE_BLESS").is_some() {
        let folder = Folder::new("image-seeds");
        write(&folder.0);
        fs::create_dir_all(corpus().path("")).unwrap();
        fs::copy(folder.0.join("7.kimg"), corpus().path("file")).unwrap();
        fs::copy(folder.0.join(MANIFEST), corpus().path("manifest")).unwrap();
    }
    let folder = Folder::new("image-corpus");
    fs::copy(corpus().path("file"), folder.0.join("7.kimg")).unwrap();
    fs::copy(corpus().path("manifest"), folder.0.join(MANIFEST)).unwrap();
    let manifest = Manifest::read(&folder.0).unwrap();
    let file = ImageFile::open(&folder.0.join("7.kimg"), manifest.file("7.kimg")).unwrap();
    file.verify().unwrap();
    assert_eq!((file.extents().len(), manifest.parts.len()), (6, 1));
}

#[test]
fn mutations_bring_no_reader_down() {
    let mut random = Random::default();
    for seed in corpus().seeds() {
        for _ in 0..2000 {
            let mut bytes = seed.clone();
            for _ in 0..=random.below(4) {
                // The table and the footer are near the end.
                let is_near = random.below(2) == 0;
                let near = if is_near { bytes.len().min(400) } else { bytes.len() };
                let at = bytes.len() - 1 - random.below(near);
                let end = (at + 8).min(bytes.len());
                match random.below(5) {
                    0 => bytes[at..end].fill(0xff),
                    1 => bytes[at..end].fill(0),
                    2 => bytes.truncate(at.max(1)),
                    3 => bytes.insert(at, random.byte()),
                    _ => bytes[at] = random.byte(),
                }
            }
            check_bytes(&bytes);
        }
    }
}
