//! What is remembered between two looks, so that no job moves to and fro, and nothing that fails is
//! tried again at once. Times are since the daemon's start.

use super::decide::Free;
use kedge_supervisor::Supervisor;
use std::collections::BTreeMap;
use std::time::Duration;

/// Time between the first two looks whether a place is free: each starts a program there.
const LOOK_INTERVAL: Duration = Duration::from_secs(5);
/// Longest time between two such looks.
const MAX_LOOK_INTERVAL: Duration = Duration::from_secs(60);
/// Longest time between two tries to move a job to one place.
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(4 * 3600);

/// How long nothing happens.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pauses {
    /// After a move of any job, or one that has failed; to be doubled where it fails again.
    pub(super) hold_off: Duration,
    /// After a move, of the job that has moved.
    pub(super) settle: Duration,
}

/// Tries that have failed in a row.
#[derive(Debug, Clone)]
struct Failed {
    times: u32,
    /// When it can be tried again; `None`: it never can be.
    until: Option<Duration>,
    why: String,
}

impl Failed {
    fn again(before: Option<&Failed>, now: Duration, first: Duration, most: Duration) -> Failed {
        let times = before.map_or(0, |before| before.times).saturating_add(1);
        let pause = first.saturating_mul(1 << (times - 1).min(16)).min(most.max(first));
        Failed { times, until: Some(now + pause), why: String::new() }
    }

    fn holds(&self, now: Duration) -> bool {
        self.until.is_none_or(|until| now < until)
    }
}

/// What is remembered of a job.
#[derive(Debug, Clone)]
struct Known {
    by: Supervisor,
    /// Its devices, as `kedge ps` names them.
    gpu: String,
    settles_until: Duration,
    /// Moves that have failed, by place.
    failed: BTreeMap<usize, Failed>,
}

#[derive(Debug)]
pub(super) struct Memory {
    pauses: Pauses,
    jobs: BTreeMap<String, Known>,
    /// Looks that found devices in use, or none, by place.
    looks: BTreeMap<usize, Failed>,
    held_until: Duration,
}

impl Memory {
    pub(super) fn new(pauses: Pauses) -> Memory {
        let (jobs, looks) = Default::default();
        Memory { pauses, jobs, looks, held_until: Duration::ZERO }
    }

    /// Takes note of the jobs that run, wherever they are, and forgets all others. One that was
    /// moved by somebody else settles there as well.
    pub(super) fn see(
        &mut self,
        now: Duration,
        jobs: impl Iterator<Item = (String, Supervisor, String)>,
    ) {
        let mut before = std::mem::take(&mut self.jobs);
        for (name, by, gpu) in jobs {
            let known = before.remove(&name).filter(|known| known.by == by);
            let mut known = known.unwrap_or_else(|| Known {
                by,
                gpu: gpu.clone(),
                settles_until: Duration::ZERO,
                failed: BTreeMap::new(),
            });
            if known.gpu != gpu {
                known.gpu = gpu;
                known.settles_until = now + self.pauses.settle;
            }
            self.jobs.insert(name, known);
        }
    }

    /// Whether nothing is to be moved now.
    pub(super) fn holds(&self, now: Duration) -> bool {
        now < self.held_until
    }

    pub(super) fn settles(&self, job: &str, now: Duration) -> bool {
        self.jobs.get(job).is_some_and(|known| now < known.settles_until)
    }

    /// Where that job could not go, and why; not to be tried now.
    pub(super) fn barred(&self, job: &str, now: Duration) -> BTreeMap<usize, String> {
        let failed = self.jobs.get(job).map(|known| &known.failed).into_iter().flatten();
        let held = failed.filter(|(_, failed)| failed.holds(now));
        held.map(|(to, failed)| (*to, failed.why.clone())).collect()
    }

    /// What is known of a place before anybody looks.
    pub(super) fn free(&self, place: usize, now: Duration) -> Free {
        match self.looks.get(&place).filter(|failed| failed.holds(now)) {
            Some(failed) => Free::No(failed.why.clone()),
            None => Free::Unknown,
        }
    }

    /// A look has found that place free.
    pub(super) fn is_free(&mut self, place: usize) {
        self.looks.remove(&place);
    }

    /// A look has found that place in use, or could not be.
    pub(super) fn is_not_free(&mut self, place: usize, now: Duration, why: &str) {
        let failed = Failed::again(self.looks.get(&place), now, LOOK_INTERVAL, MAX_LOOK_INTERVAL);
        self.looks.insert(place, Failed { why: why.to_owned(), ..failed });
    }

    /// That job would have moved there, where nothing is done: that is decided once.
    pub(super) fn would(&mut self, job: &str, to: usize, now: Duration) {
        let _ = self.failed(job, to, now, "it would have moved there (--dry-run)", true);
        if let Some(known) = self.jobs.get_mut(job) {
            known.settles_until = now + self.pauses.settle;
        }
    }

    /// That job has moved.
    pub(super) fn moved(&mut self, job: &str, to: &str, now: Duration) {
        self.held_until = now + self.pauses.hold_off;
        if let Some(known) = self.jobs.get_mut(job) {
            to.clone_into(&mut known.gpu);
            known.settles_until = now + self.pauses.settle;
            known.failed.clear();
        }
    }

    /// It could not move there: returns how long it is not tried again, `None` for ever.
    pub(super) fn failed(
        &mut self,
        job: &str,
        to: usize,
        now: Duration,
        why: &str,
        for_ever: bool,
    ) -> Option<Duration> {
        let hold_off = self.pauses.hold_off;
        self.held_until = now + hold_off;
        let known = self.jobs.get_mut(job)?;
        let mut failed = Failed::again(known.failed.get(&to), now, hold_off, MAX_RETRY_INTERVAL);
        if for_ever {
            failed.until = None;
        }
        let again = failed.until.map(|until| until.saturating_sub(now));
        known.failed.insert(to, Failed { why: why.to_owned(), ..failed });
        again
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAUSES: Pauses =
        Pauses { hold_off: Duration::from_secs(10), settle: Duration::from_secs(100) };

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn by(text: &str) -> Supervisor {
        text.parse().expect("a supervisor")
    }

    fn seen(seconds: u64, memory: &mut Memory, supervisor: &str, gpu: &str) {
        memory.see(at(seconds), [("j".to_owned(), by(supervisor), gpu.to_owned())].into_iter());
    }

    #[test]
    fn a_job_that_has_moved_settles() {
        let mut memory = Memory::new(PAUSES);
        seen(0, &mut memory, "1:1", "far");
        assert!(!memory.settles("j", at(0)), "one that is new can move at once");
        memory.moved("j", "near", at(5));
        assert!(memory.holds(at(14)) && !memory.holds(at(15)));
        seen(15, &mut memory, "1:1", "near");
        assert!(memory.settles("j", at(104)) && !memory.settles("j", at(105)));
        // Somebody else moves it.
        seen(200, &mut memory, "1:1", "far");
        assert!(memory.settles("j", at(299)) && !memory.settles("j", at(300)));
        assert!(!memory.holds(at(200)), "that is no move of ours");
        // Another job of that name.
        seen(210, &mut memory, "2:1", "near");
        assert!(!memory.settles("j", at(210)));
    }

    #[test]
    fn what_fails_is_tried_later_and_later() {
        let mut memory = Memory::new(PAUSES);
        seen(0, &mut memory, "1:1", "far");
        let mut fails = |now| memory.failed("j", 1, at(now), "no", false);
        let pauses = [0, 20, 50, 100, 200, 400, 800].map(|now| fails(now).expect("not for ever"));
        assert_eq!(pauses.map(|pause| pause.as_secs()), [10, 20, 40, 80, 160, 320, 640]);
        assert_eq!(memory.barred("j", at(1439)), BTreeMap::from([(1, "no".to_owned())]));
        assert_eq!(memory.barred("j", at(1440)), BTreeMap::new());
        assert!(memory.holds(at(809)) && !memory.holds(at(810)));
        let mut fails = || memory.failed("j", 1, at(900), "no", false);
        let hours = [fails(), fails(), fails(), fails(), fails(), fails()];
        assert_eq!(hours[..2], [Some(at(1280)), Some(at(2560))]);
        assert_eq!(hours[4..], [Some(MAX_RETRY_INTERVAL); 2]);
        memory.moved("j", "near", at(2000));
        assert_eq!(memory.failed("j", 1, at(2001), "no", false), Some(at(10)), "it counts anew");
        assert_eq!(memory.failed("j", 2, at(2001), "never", true), None);
        assert_eq!(memory.barred("j", at(1 << 30)), BTreeMap::from([(2, "never".to_owned())]));
        // Of a job that is another one, or is no more.
        seen(3000, &mut memory, "2:1", "far");
        assert_eq!(memory.barred("j", at(3000)), BTreeMap::new());
        memory.see(at(3001), std::iter::empty());
        assert_eq!(memory.failed("j", 1, at(3001), "no", false), None);
    }

    #[test]
    fn what_would_be_done_is_decided_once() {
        let mut memory = Memory::new(PAUSES);
        seen(0, &mut memory, "1:1", "far");
        for to in [0, 1] {
            memory.would("j", to, at(to as u64));
        }
        let barred = memory.barred("j", at(1 << 30));
        assert_eq!(barred.into_keys().collect::<Vec<_>>(), [0, 1]);
        assert!(memory.settles("j", at(100)) && memory.holds(at(10)));
    }

    #[test]
    fn places_in_use_are_looked_at_later_and_later() {
        let mut memory = Memory::new(PAUSES);
        assert_eq!(memory.free(0, at(0)), Free::Unknown);
        for (now, until) in [(0, 5), (5, 15), (15, 35), (35, 75), (75, 135), (135, 195)] {
            memory.is_not_free(0, at(now), "in use");
            assert_eq!(memory.free(0, at(until - 1)), Free::No("in use".into()));
            assert_eq!(memory.free(0, at(until)), Free::Unknown);
        }
        memory.is_free(0);
        memory.is_not_free(0, at(200), "x");
        assert_eq!(memory.free(0, at(205)), Free::Unknown, "it counts anew");
        assert_eq!(memory.free(1, at(200)), Free::Unknown);
    }

    #[test]
    fn no_pause_is_too_long_for_the_clock() {
        let most = Duration::from_secs(100 * 366 * 86_400);
        let mut memory = Memory::new(Pauses { hold_off: most, settle: most });
        seen(0, &mut memory, "1:1", "far");
        for _ in 0..100 {
            assert_eq!(memory.failed("j", 1, at(0), "no", false), Some(most));
            memory.is_not_free(0, at(0), "no");
        }
        memory.moved("j", "near", most);
        assert!(memory.settles("j", most) && memory.holds(most));
    }
}
