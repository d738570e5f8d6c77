//! What the names of mapped files lead to, each looked up once while all is stopped.

use crate::maps::Mapping;
use crate::state::MappedFile;
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// What a name leads to.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) inode: u64,
    pub(super) character_device: bool,
    pub(super) file: MappedFile,
}

/// The processes of a job map the same libraries: a lookup by name for each of their mappings would
/// be most of what a checkpoint asks the kernel.
#[derive(Debug, Default)]
pub(super) struct Lookup(Mutex<BTreeMap<PathBuf, Option<Arc<Target>>>>);

impl Lookup {
    /// Returns what `path` leads to; `None` if that is nothing.
    pub(super) fn target(&self, path: &Path) -> Option<Arc<Target>> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(target) = known.get(path) {
            return target.clone();
        }
        let target = match look_up(path) {
            Ok(target) => Some(Arc::new(target)),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            // It may be there, and be told the next time.
            Err(_) => return None,
        };
        known.insert(path.to_owned(), target.clone());
        target
    }
}

fn look_up(path: &Path) -> io::Result<Target> {
    let metadata = fs::metadata(path)?;
    let written = metadata.is_file().then(|| (metadata.mtime(), metadata.mtime_nsec()));
    let bytes = metadata.len();
    Ok(Target {
        inode: metadata.ino(),
        character_device: metadata.file_type().is_char_device(),
        file: MappedFile { path: path.to_owned(), bytes, written, writable: false },
    })
}

/// The files that one process maps, each once.
#[derive(Debug)]
pub(super) struct Files<'a> {
    lookup: &'a Lookup,
    pub(super) list: Vec<MappedFile>,
    by_path: BTreeMap<&'a str, usize>,
}

impl<'a> Files<'a> {
    pub(super) fn new(lookup: &'a Lookup) -> Files<'a> {
        Files { lookup, list: Vec::new(), by_path: BTreeMap::new() }
    }

    /// Returns the index of the mapping's file; `None` if its name leads elsewhere now.
    pub(super) fn index(&mut self, mapping: &'a Mapping) -> Option<usize> {
        let path = mapping.path()?;
        let writable = mapping.shared && mapping.protection & libc::PROT_WRITE != 0;
        let index = match self.by_path.get(path) {
            Some(index) => *index,
            None => {
                let target = self.lookup.target(Path::new(path))?;
                // File systems may report another device than maps has; the inode is the same.
                if target.inode != mapping.inode {
                    return None;
                }
                self.list.push(target.file.clone());
                self.by_path.insert(path, self.list.len() - 1);
                self.list.len() - 1
            }
        };
        self.list[index].writable |= writable;
        Some(index)
    }

    /// Whether the mapping is one of a character device.
    pub(super) fn is_device(&self, mapping: &Mapping) -> bool {
        let path = mapping.path().filter(|path| *path != "/dev/zero");
        let target = path.and_then(|path| self.lookup.target(Path::new(path)));
        target.is_some_and(|target| target.character_device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_looked_up_once() {
        let path = std::env::temp_dir().join(format!("kedge-lookup-{}", std::process::id()));
        let lookup = Lookup::default();
        assert!(lookup.target(&path).is_none());
        fs::write(&path, b"four").unwrap();
        // What was not there when all stood still is not there for the rest of the pause.
        assert!(lookup.target(&path).is_none());
        let target = Lookup::default().target(&path).unwrap();
        assert_eq!((target.file.bytes, target.character_device), (4, false));
        // What could not be looked up may be there the next time.
        let inside = path.join("inside");
        assert!(lookup.target(&inside).is_none());
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        fs::write(&inside, b"four").unwrap();
        assert!(lookup.target(&inside).is_some());
        fs::remove_dir_all(&path).unwrap();
        assert!(lookup.target(Path::new("/dev/null")).is_some_and(|null| null.character_device));
    }
}
