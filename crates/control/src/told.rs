//! Files that processes of a job leave in a folder of its own for the job's supervisor, which
//! trusts none of them.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Most files of one folder that are read: a job usually has fewer clients in its life.
const MAX_FILES: usize = 65_536;

/// Returns the files of a folder whose names end so, by name.
///
/// # Errors
/// The folder cannot be read.
pub fn files(folder: &Path, extension: &str) -> io::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder)?.flatten().map(|entry| entry.path());
    let its = entries.filter(|path| path.extension().is_some_and(|ends| ends == extension));
    let mut paths: Vec<_> = its.take(MAX_FILES).collect();
    paths.sort();
    Ok(paths)
}

/// Opens a file to be read. Waits for nobody, as it would for the writer of a FIFO.
///
/// # Errors
/// As of files; it is a link, or no regular file.
pub fn open(path: &Path) -> io::Result<File> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file")),
    }
}

/// Returns what is in a file.
///
/// # Errors
/// As of [`open`]; it has more than `longest` bytes.
pub fn read(path: &Path, longest: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.take(longest.saturating_add(1)).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > longest {
        true => Err(io::Error::new(io::ErrorKind::InvalidData, "it is longer than any such file")),
        false => Ok(bytes),
    }
}

/// Makes the file `path` to be written, in place of whatever has its name.
///
/// # Errors
/// As of files.
pub fn create(path: &Path) -> io::Result<File> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

/// Writes the file `path` as a whole: nobody sees a part of it.
///
/// # Errors
/// As of files.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let new = path.with_extension("new");
    create(&new)?.write_all(bytes)?;
    fs::rename(new, path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn no_link_is_followed_in_writing() {
        let folder = std::env::temp_dir().join(format!("kedge-told-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let (kept, path) = (folder.join("kept"), folder.join("1.json"));
        fs::write(&kept, "kept").unwrap();
        symlink(&kept, folder.join("1.new")).unwrap();
        symlink(&kept, &path).unwrap();
        replace(&path, b"new").unwrap();
        let (kept, new) = (fs::read(&kept).unwrap(), read(&path, 3).unwrap());
        assert!(read(&path, 2).is_err(), "longer than it may be");
        assert!(open(&folder).is_err(), "a folder");
        let named = files(&folder, "json").unwrap();
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!((&*kept, &*new), (&b"kept"[..], &b"new"[..]));
        assert_eq!(named, [path]);
    }
}
