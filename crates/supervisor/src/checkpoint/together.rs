//! The last word of ranks: SIGTERM reaches every process of a step, or some of them, in any order.
//! Whichever rank hears of it has all of them saved once, and all end with that image. A job of its
//! own whose processes are all told (`--withhold-term`) ends as one rank does.

use crate::checkpoint::ask::take_one;
use crate::job::jobs::{JobDir, LastImage};
use crate::job::joint::{Joint, Saved};
use crate::job::missed::Missed;
use crate::job::policy::Policy;
use crate::services::control::Until;
use kedge_control::error;
use kedge_control::job::{Order, Progress};
use kedge_control::joblog::JobLog;
use std::fs;
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// The first rank asks at once; another one, if it has not been saved by then.
const ALONE: Duration = Duration::from_secs(1);
/// Before what has failed is tried again: the batch system ends the job when its time is over.
const AGAIN: Duration = Duration::from_secs(1);

/// One of several ranks.
#[derive(Debug, Clone)]
pub(crate) struct Ranks {
    pub(crate) first: bool,
    /// Set with the image that is the last, also where that cannot be noted.
    saved: Saved,
    /// Where the rank's latest image is noted.
    pub(crate) last: PathBuf,
}

/// How far the image is.
enum Came {
    Captured,
    Over(Result<(), String>),
}

impl Ranks {
    /// That of a job's part, if it is one; or of a job that ends as a rank does.
    pub(crate) fn of(joint: Option<&Joint>, policy: &Policy, dir: &JobDir) -> Option<Ranks> {
        let last = dir.last_image();
        match joint.filter(|joint| joint.ranks.is_some()) {
            Some(joint) => Some(Ranks { first: joint.is_first(), saved: joint.saved, last }),
            // A part that is no rank ends for itself.
            None if policy.withholds_term() && joint.is_none() => {
                Some(Ranks { first: true, saved: Saved::new(), last })
            }
            None => None,
        }
    }

    /// Whether all have been saved and end.
    pub(crate) fn are_saved(&self) -> bool {
        let noted = fs::read(&self.last).ok();
        let last = noted.and_then(|text| serde_json::from_slice::<LastImage>(&text).ok());
        self.saved.is_set() || last.is_some_and(|last| last.last_word)
    }

    /// Has all ranks saved and ended, by the part that answers at `control`. Returns when that is
    /// done, or when not all have been captured at `deadline`; what fails before is tried again.
    pub(crate) fn save(
        &self,
        control: PathBuf,
        deadline: Option<Instant>,
        log: &JobLog,
        missed: &Missed,
    ) -> bool {
        if !self.first {
            thread::sleep(left(deadline).map_or(ALONE, |left| left.min(ALONE)));
        }
        while !self.are_saved() {
            let Err(error) = try_once(control.clone(), deadline) else { break };
            if self.are_saved() {
                break;
            }
            let failure = format!("checkpoint on SIGTERM: {error}");
            error!(log, "{failure}");
            missed.last(failure);
            if left(deadline).is_some_and(|left| left.is_zero()) {
                return false;
            }
            thread::sleep(AGAIN);
        }
        true
    }
}

fn left(deadline: Option<Instant>) -> Option<Duration> {
    deadline.map(|at| at.saturating_duration_since(Instant::now()))
}

fn try_once(control: PathBuf, deadline: Option<Instant>) -> Result<(), String> {
    let (tell, come) = mpsc::channel();
    let taking = move || {
        let order = Order { stop: true, verify: true, last_word: true, ..Order::default() };
        let heard = |progress: &Progress| {
            if matches!(progress, Progress::Captured { .. }) {
                let _ = tell.send(Came::Captured);
            }
        };
        let taken = take_one(&control, &order, Until::Durable, deadline, heard);
        let _ = tell.send(Came::Over(taken.map_err(|error| error.to_string())));
    };
    let taking = thread::Builder::new().name("last image".into()).spawn(taking);
    taking.map_err(|error| format!("cannot start a thread: {error}"))?;
    let gone = || "the thread for it has failed".to_owned();
    let first = match left(deadline) {
        Some(left) => come.recv_timeout(left).map_err(|error| match error {
            mpsc::RecvTimeoutError::Timeout => "not captured in time".to_owned(),
            mpsc::RecvTimeoutError::Disconnected => gone(),
        })?,
        None => come.recv().map_err(|_| gone())?,
    };
    // What has been captured stands still until its image is durable.
    let mut came = first;
    loop {
        match came {
            Came::Over(taken) => return taken,
            Came::Captured => came = come.recv().map_err(|_| gone())?,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_saved_once_their_last_image_says_so() {
        let last = std::env::temp_dir().join(format!("kedge-last-word-{}", std::process::id()));
        let ranks = Ranks { first: true, saved: Saved::new(), last: last.clone() };
        let note = |last_word| {
            let (image, captured, bytes, stall_seconds) = ("/i".into(), 1, 1, 0.1);
            let note = LastImage { image, captured, bytes, stall_seconds, last_word };
            note.write(&last).unwrap();
        };
        let mut saved = vec![ranks.are_saved()];
        for last_word in [false, true] {
            note(last_word);
            saved.push(ranks.are_saved());
        }
        // Nobody is asked any more.
        let nowhere = PathBuf::from("/nowhere/control");
        let none = JobLog::none();
        let again = ranks.save(nowhere.clone(), None, &none, &Missed::new());
        note(false);
        let missed = Missed::new();
        let in_vain = ranks.save(nowhere, Some(Instant::now()), &none, &missed);
        std::fs::remove_file(&last).unwrap();
        assert_eq!((saved, again, in_vain), (vec![false, false, true], true, false));
        let told = missed.told();
        assert!(told.len() == 1 && told[0].starts_with("checkpoint on SIGTERM: "), "{told:?}");
        // What failed before the others had it saved is made good.
        missed.saved();
        assert!(missed.told().is_empty() && missed.is_saved());
    }

    /// A rank whose note could not be written ended as one that was killed.
    #[test]
    fn a_process_that_is_forked_says_that_ranks_are_saved() {
        let ranks = Ranks { first: true, saved: Saved::new(), last: PathBuf::from("/nowhere") };
        let before = ranks.are_saved();
        // SAFETY: the child stores one byte and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            ranks.saved.set();
            // SAFETY: as above.
            unsafe { libc::_exit(0) };
        }
        // SAFETY: it waits for that child alone.
        assert_eq!(unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) }, child);
        assert!(!before && ranks.are_saved());
    }
}
