//! The manifest, and the folder that it makes an image.

use crate::bytes::Bytes;
use crate::cached;
use crate::error::ImageError;
use crate::folder::Folder;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The file of an image that makes it one, which comes last.
pub const NAME: &str = "manifest.json";
/// Its name until it is whole.
pub(crate) const NEW: &str = "manifest.json.new";
const VERSION: u32 = 1;
/// Of images with files that build on others of the same image, which whoever knows the first
/// version alone would take for damaged.
const AHEAD: u32 = 2;
/// Of images of which processes have memory in the files of others.
const FORKED: u32 = 3;
/// Of parts that build on parts of another image, which whoever knows no such would look for beside
/// them.
const PARTED: u32 = 4;
/// Of images with processes that filter their system calls, which whoever knows no such would bring
/// back without.
const FILTERED: u32 = 5;
/// Longest manifest that is read.
const MAX_BYTES: u64 = 64 << 20;
/// Most images of one job in a folder.
const MAX_IMAGES: u32 = 1_000_000;

/// A file of the image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    pub name: String,
    pub bytes: u64,
    /// Of its footer, which holds the table's, which holds each extent's.
    pub checksum: u64,
}

/// What a job's devices may take, in bytes, where that was said, and must be able to do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceLimits {
    /// Of each software device: its memory.
    pub soft_memory: Option<u64>,
    /// Of each GPU: the memory that the job may have.
    #[serde(default)]
    pub gpu_memory: Option<u64>,
    /// Snapshots: of each GPU's memory, and of pinned host memory.
    #[serde(default)]
    pub cache_gpu: Option<u64>,
    #[serde(default)]
    pub cache_host: Option<u64>,
    /// Bytes a second that snapshots leave a GPU with, at most.
    #[serde(default)]
    pub drain_rate: Option<u64>,
    /// Of devices on another machine: milliseconds for which a line that was cut is tried anew.
    #[serde(default)]
    pub reconnect_ms: Option<u64>,
}

/// The devices that a job sees.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Devices {
    /// As `--gpu` takes them.
    pub gpu: String,
    #[serde(flatten)]
    pub limits: DeviceLimits,
    /// The folder of the job that was first started: its processes look for the driver and for
    /// devices there, by their environment.
    pub folder: PathBuf,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    pub version: u32,
    /// The job's name.
    pub job: String,
    pub command: Vec<String>,
    /// When it was captured, seconds since 1970.
    pub captured: u64,
    /// Process ids, the program's first.
    pub processes: Vec<i32>,
    pub files: Vec<FileEntry>,
    /// Images in the folder of this one, which together are it: those of the parts of a job.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<Part>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub devices: Option<Devices>,
    /// The image that this one builds on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<Parent>,
    /// Files of processes refer to memory that the files of others store.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub forked: bool,
    /// Processes filter their system calls.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub filtered: bool,
    /// How the job was run, in words that are its supervisor's affair.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settings: Option<serde_json::Value>,
    /// Its text's checksum, once it has been written or read.
    #[serde(skip)]
    identity: u64,
}

/// An image that others build on: a folder's name beside theirs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parent {
    pub name: String,
    /// The image of which it is a part, beside the one of which those are parts; `None`: it is
    /// beside them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub whole: Option<String>,
    /// Of its manifest, which holds those of all of it: another image under its name is none.
    pub checksum: u64,
}

impl Parent {
    /// Returns where it lies, from the folder in which the first of both is.
    pub fn place(&self) -> PathBuf {
        self.whole.as_deref().map(Path::new).unwrap_or(Path::new("")).join(&self.name)
    }
}

/// An image that is a part of another, in whose folder it lies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Its folder's name.
    pub name: String,
    /// Of its manifest.
    pub checksum: u64,
    pub processes: usize,
    pub bytes: u64,
}

impl Part {
    /// Describes the finished image in the folder `name`, whose manifest that is.
    pub fn of(name: &str, manifest: &Manifest) -> Part {
        let (checksum, bytes) = (manifest.identity(), manifest.bytes());
        let processes = manifest.processes.len();
        Part { name: name.to_owned(), checksum, processes, bytes }
    }

    /// Returns its folder, in that of the whole, if what is there is the image that was meant.
    pub fn check(&self, whole: &Path) -> Result<PathBuf, ImageError> {
        Ok(self.open(&Folder::open(whole)?)?.path().to_owned())
    }

    /// Opens the same, with root's demand that one user has the whole and its parts.
    pub fn open(&self, whole: &Folder) -> Result<Folder, ImageError> {
        let folder = whole.inside(&self.name)?;
        folder.is_of(whole)?;
        let found = Manifest::of(&folder)?;
        if found.identity() != self.checksum || !found.parts.is_empty() {
            let what = "it is another image than the one that was a part of this job";
            return Err(ImageError::Damaged { path: folder.path().join(NAME), offset: 0, what });
        }
        Ok(folder)
    }
}

impl Manifest {
    pub fn new(job: String, command: Vec<String>, captured: u64) -> Manifest {
        Manifest {
            version: VERSION,
            job,
            command,
            captured,
            processes: Vec::new(),
            files: Vec::new(),
            parts: Vec::new(),
            devices: None,
            parent: None,
            forked: false,
            filtered: false,
            settings: None,
            identity: 0,
        }
    }

    /// Makes `folder` an image: from the rename on, and not before, it is one.
    pub fn write(&mut self, folder: &Path) -> Result<(), ImageError> {
        let (path, new) = (folder.join(NAME), folder.join(NEW));
        let ahead = self.files.iter().any(|file| crate::chain::is_ahead(&file.name));
        let parted = self.parent.as_ref().is_some_and(|parent| parent.whole.is_some());
        let versions =
            [(self.filtered, FILTERED), (parted, PARTED), (self.forked, FORKED), (ahead, AHEAD)];
        let needed = versions.into_iter().find(|(is, _)| *is);
        self.version = needed.map_or(VERSION, |(_, version)| version);
        let mut text =
            serde_json::to_vec_pretty(self).map_err(|e| ImageError::io(&path)(e.into()))?;
        text.push(b'\n');
        self.identity = crate::checksum(&text);
        text.extend(format!("xxh3 {:016x}\n", self.identity).as_bytes());
        let written = || -> io::Result<()> {
            let mut file =
                File::options().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
            cached::keep(&file, cached::Part::Manifest);
            file.write_all(&text)?;
            file.sync_all()?;
            fs::rename(&new, &path)?;
            File::open(folder)?.sync_all()
        };
        written().map_err(ImageError::io(&path))
    }

    /// Reads the manifest of the image in `folder`, and checks it.
    pub fn read(folder: &Path) -> Result<Manifest, ImageError> {
        match Folder::open(folder) {
            Err(error) if error.is_missing() => {
                Err(ImageError::NoImage { path: folder.to_owned() })
            }
            other => Manifest::of(&other?),
        }
    }

    /// Reads the same of a folder that is open.
    pub fn of(folder: &Folder) -> Result<Manifest, ImageError> {
        Manifest::read_by(folder, |file| Ok(Bytes::cached(file)))
    }

    /// Reads the same, of what is on the device.
    pub(crate) fn on_device(folder: &Folder) -> Result<Manifest, ImageError> {
        Manifest::read_by(folder, Bytes::on_device)
    }

    fn read_by(
        folder: &Folder,
        open: impl FnOnce(File) -> io::Result<Bytes>,
    ) -> Result<Manifest, ImageError> {
        let path = folder.path().join(NAME);
        let file = match folder.file(NAME) {
            Err(error) if error.is_missing() => {
                return Err(ImageError::NoImage { path: folder.path().to_owned() });
            }
            other => open(other?).map_err(ImageError::io(&path))?,
        };
        let length = file.length().map_err(ImageError::io(&path))?;
        if length > MAX_BYTES {
            let (offset, what) = (0, "longer than any manifest");
            return Err(ImageError::Damaged { path, offset, what });
        }
        let mut text = vec![0; length as usize];
        file.read_exact_at(&mut text, 0).map_err(ImageError::io(&path))?;
        Manifest::parse(&text, &path)
    }

    /// Reads the text of a manifest; `path` is what errors call it.
    pub(crate) fn parse(text: &[u8], path: &Path) -> Result<Manifest, ImageError> {
        let damaged = |what| ImageError::Damaged { path: path.to_owned(), offset: 0, what };
        let line = text.len().checked_sub(22).ok_or_else(|| damaged("cut short"))?;
        let (body, line) = text.split_at(line);
        if line != format!("xxh3 {:016x}\n", crate::checksum(body)).as_bytes() {
            return Err(damaged("the manifest's checksum is wrong"));
        }
        let mut manifest: Manifest =
            serde_json::from_slice(body).map_err(|_| damaged("not a manifest's JSON"))?;
        if !(VERSION..=FILTERED).contains(&manifest.version) {
            let (found, known) = (manifest.version, FILTERED);
            return Err(ImageError::Newer { path: path.to_owned(), found, known });
        }
        let plain = |name: &str| !name.is_empty() && !name.contains('/') && !name.starts_with('.');
        if !manifest.files.iter().all(|file| plain(&file.name)) {
            return Err(damaged("a file lies outside of the image's folder"));
        }
        if !manifest.parts.iter().all(|part| plain(&part.name)) {
            return Err(damaged("a part lies outside of the image's folder"));
        }
        let beside =
            |parent: &Parent| plain(&parent.name) && parent.whole.as_deref().is_none_or(plain);
        if !manifest.parent.iter().all(beside) {
            return Err(damaged("its parent does not lie beside it"));
        }
        manifest.identity = crate::checksum(body);
        Ok(manifest)
    }

    /// Returns what another image that builds on this one, in `folder`, keeps of it.
    pub fn as_parent(&self, folder: &Path) -> Option<Parent> {
        let name = folder.file_name()?.to_str()?.to_owned();
        Some(Parent { name, whole: None, checksum: self.identity })
    }

    /// Returns the checksum of the text that was written or read; it pins all that the image has.
    pub fn identity(&self) -> u64 {
        self.identity
    }

    /// Returns the entry of the file `name`.
    pub fn file(&self, name: &str) -> Option<&FileEntry> {
        self.files.iter().find(|file| file.name == name)
    }

    /// Returns the bytes of all files.
    pub fn bytes(&self) -> u64 {
        let files = self.files.iter().map(|file| file.bytes);
        files.chain(self.parts.iter().map(|part| part.bytes)).fold(0, u64::saturating_add)
    }

    /// Returns how many processes it has, those of its parts among them.
    pub fn process_count(&self) -> usize {
        let parts = self.parts.iter().map(|part| part.processes);
        parts.fold(self.processes.len(), usize::saturating_add)
    }
}

/// Makes the folder for the next image of `job` in `parent`.
pub fn next_folder(parent: &Path, job: &str) -> Result<PathBuf, ImageError> {
    let private =
        |path: &Path, recursive| DirBuilder::new().recursive(recursive).mode(0o700).create(path);
    private(parent, true).map_err(ImageError::io(parent))?;
    let last = folders(parent)?.into_iter().filter_map(|path| number(&path, job)).max();
    for number in last.unwrap_or(0) + 1..MAX_IMAGES {
        let folder = parent.join(format!("{job}-{number:04}"));
        match private(&folder, false) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            other => return other.map(|()| folder.clone()).map_err(ImageError::io(&folder)),
        }
    }
    Err(ImageError::io(parent)(io::Error::other("it has too many images of this job")))
}

pub(crate) fn number(path: &Path, job: &str) -> Option<u32> {
    let name = path.file_name()?.to_str()?;
    name.strip_prefix(job)?.strip_prefix('-')?.parse().ok()
}

pub(crate) fn folders(parent: &Path) -> Result<Vec<PathBuf>, ImageError> {
    let entries = fs::read_dir(parent).map_err(ImageError::io(parent))?;
    Ok(entries.flatten().map(|entry| entry.path()).collect())
}

/// Orders images as they were captured; those of one second by their numbers.
pub(crate) fn age(path: &Path, manifest: &Manifest) -> (u64, Option<u32>, PathBuf) {
    (manifest.captured, number(path, &manifest.job), path.to_owned())
}

/// Returns the finished images in `parent`, the newest first.
pub fn list(parent: &Path) -> Result<Vec<(PathBuf, Manifest)>, ImageError> {
    let mut images: Vec<_> = folders(parent)?
        .into_iter()
        .filter_map(|path| Manifest::read(&path).ok().map(|manifest| (path, manifest)))
        .collect();
    images.sort_by_cached_key(|(path, manifest)| Reverse(age(path, manifest)));
    Ok(images)
}

/// Returns `path` if it is an image, else the newest one in it.
pub fn newest(path: &Path) -> Result<(PathBuf, Manifest), ImageError> {
    match Manifest::read(path) {
        Ok(manifest) => Ok((path.to_owned(), manifest)),
        Err(ImageError::NoImage { .. }) => {
            let first = list(path)?.into_iter().next();
            first.ok_or_else(|| ImageError::NoImage { path: path.to_owned() })
        }
        Err(other) => Err(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("kman-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).unwrap();
        path
    }

    #[test]
    fn an_image_counts_once_its_manifest_does() {
        let parent = folder("counts");
        let first = next_folder(&parent, "j").unwrap();
        assert!(matches!(newest(&parent), Err(ImageError::NoImage { .. })));
        let mut manifest = Manifest::new("j".into(), vec!["x".into()], 5);
        manifest.write(&first).unwrap();
        let second = next_folder(&parent, "j").unwrap();
        assert_ne!(first, second);
        assert_eq!(newest(&parent).unwrap(), (first.clone(), manifest.clone()));
        manifest.captured = 6;
        manifest.write(&second).unwrap();
        assert_eq!(newest(&parent).unwrap().0, second);
        assert_eq!(newest(&first).unwrap().0, first);
        fs::remove_dir_all(&parent).unwrap();
    }

    #[test]
    fn a_whole_is_made_of_just_the_parts_that_it_was_made_of() {
        let whole = folder("parts");
        let mut manifest = Manifest::new("j".into(), vec![], 5);
        for (number, name) in ["j.0-0001", "j.1-0001"].into_iter().enumerate() {
            fs::create_dir(whole.join(name)).unwrap();
            let mut part = Manifest::new(name.into(), vec![], number as u64);
            part.processes = vec![1, 2];
            part.write(&whole.join(name)).unwrap();
            manifest.parts.push(Part::of(name, &part));
        }
        manifest.write(&whole).unwrap();
        let read = Manifest::read(&whole).unwrap();
        assert_eq!((read.process_count(), read.parts.len()), (4, 2));
        assert!(read.parts.iter().all(|part| part.check(&whole).is_ok()));
        assert_eq!(crate::verify(&whole, 1).unwrap().images, 3);
        // Another image under the name of a part is none of it.
        let mut other = Manifest::new("j.1".into(), vec![], 9);
        other.write(&whole.join("j.1-0001")).unwrap();
        assert!(read.parts[1].check(&whole).is_err());
        assert!(crate::verify(&whole, 1).is_err());
        // Nor is a whole a part of another: that would have no end.
        manifest.write(&whole.join("j.1-0001")).unwrap();
        let again = Part::of("j.1-0001", &manifest);
        assert!(again.check(&whole).is_err());
        manifest.parts[0].name = "../x".into();
        manifest.write(&whole).unwrap();
        assert!(Manifest::read(&whole).is_err());
        fs::remove_dir_all(&whole).unwrap();
    }

    #[test]
    fn a_changed_manifest_is_refused() {
        let parent = folder("changed");
        let mut manifest = Manifest::new("j".into(), vec![], 5);
        manifest.write(&parent).unwrap();
        let good = fs::read(parent.join(NAME)).unwrap();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            assert!(Manifest::parse(&bad, &parent).is_err(), "offset {at}");
            assert!(Manifest::parse(&good[..at], &parent).is_err(), "length {at}");
        }
        let outside = "../x".to_owned();
        manifest.parent = Some(Parent { name: outside.clone(), whole: None, checksum: 0 });
        manifest.write(&parent).unwrap();
        assert!(Manifest::read(&parent).is_err());
        manifest.parent = None;
        manifest.files.push(FileEntry { name: outside, bytes: 0, checksum: 0 });
        manifest.write(&parent).unwrap();
        assert!(Manifest::read(&parent).is_err());
        fs::remove_dir_all(&parent).unwrap();
    }
}
