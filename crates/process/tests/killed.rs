//! Processes that somebody kills while their job is being captured: whatever becomes of the
//! capture, their parents are still to collect them, in the job that goes on and in the one that
//! comes back.

mod support;

use kedge_image::Manifest;
use kedge_process::{EngineError, Options, Together, checkpoint};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use support::survive::continues;
use support::{Folder, Running, alone, bring_back, build, kill, roots};

/// When a process is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moment {
    /// It may be at its end or not when its turn comes to be stopped.
    BeforeItStops,
    /// It is traced.
    WhenItStands,
}

/// Kills a process at that moment.
#[derive(Debug)]
struct Killer {
    moment: Moment,
    pid: i32,
}

impl Killer {
    fn strike(&self, moment: Moment) {
        if moment == self.moment {
            // SAFETY: kill takes no pointers; it is a process of the test's own.
            unsafe { libc::kill(self.pid, libc::SIGKILL) };
        }
    }
}

impl Together for Killer {
    fn prepared(&self) -> Result<(), String> {
        self.strike(Moment::BeforeItStops);
        Ok(())
    }

    fn stopped(&self) -> Result<(), String> {
        self.strike(Moment::WhenItStands);
        Ok(())
    }

    fn captured(&self, _: usize) -> Result<(), String> {
        Ok(())
    }
}

fn capture(image: &Path, killer: Option<Killer>) -> Result<Manifest, EngineError> {
    std::fs::create_dir(image).unwrap();
    let together = killer.map(|killer| Arc::new(killer) as Arc<dyn Together>);
    let options = Options { together, ..Options::new(image.into()) };
    checkpoint(&roots(), options)?.finish(Manifest::new("test".into(), vec![], 1))
}

fn child_of(pid: u32) -> i32 {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    children.trim().parse().expect("one child")
}

/// A capture that fails for it, and one after it by the same thread.
fn is_collected(name: &str, moment: Moment) {
    const STEPS: usize = 300;
    let _alone = alone();
    let folder = Folder::new(name);
    let program = build(&folder, "bereft.c", &["-pthread"]);
    for round in 0..5 {
        let mut running = Running::start(Command::new(&program).arg(STEPS.to_string()));
        let before = running.lines(3);
        let killer = Killer { moment, pid: child_of(running.child.id()) };
        let mut image = folder.path(&format!("image-{round}"));
        let mut taken = capture(&image, Some(killer));
        if let Err(error) = &taken {
            println!("round {round}: {error}");
            image = folder.path(&format!("image-{round}-again"));
            taken = capture(&image, None);
        }
        kill(running, &taken.unwrap().processes);
        let (after, status) = bring_back(&image);
        continues(&before, &after, STEPS);
        assert_eq!(libc::WEXITSTATUS(status), 7, "round {round}: status {status:#x}, {after:?}");
    }
}

#[test]
fn one_that_is_killed_before_it_stops_is_collected() {
    is_collected("killed-before", Moment::BeforeItStops);
}

#[test]
fn one_that_is_killed_where_it_stands_is_collected() {
    is_collected("killed-traced", Moment::WhenItStands);
}

/// The copies of memory that this process traces.
fn copies() -> Vec<i32> {
    let traced = |pid: &i32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let tracer =
            status.lines().find_map(|line| line.strip_prefix("TracerPid:\t")).map(str::to_owned);
        tracer
            .is_some_and(|tid| tid != "0" && Path::new(&format!("/proc/self/task/{tid}")).exists())
    };
    let names = std::fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.file_name());
    names.filter_map(|name| name.to_str()?.parse().ok()).filter(traced).collect()
}

/// As the kernel does where memory runs out: the copy goes first.
#[test]
fn a_copy_that_is_killed_fails_the_image_and_not_the_job() {
    let _alone = alone();
    let folder = Folder::new("killed-copy");
    let program = build(&folder, "bereft.c", &["-pthread"]);
    let mut running = Running::start(Command::new(&program).arg("100000"));
    running.lines(3);
    let image = folder.path("image");
    std::fs::create_dir(&image).unwrap();
    let captured = checkpoint(&roots(), Options::new(image.clone())).unwrap();
    let copies = copies();
    assert!(!copies.is_empty());
    for pid in &copies {
        let score = std::fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap();
        assert_eq!(score.trim(), "1000", "the copy goes before the program");
        // SAFETY: kill takes no pointers; it is a copy that this test has made.
        unsafe { libc::kill(*pid, libc::SIGKILL) };
    }
    let processes = captured.processes().to_vec();
    let error = captured.finish(Manifest::new("test".into(), vec![], 1)).unwrap_err();
    let told = matches!(error, EngineError::CopyKilled { most: 1.., .. });
    assert!(told, "{error}");
    assert!(Manifest::read(&image).is_err(), "there is no image");
    running.lines(50);
    kill(running, &processes);
}
