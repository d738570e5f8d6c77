//! Images that build on each other: the newest says what has changed, the ones before it hold the rest.

use crate::codec::Codec;
use crate::error::ImageError;
use crate::folder::Folder;
use crate::layout::Extent;
use crate::manifest::{FileEntry, Manifest};
use crate::read::ImageFile;
use rustix::fd::{AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};

/// Longest chain of images that is followed.
const MOST_PARENTS: usize = 10_000;

/// The image in `folder` and those that it builds on, itself first. Each parent is the one that its child
/// was written for; to root, all must be one user's.
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
        let (path, expected, parent) = (child.path().to_owned(), parent.checksum, parent.name);
        let again = |(seen, _): &(Folder, Manifest)| same(seen.path(), Path::new(&parent));
        if chain.len() > MOST_PARENTS || chain.iter().any(again) {
            return Err(ImageError::Circle { path, parent });
        }
        let opened = child.beside(&parent);
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

fn same(a: &Path, b: &Path) -> bool {
    a.file_name() == b.file_name()
}

/// The name of the file of the same image that `name` builds on, if the image has one: memory that was written while
/// the program still ran. What it wrote later is in `name`.
pub fn ahead_of(name: &str) -> String {
    format!("{}{AHEAD}", name.strip_suffix(KIMG).unwrap_or(name))
}

/// Whether that is such a file's name.
pub(crate) fn is_ahead(name: &str) -> bool {
    name.ends_with(AHEAD)
}

const KIMG: &str = ".kimg";
const AHEAD: &str = "-ahead.kimg";

/// A file of an image, and those of its name in the images that it builds on.
#[derive(Debug)]
pub struct Layers {
    /// The newest first.
    files: Vec<ImageFile>,
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
    /// Opens the file `name` of the first image of `chain`, the one of the same image that it builds on, and of as many
    /// others as they build on.
    pub fn open(chain: &[(Folder, Manifest)], name: &str) -> Result<Layers, ImageError> {
        let mut layers = Layers { files: Vec::new() };
        for (folder, manifest) in chain {
            let path = folder.path().join(name);
            let missing = || ImageError::Damaged {
                path: path.clone(),
                offset: 0,
                what: "the image lacks the file, though it or another builds on it",
            };
            let entry = manifest.file(name).ok_or_else(missing)?;
            let ahead = manifest.file(&ahead_of(name));
            for entry in std::iter::once(entry).chain(ahead) {
                layers.files.push(ImageFile::of(folder, entry)?);
                if !layers.files.last().is_some_and(builds_on_another) {
                    return Ok(layers);
                }
            }
        }
        let last = layers.files.last().ok_or(ImageError::NoImage { path: PathBuf::new() })?;
        Err(last.damaged(0, "it builds on another image, which its manifest does not name"))
    }

    /// Opens the file at `path`, which `entry` describes, and as many others as it builds on. The manifest of its
    /// image is read only if it builds on any.
    pub fn of_file(path: &Path, entry: &FileEntry) -> Result<Layers, ImageError> {
        let folder = Folder::open(path.parent().unwrap_or(Path::new(".")))?;
        folder.is_believed()?;
        let file = ImageFile::of(&folder, entry)?;
        if !builds_on_another(&file) {
            return Ok(Layers { files: vec![file] });
        }
        let chain = chain(folder.path())?;
        match chain[0].1.file(&entry.name) {
            Some(named) if named == entry => Layers::open(&chain, &entry.name),
            _ => Err(file.damaged(0, "it is not the one that its image's manifest names")),
        }
    }

    /// The file behind a descriptor of this process, which `entry` describes and which builds on no
    /// other.
    pub fn of_descriptor(fd: BorrowedFd<'_>, entry: &FileEntry) -> Result<Layers, ImageError> {
        let path = PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()));
        let file = ImageFile::open(&path, Some(entry))?;
        if builds_on_another(&file) {
            return Err(file.damaged(0, "it builds on another image, which nothing names"));
        }
        Ok(Layers { files: vec![file] })
    }

    /// Has the kernel read all of them ahead.
    pub fn read_ahead(&self) {
        self.files.iter().for_each(ImageFile::read_ahead);
    }

    pub fn file(&self, layer: usize) -> &ImageFile {
        &self.files[layer]
    }

    /// All that there is of the memory of `object`: of each page the newest, and each once.
    pub fn sources(&self, object: u64) -> Vec<Source> {
        let mut sources = Vec::new();
        let mut wanted = vec![(0, u64::MAX)];
        for (layer, file) in self.files.iter().enumerate() {
            let mut older = Vec::new();
            let mut rest = wanted.iter().copied().peekable();
            for extent in file.memory_of(object) {
                let parts = overlap(&mut rest, extent);
                match extent.codec {
                    Codec::Parent => older.extend(parts),
                    _ if parts.is_empty() => {}
                    _ => sources.push(Source { layer, extent: *extent, parts }),
                }
            }
            wanted = older;
        }
        sources
    }
}

fn builds_on_another(file: &ImageFile) -> bool {
    file.memory().any(|extent| extent.codec == Codec::Parent)
}

/// What `extent` has of the ranges in `wanted`, which are in order; those that end before it are taken out.
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
    use crate::{Choice, Encoded, ImageWriter, encode};
    use std::fs;

    struct Folder(PathBuf);
    impl Folder {
        fn new(name: &str) -> Folder {
            let path = std::env::temp_dir().join(format!("kchain-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            fs::create_dir(&path).unwrap();
            Folder(path)
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

        /// What fills each page.
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
