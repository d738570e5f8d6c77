//! Barriers: series of steps, at each of which members wait for each other.

use super::{Conn, Place, State, Waiting};
use crate::message::{MAX_MEMBERS, Name, Reply, Scope, Series, Who, Why};
use kedge_barrier::{LAST, Page};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Series at a time.
const MAX_SERIES: usize = 4096;
/// Of them, whose members meet in memory: each takes a descriptor.
const MAX_PAGES: usize = 64;

#[derive(Debug, Default)]
pub(super) struct Round {
    /// Who has arrived at any of its steps.
    taking_part: BTreeSet<Conn>,
    /// This step, and with it all before.
    passed: Option<u64>,
    /// By whom, and why.
    broken: Option<(Name, Why)>,
    steps: BTreeMap<u64, Step>,
    /// Where they meet, if not here, and how many of them there are.
    page: Option<(Arc<Page>, u32)>,
}

#[derive(Debug)]
struct Step {
    who: Who,
    here: BTreeSet<Conn>,
}

impl Round {
    /// Forgets that `conn` waits at `step`.
    pub(super) fn give_up(&mut self, conn: Conn, step: u64) {
        if let Some(waiting) = self.steps.get_mut(&step) {
            waiting.here.remove(&conn);
            if waiting.here.is_empty() {
                self.steps.remove(&step);
            }
        }
    }

    /// Takes out whoever waits at any step.
    fn release(&mut self) -> Vec<Conn> {
        std::mem::take(&mut self.steps).into_values().flat_map(|step| step.here).collect()
    }

    /// Returns those that wait at steps that have been passed.
    fn release_passed(&mut self) -> Vec<Conn> {
        let Some(passed) = self.passed else { return Vec::new() };
        let later = self.steps.split_off(&passed.saturating_add(1));
        std::mem::replace(&mut self.steps, later).into_values().flat_map(|step| step.here).collect()
    }
}

impl State {
    pub(super) fn arrive(&mut self, conn: Conn, series: &Series, step: u64, who: Who, until: u64) {
        let place = self.place_of(conn, series);
        if let Err(why) = self.may_arrive(&place, step, who) {
            return self.reply(conn, Reply::Refused { why: Why::truncated(why.to_owned()) });
        }
        let round = self.series.entry(place.clone()).or_default();
        round.taking_part.insert(conn);
        if let Some((by, why)) = round.broken.clone() {
            return self.reply(conn, Reply::Broken { by, why });
        }
        if round.passed.is_some_and(|passed| step <= passed) {
            return self.reply(conn, Reply::Through {});
        }
        let waiting = round.steps.entry(step);
        waiting.or_insert_with(|| Step { who, here: BTreeSet::new() }).here.insert(conn);
        self.wait(conn, Waiting::Step { place: place.clone(), step }, until);
        self.settle(&place);
    }

    /// Lets `conn` have the page at which the series meets.
    pub(super) fn meet(&mut self, conn: Conn, series: &Series, members: u32) {
        let place = self.place_of(conn, series);
        let page = match self.page_at(&place, series, members) {
            Ok(page) => page,
            Err(why) => return self.reply(conn, Reply::Refused { why: Why::truncated(why) }),
        };
        let round = self.series.entry(place.clone()).or_default();
        round.taking_part.insert(conn);
        round.page = Some((page.clone(), members));
        if page.has_been_left() && round.broken.is_none() {
            let (by, why) = (self.name_of(conn), "it was told that others have left".to_owned());
            self.broken(&place, by, Why::truncated(why));
        }
        if let Some((by, why)) = self.series.get(&place).and_then(|round| round.broken.clone()) {
            return self.reply(conn, Reply::Broken { by, why });
        }
        self.pages.insert(conn, page);
        self.reply(conn, Reply::Page {});
    }

    /// Returns the page that there is, or a new one.
    fn page_at(&self, place: &Place, series: &Series, members: u32) -> Result<Arc<Page>, String> {
        if series.scope != (Scope::Node {}) {
            return Err("only members on one node can meet in memory".to_owned());
        }
        if members == 0 || members as usize > MAX_MEMBERS {
            return Err(format!("a barrier has 1 to {MAX_MEMBERS} members"));
        }
        let round = self.series.get(place);
        match round.and_then(|round| round.page.as_ref()) {
            Some((page, others)) if *others == members => return Ok(page.clone()),
            Some(_) => return Err("others meet there as another number of members".to_owned()),
            None => {}
        }
        let pages = self.series.values().filter(|round| round.page.is_some()).count();
        if pages >= MAX_PAGES || round.is_none() && self.series.len() >= MAX_SERIES {
            return Err("too many series of barriers".to_owned());
        }
        if round.is_some_and(|round| !round.steps.is_empty()) {
            return Err("others wait there by messages".to_owned());
        }
        let page = Page::new().map_err(|error| format!("memory for barriers: {error}"))?;
        if let Some(passed) = round.and_then(|round| round.passed) {
            page.raise(u32::try_from(passed).unwrap_or(LAST));
        }
        Ok(Arc::new(page))
    }

    fn may_arrive(&self, place: &Place, step: u64, who: Who) -> Result<(), &'static str> {
        if who == (Who::Count { members: 0 }) {
            return Err("a barrier of nobody");
        }
        match self.series.get(place) {
            None if self.series.len() >= MAX_SERIES => Err("too many series of barriers"),
            Some(round) if round.page.is_some() => Err("others meet there in memory"),
            Some(round) if round.steps.get(&step).is_some_and(|step| step.who != who) => {
                Err("others wait there for another number of members")
            }
            _ => Ok(()),
        }
    }

    /// Lets those through who are complete.
    fn settle(&mut self, place: &Place) {
        let Some(round) = self.series.get(place) else { return };
        let complete = round.steps.iter().rev().find(|(_, step)| {
            // One that waits for all of nobody cannot be.
            step.here.len() >= self.needed(place, step.who).max(1)
        });
        let Some(step) = complete.map(|(step, _)| *step) else { return };
        self.pass(place, step);
    }

    fn pass(&mut self, place: &Place, step: u64) {
        let Some(round) = self.series.get_mut(place) else { return };
        round.passed = round.passed.max(Some(step));
        if let Some((page, _)) = &round.page {
            page.raise(u32::try_from(step).unwrap_or(LAST));
        }
        for conn in round.release_passed() {
            self.forget_wait(conn);
            self.reply(conn, Reply::Through {});
        }
    }

    pub(super) fn settle_all(&mut self) {
        let places: Vec<Place> = self.series.keys().cloned().collect();
        places.iter().for_each(|place| self.settle(place));
    }

    pub(super) fn break_series(&mut self, conn: Conn, series: &Series, why: Why) {
        let place = self.place_of(conn, series);
        if !self.series.contains_key(&place) && self.series.len() >= MAX_SERIES {
            let why = Why::truncated("too many series of barriers".to_owned());
            return self.reply(conn, Reply::Refused { why });
        }
        self.series.entry(place.clone()).or_default().taking_part.insert(conn);
        let by = self.name_of(conn);
        self.broken(&place, by, why);
        self.reply(conn, Reply::Done {});
    }

    fn broken(&mut self, place: &Place, by: Name, why: Why) {
        let Some(round) = self.series.get_mut(place) else { return };
        // The first reason is the one that counts.
        let (by, why) = round.broken.get_or_insert((by, why)).clone();
        if let Some((page, _)) = &round.page {
            page.leave();
        }
        for conn in round.release() {
            self.forget_wait(conn);
            self.reply(conn, Reply::Broken { by: by.clone(), why: why.clone() });
        }
    }

    pub(super) fn end(&mut self, conn: Conn, series: &Series) {
        let place = self.place_of(conn, series);
        self.leave(conn, &place, None);
        self.reply(conn, Reply::Done {});
    }

    /// Takes `conn` out of the series; because it was lost, if a name is given.
    pub(super) fn leave(&mut self, conn: Conn, place: &Place, lost: Option<&Name>) {
        let Some(round) = self.series.get_mut(place) else { return };
        if !round.taking_part.remove(&conn) {
            return;
        }
        round.steps.values_mut().for_each(|step| {
            step.here.remove(&conn);
        });
        round.steps.retain(|_, step| !step.here.is_empty());
        if round.taking_part.is_empty() {
            self.series.remove(place);
        } else if let Some(name) = lost {
            let why = Why::truncated("it was lost".to_owned());
            self.broken(place, name.clone(), why);
        }
    }

    /// Takes what a member remembers of another coordinator's time.
    pub(super) fn recall(
        &mut self,
        conn: Conn,
        series: &Series,
        passed: Option<u64>,
        broken: Option<(Name, Why)>,
    ) {
        let place = self.place_of(conn, series);
        if !self.series.contains_key(&place) && self.series.len() >= MAX_SERIES {
            return;
        }
        self.series.entry(place.clone()).or_default().taking_part.insert(conn);
        if let Some((by, why)) = broken {
            self.broken(&place, by, why);
        }
        if let Some(step) = passed {
            self.pass(&place, step);
        }
    }
}
