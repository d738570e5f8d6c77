//! What of a job's files is not here, or is another, before anything of it is restarted.

use super::{Files, Inode};
use crate::plugins::error::PluginError;
use crate::plugins::saved::Saved;
use crate::plugins::{PathMap, Plugin, reach};
use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// What there is to say of a job's files on this host.
#[derive(Debug, Default)]
pub(crate) struct Looked {
    /// Those whose contents come with the image, by their paths here.
    pub(crate) coming: BTreeSet<PathBuf>,
    /// A sentence for each that is not as it has to be.
    pub(crate) lacking: BTreeSet<String>,
}

/// Looks at the files that the job holds open, without opening one.
pub(crate) fn look(saved: &Saved, paths: &PathMap) -> Result<Looked, PluginError> {
    let mut looked = Looked::default();
    for state in saved.states.iter().filter(|state| state.plugin == Files.name()) {
        let inodes: Vec<Inode> = serde_json::from_value(state.state.clone())
            .map_err(|error| PluginError::Damaged(error.to_string()))?;
        for inode in inodes.iter().filter(|inode| !inode.unlinked) {
            let path = paths.apply(&inode.path.0);
            if inode.contents.is_some() {
                look_above(&path, inode, &mut looked.lacking);
                looked.coming.insert(path);
            } else if !inode.opened.is_empty() {
                looked.lacking.extend(is_other(&path, inode));
            }
        }
    }
    Ok(looked)
}

/// A file that comes needs its folder, unless it may as well not come.
fn look_above(path: &Path, inode: &Inode, lacking: &mut BTreeSet<String>) {
    let folder = path.parent().unwrap_or(Path::new("/"));
    if !inode.if_gone && !folder.is_dir() {
        let folder = folder.display();
        lacking.insert(format!(
            "{folder} is not a folder there, where the job writes {}: make it, or name its new \
             place with --path-map",
            path.display()
        ));
    }
}

/// Why what is at `path` is not the file that the job reads.
fn is_other(path: &Path, inode: &Inode) -> Option<String> {
    let shown = path.display();
    let found = match reach::find(path, true).map(std::fs::File::from) {
        Ok(found) => found,
        Err(error) => {
            return Some(format!(
                "{shown} cannot be opened there ({error}): put it there, or name its new place \
                 with --path-map"
            ));
        }
    };
    let Ok(found) = found.metadata() else { return Some(format!("{shown} cannot be looked at")) };
    let is_same = (found.dev(), found.ino()) == inode.identity;
    let is_file = inode.mode & libc::S_IFMT == libc::S_IFREG;
    if found.mode() & libc::S_IFMT != inode.mode & libc::S_IFMT {
        return Some(format!("{shown} is another kind of file there"));
    }
    (is_file && !is_same && found.len() != inode.size).then(|| {
        format!(
            "{shown} has {} bytes there, and {} where the job reads it: copy it, or name its new \
             place with --path-map",
            found.len(),
            inode.size
        )
    })
}
