//! One test at a time, none for ever, and nothing left of one that failed: a later test would wait
//! for its processes.
#![allow(unreachable_pub, dead_code, reason = "each test program uses its part of it")]

use super::survive::rounds;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What the slowest test needs on a busy machine, many times over.
const TIMEOUT: Duration = Duration::from_secs(180);

/// A test's turn; its end is the end of whatever a failed test has left.
pub struct Alone {
    /// Its end is the watch's.
    _ended: Sender<()>,
    _turn: MutexGuard<'static, ()>,
}

/// A restart needs the process ids that the job had, and its caller forks: one test at a time.
pub fn alone() -> Alone {
    alone_for(TIMEOUT)
}

/// The same for a test that may take so long in each round.
pub fn alone_for(limit: Duration) -> Alone {
    static ALONE: Mutex<()> = Mutex::new(());
    // SAFETY: PR_SET_CHILD_SUBREAPER takes a number. Clones become this process's, as they become
    // the supervisor's.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) }, 0);
    let turn = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (ended, end) = channel::<()>();
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    let limit = limit * rounds() as u32;
    std::thread::spawn(move || {
        // It fails by itself then: its programs' pipes are closed.
        while end.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
            eprintln!("{test} hangs; its processes are killed:\n{}", told(&descendants()));
            kill(&descendants());
        }
    });
    Alone { _ended: ended, _turn: turn }
}

impl Drop for Alone {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let left = descendants();
            eprintln!("left behind and killed:\n{}", told(&left));
            kill(&left);
            reap();
        }
    }
}

/// Collects orphans until there are none; those that do not end are killed and named.
pub fn reap() {
    let begin = Instant::now();
    loop {
        let mut status = 0;
        // SAFETY: waitpid stores the status.
        match unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG) } {
            0 if begin.elapsed() > Duration::from_secs(60) => {
                let left = descendants();
                kill(&left);
                assert!(std::thread::panicking(), "these do not end:\n{}", told(&left));
                return;
            }
            0 => std::thread::sleep(Duration::from_millis(1)),
            pid if pid < 0 => return,
            _ => {}
        }
    }
}

/// This process's children, their children, and so on.
fn descendants() -> Vec<i32> {
    let mut found = children(std::process::id() as i32);
    let mut at = 0;
    while at < found.len() {
        found.extend(children(found[at]));
        at += 1;
    }
    found
}

fn children(pid: i32) -> Vec<i32> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let lists = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    lists
        .flat_map(|list| list.split_whitespace().flat_map(str::parse).collect::<Vec<_>>())
        .collect()
}

fn kill(pids: &[i32]) {
    for pid in pids {
        // SAFETY: kill takes no pointers; the processes are of this test.
        unsafe { libc::kill(*pid, libc::SIGKILL) };
    }
}

/// A line for each: its id, name, state and parent, where in the kernel it waits, its command;
/// below it, where each of its threads waits, as far as root can see.
fn told(pids: &[i32]) -> String {
    let read = |path: String| std::fs::read_to_string(path).unwrap_or_default();
    let line = |pid: &i32| {
        let command = read(format!("/proc/{pid}/cmdline")).replace('\0', " ");
        let command: String = command.chars().take(120).collect();
        let stat = read(format!("/proc/{pid}/stat"));
        let stat = stat.split(' ').take(4).collect::<Vec<_>>().join(" ");
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let threads = tasks.map(|task| {
            let of = |file| read(format!("{}/{file}", task.path().display()));
            let stack: Vec<String> = of("stack").lines().take(5).map(str::to_owned).collect();
            let call = of("syscall");
            format!("\n    {:?}: {}: {}", task.file_name(), call.trim(), stack.join(" "))
        });
        format!("{stat} {command}{}", threads.collect::<String>())
    };
    pids.iter().map(line).collect::<Vec<_>>().join("\n")
}
