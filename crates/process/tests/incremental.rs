//! Images that build on each other: what has changed in between, and nothing else, is stored, and a
//! restart finds every page as it was.

mod support;

use kedge_image::{Codec, ImageError, ImageFile, Manifest, chain, verify};
use kedge_process::{Begun, EngineError, Options, RestartOptions, Tracker, checkpoint, restart};
use std::path::{Path, PathBuf};
use std::process::Command;
use support::kernel::{reaches_threads, tells_writes};
use support::survive::{as_an_ordinary_user, counts_on};
use support::{Folder, Running, alone, bring_back, build, capture_by, kill, roots, step};

/// Captures the job into `image`; its manifest.
fn capture(image: &Path, tracker: &Tracker) -> Manifest {
    let tracker = Some(tracker.clone());
    capture_by(Options { tracker, ..Options::new(image.to_owned()) })
}

/// Bytes of memory that each file has itself, and has from its parent.
fn memory(image: &Path, manifest: &Manifest) -> (u64, u64) {
    let (mut own, mut parent) = (0, 0);
    for entry in manifest.files.iter().filter(|entry| !entry.is_plain()) {
        for extent in ImageFile::open(&image.join(&entry.name), Some(entry)).unwrap().memory() {
            let sum = if extent.codec == Codec::Parent { &mut parent } else { &mut own };
            *sum += extent.decoded;
        }
    }
    (own, parent)
}

fn rounds() -> usize {
    std::env::var("KEDGE_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(2)
}

/// Captured several times, at moments that nothing chooses; restarted from the last image of each
/// chain.
fn survives(folder: &Folder, command: &[&str], steps: usize, images: usize) {
    for round in 0..rounds() {
        let mut running =
            Running::start(Command::new(command[0]).args(&command[1..]).arg(steps.to_string()));
        let tracker = Tracker::default();
        let mut last = (PathBuf::new(), Manifest::new("test".into(), vec![], 1));
        let mut before = running.lines(1);
        for number in 0..images {
            before.extend(running.lines(1 + number * 2 % 5));
            let image = folder.path(&format!("image-{round}-{number}"));
            let manifest = capture(&image, &tracker);
            assert_eq!(manifest.parent.is_some(), number > 0);
            last = (image, manifest);
        }
        let (own, parent) = memory(&last.0, &last.1);
        assert!(own > 0 && parent > 0, "{own} {parent}");
        assert_eq!(chain(&last.0).unwrap().len(), images);
        verify(&last.0, 2).unwrap();
        kill(running, &last.1.processes);
        let (after, status) = bring_back(&last.0);
        assert_eq!(libc::WEXITSTATUS(status), 7, "status {status:#x}, {after:?}");
        counts_on(&before, &after, steps);
    }
}

#[test]
fn memory_that_changes_in_every_way_comes_back() {
    if !tells_writes() {
        return;
    }
    let _alone = alone();
    let folder = Folder::new("changes");
    let program = build(&folder, "changes.c", &[]);
    survives(&folder, &[program.to_str().unwrap()], 300, 6);
}

#[test]
fn guards_come_back() {
    if !tells_writes() {
        return;
    }
    let _alone = alone();
    let folder = Folder::new("changes-guards");
    let program = build(&folder, "guards.c", &[]);
    survives(&folder, &[program.to_str().unwrap()], 300, 6);
}

/// Whose memory is reached through another one.
#[test]
fn a_program_without_its_first_thread_comes_back() {
    if !tells_writes() || !reaches_threads() {
        return;
    }
    let _alone = alone();
    let folder = Folder::new("changes-firstless");
    let program = build(&folder, "firstless.c", &["-pthread"]);
    survives(&folder, &[program.to_str().unwrap()], 300, 4);
}

#[test]
fn descriptors_under_way_come_back() {
    if !tells_writes() {
        return;
    }
    let _alone = alone();
    let folder = Folder::new("changes-under-way");
    let program = build(&folder, "features.c", &["-pthread"]);
    survives(&folder, &[program.to_str().unwrap(), "under_way"], 300, 4);
}

#[test]
fn a_tree_of_processes_comes_back() {
    if !tells_writes() {
        return;
    }
    let _alone = alone();
    let folder = Folder::new("changes-tree");
    let program = build(&folder, "tree.c", &["-pthread"]);
    survives(&folder, &[program.to_str().unwrap()], 600, 3);
}

/// What a program is after it has executed another is a full part of the image.
#[test]
fn a_program_that_executes_another_comes_back() {
    if !tells_writes() {
        return;
    }
    let _alone = alone();
    let folder = Folder::new("changes-exec");
    let program = build(&folder, "changes.c", &[]);
    let script = "sleep 0.2; exec \"$0\" \"$@\"";
    let mut running =
        Running::start(Command::new("/bin/sh").args(["-c", script]).arg(&program).arg("300"));
    let tracker = Tracker::default();
    capture(&folder.path("image-0"), &tracker);
    let before = running.lines(3);
    let (image, third) = (folder.path("image-1"), folder.path("image-2"));
    capture(&image, &tracker);
    let manifest = capture(&third, &tracker);
    assert!(manifest.parent.is_some());
    kill(running, &manifest.processes);
    let (after, status) = bring_back(&third);
    assert_eq!(libc::WEXITSTATUS(status), 7, "{after:?}");
    assert!(step(&after[0]) > before.len());
}

/// A checkpoint that failed has taken what had changed: the next one holds all of it again.
#[test]
fn after_a_failure_an_image_is_full() {
    if !tells_writes() {
        return;
    }
    let _alone = alone();
    let folder = Folder::new("changes-failed");
    let program = build(&folder, "changes.c", &[]);
    let mut running = Running::start(Command::new(&program).arg("300"));
    running.lines(2);
    let tracker = Tracker::default();
    capture(&folder.path("image-0"), &tracker);
    running.lines(2);
    let image = folder.path("image-1");
    std::fs::create_dir(&image).unwrap();
    let options = Options { tracker: Some(tracker.clone()), ..Options::new(image.clone()) };
    let failing = std::thread::spawn(move || {
        let captured = checkpoint(&roots(), options)?;
        // Its last step will find something in the way.
        std::fs::create_dir(image.join("manifest.json")).unwrap();
        captured.finish(Manifest::new("test".into(), vec![], 1))
    });
    assert!(failing.join().unwrap().is_err());
    running.lines(2);
    let image = folder.path("image-2");
    let manifest = capture(&image, &tracker);
    assert_eq!((manifest.parent.is_none(), memory(&image, &manifest).1), (true, 0));
    let image = folder.path("image-3");
    let manifest = capture(&image, &tracker);
    assert!(manifest.parent.as_ref().is_some_and(|parent| parent.name == "image-2"));
    kill(running, &manifest.processes);
    assert_eq!(libc::WEXITSTATUS(bring_back(&image).1), 7);
}

/// One that ends before it has looked into the stopped job has not lost what it was told: the next
/// one builds on the same image, and holds what had changed before.
#[test]
fn what_a_checkpoint_was_told_that_came_to_nothing_is_in_the_next() {
    if !tells_writes() {
        return;
    }
    let _alone = alone();
    let folder = Folder::new("changes-given-up");
    let program = build(&folder, "changes.c", &[]);
    let mut running = Running::start(Command::new(&program).arg("300"));
    let mut before = running.lines(2);
    let tracker = Tracker::default();
    capture(&folder.path("image-0"), &tracker);
    for round in 1..4 {
        let begin = |number: usize| {
            let folder = folder.path(&format!("none-{round}-{number}"));
            std::fs::create_dir(&folder).unwrap();
            let options = Options { tracker: Some(tracker.clone()), ..Options::new(folder) };
            let given_up = std::thread::spawn(move || {
                let mut begun = Begun::new(options)?;
                begun.survey(&roots(), &[])?;
                begun.watch(&roots())?;
                begun.write_ahead(&roots())?;
                if number < 2 {
                    begun.catch_up();
                }
                Ok::<(), EngineError>(())
            });
            given_up.join().unwrap().unwrap();
        };
        for number in 0..3 {
            before.extend(running.lines(2));
            begin(number);
        }
        before.extend(running.lines(1));
        let image = folder.path(&format!("image-{round}"));
        let manifest = capture(&image, &tracker);
        assert!(manifest.parent.is_some() && memory(&image, &manifest).1 > 0, "{manifest:?}");
        if round == 3 {
            assert_eq!(chain(&image).unwrap().len(), 4);
            kill(running, &manifest.processes);
            let (after, status) = bring_back(&image);
            assert_eq!(libc::WEXITSTATUS(status), 7, "status {status:#x}, {after:?}");
            assert!(step(&after[0]) > before.len() && after[0][..16] == before[0][..16]);
            return;
        }
    }
}

/// What it was told, the next one that follows memory is not: it builds on none.
#[test]
fn one_that_asks_the_kernel_for_itself_ends_the_chain() {
    if !tells_writes() {
        return;
    }
    let _alone = alone();
    let folder = Folder::new("changes-between");
    let program = build(&folder, "changes.c", &[]);
    for comes_to_nothing in [true, false] {
        let mut running = Running::start(Command::new(&program).arg("300"));
        running.lines(2);
        let tracker = Tracker::default();
        let image = |number: usize| folder.path(&format!("{number}-{comes_to_nothing}"));
        capture(&image(0), &tracker);
        running.lines(10);
        let other = Some(tracker.clone());
        let options = Options { other, ahead: Some(0), ..Options::new(image(1)) };
        if comes_to_nothing {
            std::fs::create_dir(image(1)).unwrap();
            let given_up = std::thread::spawn(move || {
                let mut begun = Begun::new(options)?;
                begun.survey(&roots(), &[])?;
                begun.watch(&roots())?;
                begun.write_ahead(&roots())
            });
            given_up.join().unwrap().unwrap();
        } else {
            capture_by(options);
        }
        running.lines(2);
        for (number, parent) in [(2, None), (3, Some(image(2)))] {
            let manifest = capture(&image(number), &tracker);
            let above = manifest.parent.as_ref().map(|parent| folder.path(&parent.name));
            assert_eq!(above, parent, "{number}");
            if number == 3 {
                kill(running, &manifest.processes);
                break;
            }
            running.lines(2);
        }
        let (after, status) = bring_back(&image(3));
        assert_eq!(libc::WEXITSTATUS(status), 7, "status {status:#x}, {after:?}");
    }
}

/// Where the kernel does not tell what was written, images are full ones and say why.
#[test]
fn without_the_kernels_help_images_are_full() {
    let _alone = alone();
    if tells_writes() {
        return; // scripts/soak-kernels runs it under kernels that do not.
    }
    let folder = Folder::new("changes-untold");
    let program = build(&folder, "changes.c", &[]);
    let mut running = Running::start(Command::new(&program).arg("300"));
    let mut before = running.lines(2);
    let tracker = Tracker::default();
    for number in 0..2 {
        let image = folder.path(&format!("image-{number}"));
        std::fs::create_dir(&image).unwrap();
        let tracker = Some(tracker.clone());
        let options = Options { tracker, ahead: Some(0), ..Options::new(image.clone()) };
        let taken = std::thread::spawn(move || {
            let captured = checkpoint(&roots(), options)?;
            let warnings = captured.warnings.clone();
            Ok((captured.finish(Manifest::new("test".into(), vec![], 1))?, warnings))
        });
        let taken: Result<_, EngineError> = taken.join().unwrap();
        let (manifest, warnings) = taken.unwrap();
        assert!(warnings.iter().any(|said| said.contains("PAGEMAP_SCAN")), "{warnings:?}");
        assert!(manifest.parent.is_none() && memory(&image, &manifest).1 == 0);
        before.extend(running.lines(2));
        if number == 1 {
            kill(running, &manifest.processes);
            let (after, status) = bring_back(&image);
            assert_eq!(libc::WEXITSTATUS(status), 7, "status {status:#x}, {after:?}");
            assert!(after[0][..16] == before[0][..16], "{}", after[0]);
            return;
        }
    }
}

/// Whatever it maps meanwhile stays one mapping: nobody watches a part of it.
#[test]
fn a_program_that_maps_without_rest_can_move_its_memory() {
    if !tells_writes() {
        return;
    }
    let _alone = alone();
    let folder = Folder::new("changes-remaps");
    let program = build(&folder, "remaps.c", &[]);
    let mut running = Running::start(&mut Command::new(&program));
    running.lines(1);
    let tracker = Tracker::default();
    for number in 0..60 * rounds() {
        let image = folder.path(&format!("image-{number}"));
        std::fs::create_dir(&image).unwrap();
        let options = Options { tracker: Some(tracker.clone()), ..Options::new(image.clone()) };
        let begun = std::thread::spawn(move || {
            let mut begun = Begun::new(options)?;
            begun.survey(&roots(), &[])?;
            begun.watch(&roots())
        });
        begun.join().unwrap().unwrap();
    }
    let pid = running.child.id() as i32;
    // SAFETY: kill takes no pointers; the process is a child that has not been waited for.
    unsafe { libc::kill(pid, libc::SIGKILL) };
    assert_eq!(running.lines_or_end(1), [""; 0]);
    kill(running, &[pid]);
}

#[test]
fn a_parent_that_is_damaged_changed_or_gone_is_named() {
    if !tells_writes() {
        return;
    }
    let _alone = alone();
    let folder = Folder::new("changes-parent");
    let program = build(&folder, "changes.c", &[]);
    let mut running = Running::start(Command::new(&program).arg("300"));
    running.lines(2);
    let tracker = Tracker::default();
    let (parent, image) = (folder.path("image-0"), folder.path("image-1"));
    capture(&parent, &tracker);
    let manifest = capture(&image, &tracker);
    kill(running, &manifest.processes);
    let file = parent.join(format!("{}.kimg", manifest.processes[0]));
    let good = std::fs::read(&file).unwrap();
    let error = || restart(&RestartOptions::new(image.clone()), |_| {}).unwrap_err();
    // The first half has payloads, of which the image needs some and others not; at the end lies
    // the footer.
    for (from, to) in [(0, good.len() / 2), (good.len() - 9, good.len() - 8)] {
        let mut bad = good.clone();
        bad[from..to].iter_mut().step_by(256).for_each(|byte| *byte ^= 1);
        std::fs::write(&file, bad).unwrap();
        assert!(verify(&image, 2).is_err());
        let said = error().to_string();
        assert!(said.contains("image-0") && said.contains(".kimg, offset"), "{said}");
    }
    std::fs::write(&file, good).unwrap();
    let good = std::fs::read(parent.join("manifest.json")).unwrap();
    Manifest::new("test".into(), vec![], 1).write(&parent).unwrap();
    let other = |error: &EngineError| matches!(error, EngineError::Image(ImageError::OtherParent { parent, .. }) if parent == "image-0");
    assert!(other(&error()));
    std::fs::remove_file(parent.join("manifest.json")).unwrap();
    let none = |error: &EngineError| matches!(error, EngineError::Image(ImageError::NoParent { parent, .. }) if parent == "image-0");
    assert!(none(&error()));
    std::fs::write(parent.join("manifest.json"), good).unwrap();
    assert_eq!(libc::WEXITSTATUS(bring_back(&image).1), 7);
}

#[test]
fn an_ordinary_user_can_do_the_same() {
    as_an_ordinary_user();
}
