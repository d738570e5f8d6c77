//! Checkpoints that a job's policy wants, and that could not be taken: told when the job has ended.

use std::fmt::Display;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A checkpoint that the end of its program has met fails, and is none that was missed.
const AT_THE_END: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct Missed(Mutex<State>);

#[derive(Debug)]
struct State {
    /// When the last one succeeded, or the job began.
    good: Instant,
    /// Those that have failed since: when, and why.
    failures: u32,
    latest: Option<(Instant, String)>,
    /// The one before the end.
    last: Option<String>,
    /// When that one was asked for, seconds since 1970, if the job has been captured.
    captured: Option<u64>,
    /// Whether the job has ended with its last image, as all ranks of its step do.
    saved: bool,
}

impl Missed {
    pub(crate) fn new() -> Missed {
        let good = Instant::now();
        let (latest, last, captured) = (None, None, None);
        let state = State { good, failures: 0, latest, last, captured, saved: false };
        Missed(Mutex::new(state))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes how a checkpoint at an interval went.
    pub(crate) fn took<E: Display>(&self, result: &Result<(), E>) {
        let mut state = self.state();
        match result {
            Ok(()) => (state.good, state.failures, state.latest) = (Instant::now(), 0, None),
            Err(error) => {
                state.failures = state.failures.saturating_add(1);
                state.latest = Some((Instant::now(), error.to_string()));
            }
        }
    }

    /// Notes that the checkpoint before the end could not be taken.
    pub(crate) fn last(&self, failure: String) {
        self.state().last = Some(failure);
    }

    /// Notes that the job has been captured before its end, by a checkpoint that was asked for
    /// `since`, in seconds since 1970.
    pub(crate) fn captured_last(&self, since: u64) {
        self.state().captured = Some(since);
    }

    /// Notes that the job was saved and ended with all ranks of its step: whatever has failed
    /// before is made good.
    pub(crate) fn saved(&self) {
        let mut state = self.state();
        (state.latest, state.last, state.saved) = (None, None, true);
    }

    /// Returns whether it was.
    pub(crate) fn is_saved(&self) -> bool {
        self.state().saved
    }

    /// Returns when the checkpoint was asked for by which the job was captured before its end.
    pub(crate) fn captured_since(&self) -> Option<u64> {
        self.state().captured
    }

    /// Returns what there is to say, now that the program has ended.
    pub(crate) fn told(&self) -> Vec<String> {
        let state = self.state();
        let mut told = Vec::new();
        if let Some((at, why)) = &state.latest
            && (state.failures > 1 || at.elapsed() > AT_THE_END)
        {
            let time = rounded(state.good.elapsed());
            let times = match state.failures {
                1 => "one failed".to_owned(),
                failures => format!("{failures} failed"),
            };
            told.push(format!("no checkpoint for the last {time} ({times}): {why}"));
        }
        told.extend(state.last.clone());
        told
    }
}

/// A length of time in its largest unit.
fn rounded(time: Duration) -> String {
    match time.as_secs() {
        seconds @ 0..120 => format!("{seconds} s"),
        seconds @ 120..7200 => format!("{} min", seconds / 60),
        seconds => format!("{} h", seconds / 3600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_failed_since_the_last_good_one_is_told() {
        let missed = Missed::new();
        assert!(missed.told().is_empty());
        missed.took(&Err("the program has ended"));
        assert!(missed.told().is_empty(), "the end has met it");
        missed.took(&Err("the disk is full"));
        assert_eq!(missed.told(), ["no checkpoint for the last 0 s (2 failed): the disk is full"]);
        missed.took(&Ok::<(), &str>(()));
        assert!(missed.told().is_empty());
        missed.last("checkpoint on SIGTERM: refused".into());
        assert_eq!(missed.told(), ["checkpoint on SIGTERM: refused"]);
    }

    #[test]
    fn times_are_in_their_largest_unit() {
        let shown = |seconds| rounded(Duration::from_secs(seconds));
        assert_eq!([shown(90), shown(1200), shown(7200)], ["90 s", "20 min", "2 h"]);
    }
}
