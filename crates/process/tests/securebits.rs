//! Securebits come back, whatever capabilities a program has kept.

mod support;

use kedge_left_out::needs_root;
use std::process::Command;
use support::{Folder, Running, alone, bring_back, build};

/// All that can be locked, and locked.
const STRICT: &str = "0xef";

fn comes_back(name: &str, arguments: &[&str]) {
    let _alone = alone();
    // SAFETY: geteuid takes no arguments and only returns a number.
    if unsafe { libc::geteuid() } != 0 {
        return needs_root(name, "only root may set securebits");
    }
    let folder = Folder::new(name);
    let program = build(&folder, "securebits.c", &[]);
    let mut running = Running::start(Command::new(&program).args(arguments));
    let before = running.lines(5);
    assert!(before[0].starts_with(arguments[0]), "{before:?}");
    let image = folder.path("image");
    running.capture_and_kill(&image);
    let (after, status) = bring_back(&image);
    assert!(!after.is_empty() && after.iter().all(|line| *line == before[0]), "{after:?}");
    assert_eq!(libc::WEXITSTATUS(status), 7, "status {status:#x}");
}

#[test]
fn locked_securebits_come_back() {
    comes_back("securebits", &[STRICT]);
}

#[test]
fn those_of_a_program_that_could_not_set_them_come_back() {
    comes_back("securebits-given-up", &[STRICT, "give up"]);
}

#[test]
fn bits_that_are_not_locked_come_back() {
    comes_back("securebits-open", &["0x4"]);
}
