//! A restart that fails, or is ended at whatever moment, leaves the user's files as they were
//! before it.

mod support;

use kedge_process::plugins::{Claim, Found, Job, Moment, Plugin, PluginError, settle_in};
use kedge_process::{EngineError, RestartOptions, restart};
use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use support::survive::as_an_ordinary_user;
use support::{Folder, Running, alone, build, reap};

const HELD: usize = 3 << 20;
const KEPT: usize = 1 << 20;
/// Two for each file that gets its contents back in place, two for one that is replaced, one for a
/// companion.
const CHANGES: usize = 7;

/// A job that was captured and killed, and the files that it had, as they have been changed since.
struct Lost {
    folder: Folder,
    _alone: support::alone::Alone,
}

/// Name: contents, inode, mode, time of the last change.
type Files = BTreeMap<String, (Vec<u8>, u64, u32, (i64, i64))>;

impl Lost {
    fn new(name: &str) -> Lost {
        let _alone = alone();
        let folder = Folder::new(name);
        let program = build(&folder, "files.c", &[]);
        fs::create_dir(folder.path("work")).unwrap();
        let mut command = Command::new(program);
        let mut running = Running::start(command.arg(folder.path("work")).arg("60"));
        running.lines(3);
        running.capture_and_kill(&folder.path("image"));
        Lost { folder, _alone }
    }

    fn work(&self, name: &str) -> PathBuf {
        self.folder.path("work").join(name)
    }

    fn journals(&self) -> PathBuf {
        self.folder.path("state").join("restarts")
    }

    /// As somebody has changed them after the checkpoint; what they are then.
    fn change(&self) -> Files {
        for (name, _) in self.files() {
            if name.contains("aside") || name.ends_with("-journal") || name == "log" {
                fs::remove_file(self.work(&name)).unwrap();
            }
        }
        write(&self.work("held"), &vec![b'H'; HELD + 5000]);
        write(&self.work("kept"), &vec![b'K'; KEPT]);
        fs::write(self.work("log"), "another log").unwrap();
        fs::write(self.work("held-journal"), "later").unwrap();
        fs::set_permissions(self.work("held"), Permissions::from_mode(0o600)).unwrap();
        self.files()
    }

    fn files(&self) -> Files {
        let mut files = Files::new();
        for entry in fs::read_dir(self.work("")).unwrap() {
            let entry = entry.unwrap();
            let found = entry.metadata().unwrap();
            let bytes = if found.is_file() { fs::read(entry.path()).unwrap() } else { Vec::new() };
            let name = entry.file_name().into_string().unwrap();
            let changed = (found.mtime(), found.mtime_nsec());
            files.insert(name, (bytes, found.ino(), found.mode(), changed));
        }
        files
    }

    fn options(&self) -> RestartOptions {
        let null = || Some(OwnedFd::from(File::options().write(true).open("/dev/null").unwrap()));
        RestartOptions {
            streams: [None, null(), null()],
            journal: Some(journal(&self.journals())),
            ..RestartOptions::new(self.folder.path("image"))
        }
    }

    /// All old, byte by byte, and nothing besides.
    fn expect_old(&self, before: &Files, when: &str) {
        let now = self.files();
        let names = |files: &Files| files.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&now), names(before), "{when}");
        for (name, file) in before {
            // Contents are too long to be shown.
            assert!(now[name] == *file, "{when}: {name} is not as it was");
        }
        self.expect_no_journal(when);
    }

    fn expect_no_journal(&self, when: &str) {
        let left = fs::read_dir(self.journals()).map_or(0, |entries| entries.count());
        assert_eq!(left, 0, "{when}: a journal is left");
    }

    fn is_restored(&self) -> bool {
        fs::read(self.work("held")).unwrap() == [b'h'; 1].repeat(HELD)
            && fs::read(self.work("kept")).unwrap() == [b'k'; 1].repeat(KEPT)
            && fs::read(self.work("log")).unwrap() == [b'l'; 1].repeat(100)
            && fs::read(self.work("log.kedge-aside-1")).unwrap() == b"another log"
            && fs::read(self.work("held.kedge-aside-1")).unwrap().len() == HELD + 5000
            && fs::read(self.work("held-journal.kedge-aside-1")).unwrap() == b"later"
            && !self.work("held-journal").exists()
    }
}

/// In place.
fn write(path: &Path, bytes: &[u8]) {
    let file = File::options().write(true).open(path).unwrap();
    file.set_len(bytes.len() as u64).unwrap();
    file.write_all_at(bytes, 0).unwrap();
}

/// One of this host's.
fn journal(folder: &Path) -> PathBuf {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    folder.join(format!("{}-1.journal", host.trim().replace(['-', '_'], "_")))
}

/// The moment that is waited for, by its number, and the pipe that is told of it; set before a
/// fork.
static WANTED: AtomicUsize = AtomicUsize::new(0);
static PIPE: AtomicI32 = AtomicI32::new(-1);

fn number(moment: Moment) -> usize {
    match moment {
        Moment::Ready => 100,
        Moment::Recorded => 101,
        Moment::Changed(count) => count,
        Moment::Applied => 102,
        Moment::Committed => 103,
    }
}

fn is_wanted(moment: Moment) -> bool {
    let wanted = number(moment) == WANTED.load(Ordering::Relaxed);
    if wanted {
        // SAFETY: the test keeps the pipe open; it has inherited it.
        let mut pipe = unsafe { File::from_raw_fd(PIPE.load(Ordering::Relaxed)) };
        pipe.write_all(b"!").unwrap();
        std::mem::forget(pipe);
    }
    wanted
}

/// Ends the init, as SIGKILL would.
fn end(moment: Moment) {
    if is_wanted(moment) {
        // SAFETY: nothing of this process runs any more.
        unsafe { libc::_exit(9) };
    }
}

fn stop(moment: Moment) {
    if is_wanted(moment) {
        std::thread::sleep(Duration::from_secs(600));
    }
}

fn moments() -> impl Iterator<Item = Moment> {
    let changed = (1..=CHANGES).map(Moment::Changed);
    [Moment::Ready, Moment::Recorded].into_iter().chain(changed).chain([Moment::Applied])
}

/// Restarts it in a process of its own, told of that moment by the pipe; which process.
fn forked(lost: &Lost, moment: Option<Moment>, at: fn(Moment)) -> (i32, File) {
    let (told, pipe) = std::io::pipe().unwrap();
    WANTED.store(moment.map_or(0, number), Ordering::Relaxed);
    PIPE.store(pipe.as_raw_fd(), Ordering::Relaxed);
    let options =
        RestartOptions { at: Some(at), inherits: vec![pipe.as_raw_fd()], ..lost.options() };
    // SAFETY: the C library's fork makes its own locks usable in the child, which ends by _exit.
    let restarter = unsafe { libc::fork() };
    if restarter == 0 {
        let ended = restart(&options, |job| job.reap_all()).and_then(|restarted| restarted.wait());
        // SAFETY: _exit takes a number; no destructor of this copy of the process runs.
        unsafe { libc::_exit(i32::from(ended.is_err())) };
    }
    drop(pipe);
    (restarter, File::from(OwnedFd::from(told)))
}

fn children(pid: i32) -> Vec<i32> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// Kills the restarter, its keeper, and with that the init.
fn kill_all(restarter: i32) {
    let keepers = children(restarter);
    for pid in [restarter].into_iter().chain(keepers) {
        // SAFETY: kill takes no pointers; the restarter is a child that has not been waited for.
        unsafe { libc::kill(pid, libc::SIGKILL) };
    }
    wait(restarter);
}

fn wait(pid: i32) {
    let mut status = 0;
    // SAFETY: waitpid stores the status.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    reap();
}

/// What the next restart says.
fn settle(lost: &Lost) -> Vec<String> {
    let begin = Instant::now();
    let mut said = settle_in(&lost.journals()).said;
    while fs::read_dir(lost.journals()).is_ok_and(|entries| entries.count() > 0) {
        assert!(begin.elapsed() < Duration::from_secs(20), "it is not settled: {said:?}");
        std::thread::sleep(Duration::from_millis(2));
        said.extend(settle_in(&lost.journals()).said);
    }
    said
}

#[test]
fn a_restart_whose_init_ends_at_any_moment_is_undone_at_once() {
    let lost = Lost::new("init-ends");
    for moment in moments() {
        let before = lost.change();
        let (restarter, mut told) = forked(&lost, Some(moment), end);
        let mut byte = [0];
        assert_eq!(told.read(&mut byte).unwrap(), 1, "{moment:?} never came");
        wait(restarter);
        lost.expect_old(&before, &format!("{moment:?}"));
    }
}

#[test]
fn a_restart_that_is_killed_with_all_that_belongs_to_it_is_undone_by_the_next() {
    let lost = Lost::new("all-killed");
    for moment in moments() {
        let before = lost.change();
        let (restarter, mut told) = forked(&lost, Some(moment), stop);
        assert_eq!(told.read(&mut [0]).unwrap(), 1, "{moment:?} never came");
        kill_all(restarter);
        let said = settle(&lost);
        let changed = matches!(moment, Moment::Changed(_) | Moment::Applied);
        assert_eq!(said.len(), usize::from(changed), "{moment:?}: {said:?}");
        lost.expect_old(&before, &format!("{moment:?}"));
    }
}

#[test]
fn what_a_restart_had_put_aside_is_told_although_all_were_killed() {
    let lost = Lost::new("committed");
    lost.change();
    let (restarter, mut told) = forked(&lost, Some(Moment::Committed), stop);
    assert_eq!(told.read(&mut [0]).unwrap(), 1);
    kill_all(restarter);
    let said = settle(&lost).join(" ");
    for name in ["held.kedge-aside-1", "log.kedge-aside-1", "kept.kedge-aside-1"] {
        assert!(said.contains(name), "{said}");
    }
    assert!(lost.is_restored());
    lost.expect_no_journal("told");
}

/// As a supervisor does that was sent SIGINT or SIGTERM.
#[test]
fn a_restart_that_is_given_up_is_undone_at_once() {
    fn give_up() -> bool {
        let mut asked =
            libc::pollfd { fd: GIVEN_UP.load(Ordering::Relaxed), events: libc::POLLIN, revents: 0 };
        // SAFETY: one structure, which lives as long as the call.
        unsafe { libc::poll(&raw mut asked, 1, 0) == 1 }
    }
    static GIVEN_UP: AtomicI32 = AtomicI32::new(-1);
    let lost = Lost::new("given-up");
    for moment in moments() {
        let before = lost.change();
        let (told, pipe) = std::io::pipe().unwrap();
        WANTED.store(number(moment), Ordering::Relaxed);
        PIPE.store(pipe.as_raw_fd(), Ordering::Relaxed);
        GIVEN_UP.store(told.as_raw_fd(), Ordering::Relaxed);
        let inherits = vec![pipe.as_raw_fd()];
        let options = RestartOptions { at: Some(stop), inherits, give_up, ..lost.options() };
        let error = restart(&options, |job| job.reap_all()).unwrap_err();
        assert!(matches!(error, EngineError::GivenUp), "{error}");
        lost.expect_old(&before, &format!("{moment:?}"));
        reap();
    }
}

#[derive(Debug)]
struct Failing {
    late: bool,
}

impl Plugin for Failing {
    fn name(&self) -> &'static str {
        "failing"
    }

    fn claim(&self, _: &Found, _: &Job) -> Claim {
        Claim::No
    }

    fn rebuilt(&self) -> Result<(), PluginError> {
        if self.late { Ok(()) } else { Err(PluginError::Refused("early".into())) }
    }

    fn agreed(&self) -> Result<(), PluginError> {
        Err(PluginError::Refused("late".into()))
    }
}

#[test]
fn a_restart_that_fails_leaves_all_files_as_they_were() {
    let lost = Lost::new("fails");
    for late in [false, true] {
        let before = lost.change();
        let options =
            RestartOptions { plugins: vec![Arc::new(Failing { late })], ..lost.options() };
        let error = restart(&options, |job| job.reap_all()).unwrap_err().to_string();
        assert!(error.contains(if late { "late" } else { "early" }), "{error}");
        lost.expect_old(&before, &error);
        reap();
    }
    let before = lost.change();
    fs::remove_file(lost.folder.path("files")).unwrap();
    let error = restart(&lost.options(), |job| job.reap_all()).unwrap_err().to_string();
    lost.expect_old(&before, &error);
    reap();
}

/// Looks at the files when the job may run, which it then may not.
#[derive(Debug)]
struct Waiting {
    file: PathBuf,
    before: Vec<u8>,
}

impl Plugin for Waiting {
    fn name(&self) -> &'static str {
        "waiting"
    }

    fn claim(&self, _: &Found, _: &Job) -> Claim {
        Claim::No
    }

    fn may_run(&self) -> Result<(), PluginError> {
        let now = fs::read(&self.file).unwrap_or_default();
        let what = if now == self.before { "as it was" } else { "changed" };
        Err(PluginError::Refused(what.into()))
    }
}

/// A job that waits for its word to run is another's still where it was, its files too.
#[test]
fn no_file_is_changed_before_the_job_may_run() {
    let lost = Lost::new("waits");
    let before = lost.change();
    let file = lost.work("held");
    let held = fs::read(&file).unwrap();
    let plugin = Waiting { file, before: held };
    let options = RestartOptions { plugins: vec![Arc::new(plugin)], ..lost.options() };
    let error = restart(&options, |job| job.reap_all()).unwrap_err().to_string();
    assert!(error.contains("as it was"), "{error}");
    lost.expect_old(&before, &error);
    reap();
}

#[test]
fn a_restart_that_succeeds_leaves_the_job_its_files_and_tells_what_is_aside() {
    let lost = Lost::new("succeeds");
    lost.change();
    let options = lost.options();
    let restarted = restart(&options, |job| job.reap_all()).unwrap();
    let notes = restarted.notes.join(" ");
    assert!(notes.contains("held.kedge-aside-1") && notes.contains("log.kedge-aside-1"), "{notes}");
    assert_eq!(libc::WEXITSTATUS(restarted.wait().unwrap()), 7, "it found other files");
    assert!(lost.is_restored());
    let mode = fs::metadata(lost.work("held")).unwrap().mode() & 0o7777;
    assert_eq!(mode, 0o640);
    lost.expect_no_journal("it runs");
    drop(restarted);
    reap();
}

#[test]
fn restarts_killed_at_random_moments_leave_all_old_or_all_restored() {
    let lost = Lost::new("random");
    let begin = Instant::now();
    lost.change();
    let (restarter, _) = forked(&lost, None, |_| ());
    wait(restarter);
    // About half of the rounds are to end before the restart does, however fast that is here.
    let mut whole = begin.elapsed();
    let mut undone = 0;
    for round in 0..40u32 {
        let before = lost.change();
        let (restarter, _) = forked(&lost, None, |_| ());
        std::thread::sleep(whole * (round * 7919 % 40_009) / 40_009);
        if round % 2 == 0 {
            kill_all(restarter);
        } else {
            // The keeper alone: the restarter undoes.
            for keeper in children(restarter) {
                // SAFETY: kill takes no pointers; the keeper descends from the restarter, a child
                // that has not been waited for.
                unsafe { libc::kill(keeper, libc::SIGKILL) };
            }
            wait(restarter);
        }
        settle(&lost);
        if lost.files().keys().any(|name| name.contains("aside")) {
            assert!(lost.is_restored(), "round {round}: neither old nor restored");
            whole = whole * 3 / 4;
        } else {
            undone += 1;
            whole = whole * 4 / 3;
            lost.expect_old(&before, &format!("round {round}"));
        }
    }
    assert!(undone > 5, "only {undone} were ended in time");
}

#[test]
fn what_was_changed_after_an_ended_restart_is_kept() {
    let lost = Lost::new("newer");
    lost.change();
    let (restarter, mut told) = forked(&lost, Some(Moment::Applied), stop);
    assert_eq!(told.read(&mut [0]).unwrap(), 1);
    kill_all(restarter);
    write(&lost.work("held"), b"newer");
    fs::write(lost.work("log"), "a newer log").unwrap();
    fs::write(lost.work("held-journal"), "a newer journal").unwrap();
    let said = settle(&lost).join("\n");
    let read = |name: &str| fs::read(lost.work(name)).unwrap();
    assert_eq!(read("held"), b"newer");
    assert_eq!(read("log"), b"a newer log");
    assert_eq!(read("held-journal"), b"a newer journal");
    assert!(read("kept") == [b'K'; 1].repeat(KEPT));
    assert!(read("held.kedge-aside-1") == [b'H'; 1].repeat(HELD + 5000));
    assert_eq!(read("log.kedge-aside-1"), b"another log");
    assert_eq!(read("held-journal.kedge-aside-1"), b"later");
    for name in ["held", "log", "held-journal"] {
        let both = [lost.work(name), lost.work(&format!("{name}.kedge-aside-1"))];
        assert!(both.iter().all(|path| said.contains(path.to_str().unwrap())), "{said}");
    }
}

#[test]
fn a_journal_that_is_not_the_user_s_own_is_not_followed() {
    let folder = Folder::new("hostile");
    let journals = folder.path("restarts");
    fs::create_dir(&journals).unwrap();
    fs::set_permissions(&journals, Permissions::from_mode(0o700)).unwrap();
    let victim = folder.path("victim.kedge-new-0");
    fs::write(&victim, "precious").unwrap();
    let text =
        format!("kedge restart 1 pending \n{{\"make\":{{\"path\":\"{}\"}}}}\n", victim.display());
    let journal = journal(&journals);
    let plant = |mode: u32| {
        let _ = fs::remove_file(&journal);
        fs::write(&journal, &text).unwrap();
        fs::set_permissions(&journal, Permissions::from_mode(mode)).unwrap();
    };
    let refused = |why: &str| {
        assert_eq!(settle_in(&journals).said.len(), 1, "{why}");
        assert!(victim.exists(), "{why}");
    };
    plant(0o644);
    refused("others may read it");
    plant(0o600);
    fs::hard_link(&journal, folder.path("other")).unwrap();
    refused("it has another name");
    fs::remove_file(&journal).unwrap();
    std::os::unix::fs::symlink(folder.path("other"), &journal).unwrap();
    refused("it is a link");
    // SAFETY: geteuid takes no arguments and only returns a number.
    if unsafe { libc::geteuid() } == 0 {
        plant(0o600);
        std::os::unix::fs::chown(&journal, Some(1234), Some(1234)).unwrap();
        refused("it is another user's");
    }
    fs::write(&journal, "nonsense").unwrap();
    refused("it is nonsense");
    plant(0o600);
    fs::set_permissions(&journals, Permissions::from_mode(0o755)).unwrap();
    assert!(settle_in(&journals).said.is_empty() && victim.exists(), "the folder is not private");
    fs::set_permissions(&journals, Permissions::from_mode(0o700)).unwrap();
    let elsewhere = journals.join("some.other.host-1.journal");
    fs::rename(&journal, &elsewhere).unwrap();
    assert!(settle_in(&journals).said.is_empty() && victim.exists(), "it is another host's");
    fs::rename(&elsewhere, &journal).unwrap();
    assert!(settle_in(&journals).said.is_empty() && !victim.exists(), "this one is followed");
}

#[test]
fn ordinary_users_files_are_as_safe() {
    as_an_ordinary_user();
}
