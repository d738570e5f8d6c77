//! Programs whose pages lie apart from each other: more runs than the kernel tells at a time come
//! back, each once and each as it was.

mod support;

use std::process::Command;
use support::chain::Chain;
use support::kernel::tells_writes;
use support::survive::as_an_ordinary_user;
use support::{Folder, alone, build};

/// The kernel's own buffer has room for 512.
const RUNS: [usize; 3] = [600, 1500, 12_000];
const STEPS: usize = 60;

/// `images` of them, one after the other; restarted from the last.
fn survives(name: &str, images: usize, ahead: bool, tracked: bool) {
    if (ahead || tracked) && !tells_writes() {
        return;
    }
    let _alone = alone();
    let folder = Folder::new(name);
    let program = build(&folder, "sparse.c", &[]);
    let chain = Chain { images, ahead, tracked };
    for runs in RUNS {
        let mut command = Command::new(&program);
        let command = command.args([runs.to_string(), STEPS.to_string()]);
        chain.survives(&folder, command, &runs.to_string(), STEPS);
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
