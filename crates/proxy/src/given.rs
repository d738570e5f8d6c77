//! The files of an image that a proxy has been given to read: by descriptors, which the supervisor
//! has opened. Nothing is opened here, and no name leads anywhere: names are for errors, and for
//! the files' entries in the image.

use crate::error::RestoreError;
use kedge_control::proxy::StoredFile;
use kedge_cuda_types::arena::MAX_DEVICES;
use kedge_image::{FileEntry, ImageError, ImageFile, Layers, is_file_name};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// Most files that a client can come back from: of each of its places, as many images as build on
/// each other.
const MAX_FILES: usize = 16 << 10;

/// All that a client's devices come back from.
#[derive(Debug, Default)]
pub(crate) struct Given {
    named: Vec<StoredFile>,
    fds: Vec<OwnedFd>,
}

/// The layers of one file.
#[derive(Debug)]
pub(crate) struct GivenFile {
    /// What the image has of the newest.
    pub(crate) entry: FileEntry,
    pub(crate) layers: Layers,
}

impl Given {
    /// Returns whether there may be more.
    pub(crate) fn has_room(&self) -> bool {
        self.named.len() < MAX_FILES
    }

    /// Takes some more.
    pub(crate) fn add(&mut self, files: Vec<StoredFile>, fds: Vec<OwnedFd>) {
        self.named.extend(files);
        self.fds.extend(fds);
    }

    /// Returns what the newest of the client's own is called: by its image and its name.
    pub(crate) fn shown(&self) -> PathBuf {
        self.named.first().map(shown).unwrap_or_default()
    }

    /// Checks all of them: the client's own, and those of its places in order.
    ///
    /// # Errors
    /// A name could lead elsewhere; a descriptor is missing, or none of the file that it should be;
    /// or one builds on another that has not been given.
    pub(crate) fn open(self) -> Result<(GivenFile, Vec<GivenFile>), RestoreError> {
        if self.fds.len() != self.named.len() {
            return Err(RestoreError::Descriptors);
        }
        let mut all: Vec<(FileEntry, Vec<ImageFile>)> = Vec::new();
        for (file, fd) in self.named.into_iter().zip(self.fds) {
            check_names(&file)?;
            let (of, path) = (file.of as usize, shown(&file));
            let name = file.name.into_inner();
            let entry = FileEntry { name, bytes: file.bytes, checksum: file.checksum };
            let opened = ImageFile::of_descriptor(File::from(fd), &path, Some(&entry))?;
            match all.len().checked_sub(of) {
                Some(0) if of <= MAX_DEVICES as usize => all.push((entry, vec![opened])),
                Some(1) => all[of].1.push(opened),
                _ => return Err(RestoreError::Damaged("its files come in disorder")),
            }
        }
        let stored = all.into_iter().map(|(entry, files)| {
            let layers = Layers::of_opened(files)?;
            layers.read_ahead();
            Ok(GivenFile { entry, layers })
        });
        let mut stored = stored.collect::<Result<Vec<GivenFile>, ImageError>>()?.into_iter();
        let own = stored.next().ok_or(RestoreError::Damaged("there is no file of it"))?;
        Ok((own, stored.collect()))
    }
}

/// What errors call a file.
fn shown(file: &StoredFile) -> PathBuf {
    Path::new(&*file.image).join(&*file.name)
}

fn check_names(file: &StoredFile) -> Result<(), RestoreError> {
    match [&*file.image, &*file.name].into_iter().find(|name| !is_file_name(name)) {
        None => Ok(()),
        Some(name) => Err(RestoreError::NoName(name.escape_debug().to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_image::{Choice, Encoded, ImageWriter, PAGE, encode};
    use kedge_wire::Text;

    fn text<const MAX: usize>(text: &str) -> Text<MAX> {
        Text::truncated(text.to_owned())
    }

    /// A file in memory, whose second page is in the one that it builds on.
    fn file(of: u32, image: &str, name: &str, builds: bool) -> (StoredFile, OwnedFd) {
        let (writer, file) = ImageWriter::in_memory(name).unwrap();
        let page = vec![image.len() as u8; PAGE as usize];
        writer.memory(1, 0, PAGE, &encode(&page, Choice::Raw)).unwrap();
        let second = if builds { Encoded::parent() } else { encode(&page, Choice::Raw) };
        writer.memory(1, PAGE, PAGE, &second).unwrap();
        let FileEntry { bytes, checksum, .. } = writer.finish().unwrap();
        (StoredFile { of, image: text(image), name: text(name), bytes, checksum }, file.into())
    }

    fn given(files: impl IntoIterator<Item = (StoredFile, OwnedFd)>) -> Given {
        let mut given = Given::default();
        let (named, fds): (Vec<StoredFile>, Vec<OwnedFd>) = files.into_iter().unzip();
        given.add(named, fds);
        given
    }

    fn refused(given: Given) -> String {
        given.open().unwrap_err().to_string()
    }

    #[test]
    fn files_of_several_images_and_places_are_read_by_their_descriptors() {
        let given = given([
            file(0, "j-2", "gpu-7.kimg", false),
            file(1, "j-2", "gpu-7-place-0.kimg", true),
            file(1, "j-1", "gpu-7-place-0.kimg", false),
            file(2, "j-2", "gpu-7-place-1.kimg", false),
        ]);
        assert_eq!(given.shown(), Path::new("j-2/gpu-7.kimg"));
        let (own, places) = given.open().unwrap();
        assert_eq!(own.entry.name, "gpu-7.kimg");
        let told = |stored: &GivenFile| (stored.entry.name.clone(), stored.layers.own().len());
        let [first, second] = &places[..] else { panic!("{places:?}") };
        assert_eq!(told(first), ("gpu-7-place-0.kimg".to_owned(), 2));
        assert_eq!(told(second), ("gpu-7-place-1.kimg".to_owned(), 1));
    }

    #[test]
    fn names_that_could_lead_elsewhere_are_refused() {
        for bad in ["", ".", "..", "../gpu-7.kimg", "/etc/shadow", "a/b", "a\0b"] {
            for (image, name) in [(bad, "gpu-7.kimg"), ("j-1", bad)] {
                let (stored, fd) = file(0, "j-1", "gpu-7.kimg", false);
                let stored = StoredFile { image: text(image), name: text(name), ..stored };
                let why = refused(given([(stored, fd)]));
                assert!(why.contains("is no name of a file"), "{image} {name}: {why}");
            }
        }
    }

    #[test]
    fn what_is_no_regular_file_is_refused() {
        let (reading, _writing) = std::io::pipe().unwrap();
        let folder = File::open("/").unwrap();
        let device = File::open("/dev/zero").unwrap();
        for other in [OwnedFd::from(reading), folder.into(), device.into()] {
            let (stored, _) = file(0, "j-1", "gpu-7.kimg", false);
            let why = refused(given([(stored, other)]));
            assert!(why.contains("j-1/gpu-7.kimg") && why.contains("no regular file"), "{why}");
        }
    }

    #[test]
    fn what_is_missing_or_another_is_refused() {
        let fine = || file(0, "j-1", "gpu-7.kimg", false);
        // No file at all; no descriptor, as where there are too many open.
        assert!(refused(Given::default()).contains("no file of it"));
        let mut without = given([fine()]);
        without.fds.clear();
        assert!(refused(without).contains("descriptors"));
        // One that builds on another; another file than the one that is named.
        let alone = refused(given([file(0, "j-2", "gpu-7.kimg", true)]));
        assert!(alone.contains("which nothing names"), "{alone}");
        let swapped = (fine().0, file(0, "longer", "gpu-7.kimg", false).1);
        assert!(refused(given([swapped])).contains("the footer is not the one"));
        // Of places that are not in order.
        for order in [&[1][..], &[0, 2], &[0, 1, 0]] {
            let files = order.iter().map(|of| file(*of, "j-1", "gpu-7.kimg", false));
            assert!(refused(given(files)).contains("disorder"), "{order:?}");
        }
        let mut many = given([fine()]);
        assert!(many.has_room());
        many.add(vec![fine().0; MAX_FILES], Vec::new());
        assert!(!many.has_room());
    }
}
