//! A signal that waits for a job, and was meant for its former life alone, does not come back.

mod support;

use kedge_process::RestartOptions;
use std::process::Command;
use support::{Folder, Running, alone, bring_back_by, build};

#[test]
fn one_signal_does_not_come_back_and_others_do() {
    let _alone = alone();
    let folder = Folder::new("withheld");
    let program = build(&folder, "withheld.c", &[]);
    let mut running = Running::start(Command::new(&program).args(["40", "signals"]));
    let before = running.lines(5);
    assert!(before.iter().all(|line| line.ends_with(" 1 1")), "{before:?}");
    let image = folder.path("image");
    running.capture_and_kill(&image);
    for (forgets, wait) in [(None, " 1 1"), (Some(libc::SIGTERM), " 0 1")] {
        let options = RestartOptions { forgets, ..RestartOptions::new(image.clone()) };
        let (after, status) = bring_back_by(options, |_| {});
        assert_eq!(libc::WEXITSTATUS(status), 7, "status {status:#x}");
        // The first may have been asked before.
        let right = after.iter().skip(1).all(|line| line.ends_with(wait));
        assert!(right && after.len() > 5, "{forgets:?}: {after:?}");
    }
}
