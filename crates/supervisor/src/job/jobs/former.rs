//! What an ended job has left, put aside while another one of its name begins. One that never comes
//! to be gives it back, also if it is killed.

use std::fs;
use std::io;
use std::path::Path;

const ASIDE: &str = "former";
/// How the name of a file ends until it is whole.
pub(super) const UNFINISHED: &str = ".json.new";
const META: &str = "meta.json";
const OTHERS: [&str; 4] = ["log", "last.json", "images.json", "checkpoints.json"];

/// Puts it aside; `dir` is locked.
///
/// # Errors
/// The folder cannot be made, or nothing can be moved.
pub(super) fn put_aside(dir: &Path) -> io::Result<()> {
    put_back(dir);
    let aside = dir.join(ASIDE);
    if dir.join(META).exists() {
        let _ = fs::remove_dir_all(&aside);
        fs::create_dir(&aside)?;
        // That first: without it the rest is looked for beside it.
        fs::rename(dir.join(META), aside.join(META))?;
        OTHERS.iter().try_for_each(|name| absent(fs::rename(dir.join(name), aside.join(name))))?;
    }
    clear(dir);
    Ok(())
}

/// Puts back what was put aside, if no other job has come to be; `dir` is locked.
pub(super) fn put_back(dir: &Path) -> bool {
    let aside = dir.join(ASIDE);
    if dir.join(META).exists() || !aside.join(META).exists() {
        return false;
    }
    for name in OTHERS.into_iter().filter(|name| aside.join(name).exists()) {
        let _ = fs::rename(aside.join(name), dir.join(name));
    }
    let back = fs::rename(aside.join(META), dir.join(META)).is_ok();
    let _ = fs::remove_dir_all(aside);
    back
}

/// Removes what a job has left that has not come to be.
pub(super) fn clear(dir: &Path) {
    for name in OTHERS.into_iter().chain([META]) {
        let _ = fs::remove_file(dir.join(name));
    }
}

/// Removes the files that a supervisor was writing when it was killed; `dir` is locked.
pub(super) fn clear_unfinished(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().ends_with(UNFINISHED) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// The job that came after it has come to be.
pub(super) fn forget(dir: &Path) {
    let _ = fs::remove_dir_all(dir.join(ASIDE));
}

fn absent(done: io::Result<()>) -> io::Result<()> {
    match done {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_being_written_goes_and_nothing_else() {
        let dir = std::env::temp_dir().join(format!("kedge-unfinished-{}", std::process::id()));
        fs::create_dir(&dir).expect("a folder");
        for name in ["checkpoints.json.new", "meta.json.new", "meta.json", "log", "log.new"] {
            fs::write(dir.join(name), "{").expect("a file");
        }
        clear_unfinished(&dir);
        let names = fs::read_dir(&dir).expect("the folder").flatten();
        let mut left: Vec<_> = names.map(|entry| entry.file_name()).collect();
        left.sort();
        fs::remove_dir_all(&dir).expect("its end");
        assert_eq!(left, ["log", "log.new", "meta.json"]);
    }
}
