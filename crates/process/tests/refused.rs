//! What cannot be saved is refused by name, and the job that has it goes on.

mod support;

use kedge_process::{Options, Roots, checkpoint};
use std::process::Command;
use support::kernel::reaches_threads;
use support::survive::as_an_ordinary_user;
use support::{Folder, Running, alone, build, reap};

/// What a program holds, and how the refusal names it.
const REFUSED: [(&str, &str); 11] = [
    ("seccomp", "seccomp"),
    ("seccomp_of_another", "seccomp"),
    ("namespace", "namespaces of its own"),
    ("io_uring", "io_uring"),
    ("aio", "/[aio]"),
    ("userfaultfd", "userfaultfd"),
    ("netlink", "netlink"),
    ("notification", "mq_notify"),
    ("huge", "huge pages"),
    ("guard", "MADV_GUARD_INSTALL"),
    ("deadly", "PR_SET_PDEATHSIG"),
];

#[test]
fn what_cannot_be_saved_is_named_and_the_job_goes_on() {
    let _alone = alone();
    let folder = Folder::new("refused");
    let program = build(&folder, "refused.c", &["-pthread", "-lrt"]);
    for (what, named) in REFUSED {
        let mut running = Running::start(Command::new(&program).arg(what));
        let first = running.lines(1).remove(0);
        if first != "there" {
            eprintln!("{what}: not tested, because it is {first}");
            running.child.wait().unwrap();
            continue;
        }
        let image = folder.path(what);
        std::fs::create_dir(&image).unwrap();
        let roots = Roots::These(vec![running.child.id() as i32]);
        // Without its first thread it is not even looked into.
        let named = match what {
            "deadly" if !reaches_threads() => "its first thread has ended",
            _ => named,
        };
        let error = checkpoint(&roots, Options::new(image)).unwrap_err().to_string();
        assert!(error.contains(named), "{what}: {error}");
        assert_eq!(running.lines(50).iter().filter(|line| *line == "there").count(), 50);
        running.child.kill().unwrap();
        running.child.wait().unwrap();
        reap();
    }
}

#[test]
fn ordinary_users_read_the_same() {
    as_an_ordinary_user();
}
