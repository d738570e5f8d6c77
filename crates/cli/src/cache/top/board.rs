//! What there is to see of caches at one moment, and how it is gathered.

use crate::Failure;
use crate::top::words;
use kedge_cache::CacheError;
use kedge_cache::control::{Answer, Ask, Status, Stuck};
use kedge_cache::places::{Place, places};
use serde::Serialize;
use std::collections::{HashMap, HashSet};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How long all caches together are waited for.
const PROMPT: Duration = Duration::from_millis(800);

/// The longest name of a folder, and of a file with why it cannot be drained, bytes.
const NAME: usize = 4096;
const TEXT: usize = 4 * NAME;
/// Tiers of a cache, and files that it names.
const TIERS: usize = 16;
const FILES: usize = 1000;

/// All caches, at one moment.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(crate) struct Board {
    /// Seconds since 1970; 0 where nothing has been gathered as yet.
    pub(crate) at: u64,
    pub(crate) caches: Vec<Cache>,
}

/// A cache.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Cache {
    pub(crate) user: u32,
    /// The folder, or where its daemon would answer.
    pub(crate) under: String,
    /// What programs write, into tiers and below at once.
    pub(crate) in_bytes_per_second: Option<f64>,
    pub(crate) drained_bytes_per_second: Option<f64>,
    /// Why it cannot be asked.
    pub(crate) error: Option<String>,
    pub(crate) status: Option<Box<Status>>,
    #[serde(skip)]
    pub(crate) place: Place,
}

impl Cache {
    /// Returns its folder as a terminal may have it.
    pub(crate) fn name(&self) -> String {
        words::escaped(&self.under)
    }
}

type Said = (Place, Instant, Result<Answer, CacheError>);

/// What a cache had counted at a moment.
#[derive(Debug, Clone, Copy)]
struct Counted {
    at: Instant,
    pid: u32,
    written: u64,
    drained: u64,
}

/// Gathers boards, one after the other.
#[derive(Debug)]
pub(crate) struct Gatherer {
    before: HashMap<Place, Counted>,
    /// Those that have been asked, and have not answered as yet.
    asked: HashSet<Place>,
    tell: Sender<Said>,
    told: Receiver<Said>,
}

impl Default for Gatherer {
    fn default() -> Gatherer {
        let (tell, told) = mpsc::channel();
        Gatherer { before: HashMap::new(), asked: HashSet::new(), tell, told }
    }
}

impl Gatherer {
    /// Asks all caches. One that hangs holds up nobody, and is asked by one thread at a time.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(crate) fn gather(&mut self) -> Result<Board, Failure> {
        let all = places();
        let mut waited: HashSet<Place> = all.iter().cloned().collect();
        for place in &all {
            if !self.asked.insert(place.clone()) {
                continue;
            }
            let (place, tell) = (place.clone(), self.tell.clone());
            let ask = move || {
                let answer = place.ask(Ask::Status);
                // Nobody may look any more.
                let _ = tell.send((place, Instant::now(), answer));
            };
            thread::Builder::new().name("ask".into()).spawn(ask)?;
        }
        let mut answers = HashMap::new();
        let until = Instant::now() + PROMPT;
        while !waited.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            let Ok((place, at, answer)) = self.told.recv_timeout(left) else { break };
            self.asked.remove(&place);
            waited.remove(&place);
            answers.insert(place, (at, answer));
        }
        self.before.retain(|place, _| all.contains(place));
        let caches = all.into_iter().map(|place| {
            let answer = answers.remove(&place);
            self.cache(place, answer)
        });
        let caches = caches.collect();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Ok(Board { at: now, caches })
    }

    fn cache(
        &mut self,
        place: Place,
        answer: Option<(Instant, Result<Answer, CacheError>)>,
    ) -> Cache {
        let (status, error) = match answer {
            Some((at, Ok(Answer::Status(status)))) if is_sound(&status) => {
                (Some((at, status)), None)
            }
            Some((_, Err(error))) => (None, Some(error.to_string())),
            Some((_, Ok(_))) => (None, Some("its daemon did not answer the question".to_owned())),
            None => (None, Some("its daemon does not answer".to_owned())),
        };
        let rates = status.as_ref().and_then(|(at, status)| self.rates(&place, *at, status));
        let status = status.map(|(_, status)| status);
        let under = status.as_ref().map_or(&place.at, |status| &status.under);
        Cache {
            user: place.user,
            under: under.display().to_string(),
            in_bytes_per_second: rates.map(|(written, _)| written),
            drained_bytes_per_second: rates.map(|(_, drained)| drained),
            error,
            status,
            place,
        }
    }

    /// Returns what was written and drained a second since it was asked before.
    fn rates(&mut self, place: &Place, at: Instant, status: &Status) -> Option<(f64, f64)> {
        let written = status.absorbed.saturating_add(status.through);
        let now = Counted { at, pid: status.pid, written, drained: status.drained };
        let before = self.before.insert(place.clone(), now)?;
        let seconds = at.saturating_duration_since(before.at).as_secs_f64();
        // Another daemon counts anew.
        let rate = |now: u64, before: u64| now.saturating_sub(before) as f64 / seconds;
        (before.pid == now.pid && seconds > 0.0)
            .then(|| (rate(now.written, before.written), rate(now.drained, before.drained)))
    }
}

/// Returns whether an answer can be one of a daemon: another user's may be any process of theirs.
fn is_sound(status: &Status) -> bool {
    let partner = status.partner.iter();
    let mut texts =
        partner.flat_map(|partner| std::iter::once(&partner.address).chain(&partner.why));
    let stuck = |file: &Stuck| file.path.len() + file.why.len() <= TEXT;
    status.under.as_os_str().len() <= NAME
        && status.tiers.len() <= TIERS
        && status.stuck.len() <= FILES
        && status.stuck.iter().all(stuck)
        && texts.all(|text| text.len() <= TEXT)
}

#[cfg(test)]
mod tests {
    use super::super::tests::status;
    use super::*;

    #[test]
    fn what_no_daemon_says_is_no_answer() {
        let place = Place { user: 1000, at: "/dev/shm/kedge-cache-1000/x".into() };
        let mut gatherer = Gatherer::default();
        let mut told = |status: Status| {
            let answer = Ok(Answer::Status(Box::new(status)));
            gatherer.cache(place.clone(), Some((Instant::now(), answer))).error
        };
        assert_eq!(told(status("/scratch")), None);
        let long = "a".repeat(1 << 20);
        let stuck = Stuck { path: long.clone(), bytes: 1, why: String::new() };
        let tiers = vec![status("/").tiers[0].clone(); 1000];
        for bad in [
            status(&long),
            Status { tiers, ..status("/scratch") },
            Status { stuck: vec![stuck], ..status("/scratch") },
        ] {
            assert_eq!(told(bad).as_deref(), Some("its daemon did not answer the question"));
        }
    }

    #[test]
    fn another_daemon_counts_anew() {
        let place = Place { user: 0, at: "/scratch".into() };
        let mut gatherer = Gatherer::default();
        let begin = Instant::now();
        let mut rates = |seconds, pid, absorbed, through| {
            let status = Status { pid, absorbed, through, drained: absorbed, ..status("/scratch") };
            gatherer.rates(&place, begin + Duration::from_secs(seconds), &status)
        };
        assert_eq!(rates(0, 7, 100, 10), None);
        assert_eq!(rates(2, 7, 500, 30), Some((210.0, 200.0)));
        assert_eq!(rates(2, 7, 500, 30), None, "at the same moment");
        assert_eq!(rates(4, 8, 20, 0), None);
        assert_eq!(rates(5, 8, 21, 0), Some((1.0, 1.0)));
    }
}
