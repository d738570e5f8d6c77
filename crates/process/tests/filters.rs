//! Filters of system calls come back: each thread's own, and those that all share.

mod support;

use kedge_left_out::needs_root;
use kedge_process::Options;
use std::process::Command;
use support::{Folder, Running, alone, bring_back, build, capture_again, capture_by};

/// What the first thread's getppid() and getuid() fail with, then the second's getuid() and
/// geteuid(); no step went wrong.
const TOGETHER: &str = "77 0 0 0 0";
const TOGETHER_LATER: &str = "77 0 0 79 0";
const APART: &str = "77 0 78 0 0";
/// The first has one that lets all calls be.
const FREE: &str = "0 0 78 0 0";

fn is_root(name: &str) -> bool {
    // SAFETY: geteuid takes no arguments and only returns a number.
    let root = unsafe { libc::geteuid() } == 0;
    if !root {
        needs_root(name, "only root may suspend and read filters");
    }
    root
}

/// The program goes on after a capture, and after a restart of an image that a restarted one has
/// made: what all its lines were then.
fn lines(what: &str, first: &str) -> Vec<String> {
    let folder = Folder::new(what);
    let program = build(&folder, "filters.c", &["-pthread"]);
    let mut running = Running::start(Command::new(&program).arg(what));
    assert!(running.lines(5).iter().all(|line| line == first));
    // A sleep of the program does not end it because it was stopped.
    for number in 0..5 {
        capture_by(Options::new(folder.path(&format!("meanwhile{number}"))));
        assert!(running.lines(5).iter().all(|line| line == first));
    }
    let [image, next] = ["image", "next"].map(|name| folder.path(name));
    running.capture_and_kill(&image);
    let between = capture_again(&image, &next);
    assert!(between.iter().all(|line| line == first), "{between:?}");
    let (after, status) = bring_back(&next);
    assert_eq!(libc::WEXITSTATUS(status), 7, "status {status:#x} after {after:?}");
    after
}

#[test]
fn filters_of_all_threads_come_back_as_theirs() {
    let _alone = alone();
    if is_root("filters") {
        let after = lines("together", TOGETHER);
        let later = after.iter().position(|line| line == TOGETHER_LATER).expect("one more filter");
        assert!(after[..later].iter().all(|line| line == TOGETHER), "{after:?}");
        assert!(after[later..].iter().all(|line| line == TOGETHER_LATER), "{after:?}");
    }
}

#[test]
fn filters_of_one_thread_come_back_to_it() {
    let _alone = alone();
    for (what, all) in [("apart", APART), ("as_nobody", APART), ("no_promise", FREE)] {
        if is_root(what) {
            assert!(lines(what, all).iter().all(|line| line == all));
        }
    }
}

/// The kernel resumes a sleep that was stopped before by a call that a later filter does not know.
#[test]
fn a_sleep_that_was_stopped_before_its_filter_came_ends_nobody() {
    let _alone = alone();
    if !is_root("late") {
        return;
    }
    let folder = Folder::new("late");
    let program = build(&folder, "filters.c", &["-pthread"]);
    let mut running = Running::start(Command::new(&program).arg("late"));
    assert!(running.lines(5).iter().all(|line| line == "0 0 0 0 0"));
    capture_by(Options::new(folder.path("before")));
    assert!((0..300).any(|_| running.lines(1)[0] == "77 0 0 0 0"), "the filter never came");
    capture_by(Options::new(folder.path("behind")));
    let image = folder.path("image");
    assert!(running.lines(10).iter().all(|line| line == "77 0 0 0 0"));
    running.capture_and_kill(&image);
    let (after, status) = bring_back(&image);
    assert!(after.iter().all(|line| line == "77 0 0 0 0"), "{after:?}");
    assert_eq!(libc::WEXITSTATUS(status), 7, "status {status:#x} after {after:?}");
}
