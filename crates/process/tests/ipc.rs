//! What processes share by ids, keys and names: System V IPC, POSIX shared memory, semaphores and message queues.

mod support;

use std::process::Command;
use support::survive::{as_an_ordinary_user, continues, random, rounds};
use support::{Folder, Running, alone, bring_back, build};

const STEPS: usize = 200;

/// `between` is done when the job is dead and not yet brought back: its output, and its files.
fn shared_survives(name: &str, source: &str, between: impl Fn()) {
    let _alone = alone();
    let folder = Folder::new(name);
    let program = build(&folder, source, &["-pthread", "-lrt"]);
    for round in 0..rounds() {
        between();
        let mut running = Running::start(Command::new(&program).arg(STEPS.to_string()));
        let before = running.lines(1 + random() % 100);
        assert!(!before[0].starts_with("wrong"), "{}", before[0]);
        let image = folder.path(&format!("image-{round}"));
        running.capture_and_kill(&image);
        between();
        let (after, status) = bring_back(&image);
        continues(&before, &after, STEPS);
        assert_eq!(libc::WEXITSTATUS(status), 7, "status {status:#x}");
    }
}

/// Removes what a killed job has left behind: nobody else does, and nothing of it may be needed.
fn remove_left_behind() {
    for (table, option) in [("shm", "-m"), ("sem", "-s"), ("msg", "-q")] {
        let rows = std::fs::read_to_string(format!("/proc/sysvipc/{table}")).unwrap();
        for row in rows.lines().skip(1) {
            let words: Vec<&str> = row.split_whitespace().collect();
            let key: i32 = words[0].parse().unwrap();
            if key & !0xff == 0x6b65_6400 {
                assert!(Command::new("ipcrm").args([option, words[1]]).status().unwrap().success());
            }
        }
    }
}

#[test]
fn system_v_ipc_comes_back_under_its_ids() {
    shared_survives("sysv", "sysv.c", remove_left_behind);
}

#[test]
fn ordinary_users_can_do_all_that() {
    as_an_ordinary_user();
}
