//! Signals to a whole job.

use crate::Roots;
use crate::proc::{self, Stat, Status};
use crate::stop;
use std::collections::{BTreeMap, BTreeSet};

/// The processes of the job that run now: those too that stand still, but for a capture.
pub fn running(roots: &Roots) -> Vec<i32> {
    stop::alive(roots)
}

/// Sends `signal`, one that ends processes or stops them, to every process of the job; to those too
/// that are made meanwhile.
pub fn signal(roots: &Roots, signal: i32) {
    let mut sent = BTreeSet::new();
    loop {
        let new: Vec<i32> =
            stop::alive(roots).into_iter().filter(|pid| sent.insert(*pid)).collect();
        if new.is_empty() {
            return;
        }
        for pid in new {
            // SAFETY: kill takes no pointers; the process descends from this one, so unless it has
            // ended just now the id is its own; and ids are not given anew that soon.
            unsafe { libc::kill(pid, signal) };
        }
    }
}

/// Returns which signals wait in the processes of the job that run now: a bit for each, by process.
#[must_use]
pub fn waiting(roots: &Roots) -> BTreeMap<i32, u64> {
    stop::alive(roots).into_iter().map(|pid| (pid, waiting_in(pid))).collect()
}

fn waiting_in(tid: i32) -> u64 {
    Status::of(tid).map_or(0, |status| status.hex("SigPnd") | status.hex("ShdPnd"))
}

/// Whether a process runs: it has not ended, was not killed, and does not stand still for whoever
/// traces it, which is to decide what becomes of it.
#[must_use]
pub fn runs(pid: i32) -> bool {
    const KILLED: u64 = 1 << (libc::SIGKILL - 1);
    const TRACED: char = 't';
    let stands = |tid: i32| Stat::of_thread(tid).is_ok_and(|stat| stat.state == TRACED);
    let runs = |tid: i32| proc::goes_on(tid) && waiting_in(tid) & KILLED == 0 && !stands(tid);
    proc::own_threads(pid).into_iter().any(runs)
}
