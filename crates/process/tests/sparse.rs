//! Programs whose pages lie apart from each other: more runs than the kernel tells at a time come
//! back, each once and each as it was.

mod support;

use kedge_image::{Choice, Manifest, verify};
use kedge_process::{Options, Tracker};
use std::path::{Path, PathBuf};
use std::process::Command;
use support::survive::as_an_ordinary_user;
use support::{Folder, Running, alone, bring_back, build, capture_by, kill, step};

/// The kernel's own buffer has room for 512.
const RUNS: [usize; 3] = [600, 1500, 12_000];
const STEPS: usize = 60;

fn capture(image: &Path, ahead: bool, tracker: Option<&Tracker>) -> Manifest {
    let (ahead, tracker) = (ahead.then_some(0), tracker.cloned());
    let options = Options { ahead, tracker, codec: Choice::Lz4, ..Options::new(image.to_owned()) };
    capture_by(options)
}

/// `images` of them, one after the other; restarted from the last.
fn survives(name: &str, images: usize, ahead: bool, tracked: bool) {
    let _alone = alone();
    let folder = Folder::new(name);
    let program = build(&folder, "sparse.c", &[]);
    for runs in RUNS {
        let arguments = [runs.to_string(), STEPS.to_string()];
        let mut running = Running::start(Command::new(&program).args(arguments));
        let tracker = tracked.then(Tracker::default);
        let mut before = running.lines(2);
        let mut last = (PathBuf::new(), Manifest::new("test".into(), vec![], 1));
        for number in 0..images {
            let image = folder.path(&format!("image-{runs}-{number}"));
            let manifest = capture(&image, ahead, tracker.as_ref());
            assert_eq!(manifest.parent.is_some(), tracked && number > 0);
            last = (image, manifest);
            before.extend(running.lines(2));
        }
        verify(&last.0, 2).unwrap();
        kill(running, &last.1.processes);
        let (after, status) = bring_back(&last.0);
        assert_eq!(libc::WEXITSTATUS(status), 7, "{runs} runs: status {status:#x}, {after:?}");
        let numbers: Vec<usize> = after.iter().map(|line| step(line)).collect();
        assert_eq!(numbers, (numbers[0]..=STEPS).collect::<Vec<_>>());
        assert!(after[0][..16] == before[0][..16], "{}", after[0]);
    }
}

#[test]
fn thousands_of_runs_come_back_from_a_clone() {
    survives("sparse", 1, false, false);
}

#[test]
fn thousands_of_runs_come_back_written_ahead() {
    survives("sparse-ahead", 1, true, false);
}

#[test]
fn thousands_of_runs_come_back_from_a_chain() {
    survives("sparse-chain", 3, false, true);
}

#[test]
fn thousands_of_runs_come_back_from_a_chain_on_what_was_written_ahead() {
    survives("sparse-ahead-chain", 3, true, true);
}

#[test]
fn an_ordinary_user_can_do_the_same() {
    as_an_ordinary_user();
}
