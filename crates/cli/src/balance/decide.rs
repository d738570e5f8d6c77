//! The decision: which job moves where, and why, from what is known at one moment.

use serde::Serialize;
use std::collections::BTreeMap;

/// What the user allows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Rules {
    /// A job moves where it would be so many times as fast, by a model.
    pub(super) gain: f64,
    /// Errors that a device may have reported and still count as whole.
    pub(super) most_errors: u64,
}

/// What is known of all places, the best first, and of the jobs that are on them, the oldest first.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct View {
    pub(super) places: Vec<PlaceView>,
    pub(super) jobs: Vec<JobView>,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct PlaceView {
    /// As `kedge migrate --to` takes it.
    pub(super) name: String,
    /// Whether its devices are this machine's.
    pub(super) near: bool,
    /// Whether no job moves between them and a server's devices.
    pub(super) bound: bool,
    /// How many devices it has; `None` where its name does not tell.
    pub(super) devices: Option<usize>,
    /// A job of the user's that has devices there.
    pub(super) taken: Option<String>,
    /// What its devices have reported.
    pub(super) errors: u64,
    pub(super) free: Free,
}

/// Whether the devices of a place are free, as `kedge migrate --when free` means it.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Free {
    /// Nobody has looked.
    Unknown,
    /// Bytes that are free, of all its devices.
    Yes { bytes: u64 },
    /// Why not; not to be looked at again for a while.
    No(String),
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct JobView {
    pub(super) name: String,
    /// Its place.
    pub(super) at: usize,
    /// Whether it moved a short while ago.
    pub(super) settles: bool,
    /// Places where it could not go, and why; not to be tried now.
    pub(super) barred: BTreeMap<usize, String>,
    /// Seconds that its program is expected to take at each place; none where that is not known.
    pub(super) seconds: Vec<Option<f64>>,
    /// Seconds that a move is expected to take.
    pub(super) move_seconds: f64,
}

/// Why a job is to move.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(tag = "trigger", rename_all = "lowercase")]
pub(super) enum Trigger {
    /// The devices that it is on have reported so many errors.
    Errors { errors: u64 },
    /// Its program would be so many times as fast there, the move counted in.
    Gain { gain: f64, threshold: f64, here_seconds: f64, there_seconds: f64, move_seconds: f64 },
    /// Devices of this machine, which stand before those that it is on, are free.
    Free,
}

/// A job that would move, and does not.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Wait {
    pub(super) job: String,
    pub(super) to: String,
    pub(super) why: String,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Decision {
    /// The job, as the view counts, moves to that place, of which so many bytes are free.
    Move { job: usize, to: usize, trigger: Trigger, free: u64 },
    /// That place would be moved to, if it is free: look.
    Look(usize),
    /// Nothing, now.
    Stay(Vec<Wait>),
}

/// Decides. Jobs whose devices report errors come first, then the oldest one; of a job's places
/// the one with the largest gain, and where that is not known, the one that is named first.
pub(super) fn decide(view: &View, rules: &Rules) -> Decision {
    let fails = |job: &JobView| view.places[job.at].errors > rules.most_errors;
    let leaving = view.jobs.iter().enumerate().filter(|(_, job)| fails(job));
    let others = view.jobs.iter().enumerate().filter(|(_, job)| !fails(job));
    let mut waits = Vec::new();
    for (index, job) in leaving.chain(others) {
        let mut wait = |to: usize, why: String| {
            waits.push(Wait { job: job.name.clone(), to: view.places[to].name.clone(), why });
        };
        let candidates = match fails(job) {
            true => refuges(view, job),
            false => better(view, job, rules, &mut wait),
        };
        for (to, trigger) in candidates {
            match obstacle(view, job, to, rules, fails(job)) {
                Some(why) => wait(to, why),
                None => match view.places[to].free {
                    Free::Unknown => return Decision::Look(to),
                    Free::Yes { bytes } => {
                        return Decision::Move { job: index, to, trigger, free: bytes };
                    }
                    Free::No(ref why) => wait(to, why.clone()),
                },
            }
        }
    }
    Decision::Stay(waits)
}

/// Places that a job can move to, with as many devices, as far as their names tell.
fn fitting<'a>(view: &'a View, job: &'a JobView) -> impl Iterator<Item = usize> + 'a {
    let here = &view.places[job.at];
    let fits = move |there: &PlaceView| {
        let crosses = here.near != there.near;
        let as_many = here.devices.zip(there.devices).is_none_or(|(here, there)| here == there);
        as_many && !(crosses && (here.bound || there.bound))
    };
    (0..view.places.len()).filter(move |to| *to != job.at && fits(&view.places[*to]))
}

/// Where a job can go whose devices report errors.
fn refuges(view: &View, job: &JobView) -> Vec<(usize, Trigger)> {
    let errors = view.places[job.at].errors;
    fitting(view, job).map(|to| (to, Trigger::Errors { errors })).collect()
}

/// Where a job is better off, the best first. `wait` hears of gains that are too small.
fn better(
    view: &View,
    job: &JobView,
    rules: &Rules,
    wait: &mut impl FnMut(usize, String),
) -> Vec<(usize, Trigger)> {
    let seconds = |place: usize| job.seconds.get(place).copied().flatten();
    let mut found = Vec::new();
    for to in fitting(view, job) {
        let known = seconds(job.at).zip(seconds(to)).filter(|(_, there)| *there > 0.0);
        let Some((here, there)) = known else {
            if to < job.at && view.places[to].near {
                found.push((to, Trigger::Free));
            }
            continue;
        };
        let (move_seconds, threshold) = (job.move_seconds, rules.gain);
        let gain = here / (there + move_seconds);
        if gain >= threshold {
            let (here_seconds, there_seconds) = (here, there);
            let trigger =
                Trigger::Gain { gain, threshold, here_seconds, there_seconds, move_seconds };
            found.push((to, trigger));
        } else if to < job.at {
            wait(to, format!("the predicted gain is {gain:.3}, less than {threshold}"));
        }
    }
    // Stable: of equal gains the place that is named first, and known gains before unknown ones.
    let gain = |trigger: &Trigger| match trigger {
        Trigger::Gain { gain, .. } => *gain,
        _ => 0.0,
    };
    found.sort_by(|(_, a), (_, b)| gain(b).total_cmp(&gain(a)));
    found
}

/// What keeps a job from a place, before anybody looks whether it is free.
fn obstacle(view: &View, job: &JobView, to: usize, rules: &Rules, leaves: bool) -> Option<String> {
    let place = &view.places[to];
    if place.errors > rules.most_errors {
        return Some(format!("its devices have reported {} errors", place.errors));
    }
    if job.settles && !leaves {
        return Some("it has moved a short while ago".to_owned());
    }
    if let Some(other) = &place.taken {
        return Some(format!("the job {other} is there"));
    }
    job.barred.get(&to).cloned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: Rules = Rules { gain: 1.2, most_errors: 0 };
    const YES: Free = Free::Yes { bytes: 7 };

    /// Near, near, far, far; all are free, each has a device.
    fn view(at: &[usize]) -> View {
        let place = |(index, name): (usize, &str)| PlaceView {
            name: name.to_owned(),
            near: index < 2,
            bound: false,
            devices: Some(1),
            taken: at.iter().position(|at| *at == index).map(|job| format!("j{job}")),
            errors: 0,
            free: YES,
        };
        let job = |(index, at): (usize, &usize)| JobView {
            name: format!("j{index}"),
            at: *at,
            settles: false,
            barred: BTreeMap::new(),
            seconds: Vec::new(),
            move_seconds: 0.0,
        };
        let places = ["local:0", "local:1", "a:1/0", "b:1/0"];
        let places = places.into_iter().enumerate().map(place).collect();
        View { places, jobs: at.iter().enumerate().map(job).collect() }
    }

    fn moves(job: usize, to: usize, trigger: Trigger) -> Decision {
        Decision::Move { job, to, trigger, free: 7 }
    }

    /// Who waits for what, and why.
    fn waits(decision: Decision) -> Vec<(String, String, String)> {
        let Decision::Stay(waits) = decision else { panic!("{decision:?}") };
        waits.into_iter().map(|wait| (wait.job, wait.to, wait.why)).collect()
    }

    fn gain(gain: f64, here: f64, there: f64, moving: f64) -> Trigger {
        Trigger::Gain {
            gain,
            threshold: 1.2,
            here_seconds: here,
            there_seconds: there,
            move_seconds: moving,
        }
    }

    type Change = fn(&mut View);
    /// Who waits for what, and why.
    type Waits = [(&'static str, &'static str, &'static str)];

    #[test]
    fn jobs_move_where_they_are_better_off() {
        let free = Trigger::Free;
        let table: &[(&str, &[usize], Change, Decision)] = &[
            ("home, to the first of two", &[2], |_| {}, moves(0, 0, free)),
            ("the oldest first", &[3, 2], |_| {}, moves(0, 0, free)),
            ("the second place is free", &[0, 3], |_| {}, moves(1, 1, free)),
            ("from near to nearer", &[1], |_| {}, moves(0, 0, free)),
            ("nobody has looked", &[2], |v| v.places[0].free = Free::Unknown, Decision::Look(0)),
            (
                "the first is in use",
                &[2],
                |v| v.places[0].free = Free::No("in use".into()),
                moves(0, 1, free),
            ),
            ("as many devices", &[2], |v| v.places[0].devices = Some(2), moves(0, 1, free)),
            ("GPUs here, not a server's", &[2], |v| v.places[0].bound = true, moves(0, 1, free)),
            (
                "from GPUs here to others here, and to no server",
                &[0],
                |v| (v.places[0].bound, v.places[0].errors) = (true, 1),
                moves(0, 1, Trigger::Errors { errors: 1 }),
            ),
            ("nobody knows how many", &[2], |v| v.places[0].devices = None, moves(0, 0, free)),
            (
                "a gain to a far place",
                &[2],
                |v| {
                    v.places[..2].iter_mut().for_each(|place| place.free = Free::No("x".into()));
                    v.jobs[0].seconds = vec![None, None, Some(10.0), Some(4.0)];
                    v.jobs[0].move_seconds = 1.0;
                },
                moves(0, 3, gain(2.0, 10.0, 4.0, 1.0)),
            ),
            (
                "the largest gain",
                &[2],
                |v| v.jobs[0].seconds = vec![Some(8.0), Some(5.0), Some(10.0), Some(9.0)],
                moves(0, 1, gain(2.0, 10.0, 5.0, 0.0)),
            ),
            (
                "of equal gains the first place",
                &[2],
                |v| v.jobs[0].seconds = vec![Some(5.0), Some(5.0), Some(10.0), Some(5.0)],
                moves(0, 0, gain(2.0, 10.0, 5.0, 0.0)),
            ),
            (
                "just enough",
                &[2],
                |v| v.jobs[0].seconds = vec![Some(10.0), None, Some(12.0)],
                moves(0, 0, gain(1.2, 12.0, 10.0, 0.0)),
            ),
            (
                "devices that report errors are left first, and for any place",
                &[2, 1],
                |v| v.places[1].errors = 3,
                moves(1, 0, Trigger::Errors { errors: 3 }),
            ),
            (
                "from near to far, if there is nothing else",
                &[1],
                |v| (v.places[1].errors, v.places[0].errors) = (3, 1),
                moves(0, 2, Trigger::Errors { errors: 3 }),
            ),
            (
                "also by a job that has just moved",
                &[1],
                |v| (v.places[1].errors, v.jobs[0].settles) = (1, true),
                moves(0, 0, Trigger::Errors { errors: 1 }),
            ),
        ];
        for (what, at, change, decision) in table {
            let mut view = view(at);
            change(&mut view);
            assert_eq!(decide(&view, &RULES), *decision, "{what}");
        }
    }

    #[test]
    fn jobs_stay_where_they_are_well_off_or_cannot_leave() {
        let busy = |view: &mut View| {
            view.places.iter_mut().for_each(|place| place.free = Free::No("in use".into()));
        };
        let table: &[(&str, &[usize], Change, &Waits)] = &[
            ("the best place", &[0], |_| {}, &[]),
            ("no jobs", &[], |_| {}, &[]),
            (
                "no far place without a gain",
                &[3, 0, 1],
                |_| {},
                &[
                    ("j0", "local:0", "the job j1 is there"),
                    ("j0", "local:1", "the job j2 is there"),
                    ("j2", "local:0", "the job j1 is there"),
                ],
            ),
            (
                "just moved",
                &[1],
                |v| v.jobs[0].settles = true,
                &[("j0", "local:0", "it has moved a short while ago")],
            ),
            (
                "could not go",
                &[1],
                |v| drop(v.jobs[0].barred.insert(0, "no".into())),
                &[("j0", "local:0", "no")],
            ),
            (
                "an unhealthy target",
                &[1],
                |v| v.places[0].errors = 2,
                &[("j0", "local:0", "its devices have reported 2 errors")],
            ),
            (
                "too small a gain",
                &[2],
                |v| v.jobs[0].seconds = vec![Some(10.0), Some(9.5), Some(11.0), Some(11.0)],
                &[
                    ("j0", "local:0", "the predicted gain is 1.100, less than 1.2"),
                    ("j0", "local:1", "the predicted gain is 1.158, less than 1.2"),
                ],
            ),
            (
                "a move would take longer than it gains",
                &[2],
                |v| {
                    v.jobs[0].seconds = vec![Some(5.0), Some(6.0), Some(10.0)];
                    v.jobs[0].move_seconds = 5.0;
                },
                &[
                    ("j0", "local:0", "the predicted gain is 1.000, less than 1.2"),
                    ("j0", "local:1", "the predicted gain is 0.909, less than 1.2"),
                ],
            ),
            (
                "nowhere to go",
                &[0, 1, 2, 3],
                |v| v.places[0].errors = 1,
                &[
                    ("j0", "local:1", "the job j1 is there"),
                    ("j0", "a:1/0", "the job j2 is there"),
                    ("j0", "b:1/0", "the job j3 is there"),
                    ("j2", "local:0", "its devices have reported 1 errors"),
                    ("j2", "local:1", "the job j1 is there"),
                    ("j3", "local:0", "its devices have reported 1 errors"),
                    ("j3", "local:1", "the job j1 is there"),
                    ("j1", "local:0", "its devices have reported 1 errors"),
                ],
            ),
            (
                "GPUs here, which no job leaves for a server",
                &[0],
                |v| {
                    (v.places[0].bound, v.places[0].errors) = (true, 1);
                    v.places[1].errors = 1;
                    v.jobs[0].seconds = vec![Some(9.0), None, Some(1.0), Some(1.0)];
                },
                &[("j0", "local:1", "its devices have reported 1 errors")],
            ),
            (
                "all are in use",
                &[2],
                busy,
                &[("j0", "local:0", "in use"), ("j0", "local:1", "in use")],
            ),
        ];
        for (what, at, change, expected) in table {
            let mut view = view(at);
            change(&mut view);
            let mut found = waits(decide(&view, &RULES));
            let expected = expected
                .iter()
                .map(|(job, to, why)| ((*job).to_owned(), (*to).to_owned(), (*why).to_owned()));
            let mut expected: Vec<_> = expected.collect();
            // Who waits, not in which order that is told.
            found.sort();
            expected.sort();
            assert_eq!(found, expected, "{what}");
        }
    }

    #[test]
    fn devices_may_have_reported_what_the_user_allows() {
        let mut view = view(&[0]);
        view.places[0].errors = 4;
        let allows = |most_errors| Rules { most_errors, ..RULES };
        assert_eq!(decide(&view, &allows(4)), Decision::Stay(Vec::new()));
        let left = moves(0, 1, Trigger::Errors { errors: 4 });
        assert_eq!(decide(&view, &allows(3)), left);
    }

    /// Nonsense of a model moves nobody.
    #[test]
    fn times_that_are_none_count_as_unknown() {
        let mut view = view(&[1]);
        for there in [0.0, -1.0, f64::NAN] {
            view.jobs[0].seconds = vec![Some(there), Some(1.0), None, None];
            assert_eq!(decide(&view, &RULES), moves(0, 0, Trigger::Free), "{there}");
        }
        view.jobs[0].seconds = vec![Some(1.0), Some(f64::NAN), None, None];
        assert!(matches!(decide(&view, &RULES), Decision::Stay(_)));
    }
}
