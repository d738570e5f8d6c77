//! What can be wrong with an image.

use std::io;
use std::path::PathBuf;
use thiserror::Error;

#[derive(Debug, Error)]
pub enum ImageError {
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error("{path}, offset {offset}: {what}; the image is damaged, use another one")]
    Damaged { path: PathBuf, offset: u64, what: &'static str },
    #[error(
        "{path}: written by a newer kedge (format {found}, this one reads {known}): update kedge"
    )]
    Newer { path: PathBuf, found: u32, known: u32 },
    #[error(
        "{path}: memory at {address:#x}: {what}: no restart could read the image, so there is none; the job goes on. It is a fault of \
         kedge: please report it"
    )]
    Unwritable { path: PathBuf, address: u64, what: &'static str },
    #[error("{path}: no image here: a checkpoint that was not finished, or another folder")]
    NoImage { path: PathBuf },
    #[error("{path}: builds on the image {parent}, which is not beside it: put it there")]
    NoParent { path: PathBuf, parent: String },
    #[error(
        "{path}: builds on the image {parent}, but another image has that name now: put the old one back"
    )]
    OtherParent { path: PathBuf, parent: String },
    #[error("{path}: builds on itself, through {parent}; the image is damaged, use another one")]
    Circle { path: PathBuf, parent: String },
    #[error("{path}: the image {by} builds on it: remove that one too")]
    Needed { path: PathBuf, by: String },
    #[error(
        "{path} is another user's, as are all images of the job there: none is removed (NFS may take \
         root for nobody, root_squash): remove old ones as their owner"
    )]
    NotOwn { path: PathBuf },
    #[error("{path}: {why}; it is not trusted")]
    Untrusted { path: PathBuf, why: String },
    #[error("{path}: a checkpoint is being written there: wait until it has ended")]
    Busy { path: PathBuf },
}

impl ImageError {
    /// Returns whether what was looked for is not there.
    pub(crate) fn is_missing(&self) -> bool {
        matches!(self, ImageError::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }

    pub(crate) fn io(path: &std::path::Path) -> impl FnOnce(io::Error) -> ImageError {
        move |source| ImageError::Io { path: path.to_owned(), source }
    }
}
