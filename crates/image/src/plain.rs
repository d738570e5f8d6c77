//! Files of an image that are kept as they are: any name that does not end in `.kimg`. Their
//! checksum is that of all their bytes.

use crate::bytes::{Bytes, ReadFrom};
use crate::cached;
use crate::error::ImageError;
use crate::folder::{Folder, open_regular};
use crate::manifest::FileEntry;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::Xxh3Default;

const CHUNK: usize = 1 << 20;

impl FileEntry {
    /// Returns whether it is kept as it is, and not as a `.kimg` file.
    pub fn is_plain(&self) -> bool {
        !self.name.ends_with(".kimg")
    }

    /// Returns the entry of the finished file `name` in `folder`, which is on the disk when this
    /// returns.
    pub fn plain(folder: &Path, name: &str) -> Result<FileEntry, ImageError> {
        let path = folder.join(name);
        let file = open_regular(&path)?;
        cached::keep(&file, cached::Part::Data);
        file.sync_all().map_err(ImageError::io(&path))?;
        let (bytes, checksum) = sum(&Bytes::cached(file), &path)?;
        Ok(FileEntry { name: name.to_owned(), bytes, checksum })
    }

    /// Checks that the plain file in `folder` is still the one that this describes.
    pub fn verify_plain(&self, folder: &Folder) -> Result<(), ImageError> {
        let file = Bytes::cached(folder.file(&self.name)?);
        self.verify_bytes(&file, folder.path().join(&self.name))
    }

    /// Checks the same of what is on the device.
    pub(crate) fn verify_on_device(&self, folder: &Folder) -> Result<ReadFrom, ImageError> {
        let path = folder.path().join(&self.name);
        let file = Bytes::on_device(folder.file(&self.name)?).map_err(ImageError::io(&path))?;
        self.verify_bytes(&file, path)?;
        Ok(file.read_from())
    }

    fn verify_bytes(&self, file: &Bytes, path: PathBuf) -> Result<(), ImageError> {
        let damaged = |offset, what| ImageError::Damaged { path: path.clone(), offset, what };
        let length = file.length().map_err(ImageError::io(&path))?;
        if length != self.bytes {
            return Err(damaged(length, "the file is not as long as the manifest says"));
        }
        if sum(file, &path)? != (self.bytes, self.checksum) {
            return Err(damaged(0, "the checksum of the file is wrong"));
        }
        Ok(())
    }
}

/// Returns length and checksum.
fn sum(file: &Bytes, path: &Path) -> Result<(u64, u64), ImageError> {
    let total = file.length().map_err(ImageError::io(path))?;
    let mut hasher = Xxh3Default::new();
    let mut buffer = vec![0; CHUNK];
    for at in (0..total).step_by(CHUNK) {
        let part = &mut buffer[..(total - at).min(CHUNK as u64) as usize];
        file.read_exact_at(part, at).map_err(ImageError::io(path))?;
        hasher.update(part);
    }
    Ok((total, hasher.digest()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_file_is_found() {
        let folder = std::env::temp_dir().join(format!("kplain-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("x.data"), vec![7; CHUNK + 5]).unwrap();
        let entry = FileEntry::plain(&folder, "x.data").unwrap();
        assert_eq!(entry.checksum, crate::checksum(&vec![7; CHUNK + 5]));
        entry.verify_plain(&Folder::open(&folder).unwrap()).unwrap();
        for bad in [vec![7; CHUNK + 4], [vec![7; CHUNK + 4], vec![6]].concat()] {
            std::fs::write(folder.join("x.data"), bad).unwrap();
            assert!(matches!(
                entry.verify_plain(&Folder::open(&folder).unwrap()),
                Err(ImageError::Damaged { .. })
            ));
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
