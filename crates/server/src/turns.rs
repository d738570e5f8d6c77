//! Turns of a tenant's sessions on devices that others have work on.
//!
//! A kernel's scheduler and a GPU's time slices give each process the same. Where no tenant has
//! more than one session on a device at a time, that is the same for each tenant. So while another
//! tenant has work on it, the sessions of one take turns there; otherwise each is as free as it is
//! alone.

use kedge_control::account::{Turn, Work};
use kedge_remote::SessionKey;
use std::collections::{HashMap, HashSet};
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
/// For what has begun to end, before the next has its turn all the same: it may wait for that.
const PATIENCE: Duration = Duration::from_secs(1);

/// A session, as it is seen at a moment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seen<'a> {
    pub(crate) key: SessionKey,
    /// A number of its tenant's.
    pub(crate) tenant: usize,
    /// By the server's numbers; none: those that there are, which are not known.
    pub(crate) devices: &'a [u32],
    pub(crate) work: Work,
}

impl Seen<'_> {
    fn meets(&self, other: &Seen<'_>) -> bool {
        let (own, others) = (self.devices, other.devices);
        own.is_empty() || others.is_empty() || own.iter().any(|device| others.contains(device))
    }

    /// Whether another tenant's session is on a device of its own.
    pub(crate) fn is_shared(&self, all: &[Seen<'_>]) -> bool {
        all.iter().any(|other| other.tenant != self.tenant && self.meets(other))
    }
}

/// Whose turn it is.
#[derive(Debug, Default)]
pub(crate) struct Turns(HashMap<SessionKey, Known>);

/// What is known of a session.
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
    pub(crate) fn look(&mut self, all: &[Seen<'_>], now: Instant) -> Vec<Turn> {
        let there: HashSet<SessionKey> = all.iter().map(|seen| seen.key).collect();
        self.0.retain(|key, _| there.contains(key));
        for seen in all {
            let known = self.0.entry(seen.key).or_default();
            if seen.work.wants {
                known.wanted = Some(now);
            }
        }
        let contended: Vec<bool> =
            all.iter().map(|seen| self.is_contended(seen, all, now)).collect();
        let mut turns = vec![Turn::Free; all.len()];
        let mut tenants: HashMap<usize, Vec<usize>> = HashMap::new();
        for (at, seen) in all.iter().enumerate() {
            if contended[at] {
                tenants.entry(seen.tenant).or_default().push(at);
            } else {
                self.known(seen).is_free();
            }
        }
        for own in tenants.values() {
            let sessions: Vec<&Seen<'_>> = own.iter().map(|at| &all[*at]).collect();
            for (at, turn) in own.iter().zip(self.among(&sessions, now)) {
                turns[*at] = turn;
            }
        }
        turns
    }

    fn known(&mut self, seen: &Seen<'_>) -> &mut Known {
        self.0.entry(seen.key).or_default()
    }

    /// Whether another tenant has work where this session may have some.
    fn is_contended(&self, seen: &Seen<'_>, all: &[Seen<'_>], now: Instant) -> bool {
        let wanted = |other: &Seen<'_>| self.0.get(&other.key).and_then(|known| known.wanted);
        let recently = |at: Instant| now.saturating_duration_since(at) < RECENT;
        let mut others = all.iter().filter(|other| other.tenant != seen.tenant);
        others.any(|other| seen.meets(other) && wanted(other).is_some_and(recently))
    }

    /// Gives turns to one tenant's sessions: to as many as have no device in common.
    fn among(&mut self, own: &[&Seen<'_>], now: Instant) -> Vec<Turn> {
        let past = |since: Option<Instant>| {
            since.map_or(Duration::MAX, |since| now.saturating_duration_since(since))
        };
        // Who has the turn keeps it while nobody waits for it, and for its time otherwise.
        for seen in own {
            let known = self.0.get(&seen.key).copied().unwrap_or_default();
            let waits = |it: &&&Seen<'_>| it.key != seen.key && it.work.wants && it.meets(seen);
            let over = past(known.wanted) >= GAP || past(known.has_since) >= QUANTUM;
            if known.has_since.is_some() && over && own.iter().any(|it| waits(&it)) {
                *self.known(seen) = Known { has_since: None, had_until: Some(now), ..known };
            }
        }
        let known = |seen: &Seen<'_>| self.0.get(&seen.key).copied().unwrap_or_default();
        let has = |seen: &Seen<'_>| known(seen).has_since.is_some();
        // What was given to one that is held ends first.
        let ends = |seen: &Seen<'_>| {
            let Known { has_since, held_since, .. } = known(seen);
            let patient = held_since.is_none_or(|since| past(Some(since)) < PATIENCE);
            has_since.is_none() && seen.work.runs && patient
        };
        let mut given: HashSet<SessionKey> =
            own.iter().filter(|it| has(it)).map(|it| it.key).collect();
        let mut taken: Vec<&Seen<'_>> = own.iter().copied().filter(|it| has(it)).collect();
        let mut waiting: Vec<&Seen<'_>> =
            own.iter().copied().filter(|it| it.work.wants && !has(it)).collect();
        // Who has waited longest first. Whoever cannot have its turn as yet keeps others from
        // having theirs before it.
        waiting.sort_by_key(|it| known(it).had_until);
        for seen in waiting {
            let other = |it: &Seen<'_>| it.key != seen.key && it.meets(seen);
            let free =
                !taken.iter().any(|it| other(it)) && !own.iter().any(|it| other(it) && ends(it));
            if free {
                given.insert(seen.key);
            }
            taken.push(seen);
        }
        let alone = own.len() == 1;
        let turns = own.iter().map(|seen| {
            let known = self.0.entry(seen.key).or_default();
            if alone {
                known.is_free();
                return Turn::Free;
            }
            if given.contains(&seen.key) {
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

    /// A session with as much work as it gets done, or with none.
    #[derive(Debug, Clone)]
    struct Session {
        tenant: usize,
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
        let (wants, every) = (true, 1);
        Session { tenant, devices, wants, every, tail: 0, left: 0, turn: Turn::Free, had: 0.0 }
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
                        devices: &it.devices,
                        work: Work { wants: wanted[at], runs: *runs },
                    })
                    .collect();
                let turns = self.turns.look(&seen, self.now);
                for (it, turn) in self.sessions.iter_mut().zip(turns) {
                    it.turn = turn;
                }
            }
        }

        fn had(&self, at: usize) -> f64 {
            self.sessions[at].had
        }
    }

    /// But for the moments between one's turn and the next one's, which others have.
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
}
