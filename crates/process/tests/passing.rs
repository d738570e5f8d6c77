//! Temporary files that a program has closed, and whose names are all that it has of them, come
//! back where they are gone; other programs' do not.

mod support;

use kedge_process::{Options, Tracker};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::survive::as_an_ordinary_user;
use support::{Folder, Running, alone, bring_back, capture_by, kill};

/// The program of this test, which makes, hands on and removes such files.
fn build(folder: &Folder) -> PathBuf {
    let program = folder.path("passing");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/hosts/passing.c");
    let mut compiler = Command::new("cc");
    compiler.args(["-O1", "-D_GNU_SOURCE"]).arg("-o").arg(&program).arg(source);
    assert!(compiler.status().expect("cc").success());
    program
}

/// What is left in /tmp of the program `pid`.
fn left(pid: u32) -> Vec<PathBuf> {
    let start = format!("kedge-passing-{pid}-");
    let is = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().starts_with(&start);
    fs::read_dir("/tmp").unwrap().map(|entry| entry.unwrap().path()).filter(is).collect()
}

/// Runs the program to its end, captured before it makes its last file and after that, as `options`
/// are for each; then both images bring back what it has removed.
fn comes_back(name: &str, options: impl Fn(Options) -> Options) {
    let _alone = alone();
    let folder = Folder::new(name);
    let (program, go) = (build(&folder), folder.path("go"));
    let mut running = Running::start(Command::new(program).arg(&go).arg("24"));
    let pid = running.child.id();
    running.lines(1);
    // Some other program's, of the same user.
    let stranger = PathBuf::from(format!("/tmp/kedge-passing-{pid}-stranger"));
    fs::write(&stranger, "another's").unwrap();
    let images = [folder.path("image-0"), folder.path("image-1")];
    capture_by(options(Options::new(images[0].clone())));
    fs::write(&go, "1").unwrap();
    running.lines(1);
    let manifest = capture_by(options(Options::new(images[1].clone())));
    assert_eq!(left(pid).len(), 4, "{:?}", left(pid));
    fs::write(&go, "12").unwrap();
    let last = running.lines(2).pop().unwrap();
    assert!(last.ends_with(" well"), "{last}");
    kill(running, &manifest.processes);
    fs::remove_file(&stranger).unwrap();
    assert!(left(pid).is_empty());
    for (number, image) in images.iter().enumerate() {
        let (lines, status) = bring_back(image);
        assert_eq!((lines.len(), status), (3 - number, 0), "{lines:?}");
        assert!(left(pid).is_empty(), "{:?}", left(pid));
    }
}

#[test]
fn closed_temporary_files_come_back() {
    comes_back("passing", |options| options);
}

#[test]
fn they_come_back_where_memory_is_written_ahead() {
    comes_back("passing-ahead", |options| Options { ahead: Some(0), ..options });
}

#[test]
fn they_come_back_by_images_that_build_on_each_other() {
    let tracker = Tracker::default();
    comes_back("passing-changes", |options| Options { tracker: Some(tracker.clone()), ..options });
}

/// Whatever has the name by now stays what it is.
#[test]
fn nothing_is_overwritten() {
    let _alone = alone();
    let folder = Folder::new("passing-there");
    let (program, go) = (build(&folder), folder.path("go"));
    fs::write(&go, "1").unwrap();
    let mut running = Running::start(Command::new(program).arg(&go));
    let pid = running.child.id();
    running.lines(2);
    let image = folder.path("image");
    let manifest = capture_by(Options::new(image.clone()));
    kill(running, &manifest.processes);
    let files: Vec<PathBuf> = left(pid).into_iter().filter(|path| path.is_file()).collect();
    fs::write(&files[0], "newer").unwrap();
    fs::write(&go, "12").unwrap();
    let (lines, status) = bring_back(&image);
    assert!(lines[0].starts_with("lost: read") && status != 0, "{lines:?}");
    assert_eq!(fs::read(&files[0]).unwrap(), b"newer");
    for path in left(pid) {
        let _ = fs::remove_dir_all(&path).or_else(|_| fs::remove_file(&path));
    }
}

#[test]
fn an_ordinary_user_can_do_the_same() {
    as_an_ordinary_user();
}
