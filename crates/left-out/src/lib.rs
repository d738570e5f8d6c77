//! Tells of tests that did not run, so that none of them counts as passed.
//!
//! libtest hides what a test prints if it passes, and a test that returns early passes. So each
//! says here what it left out; `scripts/test` names all of it at its end, and fails.

#![forbid(unsafe_code)]

use std::fs::OpenOptions;
use std::io::Write as _;

/// Names the file to which each line goes as well, if it is set.
pub const FILE: &str = "KEDGE_LEFT_OUT";

/// Set for tests that root runs again as an ordinary user.
pub const BY_ROOT_TOO: &str = "KEDGE_BY_ROOT_TOO";

/// Like [`left_out`], of what takes root; nothing is said where root has run the same tests.
///
/// # Panics
/// As [`left_out`].
pub fn needs_root(what: &str, why: &str) {
    if std::env::var_os(BY_ROOT_TOO).is_none() {
        left_out(what, why);
    }
}

/// Says on standard error, and in [`FILE`], that `what` was not tested, and why.
///
/// # Panics
/// Where that file cannot be written: what was left out would be lost.
pub fn left_out(what: &str, why: &str) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    let line = format!("{test}: {what}: not tested: {}\n", why.replace('\n', " "));
    eprint!("{line}");
    if let Some(path) = std::env::var_os(FILE) {
        let written = OpenOptions::new()
            .append(true)
            .open(&path)
            .and_then(|mut file| file.write_all(line.as_bytes()));
        assert!(written.is_ok(), "{}: {written:?}: {line}", path.display());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In a process of its own, since the environment is all tests'.
    #[test]
    fn a_line_goes_to_the_file_and_a_missing_file_is_a_failure() {
        if std::env::var_os("KEDGE_LEFT_OUT_CHILD").is_some() {
            return left_out("the part", "of a\nreason");
        }
        let path = std::env::temp_dir().join(format!("kedge-left-out-{}", std::process::id()));
        let run = || {
            let mut child = std::process::Command::new(std::env::current_exe().unwrap());
            child.env("KEDGE_LEFT_OUT_CHILD", "1").env(FILE, &path).output().unwrap().status
        };
        assert!(!run().success());
        std::fs::write(&path, "").unwrap();
        assert!(run().success());
        let written = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(
            written,
            "tests::a_line_goes_to_the_file_and_a_missing_file_is_a_failure: \
             the part: not tested: of a reason\n"
        );
    }
}
