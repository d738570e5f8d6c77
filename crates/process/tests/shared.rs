//! Memory that processes share is written ahead and incremental: what they change of it, by
//! whatever mapping, is in the image as it was when they stood still, and what they do not change
//! is not copied in the pause.

mod support;

use kedge_image::{Codec, ImageFile, Manifest, ahead_of, verify};
use kedge_process::Tracker;
use std::path::Path;
use std::process::Command;
use support::chain::{Chain, capture};
use support::kernel::{reaches_threads, tells_writes};
use support::survive::{as_an_ordinary_user, rounds};
use support::{Folder, Running, alone, bring_back, build, kill};

const JOB: &str = "job.kimg";

/// Bytes of shared memory that the image's own file has, and has from another one.
fn shared(image: &Path, manifest: &Manifest) -> (u64, u64) {
    let file = ImageFile::open(&image.join(JOB), manifest.file(JOB)).unwrap();
    let sum = |parent| {
        let extents = file.memory().filter(|extent| (extent.codec == Codec::Parent) == parent);
        extents.map(|extent| extent.decoded).sum()
    };
    (sum(false), sum(true))
}

/// `images` of them, one after the other; restarted from the last.
fn survives(name: &str, kind: &str, images: usize, ahead: bool, tracked: bool) {
    all_survive("shared.c", name, kind, Chain { images, ahead, tracked });
}

fn all_survive(source: &str, name: &str, kind: &str, chain: Chain) {
    let Chain { ahead, tracked, .. } = chain;
    if (ahead || tracked) && !tells_writes() {
        return;
    }
    let _alone = alone();
    let folder = Folder::new(name);
    let program = build(&folder, source, &["-pthread"]);
    let steps = 120;
    for round in 0..rounds() {
        let mut command = Command::new(&program);
        let command = command.args([kind, &steps.to_string()]);
        chain.survives(&folder, command, &round.to_string(), steps);
    }
}

#[test]
fn it_comes_back_as_a_whole() {
    survives("shared", "anonymous", 1, false, false);
}

#[test]
fn it_comes_back_written_ahead() {
    survives("shared-ahead", "anonymous", 2, true, false);
    survives("shared-ahead-memfd", "memfd", 1, true, false);
}

#[test]
fn it_comes_back_from_a_chain() {
    survives("shared-chain", "anonymous", 5, false, true);
}

#[test]
fn it_comes_back_from_a_chain_on_what_was_written_ahead() {
    survives("shared-ahead-chain", "anonymous", 5, true, true);
    survives("shared-ahead-chain-memfd", "memfd", 4, true, true);
}

/// The kernel says it at once, and at once only.
#[test]
fn what_page_tables_do_not_tell_is_heard() {
    let kinds = ["removed", "twice", "firstless", "dropped"];
    for kind in kinds.into_iter().filter(|kind| *kind != "firstless" || reaches_threads()) {
        let chain = |images, tracked| Chain { images, ahead: true, tracked };
        all_survive("shared_told.c", &format!("shared-{kind}"), kind, chain(3, true));
        all_survive("shared_told.c", &format!("shared-{kind}-ahead"), kind, chain(1, false));
    }
}

/// The mapping that was written was never watched, and those that are there again are watched anew.
#[test]
fn what_was_mapped_in_between_is_not_trusted() {
    if !tells_writes() {
        return;
    }
    let _alone = alone();
    let folder = Folder::new("shared-swapped");
    let program = build(&folder, "shared_swapped.c", &[]);
    let mut running = Running::start(&mut Command::new(program));
    running.lines(1);
    let (tracker, image) = (Tracker::default(), |n| folder.path(&format!("image-{n}")));
    capture(&image(0), true, Some(&tracker));
    // SAFETY: a signal to this test's own child.
    assert_eq!(unsafe { libc::kill(running.child.id() as i32, libc::SIGUSR1) }, 0);
    running.lines(1);
    let manifest = capture(&image(1), true, Some(&tracker));
    assert!(manifest.parent.is_some());
    kill(running, &manifest.processes);
    let (_, status) = bring_back(&image(1));
    assert_eq!(libc::WEXITSTATUS(status), 7, "{status:#x}");
}

/// What they have written through mappings that went with them is told by nobody.
#[test]
fn children_that_come_and_go_lose_nothing() {
    survives("shared-children", "children", 5, true, true);
    survives("shared-forgotten", "forgotten", 5, true, true);
    survives("shared-children-ahead", "children", 2, true, false);
}

/// Says when its memory is there, and changes some of it.
const CHANGES_SOME: &str = "
import mmap, os, sys, time
m = mmap.mmap(-1, 64 << 20)
for i in range(0, len(m), 1 << 20): m[i:i + (1 << 20)] = os.urandom(1 << 20)
child = os.fork() == 0
if not child: print('0000000000000000 1', flush=True)
n = 0
while True:
    time.sleep(0.01)
    n += 1
    at = (n % 16) * 8192 + (4096 if child else 0)
    m[at:at + 8] = n.to_bytes(8, 'little')
";

#[test]
fn what_does_not_change_is_not_stored_again() {
    if !tells_writes() {
        return;
    }
    let _alone = alone();
    let folder = Folder::new("shared-few");
    let mut running = Running::start(Command::new("/usr/bin/python3").args(["-c", CHANGES_SOME]));
    running.lines(1);
    let whole = 64 << 20;
    let tracker = Tracker::default();
    let first = folder.path("image-0");
    let manifest = capture(&first, true, Some(&tracker));
    assert!(manifest.file(&ahead_of(JOB)).is_some(), "it was written ahead");
    let (own, parent) = shared(&first, &manifest);
    assert!(own < whole / 64 && own + parent >= whole, "{own} {parent}");
    let second = folder.path("image-1");
    let manifest = capture(&second, true, Some(&tracker));
    assert!(manifest.parent.is_some() && manifest.file(&ahead_of(JOB)).is_none());
    let (own, parent) = shared(&second, &manifest);
    assert!(own < whole / 64 && own + parent >= whole, "{own} {parent}");
    kill(running, &manifest.processes);
    verify(&second, 2).unwrap();
}

#[test]
fn an_ordinary_user_can_do_the_same() {
    as_an_ordinary_user();
}
