//! Ending a job's processes from outside: `kedge kill`, and what goes before a job's way back.

use crate::base::ends::{LAST_LOOK, looks};
use crate::checkpoint::checkpointer::Checkpointer;
use crate::devices::proxies::Proxies;
use kedge_process::plugins::release_ports;
use kedge_process::{Roots, running};
use std::collections::BTreeSet;
use std::sync::PoisonError;
use std::thread;
use std::time::{Duration, Instant};

/// Killed processes are gone by then, unless the kernel holds them.
const LAST: Duration = Duration::from_secs(10);
/// Longest time between SIGTERM and SIGKILL.
const MAX_GRACE: Duration = Duration::from_secs(3600);

impl Checkpointer {
    /// The job's processes, without its proxies, which end with them.
    pub(crate) fn program(&self) -> Roots {
        let proxies = Proxies::children(&self.proxies.locked());
        self.roots.without(&proxies)
    }

    /// Ends all of the job: by SIGTERM, and what is left of it after `grace` by SIGKILL; at once if
    /// `grace` is nothing. Whether nothing is left.
    pub(crate) fn end(&self, grace: Duration) -> bool {
        self.recovery.give_up();
        let _one = self.ending.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = !grace.is_zero() && self.end_by(libc::SIGTERM, grace.min(MAX_GRACE));
        ended || self.end_by(libc::SIGKILL, LAST)
    }

    /// Sends a signal to every process of the job, also to those that come later, until none is
    /// left or `limit` has passed.
    pub(crate) fn end_by(&self, signal: i32, limit: Duration) -> bool {
        let begin = Instant::now();
        let (mut sent, mut looks) = (BTreeSet::new(), looks());
        loop {
            // What is being captured is not among those that are found: looked at before them.
            let captures = self.is_under_way();
            let found = running(&self.program());
            let found_none = found.is_empty();
            if found_none && !captures {
                return true;
            }
            let new: Vec<i32> = found.into_iter().filter(|pid| sent.insert(*pid)).collect();
            // A restart may come at once. All of them first: who loses its peer closes its own end.
            new.iter().for_each(|pid| release_ports(*pid));
            send(signal, &new);
            if begin.elapsed() >= limit {
                return found_none;
            }
            thread::sleep(looks.next().unwrap_or(LAST_LOOK));
        }
    }

    /// Sends a signal to every process that the job has.
    pub(crate) fn signal(&self, signal: i32) {
        if signal == libc::SIGKILL {
            self.recovery.give_up();
        }
        send(signal, &running(&self.program()));
    }
}

/// To processes that descend from this one and have just been seen.
fn send(signal: i32, pids: &[i32]) {
    for pid in pids.iter().filter_map(|pid| rustix::process::Pid::from_raw(*pid)) {
        if let Some(signal) = rustix::process::Signal::from_named_raw(signal) {
            // One that has ended meanwhile takes no signal.
            let _ = rustix::process::kill_process(pid, signal);
        }
    }
}
