//! Collecting children that have ended.

mod support;

use kedge_process::{Options, Thread, checkpoint, reap};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use support::{Folder, Running, alone, build, roots};

/// Far longer than anything here takes.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Asks again and again until there is an answer.
fn until<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(begin.elapsed() < TIMEOUT, "{what}: not within {TIMEOUT:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// What reap() collects of this process's children once there is something.
fn collected(pid: i32) -> Vec<(i32, i32)> {
    until("the child is not collected", || {
        let now = reap(&[pid]);
        assert!(now.more || !now.ended.is_empty(), "lost");
        (!now.ended.is_empty()).then_some(now.ended)
    })
}

fn is_zombie(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap().contains(") Z ")
}

/// The thread of `pid` that has called itself so, but for its first.
fn thread_named(pid: i32, name: &str) -> Option<i32> {
    let mut tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let is_it = |task: &std::fs::DirEntry| {
        std::fs::read_to_string(task.path().join("comm")).is_ok_and(|comm| comm.trim() == name)
    };
    let id = |task: std::fs::DirEntry| task.file_name().to_str()?.parse::<i32>().ok();
    tasks.find_map(|task| is_it(&task).then(|| id(task))?.filter(|tid| *tid != pid))
}

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
    until("its first thread lives", || is_zombie(pid).then_some(()));
    let early = reap(&[pid]);
    assert!(early.ended.is_empty() && early.more, "{early:?}");
    assert_eq!(collected(pid), [(pid, 5 << 8)]);
}

/// A program that is restarted and ends at once does so while its other threads are still traced:
/// they stay, and it is not collected before they are.
#[test]
fn a_thread_that_ends_under_trace_keeps_no_process() {
    let _alone = alone();
    let folder = Folder::new("reap-traced");
    let program = build(&folder, "leaderless.c", &["-pthread"]);
    for first in ["led", "leaderless"] {
        let mut command = Command::new(&program);
        // Collected by reap(), not through it.
        #[expect(clippy::zombie_processes, reason = "reap() collects every child of this process")]
        let mut child = command.arg(first).stdin(Stdio::piped()).spawn().unwrap();
        let pid = child.id() as i32;
        let idle = until("its idle thread is not there", || thread_named(pid, "idle"));
        let traced = Thread::stop(idle).unwrap();
        drop(child.stdin.take());
        assert_eq!(collected(pid), [(pid, 5 << 8)], "{first}");
        drop(traced);
    }
}

/// Its end is seen by who cannot look into /proc.
#[test]
fn a_wanted_child_is_collected_without_a_free_descriptor() {
    let _alone = alone();
    #[expect(clippy::zombie_processes, reason = "reap() collects it")]
    let child = Command::new("true").spawn().unwrap();
    let pid = child.id() as i32;
    until("it ends", || is_zombie(pid).then_some(()));
    let limit = |most: u64| {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the kernel fills the structure, and reads it.
        unsafe {
            assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
            let before = std::mem::replace(&mut limit.rlim_cur, most);
            assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
            before
        }
    };
    let before = limit(0);
    let found = reap(&[pid]);
    limit(before);
    assert_eq!(found.ended, [(pid, 0)]);
}

/// The clones that hold a job's memory are orphans; those of a subreaper's descendants, and its
/// own, must not become its children.
#[test]
fn a_program_that_is_a_subreaper_gets_no_clone_for_a_child() {
    let _alone = alone();
    let folder = Folder::new("subreaper");
    let program = build(&folder, "subreaper.c", &[]);
    for arguments in [&[][..], &["catches all"]] {
        let mut running = Running::start(Command::new(&program).args(arguments));
        running.lines(1);
        for round in 0..10 {
            let image = folder.path(&format!("{}-{round}", arguments.len()));
            std::fs::create_dir(&image).unwrap();
            let captured = checkpoint(&roots(), Options::new(image)).unwrap();
            assert_eq!(captured.processes().len(), 3);
            // It looks while its memory is held.
            std::thread::sleep(Duration::from_millis(20));
            if round == 9 {
                // SAFETY: the child has not been waited for.
                unsafe { libc::kill(running.child.id() as i32, libc::SIGTERM) };
                assert_eq!(running.lines(1), ["well"]);
            }
            drop(captured);
        }
        assert!(running.child.wait().unwrap().success());
        support::reap();
    }
}
