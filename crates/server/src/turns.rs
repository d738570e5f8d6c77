//! Turns of a tenant's jobs on devices that others have work on.
//!
//! A kernel's scheduler and a GPU's time slices give each process the same. Where no tenant has
//! more than one job on a device at a time, that is the same for each tenant whose jobs have one
//! process there. So while another tenant has work on it, the jobs of one take turns there;
//! otherwise each is as free as it is alone.
//!
//! The processes of a job have their turns together, on all their devices: they may wait for each
//! other.

use kedge_control::account::{Turn, Work};
use kedge_remote::{JobKey, SessionKey};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// From one look at what work there is to the next.
pub(crate) const TICK: Duration = Duration::from_millis(5);
/// For which a session is taken to have work after it was seen to have some: a program that waits
/// for each of its kernels has none in between.
const RECENT: Duration = Duration::from_millis(100);
/// For which a session has a turn that another of its tenant waits for.
const QUANTUM: Duration = Duration::from_millis(100);
/// For which who has the turn may have no work before another has it: over a network there is none
/// between two kernels of a program that waits for each.
const GAP: Duration = Duration::from_millis(25);
/// How long what has begun to end may take before the next has its turn all the same: it may wait
/// for that.
const END_TIMEOUT: Duration = Duration::from_secs(1);

/// A session, as it is seen at a moment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seen<'a> {
    pub(crate) key: SessionKey,
    /// A number of its tenant's, which stays.
    pub(crate) tenant: usize,
    pub(crate) job: JobKey,
    /// By the server's numbers; none: those that there are, which are not known.
    pub(crate) devices: &'a [u32],
    pub(crate) work: Work,
}

/// Its tenant, and its key.
type JobId = (usize, JobKey);

/// A job's sessions together.
#[derive(Debug)]
struct Job {
    id: JobId,
    /// All of theirs; `None`: any.
    devices: Option<BTreeSet<u32>>,
    work: Work,
}

impl Job {
    /// Returns the jobs of all sessions, in the order of their ids.
    fn of(all: &[Seen<'_>]) -> Vec<Job> {
        let mut jobs = BTreeMap::<JobId, Job>::new();
        for seen in all {
            let id = seen.id();
            let new = || Job { id, devices: Some(BTreeSet::new()), work: Work::default() };
            let job = jobs.entry(id).or_insert_with(new);
            job.work.wants |= seen.work.wants;
            job.work.runs |= seen.work.runs;
            match &mut job.devices {
                Some(devices) if !seen.devices.is_empty() => devices.extend(seen.devices),
                devices => *devices = None,
            }
        }
        jobs.into_values().collect()
    }

    fn tenant(&self) -> usize {
        self.id.0
    }

    fn meets(&self, other: &Job) -> bool {
        match (&self.devices, &other.devices) {
            (Some(own), Some(others)) => !own.is_disjoint(others),
            _ => true,
        }
    }

    /// Returns whether another tenant's job is on a device of its own.
    fn is_shared(&self, all: &[Job]) -> bool {
        all.iter().any(|other| other.tenant() != self.tenant() && self.meets(other))
    }
}

impl Seen<'_> {
    fn id(&self) -> JobId {
        (self.tenant, self.job)
    }
}

/// Returns whether sessions of different tenants are on one device.
pub(crate) fn any_shared(all: &[Seen<'_>]) -> bool {
    let jobs = Job::of(all);
    jobs.iter().any(|job| job.is_shared(&jobs))
}

/// What a session hears.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Told {
    /// Another tenant's is on a device of its job's.
    pub(crate) shared: bool,
    pub(crate) turn: Turn,
}

/// Whose turn it is.
#[derive(Debug, Default)]
pub(crate) struct Turns(BTreeMap<JobId, Known>);

/// What is known of a job.
#[derive(Debug, Clone, Copy, Default)]
struct Known {
    /// When it was last seen to have work.
    wanted: Option<Instant>,
    /// Since when it has the turn, or is held.
    has_since: Option<Instant>,
    held_since: Option<Instant>,
    /// When its last turn ended.
    had_until: Option<Instant>,
}

impl Turns {
    /// Decides, for each session, how it may use its devices until the next look.
    pub(crate) fn look(&mut self, all: &[Seen<'_>], now: Instant) -> Vec<Told> {
        let jobs = Job::of(all);
        let there: BTreeSet<JobId> = jobs.iter().map(|job| job.id).collect();
        self.0.retain(|id, _| there.contains(id));
        for job in &jobs {
            let known = self.0.entry(job.id).or_default();
            if job.work.wants {
                known.wanted = Some(now);
            }
        }
        let contended: Vec<bool> =
            jobs.iter().map(|job| self.is_contended(job, &jobs, now)).collect();
        let mut turns: BTreeMap<JobId, Turn> = BTreeMap::new();
        let mut tenants: BTreeMap<usize, Vec<&Job>> = BTreeMap::new();
        for (job, contended) in jobs.iter().zip(contended) {
            if contended {
                tenants.entry(job.tenant()).or_default().push(job);
            } else {
                self.known(job).is_free();
            }
        }
        for own in tenants.values() {
            turns.extend(own.iter().map(|job| job.id).zip(self.among(own, now)));
        }
        let shared: BTreeMap<JobId, bool> =
            jobs.iter().map(|job| (job.id, job.is_shared(&jobs))).collect();
        let told = |id: &JobId| Told {
            shared: shared.get(id).is_some_and(|shared| *shared),
            turn: turns.get(id).copied().unwrap_or(Turn::Free),
        };
        all.iter().map(|seen| told(&seen.id())).collect()
    }

    fn known(&mut self, job: &Job) -> &mut Known {
        self.0.entry(job.id).or_default()
    }

    /// Returns whether another tenant has work where this job may have some.
    fn is_contended(&self, job: &Job, all: &[Job], now: Instant) -> bool {
        let wanted = |other: &Job| self.0.get(&other.id).and_then(|known| known.wanted);
        let recently = |at: Instant| now.saturating_duration_since(at) < RECENT;
        let mut others = all.iter().filter(|other| other.tenant() != job.tenant());
        others.any(|other| job.meets(other) && wanted(other).is_some_and(recently))
    }

    /// Gives turns to one tenant's jobs: to as many as have no device in common.
    fn among(&mut self, own: &[&Job], now: Instant) -> Vec<Turn> {
        let past = |since: Option<Instant>| {
            since.map_or(Duration::MAX, |since| now.saturating_duration_since(since))
        };
        // Who has the turn keeps it while nobody waits for it, and for its time otherwise.
        for job in own {
            let known = self.0.get(&job.id).copied().unwrap_or_default();
            let waits = |it: &&Job| it.id != job.id && it.work.wants && it.meets(job);
            let over = past(known.wanted) >= GAP || past(known.has_since) >= QUANTUM;
            if known.has_since.is_some() && over && own.iter().any(waits) {
                *self.known(job) = Known { has_since: None, had_until: Some(now), ..known };
            }
        }
        let known = |job: &Job| self.0.get(&job.id).copied().unwrap_or_default();
        let has = |job: &Job| known(job).has_since.is_some();
        // What was given to one that is held ends first.
        let ends = |job: &Job| {
            let Known { has_since, held_since, .. } = known(job);
            let patient = held_since.is_none_or(|since| past(Some(since)) < END_TIMEOUT);
            has_since.is_none() && job.work.runs && patient
        };
        let mut given: BTreeSet<JobId> = own.iter().filter(|it| has(it)).map(|it| it.id).collect();
        let mut taken: Vec<&Job> = own.iter().copied().filter(|it| has(it)).collect();
        let mut waiting: Vec<&Job> =
            own.iter().copied().filter(|it| it.work.wants && !has(it)).collect();
        // Who has waited longest first. Whoever cannot have its turn as yet keeps others from
        // having theirs before it.
        waiting.sort_by_key(|it| known(it).had_until);
        for job in waiting {
            let other = |it: &Job| it.id != job.id && it.meets(job);
            let free =
                !taken.iter().any(|it| other(it)) && !own.iter().any(|it| other(it) && ends(it));
            if free {
                given.insert(job.id);
            }
            taken.push(job);
        }
        let alone = own.len() == 1;
        let turns = own.iter().map(|job| {
            let known = self.0.entry(job.id).or_default();
            if alone {
                known.is_free();
                return Turn::Free;
            }
            if given.contains(&job.id) {
                known.has_since.get_or_insert(now);
                known.held_since = None;
                return Turn::Paced;
            }
            known.held_since.get_or_insert(now);
            Turn::Held
        });
        turns.collect()
    }
}

impl Known {
    fn is_free(&mut self) {
        (self.has_since, self.held_since) = (None, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A session with as much work as it gets done, or with none; of a job of its own unless it
    /// says of which.
    #[derive(Debug, Clone)]
    struct Session {
        tenant: usize,
        job: Option<u8>,
        devices: Vec<u32>,
        wants: bool,
        /// It has work in one look of so many; what it begins while it is held stays there.
        every: u32,
        /// Looks for which what it has begun goes on once it is held.
        tail: u32,
        left: u32,
        turn: Turn,
        /// What it has had of its devices' time, in looks.
        had: f64,
    }

    fn session(tenant: usize, devices: &[u32]) -> Session {
        let devices = devices.to_vec();
        let (job, wants, every) = (None, true, 1);
        Session { tenant, job, devices, wants, every, tail: 0, left: 0, turn: Turn::Free, had: 0.0 }
    }

    struct World {
        turns: Turns,
        sessions: Vec<Session>,
        now: Instant,
        looks: u32,
    }

    impl World {
        fn new(sessions: Vec<Session>) -> World {
            World { turns: Turns::default(), sessions, now: Instant::now(), looks: 0 }
        }

        /// Lets time pass, of which each device gives the same to each session that runs there.
        fn pass(&mut self, looks: u32) {
            for _ in 0..looks {
                for it in &mut self.sessions {
                    it.left =
                        if it.turn == Turn::Held { it.left.saturating_sub(1) } else { it.tail };
                }
                self.looks += 1;
                let wants = |it: &Session| {
                    it.wants && (it.turn == Turn::Held || self.looks.is_multiple_of(it.every))
                };
                let wanted: Vec<bool> = self.sessions.iter().map(wants).collect();
                let runs: Vec<bool> = self
                    .sessions
                    .iter()
                    .zip(&wanted)
                    .map(|(it, wants)| *wants && (it.turn != Turn::Held || it.left > 0))
                    .collect();
                for device in 0..2 {
                    let on = |it: &Session| it.devices.contains(&device);
                    let all = self.sessions.iter().zip(&runs);
                    let count = all.filter(|(it, runs)| **runs && on(it)).count();
                    for (it, runs) in self.sessions.iter_mut().zip(&runs) {
                        if *runs && it.devices.contains(&device) {
                            it.had += 1.0 / count as f64;
                        }
                    }
                }
                self.now += TICK;
                let seen: Vec<Seen<'_>> = self
                    .sessions
                    .iter()
                    .zip(&runs)
                    .enumerate()
                    .map(|(at, (it, runs))| Seen {
                        key: [at as u8; 16],
                        tenant: it.tenant,
                        job: [it.job.unwrap_or(100 + at as u8); 16],
                        devices: &it.devices,
                        work: Work { wants: wanted[at], runs: *runs },
                    })
                    .collect();
                let turns = self.turns.look(&seen, self.now);
                for (it, told) in self.sessions.iter_mut().zip(turns) {
                    it.turn = told.turn;
                }
            }
        }

        fn had(&self, at: usize) -> f64 {
            self.sessions[at].had
        }
    }

    /// Returns whether the figures agree, but for the moments between one's turn and the next
    /// one's, which others have.
    fn is_about(value: f64, wanted: f64) -> bool {
        (value / wanted - 1.0).abs() < 0.12
    }

    #[test]
    fn tenants_have_the_same_however_many_sessions_they_have() {
        for tail in [0, 3, 40] {
            let mut all = vec![session(0, &[0]); 3];
            all.push(session(1, &[0]));
            all.iter_mut().for_each(|it| it.tail = tail);
            let mut world = World::new(all);
            world.pass(6000);
            assert!(is_about(world.had(3), 3000.0), "{tail}: {}", world.had(3));
            for at in 0..3 {
                assert!(is_about(world.had(at), 1000.0), "{tail}: {}", world.had(at));
            }
        }
        let mut all = vec![session(0, &[0]); 2];
        all.extend([session(1, &[0]), session(1, &[0]), session(2, &[0])]);
        let mut world = World::new(all);
        world.pass(6000);
        assert!(is_about(world.had(4), 2000.0) && is_about(world.had(0), 1000.0));
    }

    #[test]
    fn nobody_is_held_where_no_other_tenant_has_work() {
        let mut all = vec![session(0, &[0]); 3];
        all.extend([session(1, &[1]), Session { wants: false, ..session(2, &[0]) }]);
        let mut world = World::new(all);
        world.pass(100);
        assert!(world.sessions.iter().all(|it| it.turn == Turn::Free));
        // Who comes is among them once what runs has ended, and once it has gone they are free.
        world.sessions[4].wants = true;
        world.pass(2);
        let held = |world: &World| world.sessions.iter().filter(|it| it.turn == Turn::Held).count();
        assert_eq!((held(&world), world.sessions[4].turn), (2, Turn::Free));
        world.sessions[4].wants = false;
        world.pass(21);
        assert_eq!(held(&world), 0);
    }

    #[test]
    fn who_has_the_turn_and_no_work_gives_it_up_to_who_has_some() {
        let all = vec![session(0, &[0]), session(0, &[0]), session(1, &[0])];
        let mut world = World::new(all);
        world.pass(2);
        let [first, second] = if world.sessions[0].turn == Turn::Paced { [0, 1] } else { [1, 0] };
        world.sessions[first].wants = false;
        world.pass(6);
        assert_eq!(
            (world.sessions[first].turn, world.sessions[second].turn),
            (Turn::Held, Turn::Paced)
        );
        // Nobody waits for it.
        world.pass(100);
        assert_eq!(world.sessions[second].turn, Turn::Paced);
        world.sessions[second].wants = false;
        world.pass(1);
        assert_eq!(world.sessions[second].turn, Turn::Paced);
        world.sessions[first].wants = true;
        world.pass(6);
        assert_eq!(world.sessions[first].turn, Turn::Paced);
    }

    /// Between two of its kernels it has no work.
    #[test]
    fn who_waits_for_each_of_its_kernels_has_its_turn_to_the_end() {
        let mut all = vec![session(0, &[0]), session(0, &[0]), session(1, &[0])];
        all[0].every = 2;
        let mut world = World::new(all);
        let mut looks = [0; 2];
        for _ in 0..2000 {
            world.pass(1);
            (0..2).for_each(|at| looks[at] += u32::from(world.sessions[at].turn == Turn::Paced));
        }
        assert!(is_about(looks[0].into(), looks[1].into()), "{looks:?}");
    }

    /// What was given to one that is held may wait for what another is to do.
    #[test]
    fn what_does_not_end_is_not_waited_for_without_end() {
        let mut all = vec![session(0, &[0]), session(0, &[0]), session(1, &[0])];
        all.iter_mut().for_each(|it| it.tail = u32::MAX);
        let mut world = World::new(all);
        let mut have = [false; 2];
        for _ in 0..600 {
            world.pass(1);
            (0..2).for_each(|at| have[at] |= world.sessions[at].turn == Turn::Paced);
        }
        assert_eq!(have, [true; 2]);
    }

    #[test]
    fn sessions_on_different_devices_have_turns_together() {
        let all =
            vec![session(0, &[0]), session(0, &[1]), session(0, &[0, 1]), session(1, &[0, 1])];
        let mut world = World::new(all);
        let (mut together, mut apart) = (false, false);
        for _ in 0..100 {
            world.pass(1);
            let has: Vec<bool> = world.sessions.iter().map(|it| it.turn == Turn::Paced).collect();
            assert!(!(has[2] && (has[0] || has[1])));
            together |= has[0] && has[1];
            apart |= has[2];
        }
        assert!(together && apart);
    }

    /// Each waits for the others of its job: two jobs with a turn on a device each would get
    /// nothing done.
    #[test]
    fn a_job_has_its_turn_on_all_its_devices_at_once() {
        let rank = |job, device| Session { job: Some(job), ..session(0, &[device]) };
        // In which order they are seen, and who has work at a moment, does not matter.
        let mut all = vec![rank(1, 0), rank(2, 1), rank(2, 0), rank(1, 1), session(1, &[0])];
        all[1].every = 3;
        all[3].tail = 7;
        let mut world = World::new(all);
        let mut have = [false; 2];
        for look in 0..1000 {
            world.pass(1);
            let turns = [0, 1, 2, 3].map(|at| world.sessions[at].turn);
            assert_eq!([turns[0], turns[1]], [turns[3], turns[2]], "{look}");
            assert_ne!([turns[0], turns[1]], [Turn::Paced; 2], "{look}");
            (0..2).for_each(|at| have[at] |= turns[at] == Turn::Paced);
        }
        assert_eq!(have, [true; 2]);
    }

    #[test]
    fn nobody_is_held_against_another_of_its_job() {
        let rank = || Session { job: Some(1), ..session(0, &[0]) };
        // Another tenant's job may have the same key.
        let other = Session { job: Some(1), ..session(1, &[0]) };
        let mut world = World::new(vec![rank(), rank(), other]);
        for _ in 0..100 {
            world.pass(1);
            assert!(world.sessions.iter().all(|it| it.turn == Turn::Free));
        }
    }

    /// A rank whose own device nobody else is on heeds its job's turns too.
    #[test]
    fn a_job_is_shared_as_a_whole() {
        let one = |tenant, device: &'static [u32]| Seen {
            key: [0; 16],
            tenant,
            job: [0; 16],
            devices: device,
            work: Work::default(),
        };
        let all = [one(0, &[0]), one(0, &[1]), one(1, &[1]), one(2, &[2])];
        let told = Turns::default().look(&all, Instant::now());
        let shared: Vec<bool> = told.iter().map(|told| told.shared).collect();
        assert_eq!(shared, [true, true, true, false]);
        assert!(any_shared(&all) && !any_shared(&all[..2]));
    }
}
