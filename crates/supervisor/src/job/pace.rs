//! How often a job is checkpointed that nobody asks for.

use crate::job::policy::{Interval, MIN_INTERVAL};
use kedge_control::job::Progress;
use std::time::Duration;

/// An automatic interval begins with this, or with a tenth of the time between failures where that
/// is shorter: what a checkpoint costs is not known before the first.
const FIRST: Duration = Duration::from_secs(60);
/// What a program that runs on beside the writing of its image loses of that time: assumed.
const WRITING: f64 = 0.1;
/// How much the newest checkpoint says of the next one's cost.
const NEWEST: f64 = 0.5;
/// An interval that differs from the one that was told by more than this part is told.
const TOLD: f64 = 0.2;

/// What a checkpoint costs, in seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Cost {
    /// The job stands still.
    stall: f64,
    /// The image is written while it runs.
    writing: f64,
}

impl Cost {
    /// What the job loses by one.
    fn total(self) -> f64 {
        self.stall + WRITING * self.writing
    }
}

/// The time from one checkpoint to the next.
#[derive(Debug)]
pub(crate) struct Pace {
    interval: Interval,
    /// Of the newest checkpoints together; `None` before the first.
    cost: Option<Cost>,
    /// Of the one under way.
    taking: Cost,
    /// The interval that was told last, in seconds.
    told: f64,
}

impl Pace {
    pub(crate) fn new(interval: Interval) -> Pace {
        Pace { interval, cost: None, taking: Cost::default(), told: 0.0 }
    }

    /// Returns the time to the next checkpoint.
    pub(crate) fn next(&self) -> Duration {
        let (mtbf, cost) = match (self.interval, self.cost) {
            (Interval::Every(interval), _) => return interval,
            (Interval::Auto { mtbf }, None) => return FIRST.min(mtbf / 10).max(MIN_INTERVAL),
            (Interval::Auto { mtbf }, Some(cost)) => (mtbf.as_secs_f64(), cost),
        };
        // Storage that is written to all the time is no use to anybody else.
        let interval = daly(cost.total(), mtbf).max(2.0 * cost.writing);
        Duration::from_secs_f64(interval).max(MIN_INTERVAL)
    }

    /// Notes how far the checkpoint under way is.
    pub(crate) fn heard(&mut self, progress: &Progress) {
        match progress {
            Progress::Captured { stall_seconds, .. } => self.taking.stall = *stall_seconds,
            Progress::Durable { seconds, .. } => {
                let writing = (seconds - self.taking.stall).max(0.0);
                let newest = Cost { writing, ..std::mem::take(&mut self.taking) };
                let before = self.cost.unwrap_or(newest);
                let mean = |before: f64, newest: f64| NEWEST * newest + (1.0 - NEWEST) * before;
                let stall = mean(before.stall, newest.stall);
                self.cost = Some(Cost { stall, writing: mean(before.writing, newest.writing) });
            }
            Progress::Writing { .. } | Progress::Verifying { .. } => {}
        }
    }

    /// Returns what the log is to be told of an automatic interval that has changed.
    pub(crate) fn news(&mut self) -> Option<String> {
        let (Interval::Auto { mtbf }, Some(cost)) = (self.interval, self.cost) else { return None };
        let next = self.next().as_secs_f64();
        if (next - self.told).abs() <= TOLD * self.told {
            return None;
        }
        self.told = next;
        Some(format!(
            "a checkpoint every {next:.0} s from now on: one has the job stand still for {:.0} ms \
             and is written within {:.1} s, a tenth of which counts, and the job is taken to be \
             lost every {:.1} h (--interval auto,TIME)",
            cost.stall * 1e3,
            cost.writing,
            mtbf.as_secs_f64() / 3600.0,
        ))
    }
}

/// Returns the time between two checkpoints that loses the least, in seconds, where one costs
/// `cost` and failures come `mtbf` after each other on average.
///
/// Source: J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart
/// dumps, 2006, equation 37; its first term is Young's of 1974.
fn daly(cost: f64, mtbf: f64) -> f64 {
    if cost >= 2.0 * mtbf {
        return mtbf;
    }
    let part = cost / (2.0 * mtbf);
    (2.0 * cost * mtbf).sqrt() * (1.0 + part.sqrt() / 3.0 + part / 9.0) - cost
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn took(pace: &mut Pace, stall: f64, all: f64) {
        let image = "i".into();
        pace.heard(&Progress::Captured {
            image,
            processes: 1,
            stall_seconds: stall,
            warnings: vec![],
        });
        let (image, seconds) = ("i".into(), all);
        pace.heard(&Progress::Durable { image, bytes: 1, seconds, verified: None });
    }

    /// Loses the least: by trying the intervals around it.
    #[test]
    fn daly_s_interval_is_the_best() {
        // The expected time of a job per second of work, restarts that take no time: equation 20
        // there.
        let time = |cost: f64, mtbf: f64, interval: f64| {
            mtbf * (((interval + cost) / mtbf).exp() - 1.0) / interval
        };
        for (cost, mtbf) in [(0.05, 86_400.0), (10.0, 86_400.0), (300.0, 7200.0), (60.0, 600.0)] {
            let best = daly(cost, mtbf);
            for other in [0.8 * best, 1.25 * best] {
                assert!(time(cost, mtbf, best) < time(cost, mtbf, other), "{cost} {mtbf} {other}");
            }
        }
        assert_eq!(daly(100.0, 50.0), 50.0);
    }

    #[test]
    fn a_fixed_interval_stays() {
        let mut pace = Pace::new(Interval::Every(HOUR));
        took(&mut pace, 10.0, 1000.0);
        assert_eq!((pace.next(), pace.news()), (HOUR, None));
    }

    #[test]
    fn an_automatic_interval_follows_the_cost() {
        let mut pace = Pace::new(Interval::Auto { mtbf: 24 * HOUR });
        assert_eq!((pace.next(), pace.news()), (FIRST, None));
        // 0.1 s in all: √(2 · 0.1 · 86,400).
        took(&mut pace, 0.05, 0.55);
        assert!((pace.next().as_secs_f64() - 131.4).abs() < 0.1, "{:?}", pace.next());
        let news = pace.news().expect("news");
        assert!(news.contains("every 131 s") && news.contains("50 ms"), "{news}");
        took(&mut pace, 0.05, 0.6);
        assert_eq!(pace.news(), None, "nearly the same");
        for _ in 0..8 {
            took(&mut pace, 0.05, 1000.0);
        }
        // 100 s in all: more than an hour.
        assert!(pace.next() > HOUR && pace.news().is_some(), "{:?}", pace.next());
    }

    #[test]
    fn storage_is_not_written_to_all_the_time() {
        let mut pace = Pace::new(Interval::Auto { mtbf: HOUR / 60 });
        assert_eq!(pace.next(), Duration::from_secs(6));
        took(&mut pace, 0.001, 100.0);
        assert!(pace.next() >= Duration::from_secs(199), "{:?}", pace.next());
        let mut pace = Pace::new(Interval::Auto { mtbf: MIN_INTERVAL });
        assert_eq!(pace.next(), MIN_INTERVAL);
        took(&mut pace, 0.0, 0.0);
        assert_eq!(pace.next(), MIN_INTERVAL);
    }
}
