//! Reading all of an image, and of those that it builds on, to know that it can be restarted.

use crate::chain::{Layers, chain};
use crate::error::ImageError;
use crate::layout::{Extent, FOOTER, HEADER, RECORD};
use crate::manifest::{FileEntry, Manifest};
use crate::read::ImageFile;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

/// Errors that are told of one image.
const MOST_ERRORS: usize = 1000;

/// What was read and found good.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Verified {
    /// This image, and those that it builds on.
    pub images: usize,
    pub files: usize,
    /// Stored bytes that were read.
    pub bytes: u64,
}

/// Reads and checks every byte of the image in `folder` and of those that it builds on, with that
/// many threads. All that is damaged is told, by file and offset.
pub fn verify(folder: &Path, threads: usize) -> Result<Verified, Vec<ImageError>> {
    let chain = chain(folder).map_err(|error| vec![error])?;
    if !chain[0].1.parts.is_empty() {
        return verify_parts(folder, &chain[0].1, threads);
    }
    let entries: Vec<(&Path, &FileEntry)> =
        chain.iter().flat_map(|(folder, m)| m.files.iter().map(move |e| (&**folder, e))).collect();
    let mut errors = Vec::new();
    let mut files = Vec::new();
    for (folder, entry) in entries.iter().filter(|(_, entry)| !entry.is_plain()) {
        let file = ImageFile::open(&folder.join(&entry.name), Some(entry));
        match file.and_then(|file| file.check_padding().map(|()| file)) {
            Ok(file) => files.push(file),
            Err(error) => errors.push(error),
        }
    }
    if errors.is_empty() {
        errors.extend(incomplete(&chain));
    }
    let plain = entries.iter().copied().filter(|(_, entry)| entry.is_plain());
    let extents = files.iter().flat_map(|file| file.extents().iter().map(move |e| (file, e)));
    let work: Vec<Work> = extents
        .filter(|(_, extent)| !extent.codec.is_empty())
        .map(|(file, extent)| Work::Extent(file, extent))
        .chain(plain.map(|(folder, entry)| Work::Plain(folder, entry)))
        .collect();
    let (bytes, more) = read_all(&work, threads);
    errors.extend(more);
    if errors.is_empty() {
        return Ok(Verified { images: chain.len(), files: entries.len(), bytes });
    }
    errors.sort_by_key(place);
    errors.truncate(MOST_ERRORS);
    Err(errors)
}

/// Each part of `whole`, which lies in `folder`.
fn verify_parts(
    folder: &Path,
    whole: &Manifest,
    threads: usize,
) -> Result<Verified, Vec<ImageError>> {
    let mut all = Verified { images: 1, ..Verified::default() };
    let mut errors = Vec::new();
    for part in &whole.parts {
        match part.check(folder).map_err(|error| vec![error]).and_then(|at| verify(&at, threads)) {
            Ok(found) => {
                all.images += found.images;
                all.files += found.files;
                all.bytes += found.bytes;
            }
            Err(more) => errors.extend(more),
        }
    }
    errors.truncate(MOST_ERRORS);
    if errors.is_empty() { Ok(all) } else { Err(errors) }
}

/// What the newest image needs and those that it builds on lack.
fn incomplete(chain: &[(PathBuf, Manifest)]) -> Vec<ImageError> {
    let images = chain.iter().map(|(_, manifest)| manifest).take(1);
    let files = images.flat_map(|manifest| &manifest.files).filter(|entry| !entry.is_plain());
    files.filter_map(|entry| Layers::open(chain, &entry.name).err()).collect()
}

fn place(error: &ImageError) -> (PathBuf, u64) {
    match error {
        ImageError::Damaged { path, offset, .. } => (path.clone(), *offset),
        ImageError::Io { path, .. } => (path.clone(), 0),
        _ => (PathBuf::new(), 0),
    }
}

/// What one thread reads at a time.
enum Work<'a> {
    Extent(&'a ImageFile, &'a Extent),
    /// A file that is kept as it is, and its folder.
    Plain(&'a Path, &'a FileEntry),
}

impl Work<'_> {
    /// Stored bytes that were read.
    fn check(&self, scratch: &mut Vec<u8>, decoded: &mut Vec<u8>) -> Result<u64, ImageError> {
        match self {
            Work::Extent(file, extent) => {
                // Bounded by what the table was checked against.
                decoded.resize(extent.decoded as usize, 0);
                file.read(extent, scratch, decoded)?;
                Ok(u64::from(extent.stored))
            }
            Work::Plain(folder, entry) => entry.verify_plain(folder).map(|()| entry.bytes),
        }
    }
}

/// Bytes read, and what was wrong.
fn read_all(work: &[Work<'_>], threads: usize) -> (u64, Vec<ImageError>) {
    let next = AtomicUsize::new(0);
    let found = Mutex::new((0, Vec::new()));
    let one = || {
        let (mut scratch, mut decoded) = (Vec::new(), Vec::new());
        let (mut bytes, mut errors) = (0, Vec::new());
        while let Some(work) = work.get(next.fetch_add(1, Ordering::Relaxed)) {
            match work.check(&mut scratch, &mut decoded) {
                Ok(read) => bytes += read,
                Err(error) if errors.len() < MOST_ERRORS => errors.push(error),
                Err(_) => {}
            }
        }
        let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
        found.0 += bytes;
        found.1.extend(errors);
    };
    thread::scope(|scope| {
        for _ in 1..threads.min(work.len()) {
            scope.spawn(one);
        }
        one();
    });
    found.into_inner().unwrap_or_else(PoisonError::into_inner)
}

impl ImageFile {
    /// Whatever lies between payloads must be zero: so any byte that changed is found.
    pub(crate) fn check_padding(&self) -> Result<(), ImageError> {
        let length = self.file.metadata().map_err(ImageError::io(&self.path))?.len();
        let table = length - FOOTER - (self.extents().len() * RECORD) as u64;
        let mut taken: Vec<(u64, u64)> =
            self.extents().iter().map(|e| (e.offset, e.offset + u64::from(e.stored))).collect();
        taken.sort_unstable();
        let mut at = HEADER;
        for (start, end) in taken {
            self.check_zero(at, start)?;
            at = at.max(end);
        }
        self.check_zero(at, table)
    }

    fn check_zero(&self, start: u64, end: u64) -> Result<(), ImageError> {
        let mut buffer = [0; 4096];
        let mut at = start;
        while at < end {
            let part = &mut buffer[..(end - at).min(4096) as usize];
            self.file.read_exact_at(part, at).map_err(ImageError::io(&self.path))?;
            if let Some(bad) = part.iter().position(|byte| *byte != 0) {
                return Err(self.damaged(at + bad as u64, "what lies between payloads is not zero"));
            }
            at += part.len() as u64;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Choice, ImageWriter, Parent, encode};
    use std::fs;

    struct Folder(PathBuf);
    impl Folder {
        fn new(name: &str) -> Folder {
            let path = std::env::temp_dir().join(format!("kver-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            fs::create_dir(&path).unwrap();
            Folder(path)
        }
    }
    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn noise(seed: u64, length: usize) -> Vec<u8> {
        let mut state = seed;
        let next = std::iter::repeat_with(move || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 56) as u8
        });
        next.take(length).collect()
    }

    fn image(folder: &Path, parent: Option<&str>) {
        fs::create_dir(folder).unwrap();
        let mut manifest = Manifest::new("j".into(), vec!["x".into()], 7);
        for name in ["job.kimg", "96.kimg"] {
            let writer = ImageWriter::create(&folder.join(name)).unwrap();
            writer.section(1, b"some state").unwrap();
            for page in 0..3 {
                let bytes = noise(page + 1, 4096);
                writer.memory(0, page << 12, 4096, &encode(&bytes, Choice::Auto)).unwrap();
            }
            manifest.files.push(writer.finish().unwrap());
        }
        fs::write(folder.join("file-000000.data"), noise(9, 5000)).unwrap();
        manifest.files.push(FileEntry::plain(folder, "file-000000.data").unwrap());
        manifest.parent = parent.map(|name| {
            let above = folder.parent().unwrap().join(name);
            let known = Manifest::read(&above).ok().and_then(|m| m.as_parent(&above));
            known.unwrap_or(Parent { name: name.into(), checksum: 0 })
        });
        manifest.write(folder).unwrap();
    }

    #[test]
    fn every_byte_of_every_file_counts() {
        let folder = Folder::new("every");
        let image_folder = folder.0.join("j-0001");
        image(&image_folder, None);
        let good = verify(&image_folder, 4).unwrap();
        assert_eq!((good.images, good.files), (1, 3));
        for entry in fs::read_dir(&image_folder).unwrap() {
            let path = entry.unwrap().path();
            let bytes = fs::read(&path).unwrap();
            for at in (0..bytes.len()).step_by(37).chain([bytes.len() - 1]) {
                let mut bad = bytes.clone();
                bad[at] ^= 4;
                fs::write(&path, &bad).unwrap();
                let errors = verify(&image_folder, 2).expect_err("found");
                let named = format!("{}", errors[0]);
                assert!(named.contains(path.to_str().unwrap()), "{at}: {named}");
            }
            for length in (0..bytes.len()).step_by(997) {
                fs::write(&path, &bytes[..length]).unwrap();
                assert!(verify(&image_folder, 2).is_err(), "length {length}");
            }
            fs::write(&path, &bytes).unwrap();
        }
        assert_eq!(verify(&image_folder, 1).unwrap(), good);
    }

    #[test]
    fn all_damage_is_told() {
        let folder = Folder::new("all");
        let image_folder = folder.0.join("j-0001");
        image(&image_folder, None);
        for name in ["job.kimg", "96.kimg"] {
            let mut bytes = fs::read(image_folder.join(name)).unwrap();
            bytes[4096 + 100] ^= 1;
            bytes[8192 + 100] ^= 1;
            fs::write(image_folder.join(name), bytes).unwrap();
        }
        let errors = verify(&image_folder, 3).unwrap_err();
        let places: Vec<u64> = errors.iter().map(|error| place(error).1).collect();
        assert_eq!(places, [4096, 8192, 4096, 8192], "{errors:?}");
    }

    #[test]
    fn an_image_is_as_good_as_those_that_it_builds_on() {
        let folder = Folder::new("chain");
        let (first, second) = (folder.0.join("j-0001"), folder.0.join("j-0002"));
        image(&first, None);
        image(&second, Some("j-0001"));
        assert_eq!(verify(&second, 2).unwrap().images, 2);
        let path = first.join("96.kimg");
        let length = fs::metadata(&path).unwrap().len();
        fs::File::options().write(true).open(&path).unwrap().set_len(length - 1).unwrap();
        assert!(verify(&second, 2).is_err() && verify(&first, 2).is_err());
        fs::remove_dir_all(&first).unwrap();
        let errors = verify(&second, 2).unwrap_err();
        assert!(matches!(&errors[..], [ImageError::NoParent { .. }]), "{errors:?}");
        image(&first, Some("j-0001"));
        let errors = verify(&first, 2).unwrap_err();
        assert!(matches!(&errors[..], [ImageError::Circle { .. }]), "{errors:?}");
    }
}
