//! Memory that is written while the program runs: what it changes meanwhile, in whatever way, is in
//! the image as it was when the program stood still, and the program is left as it was.

mod support;

use kedge_image::{Choice, Codec, ImageFile, Manifest, ahead_of, verify};
use kedge_left_out::left_out;
use kedge_process::{Begun, Options, Patience, Tracker};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use support::kernel::{reaches_threads, tells_writes};
use support::survive::{as_an_ordinary_user, continues, counts_on, random, rounds};
use support::{Folder, Running, alone, bring_back, build, capture_by, kill, roots};

/// Captures the job into `image`, all of it that can be written ahead; its manifest.
fn capture(image: &Path, tracker: Option<&Tracker>) -> Manifest {
    let (ahead, tracker) = (Some(0), tracker.cloned());
    let options = Options { ahead, tracker, codec: Choice::Lz4, ..Options::new(image.to_owned()) };
    capture_by(options)
}

/// Bytes that the process's own file has itself, and what of it was written ahead; `None` if
/// nothing was.
fn ahead(image: &Path, manifest: &Manifest, pid: i32) -> Option<(u64, u64)> {
    let name = format!("{pid}.kimg");
    let below = manifest.file(&ahead_of(&name))?;
    assert!(image.join(&below.name).exists());
    let own = ImageFile::open(&image.join(&name), manifest.file(&name)).unwrap();
    let sum = |parent| -> u64 {
        let extents = own.memory().filter(|extent| (extent.codec == Codec::Parent) == parent);
        extents.map(|extent| extent.decoded).sum()
    };
    Some((sum(false), sum(true)))
}

/// Whether anything of the process's memory is watched; flags of smaps.
fn watched(pid: i32) -> bool {
    let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    smaps.lines().any(|line| line.starts_with("VmFlags:") && line.contains(" uw"))
}

fn survives(folder: &Folder, command: &[&str], steps: usize) -> Vec<(Vec<String>, Vec<String>)> {
    let each = |round| {
        let mut running =
            Running::start(Command::new(command[0]).args(&command[1..]).arg(steps.to_string()));
        let mut before = running.lines(1 + random() % (steps / 3));
        let images = [0, 1].map(|number| folder.path(&format!("image-{round}-{number}")));
        // The second finds what the first has left.
        capture(&images[0], None);
        before.extend(running.lines(2));
        let manifest = capture(&images[1], None);
        assert!(manifest.parent.is_none() && manifest.version >= 2, "{manifest:?}");
        // A child may be too young, and at its end by now.
        let first = manifest.processes[0];
        let (_, parent) = ahead(&images[1], &manifest, first).unwrap();
        assert!(parent > 0 && !watched(first), "{parent}");
        assert_eq!(verify(&images[1], 2).unwrap().images, 1);
        kill(running, &manifest.processes);
        let (after, status) = bring_back(&images[1]);
        assert_eq!(libc::WEXITSTATUS(status), 7, "status {status:#x}, {after:?}");
        (before, after)
    };
    (0..rounds()).map(each).collect()
}

fn steps_survive(name: &str, source: &str, flags: &[&str]) {
    let _alone = alone();
    let folder = Folder::new(name);
    let program = build(&folder, source, flags);
    for (before, after) in survives(&folder, &[program.to_str().unwrap()], 300) {
        continues(&before, &after, 300);
    }
}

/// Of programs that check their memory at each step.
fn checked_memory_survives(name: &str, source: &str) {
    let _alone = alone();
    let folder = Folder::new(name);
    let program = build(&folder, source, &[]);
    // Its lines are short, so many wait to be read.
    let steps = 450;
    for (before, after) in survives(&folder, &[program.to_str().unwrap()], steps) {
        counts_on(&before, &after, steps);
    }
}

#[test]
fn memory_that_changes_in_every_way_comes_back() {
    if !tells_writes() {
        return;
    }
    checked_memory_survives("ahead-changes", "changes.c");
}

#[test]
fn mappings_of_all_kinds_come_back() {
    if !tells_writes() {
        return;
    }
    steps_survive("ahead-mappings", "mappings.c", &[]);
}

#[test]
fn guards_come_back() {
    if !tells_writes() {
        return;
    }
    checked_memory_survives("ahead-guards", "guards.c");
}

#[test]
fn sixty_four_threads_go_on() {
    if !tells_writes() {
        return;
    }
    steps_survive("ahead-threads", "threads.c", &["-pthread"]);
}

#[test]
fn a_tree_of_processes_goes_on() {
    if !tells_writes() {
        return;
    }
    steps_survive("ahead-tree", "tree.c", &["-pthread"]);
}

#[test]
fn a_program_without_its_first_thread_goes_on() {
    if !tells_writes() || !reaches_threads() {
        return;
    }
    steps_survive("ahead-firstless", "firstless.c", &["-pthread"]);
}

/// A full image that was written ahead is one that others build on.
#[test]
fn images_build_on_one_that_was_written_ahead() {
    if !tells_writes() {
        return;
    }
    let _alone = alone();
    let folder = Folder::new("ahead-chain");
    let program = build(&folder, "changes.c", &[]);
    let mut running = Running::start(Command::new(&program).arg("300"));
    let tracker = Tracker::default();
    let mut last = (PathBuf::new(), Manifest::new("test".into(), vec![], 1));
    let mut before = running.lines(3);
    for number in 0..4 {
        let image = folder.path(&format!("image-{number}"));
        let manifest = capture(&image, Some(&tracker));
        let pid = manifest.processes[0];
        assert_eq!(manifest.parent.is_some(), number > 0);
        assert_eq!(ahead(&image, &manifest, pid).is_some(), number == 0);
        last = (image, manifest);
        before.extend(running.lines(2));
    }
    assert_eq!(verify(&last.0, 2).unwrap().images, 4);
    kill(running, &last.1.processes);
    let (after, status) = bring_back(&last.0);
    assert_eq!(libc::WEXITSTATUS(status), 7, "{after:?}");
    assert!(after[0][..16] == before[0][..16]);
}

/// What one process has written ahead is stored for its child as well; then the kernel may drop it
/// there. Some of it could be dropped before that.
#[test]
fn a_child_keeps_what_may_be_dropped_in_its_parent() {
    if !tells_writes() {
        return;
    }
    let _alone = alone();
    let folder = Folder::new("ahead-droppable");
    let program = build(&folder, "droppable.c", &[]);
    let image = folder.path("image");
    std::fs::create_dir(&image).unwrap();
    let mut running = Running::start(Command::new(&program).arg("300"));
    let pid = running.child.id() as i32;
    if running.lines_or_end(1).is_empty() {
        return left_out("MAP_DROPPABLE", "this kernel has none (Linux 6.11)");
    }
    let options = Options { ahead: Some(0), codec: Choice::Lz4, ..Options::new(image.clone()) };
    let (told, tell) = std::sync::mpsc::channel();
    let taking = std::thread::spawn(move || {
        let mut begun = Begun::new(options).unwrap();
        begun.watch(&roots()).unwrap();
        begun.write_ahead(&roots()).unwrap();
        // SAFETY: kill takes no pointers; the process is the test's own, and handles SIGUSR1.
        unsafe { libc::kill(pid, libc::SIGUSR1) };
        tell.recv().unwrap();
        begun.catch_up();
        let stopped = begun.stop(&roots(), &[], Patience::new(Duration::from_secs(10))).unwrap();
        let captured = begun.capture(stopped, &[]).unwrap();
        captured.finish(Manifest::new("test".into(), vec![], 1)).unwrap()
    });
    running.lines(2);
    told.send(()).unwrap();
    let manifest = taking.join().unwrap();
    assert!(manifest.forked && ahead(&image, &manifest, pid).is_some(), "{manifest:?}");
    verify(&image, 2).unwrap();
    kill(running, &manifest.processes);
    let (after, status) = bring_back(&image);
    assert_eq!(libc::WEXITSTATUS(status), 7, "status {status:#x}, {after:?}");
}

/// It is cloned: two copies of what it had would be one too many.
#[test]
fn a_program_that_writes_faster_is_cloned() {
    if !tells_writes() {
        return;
    }
    let _alone = alone();
    let folder = Folder::new("ahead-fast");
    let program = build(&folder, "fast.c", &["-pthread"]);
    let mut running = Running::start(Command::new(&program).arg("120"));
    let before = running.lines(5);
    let image = folder.path("image");
    let manifest = capture(&image, None);
    let pid = manifest.processes[0];
    assert_eq!(ahead(&image, &manifest, pid), None);
    assert!(!image.join(ahead_of(&format!("{pid}.kimg"))).exists());
    assert_eq!(manifest.version, 1);
    kill(running, &manifest.processes);
    let (after, status) = bring_back(&image);
    continues(&before, &after, 120);
    assert_eq!(libc::WEXITSTATUS(status), 7, "status {status:#x}");
}

#[test]
fn an_ordinary_user_can_do_the_same() {
    as_an_ordinary_user();
}
