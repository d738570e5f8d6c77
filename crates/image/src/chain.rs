//! Images that build on each other: the newest says what has changed, the ones before it hold the
//! rest.

use crate::codec::Codec;
use crate::error::ImageError;
use crate::folder::Folder;
use crate::layout::Extent;
use crate::manifest::{FileEntry, Manifest};
use crate::read::ImageFile;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Longest chain of images that is followed, in images.
const MAX_CHAIN_LEN: usize = 10_000;

/// Returns the image in `folder` and those that it builds on, itself first. Each parent is the one
/// that its child was written for; to root, all must be one user's.
pub fn chain(folder: &Path) -> Result<Vec<(Folder, Manifest)>, ImageError> {
    let first = match Folder::open(folder) {
        Err(error) if error.is_missing() => {
            return Err(ImageError::NoImage { path: folder.to_owned() });
        }
        other => other?,
    };
    let manifest = Manifest::of(&first)?;
    let mut chain = vec![(first, manifest)];
    while let Some((child, manifest)) = chain.last()
        && let Some(parent) = manifest.parent.clone()
    {
        let (path, expected) = (child.path().to_owned(), parent.checksum);
        let (opened, place) = (child.parent(&parent), parent.place());
        let again = |(seen, _): &(Folder, Manifest)| seen.path().ends_with(&place);
        let parent = place.display().to_string();
        if chain.len() > MAX_CHAIN_LEN || chain.iter().any(again) {
            return Err(ImageError::Circle { path, parent });
        }
        let next = match opened.and_then(|next| Manifest::of(&next).map(|found| (next, found))) {
            Err(ImageError::NoImage { .. }) => return Err(ImageError::NoParent { path, parent }),
            Err(error) if error.is_missing() => return Err(ImageError::NoParent { path, parent }),
            Ok((_, other)) if other.identity() != expected => {
                return Err(ImageError::OtherParent { path, parent });
            }
            other => other?,
        };
        next.0.is_of(child)?;
        chain.push(next);
    }
    Ok(chain)
}

/// Returns the name of the file of the same image that `name` builds on, if the image has one:
/// memory that was written while the program still ran. What it wrote later is in `name`.
pub fn ahead_of(name: &str) -> String {
    format!("{}{AHEAD}", name.strip_suffix(KIMG).unwrap_or(name))
}

/// Returns the name of the file that has the memory of the process `pid`.
pub fn process_file(pid: i32) -> String {
    format!("{pid}{KIMG}")
}

/// Returns whether that is such a file's name.
pub(crate) fn is_ahead(name: &str) -> bool {
    name.ends_with(AHEAD)
}

const KIMG: &str = ".kimg";
const AHEAD: &str = "-ahead.kimg";

/// Files of a chain of images that were opened lately: many processes have memory of the same few
/// others.
#[derive(Debug, Default)]
pub struct Opened(Mutex<Vec<(PathBuf, Arc<ImageFile>)>>);

impl Opened {
    /// Most files that are kept open: each holds a descriptor.
    const MAX_OPEN: usize = 32;

    /// Returns the file of the image in `folder` that `entry` describes.
    fn file(&self, folder: &Folder, entry: &FileEntry) -> Result<Arc<ImageFile>, ImageError> {
        let path = folder.path().join(&entry.name);
        let mut recent = self.recent();
        // The last is the one that was asked for last.
        let file = match recent.iter().position(|(at, _)| *at == path) {
            Some(index) => recent.remove(index).1,
            None => Arc::new(ImageFile::of(folder, entry)?),
        };
        if recent.len() == Opened::MAX_OPEN {
            recent.remove(0);
        }
        recent.push((path, file.clone()));
        Ok(file)
    }

    /// Closes those that nobody reads.
    pub fn clear(&self) {
        self.recent().clear();
    }

    fn recent(&self) -> MutexGuard<'_, Vec<(PathBuf, Arc<ImageFile>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A file of an image, and those of its name in the images that it builds on.
#[derive(Debug)]
pub struct Layers {
    /// The newest first; then those of other processes.
    files: Vec<Arc<ImageFile>>,
    /// How many of them are its own.
    own: usize,
    /// Which of them has what another process stores, by layer and number of the process.
    others: BTreeMap<(usize, i32), usize>,
}

/// Memory that one extent has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// Which file it is in: [`Layers::file`].
    pub layer: usize,
    pub extent: Extent,
    /// What counts of it, from address to address, in order; the rest has been written anew since.
    pub parts: Vec<(u64, u64)>,
}

impl Layers {
    /// Opens the file `name` of the first image of `chain`, the one of the same image that it
    /// builds on, and of as many others as they build on.
    pub fn open(chain: &[(Folder, Manifest)], name: &str) -> Result<Layers, ImageError> {
        Layers::open_among(chain, name, &Opened::default())
    }

    /// Opens the same; those that were `opened`, all of this chain, are not opened once more.
    pub fn open_among(
        chain: &[(Folder, Manifest)],
        name: &str,
        opened: &Opened,
    ) -> Result<Layers, ImageError> {
        let (mut layers, mut images) = (Layers::of(Vec::new()), Vec::new());
        'all: for (folder, manifest) in chain {
            let path = folder.path().join(name);
            let missing = || ImageError::Damaged {
                path: path.clone(),
                offset: 0,
                what: "the image lacks the file, though it or another builds on it",
            };
            let entry = manifest.file(name).ok_or_else(missing)?;
            let ahead = manifest.file(&ahead_of(name));
            for entry in std::iter::once(entry).chain(ahead) {
                layers.files.push(opened.file(folder, entry)?);
                images.push((folder, manifest));
                if !layers.files.last().is_some_and(|file| builds_on_another(file)) {
                    break 'all;
                }
            }
        }
        let last = layers.files.last().ok_or(ImageError::NoImage { path: PathBuf::new() })?;
        if builds_on_another(last) {
            let what = "it builds on another image, which its manifest does not name";
            return Err(last.damaged(0, what));
        }
        layers.own = layers.files.len();
        layers.open_others(&images, opened)?;
        Ok(layers)
    }

    fn of(files: Vec<ImageFile>) -> Layers {
        let files: Vec<Arc<ImageFile>> = files.into_iter().map(Arc::new).collect();
        Layers { own: files.len(), files, others: BTreeMap::new() }
    }

    /// Opens the files of other processes that its own refer to; `images` has the image of each of
    /// its own. They must store what is looked for there: they refer to nobody.
    fn open_others(
        &mut self,
        images: &[(&Folder, &Manifest)],
        opened: &Opened,
    ) -> Result<(), ImageError> {
        for (layer, (folder, manifest)) in images.iter().enumerate() {
            let ahead = is_ahead_of(self.files[layer].path());
            let named = |pid| if ahead { ahead_of(&process_file(pid)) } else { process_file(pid) };
            let pids: BTreeSet<i32> =
                self.files[layer].memory_of(0).iter().filter_map(Extent::process).collect();
            for pid in pids {
                let lacks = "the image lacks the file of a process that has memory of this one";
                let entry = manifest.file(&named(pid));
                let entry = entry.ok_or_else(|| self.files[layer].damaged(0, lacks))?;
                self.others.insert((layer, pid), self.files.len());
                self.files.push(opened.file(folder, entry)?);
            }
            let extents = self.files[layer].memory_of(0);
            for extent in extents.iter().filter(|extent| extent.codec == Codec::Process) {
                let range = (extent.address, extent.address + extent.decoded);
                let stored: u64 =
                    self.stored(layer, extent, &[range]).iter().map(Source::len).sum();
                if stored != extent.decoded {
                    let what = "the process that is to store some of its memory does not";
                    return Err(self.files[layer].damaged(0, what));
                }
            }
        }
        Ok(())
    }

    /// Returns what another process stores of `parts`, which `extent` refers to.
    fn stored(&self, layer: usize, extent: &Extent, parts: &[(u64, u64)]) -> Vec<Source> {
        let other = extent.process().and_then(|pid| self.others.get(&(layer, pid)));
        let Some(other) = other.copied() else { return Vec::new() };
        let all = self.files[other].memory_of(0);
        let mut sources = Vec::new();
        for (start, end) in parts {
            let from = all.partition_point(|extent| extent.address + extent.decoded <= *start);
            let inside = all[from..].iter().take_while(|extent| extent.address < *end);
            for extent in inside.filter(|e| !matches!(e.codec, Codec::Parent | Codec::Process)) {
                let part =
                    (extent.address.max(*start), (extent.address + extent.decoded).min(*end));
                sources.push(Source { layer: other, extent: *extent, parts: vec![part] });
            }
        }
        sources
    }

    /// Opens the file at `path`, which `entry` describes, and as many others as it builds on. The
    /// manifest of its image is read only if it builds on any.
    pub fn of_file(path: &Path, entry: &FileEntry) -> Result<Layers, ImageError> {
        let folder = Folder::open(path.parent().unwrap_or(Path::new(".")))?;
        folder.is_believed()?;
        let file = ImageFile::of(&folder, entry)?;
        if !needs_another(&file) {
            return Ok(Layers::of(vec![file]));
        }
        let chain = chain(folder.path())?;
        match chain[0].1.file(&entry.name) {
            Some(named) if named == entry => Layers::open(&chain, &entry.name),
            _ => Err(file.damaged(0, "it is not the one that its image's manifest names")),
        }
    }

    /// Returns the layers of files that were opened one by one, the newest first: each builds on
    /// the next, as those of [`Layers::own`] do.
    ///
    /// # Errors
    /// There is none, or one of them needs a file that is not among them.
    pub fn of_opened(files: Vec<ImageFile>) -> Result<Layers, ImageError> {
        let last = files.last().ok_or(ImageError::NoImage { path: PathBuf::new() })?;
        if builds_on_another(last) {
            return Err(last.damaged(0, "it builds on another image, which nothing names"));
        }
        let of_process = |file: &&ImageFile| file.memory().any(|e| e.codec == Codec::Process);
        if let Some(file) = files.iter().find(of_process) {
            return Err(file.damaged(0, "some of its memory is a process's, which nothing names"));
        }
        Ok(Layers::of(files))
    }

    /// Returns its own files, the newest first: each has what those after it have not.
    pub fn own(&self) -> &[Arc<ImageFile>] {
        &self.files[..self.own]
    }

    /// Has the kernel read its own files ahead.
    pub fn read_ahead(&self) {
        self.own().iter().for_each(|file| file.read_ahead());
    }

    pub fn file(&self, layer: usize) -> &ImageFile {
        &self.files[layer]
    }

    /// Returns all that there is of the memory of `object`: of each page the newest, and each once.
    pub fn sources(&self, object: u64) -> Vec<Source> {
        let (mut sources, mut others) = (Vec::new(), BTreeMap::new());
        let mut wanted = vec![(0, u64::MAX)];
        for (layer, file) in self.files[..self.own].iter().enumerate() {
            let mut older = Vec::new();
            let mut rest = wanted.iter().copied().peekable();
            for extent in file.memory_of(object) {
                let parts = overlap(&mut rest, extent);
                match extent.codec {
                    Codec::Parent => older.extend(parts),
                    Codec::Process => {
                        for source in self.stored(layer, extent, &parts) {
                            join(&mut sources, &mut others, source);
                        }
                    }
                    _ if parts.is_empty() => {}
                    _ => sources.push(Source { layer, extent: *extent, parts }),
                }
            }
            wanted = older;
        }
        sources
    }
}

impl Source {
    /// Returns the bytes that count.
    fn len(&self) -> u64 {
        self.parts.iter().map(|(start, end)| end - start).sum()
    }
}

/// Adds `source` to `sources`, as one with what is of the same extent: it is to be read once.
/// `places` has those that were added so, by layer and offset in the file.
fn join(
    sources: &mut Vec<Source>,
    places: &mut BTreeMap<(usize, u64, u64), usize>,
    source: Source,
) {
    let key = (source.layer, source.extent.offset, source.extent.address);
    match places.get(&key) {
        Some(place) => sources[*place].parts.extend(source.parts),
        None => {
            places.insert(key, sources.len());
            sources.push(source);
        }
    }
}

fn builds_on_another(file: &ImageFile) -> bool {
    file.memory().any(|extent| extent.codec == Codec::Parent)
}

/// Returns whether some of its memory is in another file, of this or of another image.
fn needs_another(file: &ImageFile) -> bool {
    file.memory().any(|extent| matches!(extent.codec, Codec::Parent | Codec::Process))
}

fn is_ahead_of(path: &Path) -> bool {
    path.file_name().and_then(|name| name.to_str()).is_some_and(is_ahead)
}

/// Returns what `extent` has of the ranges in `wanted`, which are in order; those that end before
/// it are taken out.
fn overlap(
    wanted: &mut std::iter::Peekable<impl Iterator<Item = (u64, u64)> + Clone>,
    extent: &Extent,
) -> Vec<(u64, u64)> {
    let (start, end) = (extent.address, extent.address + extent.decoded);
    while wanted.next_if(|(_, last)| *last <= start).is_some() {}
    let inside = wanted.clone().take_while(|(first, _)| *first < end);
    inside.map(|(first, last)| (first.max(start), last.min(end))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Choice, Encoded, ImageWriter, Parent, encode};
    use std::fs;

    struct Folder(PathBuf);
    impl Folder {
        fn new(name: &str) -> Folder {
            let path = std::env::temp_dir().join(format!("kchain-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            fs::create_dir(&path).unwrap();
            Folder(path)
        }

        fn clear(&self, name: &str) {
            fs::remove_dir_all(self.0.join(name)).unwrap();
        }

        /// An image of pages, each its number and what fills it; `None`: as in the parent.
        fn image(&self, name: &str, parent: Option<&str>, pages: &[(u64, u64, Option<u8>)]) {
            let folder = self.0.join(name);
            fs::create_dir(&folder).unwrap();
            let mut manifest = Manifest::new("j".into(), vec![], 7);
            manifest.files.push(self.file(name, "9.kimg", pages));
            manifest.parent = parent.map(|parent| {
                let above = self.0.join(parent);
                Manifest::read(&above).unwrap().as_parent(&above).unwrap()
            });
            manifest.write(&folder).unwrap();
        }

        fn file(&self, image: &str, name: &str, pages: &[(u64, u64, Option<u8>)]) -> FileEntry {
            let writer = ImageWriter::create(&self.0.join(image).join(name)).unwrap();
            for (page, count, fill) in pages {
                let bytes = vec![fill.unwrap_or(0); (count * 4096) as usize];
                let encoded = match fill {
                    Some(_) => encode(&bytes, Choice::Auto),
                    None => Encoded::parent(),
                };
                writer.memory(0, page << 12, count << 12, &encoded).unwrap();
            }
            writer.finish().unwrap()
        }

        /// Returns what fills each page.
        fn restored(&self, name: &str) -> Vec<(u64, u8)> {
            let layers = Layers::open(&chain(&self.0.join(name)).unwrap(), "9.kimg").unwrap();
            let mut pages = Vec::new();
            for source in layers.sources(0) {
                let extent = &source.extent;
                let mut bytes = vec![1; extent.decoded as usize];
                layers.file(source.layer).read(extent, &mut Vec::new(), &mut bytes).unwrap();
                for (start, end) in source.parts {
                    for page in (start >> 12)..(end >> 12) {
                        pages.push((page, bytes[((page << 12) - extent.address) as usize]));
                    }
                }
            }
            pages.sort_unstable();
            pages
        }
    }
    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn the_newest_bytes_of_each_page_win() {
        let folder = Folder::new("newest");
        folder.image("j-1", None, &[(1, 8, Some(1)), (20, 4, Some(2))]);
        let second = [(1, 2, None), (3, 1, Some(3)), (4, 3, None), (8, 1, Some(4)), (20, 4, None)];
        folder.image("j-2", Some("j-1"), &second);
        // Pages 20 and 21 are gone, 22 to 30 are as they were as far as they were there.
        folder.image(
            "j-3",
            Some("j-2"),
            &[(1, 4, None), (5, 1, Some(0)), (6, 3, None), (22, 9, None)],
        );
        let one =
            |pages: &[u64], fill: u8| pages.iter().map(|page| (*page, fill)).collect::<Vec<_>>();
        let second = [one(&[1, 2], 1), one(&[3], 3), one(&[4, 5, 6], 1), one(&[8], 4)].concat();
        assert_eq!(folder.restored("j-2"), [second, one(&[20, 21, 22, 23], 2)].concat());
        let third = [(1, 1), (2, 1), (3, 3), (4, 1), (5, 0), (6, 1), (8, 4), (22, 2), (23, 2)];
        assert_eq!(folder.restored("j-3"), third);
        assert_eq!(folder.restored("j-1").len(), 12);
    }

    #[test]
    fn what_was_written_ahead_lies_below_its_own_image() {
        let folder = Folder::new("ahead");
        let fill = |name: &str, pages: &[(u64, u64, Option<u8>)]| folder.file("j-1", name, pages);
        fs::create_dir(folder.0.join("j-1")).unwrap();
        let mut manifest = Manifest::new("j".into(), vec![], 7);
        // Page 4 was written later, pages 7 and 8 are gone.
        manifest.files.push(fill("9.kimg", &[(1, 3, None), (4, 1, Some(5)), (5, 2, None)]));
        manifest.files.push(fill(&ahead_of("9.kimg"), &[(1, 8, Some(1))]));
        manifest.write(&folder.0.join("j-1")).unwrap();
        let expected = [(1, 1), (2, 1), (3, 1), (4, 5), (5, 1), (6, 1)];
        assert_eq!(folder.restored("j-1"), expected);
        // Another builds on both.
        folder.image("j-2", Some("j-1"), &[(1, 1, Some(6)), (2, 4, None)]);
        assert_eq!(folder.restored("j-2"), [(1, 6), (2, 1), (3, 1), (4, 5), (5, 1)]);
        assert_eq!(crate::verify(&folder.0.join("j-2"), 2).unwrap().files, 3);
        // A byte of it, its end, or all of it may be lost.
        let path = folder.0.join("j-1/9-ahead.kimg");
        let good = fs::read(&path).unwrap();
        let mut bad = good.clone();
        bad[good.len() - 60] ^= 1;
        for bad in [&bad[..], &good[..good.len() - 1]] {
            fs::write(&path, bad).unwrap();
            let error = crate::verify(&folder.0.join("j-1"), 2).unwrap_err()[0].to_string();
            assert!(error.contains("9-ahead.kimg"), "{error}");
        }
        fs::remove_file(&path).unwrap();
        let error = crate::verify(&folder.0.join("j-2"), 2).unwrap_err()[0].to_string();
        assert!(error.contains("9-ahead.kimg"), "{error}");
    }

    /// An image of process 5, which stores pages 1 to 8 but 3, and of 9, which has 2 and 3 itself
    /// and refers to 5 for pages `of`.
    fn forked(folder: &Folder, name: &str, ahead: bool, of: &[(u64, u64, i32)]) {
        let image = folder.0.join(name);
        fs::create_dir(&image).unwrap();
        let mut manifest = Manifest::new("j".into(), vec![], 7);
        let named = |name: &str| if ahead { ahead_of(name) } else { name.to_owned() };
        let stored = [(1, 2, Some(1)), (4, 1, Some(4)), (5, 4, Some(5))];
        manifest.files.push(folder.file(name, &named("5.kimg"), &stored));
        let writer = ImageWriter::create(&image.join(named("9.kimg"))).unwrap();
        let page = encode(&[9; 8192], Choice::Auto);
        writer.memory(0, 2 << 12, 8192, &page).unwrap();
        of.iter().for_each(|(at, count, pid)| writer.of_process(at << 12, count << 12, *pid));
        manifest.files.push(writer.finish().unwrap());
        if ahead {
            // Page 6 was written later.
            let own = [(1, 5, None), (6, 1, Some(6)), (7, 2, None)];
            manifest.files.push(folder.file(name, "9.kimg", &own));
        }
        manifest.forked = true;
        manifest.write(&image).unwrap();
        assert_eq!(Manifest::read(&image).unwrap().version, 3);
    }

    #[test]
    fn what_another_process_stores_is_found_there() {
        let folder = Folder::new("forked");
        let of = [(1, 1, 5), (4, 3, 5), (7, 2, 5)];
        forked(&folder, "j-1", false, &of);
        let all = [(1, 1), (2, 9), (3, 9), (4, 4), (5, 5), (6, 5), (7, 5), (8, 5)];
        assert_eq!(folder.restored("j-1"), all);
        // Each extent is read once, though it is referred to in pieces.
        let layers = Layers::open(&chain(&folder.0.join("j-1")).unwrap(), "9.kimg").unwrap();
        assert_eq!(layers.sources(0).len(), 4);
        folder.image("j-2", Some("j-1"), &[(1, 4, None), (5, 1, Some(7)), (8, 1, None)]);
        let next = [(1, 1), (2, 9), (3, 9), (4, 4), (5, 7), (8, 5)];
        assert_eq!(folder.restored("j-2"), next);
        forked(&folder, "j-3", true, &of);
        let all = all.map(|(page, fill)| if page == 6 { (6, 6) } else { (page, fill) });
        assert_eq!(folder.restored("j-3"), all);
        ["j-1", "j-2", "j-3"]
            .iter()
            .for_each(|name| assert!(crate::verify(&folder.0.join(name), 2).is_ok(), "{name}"));
    }

    #[test]
    fn what_several_have_memory_of_is_opened_once() {
        let folder = Folder::new("opened");
        forked(&folder, "j-1", false, &[(1, 1, 5)]);
        let (chain, opened) = (chain(&folder.0.join("j-1")).unwrap(), Opened::default());
        let other = Layers::open_among(&chain, "9.kimg", &opened).unwrap();
        let own = Layers::open_among(&chain, "5.kimg", &opened).unwrap();
        assert!(Arc::ptr_eq(&own.files[0], &other.files[1]));
        let count = |file: &Arc<ImageFile>| Arc::strong_count(file);
        assert_eq!((count(&own.files[0]), count(&other.files[0])), (3, 2));
        opened.clear();
        assert_eq!((count(&own.files[0]), count(&other.files[0])), (2, 1));
        // No more are kept than descriptors may be.
        let more = (0..Opened::MAX_OPEN)
            .map(|_| opened.recent().push((PathBuf::new(), own.files[0].clone())));
        assert_eq!(more.count(), Opened::MAX_OPEN);
        drop(Layers::open_among(&chain, "9.kimg", &opened).unwrap());
        assert_eq!(opened.recent().len(), Opened::MAX_OPEN);
    }

    #[test]
    fn a_process_that_stores_nothing_there_is_told() {
        let folder = Folder::new("unstored");
        // No such process, pages that it lacks, itself, and nobody.
        let bad = [[(1, 1, 6)], [(8, 2, 5)], [(1, 1, 9)], [(1, 1, -5)], [(1, 1, 0)]];
        for (number, bad) in bad.iter().enumerate() {
            let name = format!("j-{number}");
            let made = std::panic::catch_unwind(|| forked(&folder, &name, false, bad));
            if made.is_err() {
                // A writer finds what no reader would take.
                assert!(bad[0].2 < 1, "{bad:?}");
                continue;
            }
            let opened = Layers::open(&chain(&folder.0.join(&name)).unwrap(), "9.kimg");
            assert!(matches!(opened, Err(ImageError::Damaged { .. })), "{bad:?}: {opened:?}");
            assert!(crate::verify(&folder.0.join(&name), 2).is_err());
        }
    }

    #[test]
    fn a_parent_must_be_the_one_that_it_was() {
        let folder = Folder::new("parent");
        folder.image("j-1", None, &[(1, 2, Some(1))]);
        folder.image("j-2", Some("j-1"), &[(1, 2, None)]);
        let (first, second) = (folder.0.join("j-1"), folder.0.join("j-2"));
        assert_eq!(chain(&second).unwrap().len(), 2);
        fs::remove_dir_all(&first).unwrap();
        let gone = chain(&second).unwrap_err();
        assert!(matches!(&gone, ImageError::NoParent { parent, .. } if parent == "j-1"), "{gone}");
        folder.image("j-1", None, &[(1, 2, Some(2))]);
        let other = chain(&second).unwrap_err();
        assert!(matches!(&other, ImageError::OtherParent { parent, .. } if parent == "j-1"));
        assert!(crate::verify(&second, 2).is_err());
    }

    /// Both have the same name, in images of the whole job that lie beside each other.
    #[test]
    fn a_part_builds_on_one_of_another_whole() {
        let folder = Folder::new("parts");
        for whole in ["j-1", "j-2", "j-3"] {
            fs::create_dir(folder.0.join(whole)).unwrap();
        }
        let part = |whole: &str| format!("{whole}/j.0-1");
        folder.image(&part("j-1"), None, &[(1, 2, Some(1))]);
        let builds = |on: &str, whole: &str| {
            let above = folder.0.join(part(on));
            let parent = Manifest::read(&above).unwrap().as_parent(&above).unwrap();
            let at = folder.0.join(part(whole));
            let mut manifest = Manifest::read(&at).unwrap();
            manifest.parent = Some(Parent { whole: Some(on.to_owned()), ..parent });
            manifest.write(&at).unwrap();
        };
        for (on, whole) in [("j-1", "j-2"), ("j-2", "j-3")] {
            folder.image(&part(whole), None, &[(1, 1, None), (2, 1, Some(2))]);
            builds(on, whole);
        }
        assert_eq!(chain(&folder.0.join(part("j-3"))).unwrap().len(), 3);
        assert_eq!(folder.restored(&part("j-3")), [(1, 1), (2, 2)]);
        // A folder of one's own as the working one, named without those above.
        assert_eq!(chain(&folder.0.join("j-3/../j-3/./j.0-1")).unwrap().len(), 3);
        // As whoever knows nothing of such parents would have it.
        let text = fs::read_to_string(folder.0.join(part("j-3")).join("manifest.json")).unwrap();
        assert!(text.contains("\"version\": 4"), "{text}");
        // One that builds on itself, and one that leads out of the folder.
        builds("j-3", "j-3");
        assert!(matches!(
            chain(&folder.0.join(part("j-3"))),
            Err(ImageError::Circle { .. } | ImageError::OtherParent { .. })
        ));
        for bad in ["..", "a/b", ""] {
            let at = folder.0.join(part("j-2"));
            let mut manifest = Manifest::read(&folder.0.join(part("j-1"))).unwrap();
            manifest.parent =
                Some(Parent { name: "j.0-1".into(), whole: Some(bad.into()), checksum: 0 });
            manifest.write(&at).unwrap();
            assert!(matches!(chain(&at), Err(ImageError::Damaged { .. })), "{bad}");
            folder.clear(&part("j-2"));
            folder.image(&part("j-2"), None, &[(1, 1, Some(1))]);
        }
    }

    #[test]
    fn a_parent_that_lacks_what_is_needed_is_named() {
        let folder = Folder::new("lacks");
        folder.image("j-1", None, &[(1, 2, Some(1))]);
        folder.image("j-2", Some("j-1"), &[(1, 2, None)]);
        let alone = [chain(&folder.0.join("j-2")).unwrap().swap_remove(0)];
        let error = Layers::open(&alone, "9.kimg").unwrap_err();
        assert!(matches!(error, ImageError::Damaged { .. }), "{error}");
        let mut chain = chain(&folder.0.join("j-2")).unwrap();
        chain[1].1.files.clear();
        let error = Layers::open(&chain, "9.kimg").unwrap_err().to_string();
        assert!(error.contains("j-1/9.kimg"), "{error}");
    }
}
