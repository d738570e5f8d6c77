//! Reading all of an image, and of those that it builds on, to know that it can be restarted.

use crate::bytes::ReadFrom;
use crate::chain::{Layers, Opened, chain};
use crate::error::ImageError;
use crate::folder::Folder;
use crate::layout::{Extent, FOOTER, HEADER, RECORD};
use crate::manifest::{FileEntry, Manifest};
use crate::read::ImageFile;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// Most errors of one image that are reported.
const MAX_ERRORS: usize = 1000;
/// Stored bytes that are read together.
const TOGETHER: u64 = 2 << 20;
/// So often it is told how far it is.
const TELLING: Duration = Duration::from_millis(250);

/// What was read and found good.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Verified {
    /// This image, and those that it builds on.
    pub images: usize,
    pub files: usize,
    /// Stored bytes that were read.
    pub bytes: u64,
    /// Where all of them were read from, at least.
    pub read_from: ReadFrom,
}

impl Verified {
    fn add(&mut self, other: Verified) {
        self.images += other.images;
        self.files += other.files;
        self.bytes += other.bytes;
        self.read_from = self.read_from.max(other.read_from);
    }
}

/// Reads and checks every byte of the image in `folder` and of those that it builds on, with that
/// many threads. All that is damaged is told, by file and offset.
pub fn verify(folder: &Path, threads: usize) -> Result<Verified, Vec<ImageError>> {
    verify_telling(folder, threads, &mut |_, _| {})
}

/// Verifies as [`verify`] does; `tell` is told from time to time how many bytes have been read, and
/// of how many. Of an image of several parts, each is told of by itself.
pub fn verify_telling(
    folder: &Path,
    threads: usize,
    tell: &mut dyn FnMut(u64, u64),
) -> Result<Verified, Vec<ImageError>> {
    let chain = chain(folder).map_err(|error| vec![error])?;
    if !chain[0].1.parts.is_empty() {
        return verify_parts(folder, &chain[0].1, threads, tell);
    }
    let (files, mut errors) = open_all(&chain, |folder, entry| {
        let file = ImageFile::of(folder, entry)?;
        file.check_padding()?;
        Ok(file)
    });
    if errors.is_empty() {
        errors.extend(incomplete(&chain));
    }
    let work = Work::of(&chain, &files, false);
    let all = work.iter().map(Work::bytes).sum();
    let (mut found, more) = read_all(&work, threads, &mut |done| tell(done, all));
    errors.extend(more);
    found.images = chain.len();
    found.files = chain.iter().map(|(_, manifest)| manifest.files.len()).sum();
    conclude(found, errors)
}

/// Reads back the image in `folder`, which was just written, from its device: every stored byte of
/// it. Of those that it builds on it is looked whether they are there and have what it needs.
/// `tell` is told from time to time how many bytes have been read.
pub fn verify_written(
    folder: &Path,
    threads: usize,
    tell: &mut dyn FnMut(u64),
) -> Result<Verified, Vec<ImageError>> {
    let written = || {
        let mut chain = chain(folder)?;
        let on_device = Manifest::on_device(&chain[0].0)?;
        if on_device != chain[0].1 {
            let (path, what) = (folder.to_owned(), "the manifest on the device is another one");
            return Err(ImageError::Damaged { path, offset: 0, what });
        }
        chain[0].1 = on_device;
        Ok(chain)
    };
    let chain = written().map_err(|error| vec![error])?;
    let newest = &chain[..1];
    let (files, mut errors) = open_all(newest, ImageFile::on_device);
    if errors.is_empty() {
        errors.extend(incomplete(&chain));
    }
    let work = Work::of(newest, &files, true);
    let (mut found, more) = read_all(&work, threads, tell);
    errors.extend(more);
    (found.images, found.files) = (1, newest[0].1.files.len());
    for file in &files {
        found.read_from = found.read_from.max(file.read_from());
    }
    conclude(found, errors)
}

fn conclude(found: Verified, mut errors: Vec<ImageError>) -> Result<Verified, Vec<ImageError>> {
    if errors.is_empty() {
        return Ok(found);
    }
    errors.sort_by_key(place);
    errors.truncate(MAX_ERRORS);
    Err(errors)
}

/// Returns the files of those images that have tables, and what is wrong with them.
fn open_all(
    images: &[(Folder, Manifest)],
    open: impl Fn(&Folder, &FileEntry) -> Result<ImageFile, ImageError>,
) -> (Vec<ImageFile>, Vec<ImageError>) {
    let (mut files, mut errors) = (Vec::new(), Vec::new());
    for (folder, manifest) in images {
        for entry in manifest.files.iter().filter(|entry| !entry.is_plain()) {
            match open(folder, entry) {
                Ok(file) => files.push(file),
                Err(error) => errors.push(error),
            }
        }
    }
    (files, errors)
}

/// Returns each part of `whole`, which lies in `folder`.
fn verify_parts(
    folder: &Path,
    whole: &Manifest,
    threads: usize,
    tell: &mut dyn FnMut(u64, u64),
) -> Result<Verified, Vec<ImageError>> {
    let mut all = Verified { images: 1, read_from: ReadFrom::Memory, ..Verified::default() };
    let mut errors = Vec::new();
    for part in &whole.parts {
        let at = part.check(folder).map_err(|error| vec![error]);
        match at.and_then(|at| verify_telling(&at, threads, tell)) {
            Ok(found) => all.add(found),
            Err(more) => errors.extend(more),
        }
    }
    conclude(all, errors)
}

/// Returns what the newest image needs and those that it builds on lack.
fn incomplete(chain: &[(Folder, Manifest)]) -> Vec<ImageError> {
    let images = chain.iter().map(|(_, manifest)| manifest).take(1);
    let files = images.flat_map(|manifest| &manifest.files).filter(|entry| !entry.is_plain());
    let opened = Opened::default();
    files.filter_map(|entry| Layers::open_among(chain, &entry.name, &opened).err()).collect()
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
    /// Extents of a file that lie behind each other.
    Extents(&'a ImageFile, Vec<&'a Extent>),
    /// A file that is kept as it is, and its folder; whether it is read from the device.
    Plain(&'a Folder, &'a FileEntry, bool),
}

/// Buffers of a thread.
#[derive(Default)]
struct Buffers {
    stored: Vec<u8>,
    decoded: Vec<u8>,
}

impl<'a> Work<'a> {
    /// Returns everything that is stored in `images`, whose files with tables those are.
    fn of(
        images: &'a [(Folder, Manifest)],
        files: &'a [ImageFile],
        on_device: bool,
    ) -> Vec<Work<'a>> {
        let mut work = Vec::new();
        for file in files {
            let mut stored: Vec<&Extent> =
                file.extents().iter().filter(|extent| !extent.codec.is_empty()).collect();
            stored.sort_unstable_by_key(|extent| extent.offset);
            let mut rest = &stored[..];
            while let Some(first) = rest.first() {
                let limit = first.offset.saturating_add(TOGETHER);
                let count = rest.partition_point(|extent| end_of(extent) <= limit).max(1);
                let (some, others) = rest.split_at(count);
                work.push(Work::Extents(file, some.to_vec()));
                rest = others;
            }
        }
        for (folder, manifest) in images {
            let plain = manifest.files.iter().filter(|entry| entry.is_plain());
            work.extend(plain.map(|entry| Work::Plain(folder, entry, on_device)));
        }
        work
    }

    /// Returns how many stored bytes are to be read.
    fn bytes(&self) -> u64 {
        match self {
            Work::Extents(_, extents) => extents.iter().map(|e| u64::from(e.stored)).sum(),
            Work::Plain(_, entry, _) => entry.bytes,
        }
    }

    /// Returns what was read; each extent that is damaged is told.
    fn check(&self, buffers: &mut Buffers, errors: &mut Vec<ImageError>) -> Verified {
        let mut found = Verified::default();
        match self {
            Work::Extents(file, extents) => match read_together(file, extents, buffers) {
                Ok(bad) => {
                    found.bytes = self.bytes();
                    errors.extend(bad);
                }
                Err(error) => errors.push(error),
            },
            Work::Plain(folder, entry, false) => errors.extend(entry.verify_plain(folder).err()),
            Work::Plain(folder, entry, true) => match entry.verify_on_device(folder) {
                Ok(read_from) => found.read_from = read_from,
                Err(error) => errors.push(error),
            },
        }
        if let Work::Plain(..) = self {
            found.bytes = self.bytes();
        }
        found
    }
}

fn end_of(extent: &Extent) -> u64 {
    extent.offset.saturating_add(u64::from(extent.stored))
}

/// Reads `extents`, which are in order and lie close to each other, by one call; what is wrong with
/// them.
fn read_together(
    file: &ImageFile,
    extents: &[&Extent],
    Buffers { stored, decoded }: &mut Buffers,
) -> Result<Vec<ImageError>, ImageError> {
    let start = extents.first().map_or(0, |extent| extent.offset);
    let end = extents.iter().map(|extent| end_of(extent)).max().unwrap_or(start);
    // Bounded: by TOGETHER, or by what one extent may store.
    stored.resize((end - start) as usize, 0);
    file.file.read_exact_at(stored, start).map_err(ImageError::io(&file.path))?;
    let check = |extent: &&Extent| {
        let at = (extent.offset - start) as usize;
        // Bounded by what the table was checked against.
        decoded.resize(extent.decoded as usize, 0);
        file.check_stored(extent, &stored[at..at + extent.stored as usize], decoded).err()
    };
    Ok(extents.iter().filter_map(check).take(MAX_ERRORS).collect())
}

/// Returns what was read, and what was wrong; `tell` is told how many bytes have been read so far.
fn read_all(
    work: &[Work<'_>],
    threads: usize,
    tell: &mut dyn FnMut(u64),
) -> (Verified, Vec<ImageError>) {
    let (next, done) = (AtomicUsize::new(0), AtomicU64::new(0));
    let found = Mutex::new((Verified::default(), Vec::new()));
    let one = |_working: mpsc::Sender<()>| {
        let (mut buffers, mut errors) = (Buffers::default(), Vec::new());
        let mut all = Verified::default();
        while let Some(work) = work.get(next.fetch_add(1, Ordering::Relaxed)) {
            let read = work.check(&mut buffers, &mut errors);
            errors.truncate(MAX_ERRORS);
            done.fetch_add(read.bytes, Ordering::Relaxed);
            all.add(read);
        }
        let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
        found.0.add(all);
        found.1.extend(errors);
    };
    thread::scope(|scope| {
        let (working, ended) = mpsc::channel();
        for _ in 0..threads.clamp(1, work.len().max(1)) {
            let (one, working) = (&one, working.clone());
            scope.spawn(move || one(working));
        }
        drop(working);
        // Nothing is ever said there: it closes when the last thread is done.
        while ended.recv_timeout(TELLING) == Err(RecvTimeoutError::Timeout) {
            tell(done.load(Ordering::Relaxed));
        }
    });
    found.into_inner().unwrap_or_else(PoisonError::into_inner)
}

impl ImageFile {
    /// Checks that whatever lies between payloads is zero: so any byte that changed is found.
    pub(crate) fn check_padding(&self) -> Result<(), ImageError> {
        let length = self.file.length().map_err(ImageError::io(&self.path))?;
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
            known.unwrap_or(Parent { name: name.into(), whole: None, checksum: 0 })
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
        for errors in [verify(&second, 2), verify_written(&second, 2, &mut |_| {})] {
            let errors = errors.unwrap_err();
            assert!(matches!(&errors[..], [ImageError::NoParent { .. }]), "{errors:?}");
        }
        image(&first, Some("j-0001"));
        let errors = verify(&first, 2).unwrap_err();
        assert!(matches!(&errors[..], [ImageError::Circle { .. }]), "{errors:?}");
    }

    #[test]
    fn what_was_written_is_read_back_from_the_device() {
        let folder = Folder::new("device");
        let (first, second) = (folder.0.join("j-0001"), folder.0.join("j-0002"));
        image(&first, None);
        image(&second, Some("j-0001"));
        let good = verify_written(&second, 2, &mut |_| {}).unwrap();
        assert_eq!((good.images, good.files), (1, 3));
        assert_eq!(good.bytes, verify(&first, 1).unwrap().bytes);
        for entry in fs::read_dir(&second).unwrap() {
            let path = entry.unwrap().path();
            let bytes = fs::read(&path).unwrap();
            let payload = 4096 + 17;
            for at in [payload.min(bytes.len() / 2), bytes.len() - 1] {
                let mut bad = bytes.clone();
                bad[at] ^= 4;
                fs::write(&path, &bad).unwrap();
                let errors = verify_written(&second, 2, &mut |_| {}).expect_err("found");
                assert!(errors[0].to_string().contains(path.to_str().unwrap()), "{at}: {errors:?}");
            }
            fs::write(&path, &bytes).unwrap();
        }
        // What the parent has is looked at, its bytes are not read.
        let path = first.join("96.kimg");
        let length = fs::metadata(&path).unwrap().len();
        assert_eq!(verify_written(&second, 1, &mut |_| {}).unwrap(), good);
        fs::File::options().write(true).open(&path).unwrap().set_len(length - 1).unwrap();
        assert!(verify_written(&first, 2, &mut |_| {}).is_err());
    }
}
