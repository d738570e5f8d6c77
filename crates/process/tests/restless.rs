//! Programs that change while they are being stopped: that wait for a child of vfork(), or become
//! other programs.

mod support;

use kedge_image::Manifest;
use kedge_process::{EngineError, Options, checkpoint};
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use support::survive::continues;
use support::{Folder, Running, alone, bring_back, build, reap, roots};

/// Captures it while it runs: how long it stood still.
fn capture(image: &Path) -> Result<Duration, EngineError> {
    let _ = std::fs::remove_dir_all(image);
    std::fs::create_dir(image).unwrap();
    let options = Options::new(image.into());
    // As a supervisor does it: what it traces is let go when the thread ends.
    let taken = std::thread::spawn(move || {
        let captured = checkpoint(&roots(), options)?;
        let stall = captured.stall;
        captured.finish(Manifest::new("test".into(), vec![], 1))?;
        Ok(stall)
    });
    taken.join().unwrap()
}

/// Captured again and again it goes on, and an image of a shorter run comes back.
fn goes_on(how: &str, rounds: usize) {
    const STEPS: usize = 1_000_000;
    let _alone = alone();
    let folder = Folder::new(how);
    let program = build(&folder, "restless.c", &["-pthread"]);
    let start =
        |steps: usize| Running::start(Command::new(&program).args([how, &steps.to_string()]));
    let mut running = start(STEPS);
    let first = running.lines(3);
    for round in 0..rounds {
        let captured = capture(&folder.path("image"));
        let stall = captured.unwrap_or_else(|error| panic!("round {round}: {error}"));
        // Far less than the patience of the stop.
        assert!(stall < Duration::from_secs(5), "round {round}: {stall:?}");
        let more = running.lines(10);
        assert!(more.iter().all(|line| line[..16] == first[0][..16]), "{more:?}");
    }
    end(running);
    comes_back(&folder, start(RESTARTED_STEPS));
}

/// Steps of a program that is brought back: more than its pipe holds, so that it has not ended.
const RESTARTED_STEPS: usize = 300;

fn comes_back(folder: &Folder, mut running: Running) {
    let before = running.lines(3);
    let image = folder.path("image");
    capture(&image).unwrap();
    end(running);
    let (after, status) = bring_back(&image);
    continues(&before, &after, RESTARTED_STEPS);
    assert_eq!(libc::WEXITSTATUS(status), 7, "status {status:#x}, {after:?}");
}

/// Ends it and its children.
fn end(mut running: Running) {
    running.child.kill().unwrap();
    running.child.wait().unwrap();
    reap();
}

#[test]
fn one_that_waits_for_a_child_of_vfork_stands_still() {
    goes_on("vfork", 20);
}

#[test]
fn one_that_becomes_another_program_stands_still() {
    goes_on("exec", 100);
}
