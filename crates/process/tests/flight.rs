//! Bytes in flight survive every checkpoint that fails, and every supervisor that is killed.

mod support;

use kedge_image::Manifest;
use kedge_process::plugins::{Capture, Claim, Found, Job, Plugin, PluginError};
use kedge_process::{Options, RestartOptions, Roots, checkpoint};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};
use support::survive::as_an_ordinary_user;
use support::{Folder, Running, alone, bring_back_by, build, reap};

/// What a checkpoint meets.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fate {
    /// It succeeds.
    Whole,
    /// Its process is killed in this phase.
    Killed(Phase),
    /// It fails in this phase.
    Failed(Phase),
    /// Its process is killed after so long.
    KilledAfter(Duration),
    /// No file may be longer than this.
    DiskFull(u64),
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Phase {
    /// Before any descriptor is looked at.
    Begin,
    /// All have been looked at.
    Looked,
    /// The memory of all processes is held as well.
    Captured,
}

/// Holds no descriptors: it brings on what it is made for.
#[derive(Debug)]
struct Fatal(Fate);

impl Fatal {
    fn reach(&self, phase: Phase) -> Result<(), PluginError> {
        match self.0 {
            // SAFETY: the process ends itself.
            Fate::Killed(at) if at == phase => unsafe {
                libc::kill(libc::getpid(), libc::SIGKILL);
                Ok(())
            },
            Fate::Failed(at) if at == phase => Err(PluginError::Refused("as asked".to_owned())),
            _ => Ok(()),
        }
    }
}

impl Plugin for Fatal {
    fn name(&self) -> &'static str {
        "fatal"
    }

    fn claim(&self, _file: &Found, _job: &Job) -> Claim {
        Claim::No
    }

    fn checkpoint(&self, _: &mut Capture, _: &[usize]) -> Result<Option<Value>, PluginError> {
        self.reach(Phase::Begin).map(|()| None)
    }

    fn resume(&self, _: &mut Capture) -> Result<(), PluginError> {
        self.reach(Phase::Looked)
    }

    fn captured(&self) -> Result<(), PluginError> {
        self.reach(Phase::Captured)
    }
}

/// Captures the job in a process of its own; whether that was killed.
fn capture(pid: i32, image: &Path, fate: Fate) -> bool {
    std::fs::create_dir(image).unwrap();
    // SAFETY: the C library's fork makes its own locks usable in the child, which uses nothing of
    // this program's that another thread might hold, and ends by _exit.
    let supervisor = unsafe { libc::fork() };
    if supervisor == 0 {
        if let Fate::DiskFull(bytes) = fate {
            let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
            // SAFETY: the kernel reads one structure; writing beyond the limit is an error then.
            unsafe {
                libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
                libc::setrlimit(libc::RLIMIT_FSIZE, &limit);
            }
        }
        let options =
            Options { plugins: vec![Arc::new(Fatal(fate))], ..Options::new(image.to_owned()) };
        let captured = checkpoint(&Roots::These(vec![pid]), options);
        let done = captured.and_then(|c| c.finish(Manifest::new("test".into(), vec![], 1)));
        let told = done.as_ref().map_or_else(ToString::to_string, |_| String::new());
        if !matches!(fate, Fate::DiskFull(_)) && !told.is_empty() {
            let _ = std::fs::write(image.with_extension("error"), told);
        }
        // SAFETY: ends the process at once.
        unsafe { libc::_exit(i32::from(done.is_err())) };
    }
    if let Fate::KilledAfter(time) = fate {
        std::thread::sleep(time);
        // SAFETY: it has not been waited for.
        unsafe { libc::kill(supervisor, libc::SIGKILL) };
    }
    let mut status = 0;
    // SAFETY: waitpid stores the status.
    assert_eq!(unsafe { libc::waitpid(supervisor, &mut status, 0) }, supervisor);
    let said = std::fs::read_to_string(image.with_extension("error")).unwrap_or_default();
    match fate {
        Fate::Whole => assert_eq!(status, 0, "{said}"),
        Fate::Failed(_) => assert!(said.contains("as asked"), "{said}"),
        Fate::DiskFull(_) => assert_eq!(libc::WEXITSTATUS(status), 1),
        Fate::Killed(_) => assert!(libc::WIFSIGNALED(status), "{said}"),
        Fate::KilledAfter(_) => assert!(libc::WIFSIGNALED(status) || status == 0, "{said}"),
    }
    libc::WIFSIGNALED(status)
}

struct Full {
    running: Running,
    folder: Folder,
    image: PathBuf,
}

impl Full {
    fn start(program: &Path, name: &str) -> Full {
        let folder = Folder::new(name);
        let mut command = Command::new(program);
        command.current_dir(folder.path("."));
        let mut running = Running::start(&mut command);
        assert_eq!(running.lines(1), ["ready"]);
        let image = folder.path("image");
        Full { running, folder, image }
    }

    fn pid(&self) -> i32 {
        self.running.child.id() as i32
    }

    /// Waits until what a killed supervisor had begun is done: its last child becomes this
    /// process's.
    fn wait_until_alone(&self) {
        let begin = Instant::now();
        let own = format!("/proc/self/task/{}/children", std::process::id());
        let children = || std::fs::read_to_string(&own).unwrap();
        while children().split_whitespace().any(|pid| pid != self.pid().to_string()) {
            assert!(begin.elapsed() < Duration::from_secs(60), "{}", children());
            let mut status = 0;
            // SAFETY: waitpid stores the status; the job's own process has not ended.
            unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG | libc::__WALL) };
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// It reads all, and finds all of it.
    fn ends_well(mut self, fate: Fate) {
        self.wait_until_alone();
        std::fs::write(self.folder.path("go"), "").unwrap();
        assert_eq!(self.running.lines(1), ["well"], "{fate:?}");
        assert!(self.running.child.wait().unwrap().success());
        reap();
    }
}

fn program(folder: &Folder) -> PathBuf {
    build(folder, "flight.c", &["-pthread", "-lrt"])
}

#[test]
fn a_checkpoint_that_fails_takes_nothing() {
    let _alone = alone();
    let folder = Folder::new("flight");
    let program = program(&folder);
    let failed = [Phase::Begin, Phase::Looked, Phase::Captured].map(Fate::Failed);
    // The first bytes in flight do not fit, or those in the middle, or not all memory does.
    let full = [5_000, 1 << 20, 12 << 20].map(Fate::DiskFull);
    for fate in failed.into_iter().chain(full) {
        let full = Full::start(&program, "flight-job");
        capture(full.pid(), &full.image, fate);
        full.ends_well(fate);
    }
}

/// A sender that finds no room for some time asks for it less and less often.
#[test]
fn what_has_waited_for_long_is_held_too() {
    let _alone = alone();
    let folder = Folder::new("flight");
    let program = program(&folder);
    for waits in [1_600, 2_200].map(Duration::from_millis) {
        let full = Full::start(&program, "flight-job");
        std::thread::sleep(waits);
        capture(full.pid(), &full.image, Fate::Whole);
        full.ends_well(Fate::Whole);
    }
}

#[test]
fn a_supervisor_that_is_killed_in_any_phase_takes_nothing() {
    let _alone = alone();
    let folder = Folder::new("flight");
    let program = program(&folder);
    for phase in [Phase::Begin, Phase::Looked, Phase::Captured] {
        let fate = Fate::Killed(phase);
        let full = Full::start(&program, "flight-job");
        assert!(capture(full.pid(), &full.image, fate));
        full.ends_well(fate);
    }
}

#[test]
fn a_supervisor_that_is_killed_at_any_moment_takes_nothing() {
    let _alone = alone();
    let folder = Folder::new("flight");
    let program = program(&folder);
    let full = Full::start(&program, "flight-job");
    let begin = Instant::now();
    capture(full.pid(), &full.image, Fate::Whole);
    let mut whole = begin.elapsed();
    full.ends_well(Fate::Whole);
    const ROUNDS: u32 = 20;
    let mut killed = 0;
    while killed < ROUNDS {
        let fate = Fate::KilledAfter(whole * (killed + 1) / ROUNDS);
        let full = Full::start(&program, "flight-job");
        match capture(full.pid(), &full.image, fate) {
            true => killed += 1,
            // The machine is less busy than it was.
            false => whole = whole * 3 / 4,
        }
        full.ends_well(fate);
    }
}

#[test]
fn all_comes_back() {
    let _alone = alone();
    let folder = Folder::new("flight");
    let program = program(&folder);
    let mut full = Full::start(&program, "flight-job");
    capture(full.pid(), &full.image, Fate::Whole);
    full.running.child.kill().unwrap();
    full.running.child.wait().unwrap();
    reap();
    let go = full.folder.path("go");
    let options = RestartOptions::new(full.image.clone());
    let (said, status) = bring_back_by(options, |_| std::fs::write(go, "").unwrap());
    assert_eq!((said, status), (vec!["well".to_owned()], 0));
}

#[test]
fn ordinary_users_lose_nothing_either() {
    as_an_ordinary_user();
}
