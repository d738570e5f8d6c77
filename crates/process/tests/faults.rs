//! What goes wrong is named, harms no running job and leaves nothing behind.

mod support;

use kedge_image::{ImageError, Manifest};
use kedge_left_out::left_out;
use kedge_process::{EngineError, Options, RestartOptions, Roots, checkpoint, restart};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use support::survive::as_an_ordinary_user;
use support::{Folder, Running, alone, bring_back, build, reap, step};

fn options(folder: &Folder) -> Options {
    let image = folder.path("image");
    let _ = std::fs::remove_dir_all(&image);
    std::fs::create_dir(&image).unwrap();
    Options::new(image)
}

fn end(mut running: Running) {
    running.child.kill().unwrap();
    running.child.wait().unwrap();
    reap();
}

#[test]
fn a_debugger_is_named_and_the_job_goes_on() {
    let _alone = alone();
    let folder = Folder::new("traced");
    let program = build(&folder, "traced.c", &[]);
    let mut running = Running::start(&mut Command::new(&program));
    running.lines(2);
    let tracer = running.child.id() as i32;
    for _ in 0..3 {
        let error = checkpoint(&Roots::These(vec![tracer]), options(&folder)).unwrap_err();
        let named = matches!(error, EngineError::Traced { tracer: by, .. } if by == tracer);
        assert!(named, "{error}");
        // What was in flight and more.
        running.lines(20);
    }
    end(running);
}

#[test]
fn a_checkpoint_that_cannot_be_written_harms_nobody() {
    let _alone = alone();
    let folder = Folder::new("unwritten");
    let program = build(&folder, "threads.c", &["-pthread"]);
    let mut running = Running::start(Command::new(&program).arg("200"));
    let first = running.lines(2);
    let roots = Roots::These(vec![running.child.id() as i32]);
    for round in 0..5 {
        let options = options(&folder);
        // Something lies in the way of the process's file, or of the descriptors'.
        let name = if round % 2 == 0 { "descriptors.data" } else { "job.kimg" };
        std::fs::create_dir(options.folder.join(name)).unwrap();
        let error = checkpoint(&roots, options).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
    let rest = running.lines(198);
    assert_eq!(step(rest.last().unwrap()), 200);
    assert!(rest.iter().all(|line| line[..16] == first[0][..16]));
    assert_eq!(running.child.wait().unwrap().code(), Some(7));
}

/// Offsets to damage: everywhere in what is small, here and there in what is large.
fn offsets(length: u64) -> impl Iterator<Item = u64> {
    (0..length).step_by((length / 24).max(1) as usize).chain([length - 1])
}

fn flip(path: &Path, at: u64) {
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 0x20], at).unwrap();
}

#[test]
fn a_damaged_image_is_refused_and_leaves_nothing() {
    let _alone = alone();
    let folder = Folder::new("damaged");
    let program = build(&folder, "step.c", &["-static"]);
    let mut running = Running::start(Command::new(&program).arg("20"));
    running.lines(5);
    let image = folder.path("image");
    running.capture_and_kill(&image);
    for entry in std::fs::read_dir(&image).unwrap() {
        let path = entry.unwrap().path();
        let length = path.metadata().unwrap().len();
        if length == 0 {
            continue;
        }
        let mut refused = 0;
        for at in offsets(length) {
            flip(&path, at);
            match restart(&RestartOptions::new(image.clone()), |job| job.reap_all()) {
                Err(error) => {
                    refused += 1;
                    let name = path.file_name().unwrap().to_str().unwrap();
                    let image = matches!(error, EngineError::Image(ImageError::Damaged { .. }));
                    assert!(image || error.to_string().contains(name), "{name} {at}: {error}");
                }
                // Between payloads lies what nobody reads.
                Ok(restarted) => drop(restarted.wait().unwrap()),
            }
            flip(&path, at);
        }
        assert!(refused > 5, "{}: only {refused} were found", path.display());
    }
    // Every restart that failed has ended all that it had begun.
    reap();
    let (after, status) = bring_back(&image);
    assert_eq!(step(after.last().unwrap()), 20);
    assert_eq!(libc::WEXITSTATUS(status), 7);
}

#[test]
fn a_job_ends_with_its_keeper() {
    let _alone = alone();
    let folder = Folder::new("keeper");
    let program = build(&folder, "tree.c", &["-pthread"]);
    let mut running = Running::start(Command::new(&program).arg("100000"));
    running.lines(5);
    let image = folder.path("image");
    running.capture_and_kill(&image);
    let (output, theirs) = std::io::pipe().unwrap();
    let streams = [None, Some(theirs.into()), None];
    let options = RestartOptions { streams, ..RestartOptions::new(image) };
    let restarted = restart(&options, |job| job.reap_all()).unwrap();
    drop(options);
    let mut lines = BufReader::new(output).lines();
    lines.next().unwrap().unwrap();
    // SAFETY: kill takes no pointers; the keeper is a child that has not been waited for.
    unsafe { libc::kill(restarted.keeper(), libc::SIGKILL) };
    // Its output ends when the last of its processes does.
    assert!(lines.take(50_000).count() < 50_000);
    assert!(restarted.wait().is_err());
}

#[test]
fn a_file_that_changed_is_named() {
    let _alone = alone();
    let folder = Folder::new("changed");
    let program = build(&folder, "step.c", &[]);
    let mut running = Running::start(Command::new(&program).arg("20"));
    running.lines(5);
    let image = folder.path("image");
    running.capture_and_kill(&image);
    std::fs::File::options().append(true).open(&program).unwrap().write_all_at(b"x", 0).unwrap();
    let error = restart(&RestartOptions::new(image), |job| job.reap_all()).unwrap_err();
    assert!(error.to_string().contains(program.to_str().unwrap()), "{error}");
    reap();
}

/// Captures the job into `folder`/N for N from 0 on, until it is killed; in a process of its own.
/// Every other time its memory is written before it is stopped, the first time if `ahead`.
fn forked_supervisor(pid: i32, folder: &Path, ahead: bool) -> i32 {
    // SAFETY: the C library's fork makes its own locks usable in the child, which uses nothing of
    // this program's that another thread might hold, and ends by _exit.
    unsafe {
        let supervisor = libc::fork();
        if supervisor == 0 {
            let roots = Roots::These(vec![pid]);
            let capture = |number: usize| {
                let image = folder.join(number.to_string());
                std::fs::create_dir(&image).ok()?;
                let ahead = (ahead == number.is_multiple_of(2)).then_some(0);
                let captured = checkpoint(&roots, Options { ahead, ..Options::new(image) });
                let done = captured.and_then(|c| c.finish(Manifest::new("test".into(), vec![], 1)));
                let told = |error: &_| std::fs::write(folder.join("error"), format!("{error}"));
                done.inspect_err(|error| drop(told(error))).ok()
            };
            let failed = (0..).find(|number| capture(*number).is_none());
            libc::_exit(failed.map_or(1, |_| 2));
        }
        supervisor
    }
}

/// Waits until no thread is on its way home, which a second supervisor would disturb, and nothing
/// helps it there.
fn wait_until_home(pid: i32) {
    /// All signals that can be blocked, and those that one that makes calls in a row takes.
    const ALL: u64 = 0xffff_ffff_fffb_feff;
    let quiet = [libc::SIGURG, libc::SIGWINCH, libc::SIGCHLD].map(|signal| 1 << (signal - 1));
    let quiet = quiet.into_iter().fold(0u64, |all, bit| all | bit);
    let begin = Instant::now();
    let read = |path: std::path::PathBuf| std::fs::read_to_string(path).unwrap_or_default();
    let away = || {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
        tasks.map(|task| task.path()).any(|task| {
            let status = read(task.join("status"));
            let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:"));
            let blocked = u64::from_str_radix(blocked.unwrap_or("0").trim(), 16).unwrap();
            blocked | quiet == ALL || !read(task.join("children")).is_empty()
        })
    };
    while away() {
        assert!(begin.elapsed() < Duration::from_secs(60), "a thread does not come home");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// How long it takes here and now: a slow machine needs many times what a fast one does.
fn time_of(what: impl FnOnce()) -> Duration {
    let begin = Instant::now();
    what();
    begin.elapsed().max(Duration::from_millis(20))
}

fn kill(pid: i32) -> i32 {
    let mut status = 0;
    // SAFETY: the process is a child that has not been waited for; waitpid stores into a local.
    unsafe {
        libc::kill(pid, libc::SIGKILL);
        assert_eq!(libc::waitpid(pid, &mut status, 0), pid);
    }
    status
}

/// Whichever moment it is killed at, while threads stop, are away, or are cloned, or while the
/// image is written: the job goes on, and what was finished is an image.
#[test]
fn a_supervisor_that_is_killed_harms_neither_job_nor_images() {
    let _alone = alone();
    let folder = Folder::new("supervisor");
    let program = build(&folder, "threads.c", &["-pthread"]);
    let mut running = Running::start(Command::new(&program).arg("100000"));
    let first = running.lines(2);
    let pid = running.child.id() as i32;
    let mut whole = time_of(|| {
        let options = options(&folder);
        let captured = checkpoint(&Roots::These(vec![pid]), options).unwrap();
        captured.finish(Manifest::new("test".into(), vec![], 1)).unwrap();
    });
    let mut last = None;
    for round in 0..40u64 {
        let images = folder.path(&format!("round-{round}"));
        std::fs::create_dir(&images).unwrap();
        let supervisor = forked_supervisor(pid, &images, round % 2 == 1);
        // Prime, so that the moments spread over all that it does.
        std::thread::sleep(whole * 2 * (round as u32 * 7919 % 40_009) / 40_009);
        let killed = libc::WIFSIGNALED(kill(supervisor));
        let error = std::fs::read_to_string(images.join("error"));
        assert!(killed, "it failed in round {round}: {error:?}");
        wait_until_home(pid);
        let said = running.lines(20);
        assert!(said.iter().all(|line| line[..16] == first[0][..16]), "{said:?}");
        let done = std::fs::read_dir(&images).unwrap().map(|entry| entry.unwrap().path());
        last = done.filter(|image| Manifest::read(image).is_ok()).max().or(last);
        // It was measured when there was less else to do.
        if last.is_none() && round % 10 == 9 {
            whole *= 2;
        }
    }
    end(running);
    let options = RestartOptions::new(last.expect("no image in forty rounds"));
    let (output, theirs) = std::io::pipe().unwrap();
    let options = RestartOptions { streams: [None, Some(theirs.into()), None], ..options };
    let restarted = restart(&options, |job| job.reap_all()).unwrap();
    drop(options);
    // Open to the end: a program that nobody reads ends by itself.
    let mut output = BufReader::new(output);
    let said: Vec<String> = output.by_ref().lines().take(20).map(Result::unwrap).collect();
    // SAFETY: kill takes no pointers; the keeper is a child that has not been waited for.
    unsafe { libc::kill(restarted.keeper(), libc::SIGKILL) };
    assert!(said.iter().all(|line| line[..16] == first[0][..16]), "{said:?}");
    assert!(restarted.wait().is_err());
    drop(restarted);
    reap();
}

/// Captures the job, then stops itself, as SIGSTOP stops whoever writes an image, before anything
/// of it is written.
fn stopped_writer(pid: i32, image: &Path, ahead: Option<u64>) -> i32 {
    // SAFETY: the C library's fork makes its own locks usable in the child, which uses nothing of
    // this program's that another thread might hold.
    unsafe {
        let writer = libc::fork();
        if writer == 0 {
            let roots = Roots::These(vec![pid]);
            let captured = checkpoint(&roots, Options { ahead, ..Options::new(image.into()) });
            libc::raise(libc::SIGSTOP);
            let done = captured.and_then(|c| c.finish(Manifest::new("test".into(), vec![], 1)));
            libc::_exit(i32::from(done.is_err()));
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(writer, &mut status, libc::WUNTRACED), writer);
        assert!(libc::WIFSTOPPED(status), "status {status:#x}");
        writer
    }
}

/// The program goes on, and what it changes from then on is not in the image: it checks all of its
/// memory at each step.
#[test]
fn a_writer_that_is_stopped_holds_up_nobody() {
    let _alone = alone();
    let folder = Folder::new("stopped");
    let program = build(&folder, "changes.c", &[]);
    for (name, ahead) in [("clone", None), ("ahead", Some(0))] {
        let mut running = Running::start(Command::new(&program).arg("300"));
        let mut before = running.lines(20);
        let image = folder.path(name);
        std::fs::create_dir(&image).unwrap();
        let writer = stopped_writer(running.child.id() as i32, &image, ahead);
        let captured = before.len() + running.waiting("0123456789abcdef 1\n".len());
        before.extend(running.lines(captured + 40 - before.len()));
        let mut status = 0;
        // SAFETY: the process is a child that has not been waited for; waitpid stores into a local.
        unsafe {
            libc::kill(writer, libc::SIGCONT);
            assert_eq!(libc::waitpid(writer, &mut status, 0), writer);
        }
        assert_eq!(status, 0, "no image");
        end(running);
        let (after, status) = bring_back(&image);
        assert_eq!(libc::WEXITSTATUS(status), 7, "{after:?}");
        assert!(step(&after[0]) <= captured + 1, "{} after {captured}", after[0]);
        assert!(after[0][..16] == before[0][..16], "{}", after[0]);
    }
}

/// In a process of this program that may make no namespaces of users: the image to restart.
const FORBIDDEN: &str = "KEDGE_TEST_FORBIDDEN";

#[test]
fn forbidden_namespaces_are_named_with_the_setting() {
    let _alone = alone();
    // SAFETY: both calls take no arguments and only return numbers.
    let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
    if uid == 0 {
        // It needs none of users; `ordinary_users_are_no_worse_off` does the same.
        return;
    }
    let folder = Folder::new("forbidden");
    let program = build(&folder, "step.c", &[]);
    let mut running = Running::start(Command::new(&program).arg("200"));
    running.lines(5);
    let image = folder.path("image");
    running.capture_and_kill(&image);
    let mut tests = Command::new(std::env::current_exe().unwrap());
    tests.args(["what_may_not_make_namespaces", "--exact", "--nocapture"]).env(FORBIDDEN, &image);
    let forbid = move || {
        // SAFETY: unshare takes no pointers; the process has one thread, as CLONE_NEWUSER asks.
        if unsafe { libc::unshare(libc::CLONE_NEWUSER) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
        std::fs::write("/proc/self/setgroups", "deny")?;
        std::fs::write("/proc/self/uid_map", format!("{uid} {uid} 1"))?;
        std::fs::write("/proc/self/gid_map", format!("{gid} {gid} 1"))?;
        std::fs::write("/proc/sys/user/max_user_namespaces", "0")
    };
    // SAFETY: the C library's fork makes its own locks usable in the child.
    unsafe { tests.pre_exec(forbid) };
    match tests.output() {
        Ok(output) => assert!(output.status.success(), "{output:?}"),
        Err(error) => left_out("forbidden namespaces", &error.to_string()),
    }
    reap();
}

/// What the test above asks of it, and nothing otherwise.
#[test]
fn what_may_not_make_namespaces() {
    let Ok(image) = std::env::var(FORBIDDEN) else { return };
    let error = restart(&RestartOptions::new(image.into()), |_| {}).unwrap_err().to_string();
    assert!(error.contains("user.max_user_namespaces"), "{error}");
}

/// Those children of this process that it traces: what holds a job's memory.
fn clones() -> Vec<i32> {
    let me = std::process::id();
    let mut clones = Vec::new();
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let children = std::fs::read_to_string(task.unwrap().path().join("children")).unwrap();
        clones.extend(children.split_whitespace().map(|pid| pid.parse::<i32>().unwrap()));
    }
    let traced = |pid: &i32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:"));
        let tracer = tracer.and_then(|tracer| tracer.trim().parse::<u32>().ok()).unwrap_or(0);
        tracer != 0 && std::fs::exists(format!("/proc/{me}/task/{tracer}")).unwrap()
    };
    clones.retain(traced);
    clones
}

#[test]
fn a_clone_that_is_killed_fails_its_checkpoint_alone() {
    let _alone = alone();
    let folder = Folder::new("clone");
    let program = build(&folder, "threads.c", &["-pthread"]);
    let mut running = Running::start(Command::new(&program).arg("100000"));
    let first = running.lines(2);
    let roots = Roots::These(vec![running.child.id() as i32]);
    let options = options(&folder);
    let image = options.folder.clone();
    let captured = checkpoint(&roots, options).unwrap();
    let clones = clones();
    assert_eq!(clones.len(), 1, "{clones:?}");
    // SAFETY: kill takes no pointers; this process traces the clone, so its id is its own.
    unsafe { libc::kill(clones[0], libc::SIGKILL) };
    captured.finish(Manifest::new("test".into(), vec![], 1)).unwrap_err();
    assert!(Manifest::read(&image).is_err());
    assert!(running.lines(50).iter().all(|line| line[..16] == first[0][..16]));
    // The next one is whole.
    let image = folder.path("next");
    running.capture_and_kill(&image);
    let options = RestartOptions::new(image);
    let (output, theirs) = std::io::pipe().unwrap();
    let options = RestartOptions { streams: [None, Some(theirs.into()), None], ..options };
    let restarted = restart(&options, |job| job.reap_all()).unwrap();
    drop(options);
    assert!(BufReader::new(output).lines().next().unwrap().unwrap()[..16] == first[0][..16]);
    // SAFETY: kill takes no pointers; the keeper is a child that has not been waited for.
    unsafe { libc::kill(restarted.keeper(), libc::SIGKILL) };
    drop(restarted.wait());
    drop(restarted);
    reap();
}

/// All that descends from `pid`, by what /proc tells now.
fn descendants(pid: i32) -> Vec<i32> {
    let mut found = vec![pid];
    let mut at = 0;
    while let Some(pid) = found.get(at).copied() {
        at += 1;
        let text = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
        let text = text.unwrap_or_default();
        found.extend(text.split_whitespace().filter_map(|pid| pid.parse::<i32>().ok()));
    }
    found
}

/// The init or its keeper is killed at some moment of a restart: nothing is left of it, and it can
/// be repeated.
#[test]
fn a_restart_that_is_killed_leaves_nothing() {
    let _alone = alone();
    let folder = Folder::new("restarts");
    let program = build(&folder, "tree.c", &["-pthread"]);
    let mut running = Running::start(Command::new(&program).arg("60"));
    let before = running.lines(5);
    let image = folder.path("image");
    running.capture_and_kill(&image);
    let whole = time_of(|| {
        let restarted = restart(&RestartOptions::new(image.clone()), |_| {}).unwrap();
        assert!(restarted.wait().is_err(), "its init is gone");
    });
    let mut cut_short = 0;
    for round in 0..30u64 {
        // SAFETY: the C library's fork makes its own locks usable in the child, which uses nothing
        // of this program's that another thread might hold, and ends by _exit.
        let restarter = unsafe {
            let restarter = libc::fork();
            if restarter == 0 {
                let null =
                    || std::fs::File::options().write(true).open("/dev/null").map(Into::into);
                let streams = [None, null().ok(), None];
                let options = RestartOptions { streams, ..RestartOptions::new(image.clone()) };
                let restarted = restart(&options, |job| job.reap_all());
                libc::_exit(restarted.map_or(3, |restarted| i32::from(restarted.wait().is_err())));
            }
            restarter
        };
        std::thread::sleep(whole * (round as u32 * 6131 % 30_011) / 30_011);
        // The restarter itself first, then the keeper, then the init.
        let all = descendants(restarter);
        if let Some(victim) = all.get(1 + round as usize % 2) {
            cut_short += 1;
            // SAFETY: kill takes no pointers; it descends from a child that has not been waited
            // for.
            unsafe { libc::kill(*victim, libc::SIGKILL) };
        }
        let mut status = 0;
        // SAFETY: waitpid stores the status.
        assert_eq!(unsafe { libc::waitpid(restarter, &mut status, 0) }, restarter);
        reap();
        let left = |pid: &&i32| std::fs::exists(format!("/proc/{pid}")).unwrap();
        assert!(all.iter().find(left).is_none(), "round {round}: {all:?}");
    }
    assert!(cut_short > 10, "only {cut_short} were killed");
    let (after, status) = bring_back(&image);
    assert_eq!(step(after.last().unwrap()), 60);
    assert!(after.iter().all(|line| line[..16] == before[0][..16]));
    assert_eq!(libc::WEXITSTATUS(status), 7);
}

#[test]
fn ordinary_users_are_no_worse_off() {
    as_an_ordinary_user();
}
