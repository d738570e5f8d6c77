//! A part of a job that shares memory with another: that is refused by name before anything is
//! stopped, since each part brings back its own memory.

mod support;

use kedge_left_out::needs_root;
use kedge_process::{Begun, Options, Roots, Together};
use std::process::Command;
use std::sync::Arc;
use support::survive::as_an_ordinary_user;
use support::{Folder, Running, alone, build};

/// Other parts, which are always ready.
#[derive(Debug)]
struct Others;

impl Together for Others {
    fn prepared(&self) -> Result<(), String> {
        Ok(())
    }

    fn stopped(&self) -> Result<(), String> {
        Ok(())
    }

    fn captured(&self, _: usize) -> Result<(), String> {
        Ok(())
    }
}

/// The program, and its child, which is a part of a job of several.
struct Two {
    running: Running,
    folder: Folder,
    child: i32,
}

impl Two {
    /// Starts them so; why there is no such thing here, if there is none.
    fn start(name: &str, arguments: &[&str]) -> Result<Two, String> {
        let folder = Folder::new(name);
        let program = build(&folder, "two_parts.c", &[]);
        let file = folder.path("file");
        let arguments = arguments.iter().map(|one| match *one {
            "FILE" => file.as_os_str(),
            other => other.as_ref(),
        });
        let mut running = Running::start(Command::new(program).args(arguments));
        let first = running.lines(1).remove(0);
        match first.strip_prefix("child ") {
            Some(child) => {
                let child = child.parse().expect("a number");
                Ok(Two { running, folder, child })
            }
            None => {
                running.child.wait().unwrap();
                Err(first)
            }
        }
    }

    fn parent(&self) -> i32 {
        self.running.child.id() as i32
    }

    /// Why a part of these processes is refused; nothing if it is not.
    fn survey(&self, name: &str, roots: Vec<i32>, apart: bool) -> Option<String> {
        let image = self.folder.path(name);
        std::fs::create_dir(&image).unwrap();
        let together = apart.then(|| Arc::new(Others) as Arc<dyn Together>);
        let options = Options { together, ..Options::new(image) };
        let surveyed = Begun::new(options).unwrap().survey(&Roots::These(roots), &[]);
        surveyed.err().map(|error| error.to_string())
    }

    fn end(mut self) {
        self.running.lines(20);
        self.running.child.kill().unwrap();
        self.running.child.wait().unwrap();
    }
}

#[test]
fn memory_that_two_parts_share_is_refused_by_name() {
    let _alone = alone();
    let two = Two::start("parts-share", &[]).unwrap();
    let said = two.survey("apart", vec![two.child], true).expect("it is taken");
    let named = ["shares memory", &format!("process {}", two.parent()), "MPIR_CVAR_NOLOCAL"];
    assert!(named.iter().all(|part| said.contains(part)), "{said}");
    // In one part, or in no job of several, it is as it was.
    assert_eq!(two.survey("one", vec![two.parent()], true), None);
    assert_eq!(two.survey("alone", vec![two.child], false), None);
    two.end();
}

/// As one that a package upgrade has replaced, which programs of the whole machine have mapped.
#[test]
fn a_file_that_nobody_writes_to_may_be_two() {
    let _alone = alone();
    let two = Two::start("parts-read", &["file", "FILE"]).unwrap();
    assert_eq!(two.survey("apart", vec![two.child], true), None);
    two.end();
    let two = Two::start("parts-written", &["file", "FILE", "w"]).unwrap();
    let said = two.survey("apart", vec![two.child], true).expect("it is taken");
    assert!(said.contains("shares memory") && said.contains("file (deleted)"), "{said}");
    two.end();
}

/// Those are listed before the others, of which they may be when those are.
#[test]
fn children_that_are_made_meanwhile_are_none_of_the_others() {
    let _alone = alone();
    let two = Two::start("parts-forks", &["forks"]).unwrap();
    for time in 0..100 {
        assert_eq!(two.survey(&format!("apart-{time}"), vec![two.child], true), None);
    }
    two.end();
}

/// Parts of two hosts, once they are restarted on one.
#[test]
fn segments_of_two_namespaces_are_two() {
    let _alone = alone();
    match Two::start("parts-segments", &["segments"]) {
        Ok(two) => {
            assert_eq!(two.survey("apart", vec![two.child], true), None);
            two.end();
        }
        Err(said) => needs_root("segments of two namespaces", &said),
    }
}

#[test]
fn ordinary_users_are_told_the_same() {
    as_an_ordinary_user();
}
