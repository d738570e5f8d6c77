//! What a supervisor does while its job runs: it passes signals on, and has checkpoints taken that
//! nobody asks for. They are asked for on the job's own control socket, because in a restarted job
//! another process takes them.

use crate::base::signals::{self, Signal, Signals};
use crate::checkpoint::ask::take_one;
use crate::checkpoint::together::Ranks;
use crate::job::jobs::{self, Next};
use crate::job::missed::Missed;
use crate::job::pace::Pace;
use crate::job::policy::{OnTerm, Policy};
use crate::services::control::{Order, Progress, Until};
use kedge_control::joblog::JobLog;
use kedge_control::{error, note};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// A job that runs.
pub(crate) struct Watch {
    pub(crate) control: PathBuf,
    pub(crate) policy: Policy,
    pub(crate) log: Arc<JobLog>,
    /// Sends a signal to the program.
    pub(crate) signal: Arc<dyn Fn(libc::c_int) + Send + Sync>,
    /// Returns when no checkpoint is under way, or at the moment given.
    pub(crate) settle: Box<dyn Fn(Option<Instant>)>,
    /// Which of the checkpoints that the policy wants could not be taken.
    pub(crate) missed: Arc<Missed>,
    /// That the job is one of several ranks.
    pub(crate) ranks: Option<Ranks>,
}

impl Watch {
    /// Waits until `ended`, which is asked whenever a child may have ended, tells an outcome; and
    /// until no checkpoint is under way.
    pub(crate) fn wait<T>(&self, signals: &Signals, mut ended: impl FnMut() -> Option<T>) -> T {
        if let Some(interval) = self.policy.interval {
            self.checkpoint_at(Pace::new(interval));
        }
        // From the first SIGTERM on; `None` in it: as long as it takes.
        let mut ending: Option<Option<Instant>> = None;
        loop {
            match signals.next() {
                Signal::Forward(libc::SIGTERM) if ending.is_none() && self.has_last_word() => {
                    signals.withhold(libc::SIGTERM);
                    ending = Some(match &self.ranks {
                        Some(ranks) => self.end_together(ranks.clone()),
                        None => self.checkpoint_and_end(),
                    });
                }
                // Slurm tells all processes, and those that pass it on besides.
                Signal::Forward(libc::SIGTERM) if ending.is_some() && self.ranks.is_some() => {}
                Signal::Group(signal) if signals::to_group(signal) => {}
                Signal::Forward(signal) | Signal::Group(signal) => (self.signal)(signal),
                Signal::Child => {
                    if let Some(outcome) = ended() {
                        // An image of a program that has ended since is a good image.
                        (self.settle)(ending.flatten());
                        if self.ranks.as_ref().is_some_and(Ranks::are_saved) {
                            self.missed.saved();
                        }
                        return outcome;
                    }
                }
            }
        }
    }

    fn has_last_word(&self) -> bool {
        self.policy.on_term.is_some()
    }

    fn checkpoint_at(&self, mut pace: Pace) {
        let (control, log, missed) = (self.control.clone(), self.log.clone(), self.missed.clone());
        let all = move || {
            let mut begun = Instant::now();
            loop {
                let every = pace.next();
                let next = Instant::now().max(begun + every);
                tell_next(&control, next, every);
                thread::sleep(next.saturating_duration_since(Instant::now()));
                begun = next;
                let tell = |progress: &Progress| pace.heard(progress);
                let order = Order { ahead: true, ..Order::default() };
                let taken = take_one(&control, &order, Until::Durable, None, tell);
                if let Err(error) = &taken {
                    error!(log, "interval checkpoint: {error}");
                }
                missed.took(&taken);
                if let Some(news) = pace.news() {
                    note!(log, "{news}");
                }
            }
        };
        if thread::Builder::new().name("interval".into()).spawn(all).is_err() {
            error!(self.log, "cannot start a thread: there will be no interval checkpoints");
        }
    }

    /// Has a checkpoint taken, and asks the program to end as soon as it is captured, cannot be, or
    /// the deadline has passed: that.
    fn checkpoint_and_end(&self) -> Option<Instant> {
        let OnTerm { deadline, .. } = self.policy.on_term?;
        let deadline = deadline.map(|deadline| Instant::now() + deadline);
        let (control, log, signal) = (self.control.clone(), self.log.clone(), self.signal.clone());
        let (missed, since) = (self.missed.clone(), jobs::now());
        let last_word = move || {
            let (done, captured) = mpsc::channel();
            // The last of it: whoever restarts it later wants to know whether it can be.
            let order = Order { verify: true, ..Order::default() };
            let taken = move || take_one(&control, &order, Until::Captured, deadline, |_| {});
            let taking = move || done.send(taken());
            let taking = thread::Builder::new().name("last image".into()).spawn(taking);
            let result = match deadline {
                Some(at) => captured.recv_timeout(at.saturating_duration_since(Instant::now())),
                None => captured.recv().map_err(|_| mpsc::RecvTimeoutError::Disconnected),
            };
            let failure = match (taking, result) {
                (Ok(_), Ok(Ok(()))) => None,
                (Ok(_), Ok(Err(error))) => Some(format!("checkpoint on SIGTERM: {error}")),
                _ => Some("checkpoint on SIGTERM: not captured in time".to_owned()),
            };
            match failure {
                None => missed.captured_last(since),
                Some(failure) => {
                    error!(log, "{failure}");
                    missed.last(failure);
                }
            }
            signal(libc::SIGTERM);
        };
        if thread::Builder::new().name("term".into()).spawn(last_word).is_err() {
            error!(self.log, "cannot start a thread: no checkpoint on SIGTERM");
            (self.signal)(libc::SIGTERM);
        }
        deadline
    }
}

impl Watch {
    /// Has all ranks saved and ended. The program does not see SIGTERM: what has not been captured
    /// at the deadline is killed, and without one the batch system does that.
    fn end_together(&self, ranks: Ranks) -> Option<Instant> {
        let OnTerm { deadline, .. } = self.policy.on_term?;
        let deadline = deadline.map(|deadline| Instant::now() + deadline);
        let (control, log, signal) = (self.control.clone(), self.log.clone(), self.signal.clone());
        let missed = self.missed.clone();
        let last_word = move || {
            if !ranks.save(control, deadline, &log, &missed) {
                signal(libc::SIGKILL);
            }
        };
        if thread::Builder::new().name("term".into()).spawn(last_word).is_err() {
            error!(self.log, "cannot start a thread: no checkpoint on SIGTERM");
        }
        // The others' image may be under way when the program ends.
        None
    }
}

/// Notes when the next checkpoint is due, and how often they come. Nothing but what is shown
/// depends on it: who has no room for that is told by the checkpoint itself.
fn tell_next(control: &Path, next: Instant, every: Duration) {
    let left = next.saturating_duration_since(Instant::now());
    let at = jobs::now().saturating_add(left.as_secs_f64().round() as u64);
    let _ = jobs::note_next(control, &Next { at, every });
}
