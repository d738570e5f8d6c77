//! Signals to a whole job.

use crate::Roots;
use crate::stop;
use std::collections::BTreeSet;

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
            // SAFETY: a plain call. The process descends from this one, so unless it has ended just
            // now the id is its own; and ids are not given anew that soon.
            unsafe { libc::kill(pid, signal) };
        }
    }
}
