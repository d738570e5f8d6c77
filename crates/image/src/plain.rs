//! Files of an image that are kept as they are: any name that does not end in `.kimg`. Their
//! checksum is that of all their bytes.

use crate::error::ImageError;
use crate::manifest::FileEntry;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use xxhash_rust::xxh3::Xxh3Default;

const CHUNK: usize = 1 << 20;

impl FileEntry {
    /// Whether it is kept as it is, and not as a `.kimg` file.
    pub fn is_plain(&self) -> bool {
        !self.name.ends_with(".kimg")
    }

    /// The entry of the finished file `name` in `folder`, which is on the disk when this returns.
    pub fn plain(folder: &Path, name: &str) -> Result<FileEntry, ImageError> {
        let path = folder.join(name);
        let file = File::open(&path).map_err(ImageError::io(&path))?;
        file.sync_all().map_err(ImageError::io(&path))?;
        let (bytes, checksum) = sum(&file, &path)?;
        Ok(FileEntry { name: name.to_owned(), bytes, checksum })
    }

    /// Whether the plain file in `folder` is still the one that this describes.
    pub fn verify_plain(&self, folder: &Path) -> Result<(), ImageError> {
        let path = folder.join(&self.name);
        let file = File::open(&path).map_err(ImageError::io(&path))?;
        let damaged = |offset, what| ImageError::Damaged { path: path.clone(), offset, what };
        let length = file.metadata().map_err(ImageError::io(&path))?.len();
        if length != self.bytes {
            return Err(damaged(length, "the file is not as long as the manifest says"));
        }
        if sum(&file, &path)? != (self.bytes, self.checksum) {
            return Err(damaged(0, "the checksum of the file is wrong"));
        }
        Ok(())
    }
}

/// Length and checksum.
fn sum(mut file: &File, path: &Path) -> Result<(u64, u64), ImageError> {
    let mut hasher = Xxh3Default::new();
    let mut buffer = vec![0; CHUNK];
    let mut total = 0;
    loop {
        match file.read(&mut buffer).map_err(ImageError::io(path))? {
            0 => return Ok((total, hasher.digest())),
            count => {
                hasher.update(&buffer[..count]);
                total += count as u64;
            }
        }
    }
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
        entry.verify_plain(&folder).unwrap();
        for bad in [vec![7; CHUNK + 4], [vec![7; CHUNK + 4], vec![6]].concat()] {
            std::fs::write(folder.join("x.data"), bad).unwrap();
            assert!(matches!(entry.verify_plain(&folder), Err(ImageError::Damaged { .. })));
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
