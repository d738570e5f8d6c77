//! Programs that are captured several times, each image on the one before, and restarted from the
//! last.
#![allow(unreachable_pub, dead_code, reason = "each test program uses its part of it")]

use super::{Folder, Running, bring_back, capture_by, kill, step};
use kedge_image::{Choice, Manifest, verify};
use kedge_process::{Options, Tracker};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Captures all, written ahead or not, and builds on what `tracker` knows.
pub fn capture(image: &Path, ahead: bool, tracker: Option<&Tracker>) -> Manifest {
    let (ahead, tracker) = (ahead.then_some(0), tracker.cloned());
    let options = Options { ahead, tracker, codec: Choice::Lz4, ..Options::new(image.to_owned()) };
    capture_by(options)
}

/// How a program is captured.
#[derive(Debug, Clone, Copy)]
pub struct Chain {
    /// So many times, one after the other.
    pub images: usize,
    pub ahead: bool,
    /// Each image builds on the one before.
    pub tracked: bool,
}

impl Chain {
    /// Has `command`, which says a line for each of `steps` steps, come back from the last of its
    /// images, which are called `image-TAG-NUMBER`.
    pub fn survives(self, folder: &Folder, command: &mut Command, tag: &str, steps: usize) {
        let mut running = Running::start(command);
        let tracker = self.tracked.then(Tracker::default);
        let mut before = running.lines(2);
        let mut last = (PathBuf::new(), Manifest::new("test".into(), vec![], 1));
        for number in 0..self.images {
            let image = folder.path(&format!("image-{tag}-{number}"));
            let manifest = capture(&image, self.ahead, tracker.as_ref());
            assert_eq!(manifest.parent.is_some(), self.tracked && number > 0);
            last = (image, manifest);
            before.extend(running.lines(2));
        }
        verify(&last.0, 2).unwrap();
        kill(running, &last.1.processes);
        let (after, status) = bring_back(&last.0);
        assert_eq!(libc::WEXITSTATUS(status), 7, "{tag}: status {status:#x}, {after:?}");
        let numbers: Vec<usize> = after.iter().map(|line| step(line)).collect();
        assert_eq!(numbers, (numbers[0]..=steps).collect::<Vec<_>>());
        assert!(after[0][..16] == before[0][..16], "{}", after[0]);
    }
}
