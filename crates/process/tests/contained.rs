//! Jobs in a container: its filter of system calls (seccomp) is theirs, and that of whoever
//! checkpoints and restarts them.

mod support;

use kedge_left_out::needs_root;
use kedge_process::{Options, Roots, checkpoint};
use std::process::Command;
use support::survive::{as_an_ordinary_user, steps_survive};
use support::{Folder, Running, alone, build, reap};

/// Set for what runs in the container.
const WITHIN: &str = "KEDGE_TEST_CONTAINED";

/// Runs a test of this program again, in a container whose filter does that.
fn within(denied: &str, test: &str) {
    let folder = Folder::new(&format!("contained-{denied}-{test}"));
    let container = build(&folder, "contained.c", &[]);
    let mut command = Command::new(container);
    command.arg(denied);
    started_by(command, test);
}

/// Runs a test of this program again, by what starts a container.
fn started_by(mut command: Command, test: &str) {
    command.arg(std::env::current_exe().unwrap()).args(["--exact", test]);
    let output = command.env(WITHIN, "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("1 passed"), "{said}");
}

/// Whether this process is the one within.
fn is_within() -> bool {
    std::env::var_os(WITHIN).is_some()
}

#[test]
fn a_job_comes_back_in_a_container() {
    const OWN: &str = "a_job_comes_back_in_a_container";
    if is_within() {
        return steps_survive("contained-steps", "threads.c", &["-pthread"]);
    }
    within("errors", OWN);
}

/// As Docker's root is, who is no user of a user namespace.
#[test]
fn a_job_of_a_root_without_sys_admin_comes_back() {
    const OWN: &str = "a_job_of_a_root_without_sys_admin_comes_back";
    if is_within() {
        steps_survive("contained-root", "threads.c", &["-pthread"]);
        return steps_survive("contained-tree", "tree.c", &[]);
    }
    // SAFETY: the call has no arguments and always succeeds.
    if unsafe { libc::geteuid() } != 0 {
        return needs_root("root without CAP_SYS_ADMIN", "this user is not root");
    }
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin"]);
    started_by(command, OWN);
}

/// A filter of the program's own counts one more than the container's.
#[test]
fn a_filter_of_the_program_is_still_refused() {
    const OWN: &str = "a_filter_of_the_program_is_still_refused";
    if is_within() {
        let folder = Folder::new("contained-seccomp");
        let mut program = Command::new(build(&folder, "refused.c", &["-pthread", "-lrt"]));
        program.arg("seccomp");
        return is_refused(program, "no filter is upon kedge itself");
    }
    within("errors", OWN);
}

/// What a checkpoint does in a process would be the end of it.
#[test]
fn a_container_that_ends_processes_is_refused_and_the_job_goes_on() {
    const OWN: &str = "a_container_that_ends_processes_is_refused_and_the_job_goes_on";
    if is_within() {
        // It has nothing that would be refused.
        let mut program = Command::new("sh");
        program.args(["-c", "while echo there; do sleep 0.002; done"]);
        return is_refused(program, "seccomp=unconfined");
    }
    within("ends", OWN);
}

/// A program that says that it is there is refused with `named`, and goes on.
fn is_refused(mut program: Command, named: &str) {
    let _alone = alone();
    let folder = Folder::new("contained-image");
    let mut running = Running::start(&mut program);
    assert_eq!(running.lines(1), ["there"]);
    let image = folder.path("image");
    std::fs::create_dir(&image).unwrap();
    let roots = Roots::These(vec![running.child.id() as i32]);
    let error = checkpoint(&roots, Options::new(image)).unwrap_err().to_string();
    assert!(error.contains(named), "{error}");
    assert_eq!(running.lines(50).iter().filter(|line| *line == "there").count(), 50);
    running.child.kill().unwrap();
    running.child.wait().unwrap();
    reap();
}

#[test]
fn ordinary_users_come_back_too() {
    if !is_within() {
        as_an_ordinary_user();
    }
}
