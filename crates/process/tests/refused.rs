//! What cannot be saved is refused by name, and the job that has it goes on.

mod support;

use kedge_left_out::{left_out, needs_root};
use kedge_process::{Begun, EngineError, Options, Patience, Roots};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use support::kernel::reaches_threads;
use support::survive::{as_an_ordinary_user, installed};
use support::{Folder, Running, alone, build, reap};

/// What a program holds, and how the refusal names it: before anything is stopped.
const REFUSED: [(&str, &str); 26] = [
    ("seccomp_strict", "strict mode"),
    ("namespace", "namespaces of its own"),
    ("ring_that_waits", "wait for something"),
    ("ring_with_a_timeout", "under way"),
    ("ring_that_had_more_completions", "several completions"),
    ("ring_with_a_thread", "IORING_SETUP_SQPOLL"),
    ("ring_with_files", "IORING_REGISTER_FILES"),
    ("ring_with_buffers", "IORING_REGISTER_BUFFERS"),
    ("ring_with_a_group", "IORING_REGISTER_PBUF_RING"),
    ("ring_with_an_eventfd", "IORING_REGISTER_EVENTFD"),
    ("ring_with_credentials", "IORING_REGISTER_PERSONALITY"),
    ("ring_of_one_thread", "IORING_SETUP_SINGLE_ISSUER"),
    ("ring_that_is_polled", "IORING_SETUP_IOPOLL"),
    ("ring_that_is_disabled", "IORING_SETUP_R_DISABLED"),
    ("ring_of_large_requests", "IORING_SETUP_SQE128"),
    ("ring_of_large_completions", "IORING_SETUP_CQE32"),
    ("userfaultfd", "userfaultfd"),
    ("netlink", "netlink socket"),
    ("huge_file", "a file in a hugetlbfs"),
    ("notification_beside_a_message", "messages wait in it"),
    ("notification_without_a_socket", "has closed since"),
    ("guard", "MADV_GUARD_INSTALL"),
    ("member_that_nobody_holds", "that no process of the job holds"),
    ("socket_with_a_program", "SO_ATTACH_BPF"),
    ("no_vdso", "cannot be entered"),
    ("sandbox", "namespaces of its own"),
];

/// What only the stopped threads can be asked for: see docs/checkpoint.md.
const REFUSED_IN_THE_STOP: [(&str, &str); 7] = [
    ("seccomp_notify", "its system calls"),
    ("ring_in_a_list", "IORING_REGISTER_RING_FDS"),
    ("aio_of_a_parent", "/[aio]"),
    ("notification_with_a_value", "sigev_value"),
    ("notification_that_is_waited_for", "sigev_value"),
    ("deadly", "PR_SET_PDEATHSIG"),
    ("one_memory", "one memory with process"),
];

/// The same, before the stop, of what root can save.
const REFUSED_OF_USERS: [(&str, &str); 3] =
    [("seccomp", "as root alone"), ("seccomp_of_another", "as root alone"), ("login", "loginuid")];

/// Tells of what a program could not hold. Only root mounts a hugetlbfs, and loads a program.
fn not_here(what: &str, first: &str) {
    let tell = match what {
        "huge_file" | "socket_with_a_program" => needs_root,
        _ => left_out,
    };
    tell(what, &format!("it is {first}"));
}

/// The program that holds `what`.
fn holding(program: &Path, what: &str) -> Option<Running> {
    let mut command = Command::new(program);
    let mut running = match what {
        "sandbox" if !installed("bwrap") => return None,
        "sandbox" => {
            let bind = ["--die-with-parent", "--dev-bind", "/", "/"];
            Running::start(Command::new("bwrap").args(bind).arg(program).arg("nothing"))
        }
        _ => Running::start(command.arg(what)),
    };
    let first = running.lines_or_end(1).pop().unwrap_or_default();
    if first == "there" {
        return Some(running);
    }
    not_here(what, &first);
    running.child.wait().unwrap();
    None
}

/// The job is not stopped for that, not even for a moment.
fn refusal(begun: &mut Begun, roots: &Roots) -> Option<EngineError> {
    begun.survey(roots, &[]).and_then(|()| begun.watch(roots)).err()
}

#[test]
fn what_cannot_be_saved_is_named_and_the_job_goes_on() {
    let _alone = alone();
    let folder = Folder::new("refused");
    let program = build(&folder, "refused.c", &["-pthread", "-lrt"]);
    // SAFETY: geteuid takes no arguments and only returns a number.
    let root = unsafe { libc::geteuid() } == 0;
    let of_users = REFUSED_OF_USERS.into_iter().filter(|_| !root);
    let before = REFUSED.into_iter().chain(of_users).map(|(what, named)| (what, named, true));
    let in_the_stop = REFUSED_IN_THE_STOP.into_iter().map(|(what, named)| (what, named, false));
    for (what, named, is_before) in before.chain(in_the_stop) {
        let Some(mut running) = holding(&program, what) else { continue };
        let image = folder.path(what);
        std::fs::create_dir(&image).unwrap();
        let roots = Roots::These(vec![running.child.id() as i32]);
        // Without its first thread it is not even looked into.
        let (named, is_before) = match what {
            "deadly" if !reaches_threads() => ("its first thread has ended", true),
            // As any filter is.
            "seccomp_notify" if !root => (named, true),
            _ => (named, is_before),
        };
        let mut begun = Begun::new(Options::new(image)).unwrap();
        let error = match refusal(&mut begun, &roots) {
            Some(error) => {
                assert!(is_before, "{what}: {error}");
                error
            }
            None => {
                assert!(!is_before, "{what} is not refused before the stop");
                let stopped = begun.stop(&roots, &[], Patience::new(Duration::from_secs(10)));
                stopped.and_then(|stopped| begun.capture(stopped, &[])).unwrap_err()
            }
        };
        let error = error.to_string();
        assert!(error.contains(named), "{what}: {error}");
        assert_eq!(running.lines(50).iter().filter(|line| *line == "there").count(), 50);
        running.child.kill().unwrap();
        running.child.wait().unwrap();
        reap();
    }
}

/// The status of each thread is looked at before the job is stopped, and not again.
#[test]
fn a_thread_that_becomes_strict_meanwhile_is_named_and_the_job_goes_on() {
    let _alone = alone();
    let folder = Folder::new("refused-later");
    let program = build(&folder, "refused.c", &["-pthread", "-lrt"]);
    let mut running = Running::start(Command::new(&program).arg("seccomp_strict_later"));
    assert_eq!(running.lines(1), ["there"]);
    let image = folder.path("image");
    std::fs::create_dir(&image).unwrap();
    let pid = running.child.id() as i32;
    let roots = Roots::These(vec![pid]);
    let mut begun = Begun::new(Options::new(image)).unwrap();
    begun.survey(&roots, &[]).unwrap();
    begun.watch(&roots).unwrap();
    // SAFETY: the child is this test's own and not collected.
    unsafe { libc::kill(pid, libc::SIGUSR1) };
    let is_strict = |tid: String| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/task/{tid}/status")).unwrap();
        status.contains("Seccomp:\t1")
    };
    let begin = Instant::now();
    let threads = || std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    while !threads().any(|tid| is_strict(tid.file_name().into_string().unwrap())) {
        assert!(begin.elapsed() < Duration::from_secs(20), "it does not become strict");
        std::thread::sleep(Duration::from_millis(1));
    }
    let stopped = begun.stop(&roots, &[], Patience::new(Duration::from_secs(10)));
    let captured = stopped.and_then(|stopped| begun.capture(stopped, &[]));
    let error = captured.unwrap_err().to_string();
    assert!(error.contains("strict mode"), "{error}");
    assert_eq!(running.lines(50).iter().filter(|line| *line == "there").count(), 50);
    // It is as it was: killed, had it made any other call.
    assert!(threads().any(|tid| is_strict(tid.file_name().into_string().unwrap())));
    running.child.kill().unwrap();
    running.child.wait().unwrap();
    reap();
}

#[test]
fn ordinary_users_read_the_same() {
    as_an_ordinary_user();
}
