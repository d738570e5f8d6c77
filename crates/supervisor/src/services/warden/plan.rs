//! What becomes of a job that has lost a part: a pure function of what its wardens have told.

use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A warden that has not heard from the coordinator for so long stops its part.
pub(super) const FENCE: Duration = Duration::from_secs(15);
/// And one that the others have not heard of for so long has done that: what it may take to notice,
/// and to end what runs, is in it.
pub(super) const GONE: Duration = Duration::from_secs(25);

/// How far a part is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Stage {
    Runs,
    /// Its processes are being ended: it cannot go on.
    Stops,
    /// Nothing of it runs, and nothing will before there is a plan.
    Stopped,
    /// It follows the plan.
    Goes,
    /// As its program, or its user, has ended it: so it stays.
    Ended,
}

/// An image of the whole job, and which part of it is the warden's.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Image {
    /// Seconds since 1970: the newest is the greatest.
    pub(super) captured: u64,
    pub(super) folder: PathBuf,
    /// The name of its part in there.
    pub(super) part: String,
}

/// What a warden publishes, once in a while.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Told {
    /// How often the job has gone back: what is told of an earlier time does not count.
    pub(super) times: u32,
    /// Of two wardens of one part, the one that began later counts.
    pub(super) life: u64,
    /// Grows as long as the warden lives.
    pub(super) beat: u64,
    pub(super) stage: Stage,
    pub(super) why: String,
    /// What it knows of.
    pub(super) images: Vec<Image>,
    /// What it has read, and found to be as it was written.
    pub(super) good: Vec<Image>,
    /// What it cannot come back from, and why.
    pub(super) bad: Vec<(PathBuf, String)>,
}

/// What is known of a part.
#[derive(Debug, Clone)]
pub(super) struct Seen {
    /// What it has told this time.
    pub(super) told: Option<Told>,
    /// When it told something new; if it never has, when this warden began to listen.
    pub(super) heard: Duration,
    /// Its supervisor has joined.
    pub(super) joined: bool,
}

impl Seen {
    /// Of a job that has gone back `times` times.
    pub(super) fn hear(&mut self, told: Told, times: u32, now: Duration) {
        if told.times < times {
            return;
        }
        let is_new = |known: &Told| (known.life, known.beat) != (told.life, told.beat);
        if self.told.as_ref().is_none_or(is_new) {
            self.heard = now;
        }
        self.told = Some(told);
    }
}

/// All that a warden knows of the job, itself included.
#[derive(Debug, Clone)]
pub(super) struct View {
    pub(super) own: u32,
    pub(super) now: Duration,
    /// When it began to listen.
    pub(super) since: Duration,
    /// How often the job may go back, and has.
    pub(super) limit: u32,
    pub(super) times: u32,
    pub(super) parts: BTreeMap<u32, Seen>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Plan {
    /// All parts of the image come back: by their names in it, each by the warden of that number,
    /// or of its own where it is not named ([`taker`]).
    Go { folder: PathBuf, by: BTreeMap<String, u32>, lost: Vec<String> },
    /// The job has come to its end.
    GivenUp { why: String },
}

/// What is to be done next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Next {
    Wait,
    /// These parts of the image, which nobody else has, are to be read.
    Verify {
        folder: PathBuf,
        parts: Vec<String>,
    },
    Publish(Plan),
}

#[derive(Debug, Clone, Copy)]
enum Standing<'a> {
    /// It runs or stops, or may do so.
    Open,
    Stopped(&'a Told),
    Ended(&'a Told),
    Gone,
}

impl View {
    fn standing<'a>(&self, seen: &'a Seen) -> Standing<'a> {
        match &seen.told {
            Some(told) if told.stage == Stage::Ended => Standing::Ended(told),
            _ if self.is_silent(seen) => Standing::Gone,
            Some(told) if told.stage == Stage::Stopped && told.times == self.times => {
                Standing::Stopped(told)
            }
            _ => Standing::Open,
        }
    }

    /// A part that nobody would stop where it is cut off: it was started without a warden.
    fn unguarded(&self) -> Option<u32> {
        let silent = |seen: &&Seen| seen.told.is_none() && seen.joined && self.is_silent(seen);
        self.parts.iter().find(|(_, seen)| silent(seen)).map(|(number, _)| *number)
    }

    fn is_silent(&self, seen: &Seen) -> bool {
        self.now.saturating_sub(seen.heard) > GONE
    }

    fn stopped(&self) -> BTreeMap<u32, &Told> {
        let stopped = |(number, seen): (&u32, _)| match self.standing(seen) {
            Standing::Stopped(told) => Some((*number, told)),
            _ => None,
        };
        self.parts.iter().filter_map(|(number, seen)| stopped((number, seen))).collect()
    }

    /// Why this part, which runs, is to stop: the number of another one and what it has come to.
    pub(super) fn alarm(&self) -> Option<(u32, String)> {
        let others = self.parts.iter().filter(|(number, _)| **number != self.own);
        others.into_iter().find_map(|(number, seen)| match &seen.told {
            Some(told) if told.stage == Stage::Ended => None,
            Some(told) if told.times > self.times => {
                Some((*number, "it has gone back without this part".to_owned()))
            }
            Some(told) if told.stage != Stage::Runs => Some((*number, told.why.clone())),
            None if seen.joined => None,
            _ if self.is_silent(seen) => {
                Some((*number, format!("it has not been heard of for {} s", GONE.as_secs())))
            }
            _ => None,
        })
    }

    /// How often the job has gone back, as those know that have stopped again since.
    pub(super) fn later(&self) -> Option<u32> {
        let told = self.parts.values().filter_map(|seen| seen.told.as_ref());
        let stops = |told: &&Told| [Stage::Stops, Stage::Stopped].contains(&told.stage);
        told.filter(stops).map(|told| told.times).max().filter(|times| *times > self.times)
    }

    /// Returns whether no other part can need this one, which has ended, any more.
    pub(super) fn is_over(&self) -> bool {
        let over = |seen| matches!(self.standing(seen), Standing::Ended(_) | Standing::Gone);
        self.parts.values().all(over)
    }

    /// The newest image that no part has found to be bad: the one that all are to read.
    pub(super) fn target(&self) -> Option<Image> {
        let stopped = self.stopped();
        let bad: BTreeSet<&PathBuf> =
            stopped.values().flat_map(|told| told.bad.iter().map(|(folder, _)| folder)).collect();
        let all = stopped.values().flat_map(|told| &told.images);
        all.filter(|image| !bad.contains(&image.folder)).max().cloned()
    }

    /// What this part, which has stopped, is to do. `parts` tells the names of an image's parts,
    /// and `read` has those that this one has read for parts that nobody else has.
    pub(super) fn next(
        &self,
        parts: impl Fn(&Path) -> Vec<String>,
        read: &BTreeSet<(PathBuf, String)>,
    ) -> Next {
        let open = |seen| matches!(self.standing(seen), Standing::Open);
        let stopped = self.stopped();
        // The first one conducts.
        if self.parts.values().any(open) || stopped.keys().next() != Some(&self.own) {
            return Next::Wait;
        }
        if self.times >= self.limit {
            let why = format!("it has gone back {} times, not again", self.times);
            return Next::Publish(Plan::GivenUp { why });
        }
        if let Some(number) = self.unguarded() {
            let why = format!("part {number} was started without --recover, and may run");
            return Next::Publish(Plan::GivenUp { why });
        }
        let Some(target) = self.target() else { return Next::Publish(self.no_image(&stopped)) };
        let folder = target.folder;
        let mut by = BTreeMap::new();
        for (number, told) in &stopped {
            let Some(own) = told.good.iter().find(|image| image.folder == folder) else {
                return Next::Wait;
            };
            by.entry(own.part.clone()).or_insert(*number);
        }
        // Of who is in no part of it.
        by.remove("");
        let lost: Vec<String> =
            parts(&folder).into_iter().filter(|part| !by.contains_key(part)).collect();
        if let Some((number, why)) = self.ended(&folder, &lost) {
            let why = format!("part {number} has ended ({why}), and does not come back");
            return Next::Publish(Plan::GivenUp { why });
        }
        // One that nobody has heard of may run.
        let unheard = |part: &String| number_of(part).is_none_or(|n| !self.parts.contains_key(&n));
        if lost.iter().any(unheard) && self.now.saturating_sub(self.since) <= GONE {
            return Next::Wait;
        }
        let unread = |part: &&String| !read.contains(&(folder.clone(), (*part).clone()));
        let unread: Vec<String> = lost.iter().filter(unread).cloned().collect();
        if !unread.is_empty() {
            return Next::Verify { folder, parts: unread };
        }
        let takers: Vec<u32> = stopped.keys().copied().collect();
        by.extend(lost.iter().cloned().zip(takers.into_iter().cycle()));
        // What can be published is short.
        by.retain(|part, number| number_of(part) != Some(*number));
        Next::Publish(Plan::Go { folder, by, lost })
    }

    /// One of the parts `lost` of the image that is so because its program has ended.
    fn ended(&self, folder: &Path, lost: &[String]) -> Option<(u32, String)> {
        self.parts.iter().find_map(|(number, seen)| {
            let Standing::Ended(told) = self.standing(seen) else { return None };
            let known = told.images.iter().find(|image| image.folder == folder);
            let is_lost = match known {
                Some(image) => lost.contains(&image.part),
                None => lost.iter().any(|part| number_of(part) == Some(*number)),
            };
            is_lost.then(|| (*number, told.why.clone()))
        })
    }

    fn no_image(&self, stopped: &BTreeMap<u32, &Told>) -> Plan {
        let bad = stopped.values().flat_map(|told| &told.bad);
        let bad: BTreeSet<&String> = bad.map(|(_, why)| why).collect();
        let why = match bad.into_iter().next() {
            Some(first) => format!("no image is whole: {first}"),
            None => "there is no image yet to go back to".to_owned(),
        };
        Plan::GivenUp { why }
    }
}

/// The number of the warden that brings back the part of that name.
pub(super) fn taker(by: &BTreeMap<String, u32>, part: &str) -> Option<u32> {
    by.get(part).copied().or_else(|| number_of(part))
}

/// The number of the part whose image has that name: NAME.2-0001.
pub(super) fn number_of(part: &str) -> Option<u32> {
    part.rsplit_once('-')?.0.rsplit_once('.')?.1.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LATE: Duration = Duration::from_secs(100);

    fn image(number: u64, part: u32) -> Image {
        let folder = PathBuf::from(format!("/images/j-000{number}"));
        Image { captured: number, folder, part: format!("j.{part}-0001") }
    }

    fn parts(_: &Path) -> Vec<String> {
        (0..2).map(|part| image(1, part).part).collect()
    }

    /// A part that has told this just now.
    fn part(stage: Stage, images: &[Image], good: &[Image]) -> Seen {
        let (images, good) = (images.to_vec(), good.to_vec());
        let (why, bad) = ("why".to_owned(), Vec::new());
        let told = Told { times: 0, life: 1, beat: 1, stage, why, images, good, bad };
        Seen { told: Some(told), heard: LATE, joined: true }
    }

    /// One that has stopped, and has read the image with that number.
    fn stopped(number: u32, image_number: u64) -> Seen {
        let one = [image(image_number, number)];
        part(Stage::Stopped, &one, &one)
    }

    fn view(own: u32, all: impl IntoIterator<Item = Seen>) -> View {
        let parts = (0..).zip(all).collect();
        View { own, now: LATE, since: Duration::ZERO, limit: 3, times: 0, parts }
    }

    fn silent(seen: Seen) -> Seen {
        Seen { heard: LATE - GONE - Duration::from_millis(1), ..seen }
    }

    fn next(view: &View) -> Next {
        view.next(parts, &BTreeSet::new())
    }

    #[test]
    fn the_first_part_conducts_once_all_have_stopped_and_read() {
        let both = || [stopped(0, 1), stopped(1, 1)];
        let go = Plan::Go { folder: image(1, 0).folder, by: BTreeMap::new(), lost: Vec::new() };
        assert_eq!(next(&view(0, both())), Next::Publish(go));
        assert_eq!(next(&view(1, both())), Next::Wait);
        for stage in [Stage::Runs, Stage::Stops, Stage::Goes] {
            let open = view(0, [stopped(0, 1), part(stage, &[], &[])]);
            assert_eq!(next(&open), Next::Wait);
        }
        let unread = view(0, [stopped(0, 1), part(Stage::Stopped, &[image(1, 1)], &[])]);
        assert_eq!(next(&unread), Next::Wait);
    }

    #[test]
    fn a_part_that_is_gone_comes_back_elsewhere_once_its_image_is_read() {
        let gone = || [stopped(0, 1), silent(part(Stage::Runs, &[], &[]))];
        let lost = image(1, 1).part;
        let folder = image(1, 1).folder;
        let verify = Next::Verify { folder: folder.clone(), parts: vec![lost.clone()] };
        assert_eq!(next(&view(0, gone())), verify);
        let read = BTreeSet::from([(folder.clone(), lost.clone())]);
        let by = BTreeMap::from([(lost.clone(), 0)]);
        assert_eq!([0, 1].map(|part| taker(&by, &image(1, part).part)), [Some(0); 2]);
        assert_eq!(taker(&by, &image(1, 2).part), Some(2));
        let go = Next::Publish(Plan::Go { folder, by, lost: vec![lost] });
        assert_eq!(view(0, gone()).next(parts, &read), go);
        // A moment before it may run still, and one that nobody has heard of may, too.
        let [first, second] = gone();
        let open = Seen { heard: LATE - GONE, ..second };
        assert_eq!(view(0, [first.clone(), open]).next(parts, &read), Next::Wait);
        let early = View { since: LATE - GONE, ..view(0, [first.clone()]) };
        assert_eq!(early.next(parts, &read), Next::Wait);
        assert_eq!(view(0, [first]).next(parts, &read), go);
    }

    #[test]
    fn an_image_that_one_part_cannot_read_is_passed_over() {
        let images = |part| [image(2, part), image(1, part)];
        let mut first = part(Stage::Stopped, &images(0), &images(0));
        let mut second = part(Stage::Stopped, &images(1), &[]);
        let told = second.told.as_mut().unwrap();
        told.bad.push((image(2, 1).folder, "a byte is wrong".to_owned()));
        let both = view(0, [first.clone(), second.clone()]);
        assert_eq!(both.target(), Some(image(1, 1)));
        assert_eq!(next(&both), Next::Wait);
        second.told.as_mut().unwrap().good.push(image(1, 1));
        let Next::Publish(Plan::Go { folder, .. }) =
            next(&view(0, [first.clone(), second.clone()]))
        else {
            panic!("no plan")
        };
        assert_eq!(folder, image(1, 1).folder);
        first.told.as_mut().unwrap().bad.push((image(1, 0).folder, "so is another".to_owned()));
        let Next::Publish(Plan::GivenUp { why }) = next(&view(0, [first, second])) else {
            panic!("no end")
        };
        assert!(why.contains("is wrong"), "{why}");
    }

    #[test]
    fn what_has_ended_does_not_run_again() {
        let ended = part(Stage::Ended, &[image(1, 1)], &[]);
        // However long ago that was.
        for ended in [ended.clone(), silent(ended.clone())] {
            let both = view(0, [stopped(0, 1), ended]);
            assert!(matches!(next(&both), Next::Publish(Plan::GivenUp { .. })));
        }
        let running = view(0, [part(Stage::Runs, &[], &[]), silent(ended.clone())]);
        assert_eq!(running.alarm(), None);
        assert!(!running.is_over() && view(1, [ended.clone(), ended]).is_over());
    }

    #[test]
    fn a_part_that_runs_stops_when_another_does_or_is_gone() {
        let runs = || part(Stage::Runs, &[], &[]);
        assert_eq!(view(0, [runs(), runs()]).alarm(), None);
        assert_eq!(view(0, [silent(runs()), runs()]).alarm(), None);
        for other in [silent(runs()), part(Stage::Stops, &[], &[]), stopped(1, 1)] {
            assert_eq!(view(0, [runs(), other]).alarm().map(|(number, _)| number), Some(1));
        }
        let mut later = runs();
        later.told.as_mut().unwrap().times = 1;
        assert!(view(0, [runs(), later.clone()]).alarm().is_some());
        // It has come back without this one: that does not stop it.
        assert_eq!(view(0, [stopped(0, 1), later.clone()]).later(), None);
        later.told.as_mut().unwrap().stage = Stage::Stops;
        assert_eq!(view(0, [stopped(0, 1), later]).later(), Some(1));
    }

    #[test]
    fn a_part_without_a_warden_is_never_brought_back() {
        let mute = silent(Seen { told: None, heard: LATE, joined: true });
        assert_eq!(view(0, [part(Stage::Runs, &[], &[]), mute.clone()]).alarm(), None);
        let both = view(0, [stopped(0, 1), mute]);
        let Next::Publish(Plan::GivenUp { why }) = next(&both) else { panic!("no end") };
        assert!(why.contains("without --recover"), "{why}");
    }

    #[test]
    fn a_job_goes_back_so_often_and_no_more() {
        let often = View { limit: 0, ..view(0, [stopped(0, 1), stopped(1, 1)]) };
        assert!(matches!(next(&often), Next::Publish(Plan::GivenUp { .. })));
    }

    #[test]
    fn only_a_new_word_counts() {
        let mut seen = part(Stage::Runs, &[], &[]);
        let told = seen.told.clone().unwrap();
        seen.hear(told.clone(), 0, LATE * 2);
        assert_eq!(seen.heard, LATE);
        seen.hear(Told { beat: 2, ..told.clone() }, 1, LATE * 2);
        assert_eq!(seen.heard, LATE, "it is of an earlier time");
        seen.hear(Told { beat: 2, ..told }, 0, LATE * 2);
        assert_eq!(seen.heard, LATE * 2);
    }
}
