//! Memory that processes share since a fork is stored once, and shared again after a restart; what
//! each has changed of it is as it was.

mod support;

use kedge_image::{Choice, Manifest, verify};
use kedge_process::{Options, RestartOptions, Tracker, check};
use std::path::{Path, PathBuf};
use std::process::Command;
use support::survive::as_an_ordinary_user;
use support::{Folder, Running, alone, bring_back_by, build, capture_by, kill, step};

const STEPS: usize = 40;
/// Of what the processes share.
const SHARED: u64 = 64 << 20;
/// Seven processes each have changed a little of it.
const CHANGED: u64 = 24 << 20;

/// How a job is captured and brought back.
#[derive(Debug, Clone, Copy, Default)]
struct How {
    kind: &'static str,
    images: usize,
    ahead: bool,
    tracked: bool,
    lazy: bool,
}

const FAMILY: How = How { kind: "family", images: 1, ahead: false, tracked: false, lazy: false };

fn capture(image: &Path, how: How, tracker: Option<&Tracker>) -> Manifest {
    let (ahead, tracker) = (how.ahead.then_some(0), tracker.cloned());
    let options = Options { ahead, tracker, codec: Choice::Raw, ..Options::new(image.to_owned()) };
    capture_by(options)
}

/// What the processes take together, in bytes.
fn taken(line: &str) -> u64 {
    line.split(' ').nth(2).and_then(|word| word.parse::<u64>().ok()).unwrap() << 10
}

/// Bytes that the job takes before and after, and that its first image has.
fn survives(name: &str, how: How) -> [u64; 3] {
    let _alone = alone();
    let folder = Folder::new(name);
    let program = build(&folder, "forked.c", &[]);
    let mut running = Running::start(Command::new(&program).args([how.kind, &STEPS.to_string()]));
    let tracker = how.tracked.then(Tracker::default);
    let before = taken(running.lines(2).last().unwrap());
    let (mut image, mut bytes) = (PathBuf::new(), 0);
    let mut processes = Vec::new();
    for number in 0..how.images {
        image = folder.path(&format!("image-{number}"));
        let manifest = capture(&image, how, tracker.as_ref());
        assert_eq!(manifest.parent.is_some(), how.tracked && number > 0);
        bytes = if number == 0 { manifest.bytes() } else { bytes };
        processes = manifest.processes;
        running.lines(2);
    }
    verify(&image, 2).unwrap();
    check(&image).unwrap();
    kill(running, &processes);
    let options = RestartOptions { lazy: how.lazy, ..RestartOptions::new(image) };
    let (after, status) = bring_back_by(options, |_| {});
    assert_eq!(libc::WEXITSTATUS(status), 7, "status {status:#x}, {after:?}");
    let numbers: Vec<usize> = after.iter().map(|line| step(line)).collect();
    assert_eq!(numbers, (numbers[0]..=STEPS).collect::<Vec<_>>());
    [before, taken(after.last().unwrap()), bytes]
}

#[test]
fn it_is_shared_again() {
    let [before, after, image] = survives("forked", FAMILY);
    assert!(after < before + (3 << 20), "{before} {after}");
    assert!(image < SHARED + CHANGED, "{image}");
}

#[test]
fn it_is_shared_again_written_ahead() {
    let [before, after, image] = survives("forked-ahead", How { ahead: true, ..FAMILY });
    assert!(after < before + (3 << 20), "{before} {after}");
    assert!(image < SHARED + CHANGED, "{image}");
}

#[test]
fn it_is_shared_again_from_a_chain() {
    let how = How { images: 3, tracked: true, ..FAMILY };
    for ahead in [false, true] {
        let [before, after, image] = survives("forked-chain", How { ahead, ..how });
        assert!(after < before + (3 << 20), "{before} {after}");
        assert!(image < SHARED + CHANGED, "{image}");
    }
}

/// It comes to each process by itself, and is right.
#[test]
fn it_comes_back_later() {
    // SAFETY: geteuid takes no arguments and only returns a number.
    if unsafe { libc::geteuid() } != 0 {
        return kedge_left_out::needs_root("a lazy restart", "it takes root");
    }
    survives("forked-lazy", How { lazy: true, ..FAMILY });
    survives("forked-lazy-chain", How { lazy: true, images: 2, tracked: true, ..FAMILY });
}

#[test]
fn siblings_share_it_whose_parent_has_ended() {
    let [before, after, image] = survives("forked-orphans", How { kind: "orphans", ..FAMILY });
    assert!(after < before + (3 << 20), "{before} {after}");
    assert!(image < SHARED + CHANGED, "{image}");
}

/// Who forked whom is not asked, and no frame is looked at.
#[test]
fn an_ordinary_user_can_do_the_same() {
    as_an_ordinary_user();
}
