//! Programs with rings of io_uring: captured at some moment, killed, and brought back. Completions
//! that they have not read and requests that they have not submitted are there after the restart.

mod support;

use kedge_process::Options;
use std::process::Command;
use support::kernel::tells_writes;
use support::survive::{as_an_ordinary_user, captured_again, continues, steps_survive};
use support::{Folder, Running, alone, bring_back, build, capture_by, kill};

#[test]
fn rings_of_io_uring_come_back() {
    steps_survive("rings", "rings.c", &["-pthread"]);
}

/// What is under way is waited for, and none of it is lost or seen twice.
#[test]
fn a_ring_that_is_always_at_work_comes_back() {
    steps_survive("ring-at-work", "ring_at_work.c", &[]);
}

#[test]
fn rings_that_came_back_can_be_captured_again() {
    captured_again("rings-again", "rings.c");
}

/// Its memory is written before it is stopped, and what changes meanwhile is followed.
#[test]
fn rings_come_back_where_memory_is_written_ahead() {
    if !tells_writes() {
        return;
    }
    let _alone = alone();
    let folder = Folder::new("rings-ahead");
    let program = build(&folder, "rings.c", &["-pthread"]);
    let mut running = Running::start(Command::new(&program).arg("300"));
    let before = running.lines(20);
    let image = folder.path("image");
    let options = Options { ahead: Some(0), ..Options::new(image.clone()) };
    let manifest = capture_by(options);
    kill(running, &manifest.processes);
    let (after, status) = bring_back(&image);
    continues(&before, &after, 300);
    assert_eq!(libc::WEXITSTATUS(status), 7, "status {status:#x}");
}

#[test]
fn ordinary_users_have_them_too() {
    as_an_ordinary_user();
}
