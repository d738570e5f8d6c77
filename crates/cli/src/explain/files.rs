//! Which files to look at: a program and its libraries, or all in a folder.

use super::binary::{self, Binary, BinaryError};
use crate::loader;
use rustix::fs::OFlags;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// More folders within folders than people make.
const MAX_DEPTH: usize = 64;

/// What was found.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// Real path → what the file holds; of those with device code.
    pub(super) files: BTreeMap<PathBuf, Binary>,
    /// Libraries that a file needs and that the loader would not find: library → file.
    pub(super) missing: BTreeMap<String, PathBuf>,
    /// Files that could not be read: path → why.
    pub(super) unread: BTreeMap<PathBuf, String>,
    /// The names of all libraries that are needed.
    pub(super) needed: BTreeSet<String>,
}

/// Opens a regular file; None where it is another kind. Opening a FIFO does not wait for its
/// writer.
fn open(path: &Path) -> io::Result<Option<File>> {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(OFlags::NONBLOCK.bits() as i32);
    let file = options.open(path)?;
    Ok(file.metadata()?.is_file().then_some(file))
}

impl Found {
    /// Looks at `program` and at the libraries that the loader brings with it.
    pub(super) fn add_program(&mut self, program: &Path, kernels: bool) {
        let search = Search::new();
        let mut seen = BTreeSet::new();
        let mut waiting = VecDeque::from([program.to_owned()]);
        while let Some(path) = waiting.pop_front() {
            let real = path.canonicalize().unwrap_or(path);
            if !seen.insert(real.clone()) {
                continue;
            }
            let Some(binary) = self.read(&real, kernels) else { continue };
            for library in &binary.needed {
                match search.find(library, &real, &binary.folders) {
                    Some(found) => waiting.push_back(found),
                    None => drop(self.missing.insert(library.clone(), real.clone())),
                }
                self.needed.insert(library.clone());
            }
            self.keep(real, binary);
        }
    }

    /// Looks at each file below `folder`; links are not followed.
    pub(super) fn add_folder(
        &mut self,
        folder: &Path,
        kernels: bool,
        shown: &mut dyn FnMut(&Path),
    ) {
        let mut waiting = vec![(folder.to_owned(), 0)];
        while let Some((folder, depth)) = waiting.pop() {
            shown(&folder);
            let entries = match fs::read_dir(&folder) {
                Ok(entries) => entries,
                Err(error) => {
                    self.unread.insert(folder, error.to_string());
                    continue;
                }
            };
            for entry in entries.flatten() {
                match entry.file_type() {
                    Ok(kind) if kind.is_dir() && depth < MAX_DEPTH => {
                        waiting.push((entry.path(), depth + 1));
                    }
                    Ok(kind) if kind.is_file() => {
                        let path = entry.path();
                        if let Some(binary) = self.read(&path, kernels) {
                            self.needed.extend(binary.needed.iter().cloned());
                            self.keep(path, binary);
                        }
                    }
                    _ => {}
                }
            }
        }
    }

    fn read(&mut self, path: &Path, kernels: bool) -> Option<Binary> {
        let read = || -> Result<Option<Binary>, BinaryError> {
            open(path)?.map_or(Ok(None), |file| binary::read(&file, kernels))
        };
        read().unwrap_or_else(|error| {
            self.unread.insert(path.to_owned(), error.to_string());
            None
        })
    }

    fn keep(&mut self, path: PathBuf, binary: Binary) {
        if !binary.modules.is_empty() {
            self.files.insert(path, binary);
        }
    }
}

/// Where the loader looks for libraries.
struct Search {
    before: Vec<PathBuf>,
    /// Library → path, by the loader's own list.
    listed: BTreeMap<String, PathBuf>,
}

impl Search {
    fn new() -> Search {
        let before = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        Search {
            before: std::env::split_paths(&before).collect(),
            // The first of a name is what the loader takes.
            listed: loader::libraries().into_iter().rev().collect(),
        }
    }

    fn find(&self, library: &str, of: &Path, folders: &[PathBuf]) -> Option<PathBuf> {
        const DEFAULTS: [&str; 4] =
            ["/lib64", "/usr/lib64", "/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu"];
        if library.contains('/') {
            return Some(library.into());
        }
        let origin = of.parent().unwrap_or(Path::new("/"));
        let own = folders.iter().map(|folder| with_origin(folder, origin));
        let own = own.chain(self.before.iter().cloned()).map(|folder| folder.join(library));
        let mut all = own
            .chain(self.listed.get(library).cloned())
            .chain(DEFAULTS.iter().map(|folder| Path::new(folder).join(library)));
        all.find(|path| path.is_file())
    }
}

/// `folder`, whose beginning may say that it lies beside the file itself.
fn with_origin(folder: &Path, origin: &Path) -> PathBuf {
    for word in ["$ORIGIN", "${ORIGIN}"] {
        if let Ok(rest) = folder.strip_prefix(word) {
            return origin.join(rest);
        }
    }
    folder.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_beside_the_file_are_known() {
        let at = |folder: &str| with_origin(Path::new(folder), Path::new("/opt/app"));
        assert_eq!(at("$ORIGIN/../lib"), PathBuf::from("/opt/app/../lib"));
        assert_eq!(at("${ORIGIN}"), PathBuf::from("/opt/app/"));
        assert_eq!(at("/usr/lib"), PathBuf::from("/usr/lib"));
    }

    #[test]
    fn links_and_fifos_are_no_trap() {
        let folder = std::env::temp_dir().join(format!("kedge-explain-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        std::os::unix::fs::symlink(&folder, folder.join("again")).expect("a link");
        let fifo = folder.join("fifo");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &fifo,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
            0,
        )
        .expect("a FIFO");
        let mut found = Found::default();
        found.add_folder(&folder, false, &mut |_| {});
        found.add_program(&fifo, false);
        fs::remove_dir_all(&folder).expect("its end");
        assert!(found.files.is_empty() && found.unread.is_empty(), "{found:?}");
    }
}
