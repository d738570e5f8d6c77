//! Collecting children that have ended.

mod support;

use kedge_process::reap;
use std::process::Command;
use std::time::Duration;
use support::{Folder, alone, build};

/// A supervisor that took it for gone would end before its job.
#[test]
fn a_process_whose_first_thread_has_ended_is_not_gone() {
    let _alone = alone();
    let folder = Folder::new("reap");
    let program = build(&folder, "leaderless.c", &["-pthread"]);
    // Collected by reap(), not through it.
    #[expect(clippy::zombie_processes, reason = "reap() collects every child of this process")]
    let child = Command::new(program).spawn().unwrap();
    let pid = child.id() as i32;
    let stat = format!("/proc/{pid}/stat");
    while !std::fs::read_to_string(&stat).unwrap().contains(") Z ") {
        std::thread::sleep(Duration::from_millis(1));
    }
    let early = reap(&[pid]);
    assert!(early.ended.is_empty() && early.more, "{early:?}");
    let ended = loop {
        let now = reap(&[pid]);
        assert!(now.more || !now.ended.is_empty(), "lost");
        if !now.ended.is_empty() {
            break now.ended;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    assert_eq!(ended, [(pid, 5 << 8)]);
}
