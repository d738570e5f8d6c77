//! fio, which verifies what it has written, with the client and the daemon killed at random
//! moments.
use kedge_left_out::left_out;
use kedge_tests::cached::Cached;
use kedge_tests::kedge;
use kedge_tests::random::number;
use kedge_tests::world::stderr;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

/// What fio writes: how, in blocks of so many bytes, and how many bytes in all.
#[derive(Clone, Copy)]
struct Job {
    how: &'static str,
    block: u64,
    size: u64,
}

/// A file that grows.
const APPENDED: Job = Job { how: "write", block: 64 << 10, size: 256 << 20 };
/// Blocks of a file that is there. Each is one request to the daemon.
const REPLACED: Job = Job { how: "randwrite", block: 4096, size: 32 << 20 };
/// Moments of a kill after a run's first write, in milliseconds.
const MOMENTS: u32 = 400;

fn has_fio() -> bool {
    let found = Command::new("fio").arg("--version").output().is_ok();
    if !found {
        left_out("fio", "it is not installed");
    }
    found
}

fn fio(file: &Path, how: &str, block: u64, size: u64) -> Command {
    let mut command = Command::new("fio");
    command.args(["--name=v", "--ioengine=psync", "--verify=crc32c", "--verify_fatal=1"]);
    command.args(["--create_on_open=1", "--fallocate=none", "--verify_state_save=0"]);
    // Else its job is a process in a session of its own, which a kill would leave.
    command.arg("--thread");
    command.arg(format!("--filename={}", file.display()));
    command.args([format!("--rw={how}"), format!("--bs={block}"), format!("--size={size}")]);
    command
}

/// Has fio write a file.
fn writes(file: &Path, job: Job, by_itself: bool) -> Command {
    let mut command = fio(file, job.how, job.block, job.size);
    command.args(["--do_verify=0", "--allrandrepeat=0"]);
    if by_itself {
        command.env("LD_PRELOAD", kedge().with_file_name("libkedge_cache_preload.so"));
    }
    command
}

/// Has fio read the blocks of a file that are whole; each must be one that it wrote.
fn verifies(file: &Path, block: u64) {
    let length = fs::metadata(file).expect("a file").len() / block * block;
    if length == 0 {
        return;
    }
    let output = fio(file, "read", block, length).output().expect("fio");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}: {said}{}", file.display(), stderr(&output));
}

/// Starts fio, and waits for a moment after it has begun.
fn at_a_moment(file: &Path, job: Job, by_itself: bool) -> Child {
    let mut command = writes(file, job, by_itself);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let child = command.spawn().expect("fio");
    kedge_tests::world::wait_for("it writes nothing", || {
        fs::metadata(file).is_ok_and(|meta| meta.len() > 0)
    });
    sleep(Duration::from_millis(number(MOMENTS).into()));
    child
}

fn kill(mut child: Child) {
    // It may have ended.
    let _ = child.kill();
    child.wait().expect("it has ended");
}

/// A file for a job: where blocks are replaced, one that has some.
fn prepared(cached: &Cached, name: &str, job: Job) -> std::path::PathBuf {
    let file = cached.under.join(name);
    if job.how == REPLACED.how {
        let first = Job { how: "write", ..job };
        assert!(writes(&file, first, false).output().expect("fio").status.success());
    }
    file
}

#[test]
fn a_killed_client_leaves_whole_blocks() {
    let options = ["--tier", "ram:64M", "--host-free", "64M"];
    let Some(cached) = Cached::start("fclient", &options).filter(|_| has_fio()) else { return };
    let mut files = Vec::new();
    for round in 0..4 {
        let (job, by_itself) = ([APPENDED, REPLACED][round % 2], round < 2);
        let file = prepared(&cached, &format!("f{round}"), job);
        kill(at_a_moment(&file, job, by_itself));
        verifies(&file, job.block);
        files.push((file, job));
    }
    cached.stop();
    for (file, job) in files {
        verifies(&file, job.block);
    }
}

#[test]
fn a_killed_daemon_leaves_whole_blocks() {
    let options = ["--tier", "ram:64M", "--fsync", "memory", "--host-free", "64M"];
    let Some(cached) = Cached::start("fdaemon", &options).filter(|_| has_fio()) else { return };
    for round in 0..4 {
        let (job, by_itself) = ([APPENDED, REPLACED][round % 2], round < 2);
        let file = prepared(&cached, &format!("f{round}"), job);
        let child = at_a_moment(&file, job, by_itself);
        cached.kill();
        kill(child);
        match round % 2 {
            0 => drop(cached.recover()),
            _ => cached.begin(),
        }
        verifies(&file, job.block);
        if round % 2 == 0 {
            cached.begin();
        }
    }
}
