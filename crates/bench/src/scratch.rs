//! A folder for what a benchmark writes.

use kedge_supervisor::policy;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// What the folders' names begin with, and no image's: a job's name begins otherwise.
const PREFIX: &str = ".kedge-bench-";

/// A folder of this process alone, removed at the end. One that was interrupted leaves its own
/// behind, some GiB perhaps, which the next benchmark removes: nobody holds its lock any more.
#[derive(Debug)]
pub struct Scratch(pub PathBuf, #[expect(dead_code, reason = "the lock")] File);

impl Scratch {
    /// In `dir`, or where images are kept by default.
    ///
    /// # Errors
    /// It cannot be made there.
    pub fn new(dir: Option<&Path>) -> Result<Scratch, String> {
        let parent = match dir {
            Some(dir) => dir.to_owned(),
            None => policy::default_dir().map_err(|error| error.to_string())?,
        };
        sweep(&parent);
        let folder = parent.join(format!("{PREFIX}{}", std::process::id()));
        let lock = make(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        Ok(Scratch(folder, lock))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Makes a folder and locks it.
fn make(folder: &Path) -> io::Result<File> {
    loop {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        let lock = File::open(folder)?;
        lock.lock()?;
        // Another may have swept it away before it was locked.
        if folder.is_dir() {
            return Ok(lock);
        }
    }
}

/// Removes what benchmarks that were interrupted have left in `parent`.
fn sweep(parent: &Path) {
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    let ours = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(PREFIX));
    for folder in ours.map(|entry| entry.path()) {
        if File::open(&folder).is_ok_and(|lock| lock.try_lock().is_ok()) {
            let _ = fs::remove_dir_all(folder);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_interrupted_one_has_left_is_removed_and_no_other() {
        let parent = std::env::temp_dir().join(format!("kedge-scratch-{}", std::process::id()));
        let left = parent.join(".kedge-bench-1");
        fs::create_dir_all(left.join("image")).unwrap();
        fs::create_dir_all(parent.join("bench-0001")).unwrap();
        let held = make(&parent.join(".kedge-bench-2")).unwrap();
        let scratch = Scratch::new(Some(&parent)).unwrap();
        assert!(
            !left.exists()
                && parent.join(".kedge-bench-2").exists()
                && parent.join("bench-0001").exists()
        );
        assert!(scratch.0.exists());
        // Children that other tests are starting have the descriptor as well for a moment.
        held.unlock().unwrap();
        drop(scratch);
        sweep(&parent);
        let rest: Vec<_> =
            fs::read_dir(&parent).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(rest, ["bench-0001"]);
        fs::remove_dir_all(parent).unwrap();
    }
}
