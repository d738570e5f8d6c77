//! The coefficients, and the equations that they belong to.

use kedge_control::stats::{Amount, Stats};
use serde::{Deserialize, Serialize};

/// The version of [`Model`] that this one writes and reads.
pub(super) const FORMAT: u32 = 1;

/// What using devices costs, in seconds: equation 1 for far devices, equation 3 for near ones,
/// which are in a process beside the program (mrCUDA's helper) as well.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Costs {
    /// From a process's first word to its context.
    pub(super) session: f64,
    /// A message that the program waits for.
    pub(super) call: f64,
    /// One that it does not.
    pub(super) post: f64,
    /// A copy from the program's own memory to devices, beside its call, and each byte.
    pub(super) write: f64,
    pub(super) write_byte: f64,
    /// A copy from devices.
    pub(super) read: f64,
    pub(super) read_byte: f64,
    /// A byte from pinned memory to devices, and from devices to pinned memory.
    pub(super) shared_write_byte: f64,
    pub(super) shared_read_byte: f64,
}

/// What a move costs, in seconds: equations 4, 5 and 6, by a checkpoint here and a restart there.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct Moving {
    /// replay_const, and what stops, saves and brings back the processes.
    pub(super) fixed: f64,
    /// replay_coef: a message that is repeated.
    pub(super) record: f64,
    /// 1 / bw_coef: a region of device memory, however small.
    pub(super) region: f64,
    /// 1 / bw_max: a byte of a large one.
    pub(super) byte: f64,
}

/// What `kedge model fit` has found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Model {
    pub(super) format: u32,
    /// The devices here and there, as `--gpu` takes them.
    pub(crate) here: String,
    pub(crate) there: String,
    pub(super) near: Costs,
    pub(super) far: Costs,
    /// Equation 2: to keep a message for a restart.
    pub(super) record: f64,
    /// `None` where it was not measured.
    pub(super) moving: Option<Moving>,
}

/// What a program is expected to take, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Prediction {
    /// As it was measured.
    pub(super) here_seconds: f64,
    pub(crate) there_seconds: f64,
    /// Parts of what it takes longer there.
    pub(crate) session: f64,
    pub(super) calls: f64,
    pub(super) posts: f64,
    pub(super) bytes: f64,
    /// Of what it takes here, what the record does.
    pub(super) record: f64,
    /// With what it holds when that is the most.
    pub(crate) move_seconds: Option<f64>,
}

impl Costs {
    /// Returns what this costs more than `near`, nowhere less than nothing: noise makes nobody
    /// quicker.
    fn beyond(&self, near: &Costs) -> Costs {
        let more = |far: f64, near: f64| (far - near).max(0.0);
        Costs {
            session: more(self.session, near.session),
            call: more(self.call, near.call),
            post: more(self.post, near.post),
            write: more(self.write, near.write),
            write_byte: more(self.write_byte, near.write_byte),
            read: more(self.read, near.read),
            read_byte: more(self.read_byte, near.read_byte),
            shared_write_byte: more(self.shared_write_byte, near.shared_write_byte),
            shared_read_byte: more(self.shared_read_byte, near.shared_read_byte),
        }
    }

    pub(super) fn all(&self) -> [f64; 9] {
        let Costs { session, call, post, write, write_byte, read, read_byte, .. } = *self;
        let shared = [self.shared_write_byte, self.shared_read_byte];
        [session, call, post, write, write_byte, read, read_byte, shared[0], shared[1]]
    }
}

impl Moving {
    /// Equations 4 to 6: a region takes its share of the largest bandwidth, but no less than any
    /// region does.
    fn seconds(&self, stats: &Stats) -> f64 {
        let regions: f64 = stats
            .regions
            .classes()
            .filter(|(_, amount)| amount.count > 0)
            .map(|(_, Amount { count, bytes })| {
                let one = bytes as f64 / count as f64;
                count as f64 * (one * self.byte).max(self.region)
            })
            .sum();
        self.fixed + self.record * stats.records as f64 + regions
    }
}

impl Model {
    /// Says what is wrong with one that was read.
    pub(super) fn check(&self) -> Result<(), String> {
        if self.format != FORMAT {
            return Err(format!("of format {}, not {FORMAT}: fit it again", self.format));
        }
        let moving = self.moving.map(|m| [m.fixed, m.record, m.region, m.byte]);
        let all = [self.near.all(), self.far.all()].concat();
        let all = all.into_iter().chain(moving.into_iter().flatten()).chain([self.record]);
        if all.into_iter().all(|cost| cost.is_finite() && cost >= 0.0) {
            return Ok(());
        }
        Err("it has costs that are none: fit it again".to_owned())
    }

    /// Returns what a program takes there that took `seconds` here: equation 1, less equation 3.
    pub(crate) fn predict(&self, stats: &Stats, seconds: f64) -> Prediction {
        let more = self.far.beyond(&self.near);
        let times = |count: u64, each: f64| count as f64 * each;
        let copies = &stats.copies;
        let session = times(stats.clients, more.session);
        let calls = times(stats.calls, more.call)
            + times(copies.to_device.count, more.write)
            + times(copies.from_device.count, more.read);
        let posts = times(stats.posts, more.post);
        let sent = copies.inline.bytes + copies.to_device.bytes + stats.modules.bytes;
        let bytes = times(sent, more.write_byte)
            + times(copies.from_device.bytes, more.read_byte)
            + times(copies.shared_to_device.bytes, more.shared_write_byte)
            + times(copies.device_to_shared.bytes, more.shared_read_byte);
        Prediction {
            here_seconds: seconds,
            there_seconds: seconds + session + calls + posts + bytes,
            session,
            calls,
            posts,
            bytes,
            record: times(stats.records, self.record),
            move_seconds: self.moving.map(|moving| moving.seconds(stats)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> Model {
        let near = Costs { session: 0.01, call: 1e-5, post: 1e-6, ..Costs::default() };
        let far = Costs {
            session: 0.03,
            call: 1.1e-4,
            write: 5e-5,
            write_byte: 1e-8,
            read_byte: 2e-8,
            ..Costs::default()
        };
        let moving = Moving { fixed: 0.5, record: 1e-6, region: 1e-4, byte: 1e-9 };
        let (here, there) = ("soft".to_owned(), "host".to_owned());
        Model { format: FORMAT, here, there, near, far, record: 0.0, moving: Some(moving) }
    }

    fn stats() -> Stats {
        let mut stats = Stats { clients: 1, posts: 1_000_000, calls: 1000, ..Stats::default() };
        for _ in 0..10 {
            stats.copies.to_device.add(1_000_000);
            stats.copies.from_device.add(500_000);
        }
        stats
    }

    #[test]
    fn a_program_takes_what_it_asks_for() {
        let told = model().predict(&stats(), 1.0);
        let near = |a: f64, b: f64| (a - b).abs() < 1e-9;
        assert!(near(told.session, 0.02) && near(told.calls, 0.1 + 5e-4), "{told:?}");
        // Posts are cheaper there, which is noise.
        assert!(told.posts == 0.0 && near(told.bytes, 0.1 + 0.1), "{told:?}");
        assert!(near(told.there_seconds, 1.0 + 0.02 + 0.1005 + 0.2), "{told:?}");
    }

    #[test]
    fn small_regions_take_as_long_as_any() {
        let mut stats = stats();
        stats.records = 100_000;
        (0..1000).for_each(|_| stats.regions.add(4096));
        stats.regions.add(1_000_000_000);
        let told = model().predict(&stats, 1.0).move_seconds.unwrap();
        assert!((told - (0.5 + 0.1 + 0.1 + 1.0)).abs() < 1e-9, "{told}");
    }

    #[test]
    fn nonsense_is_no_model() {
        assert_eq!(model().check(), Ok(()));
        let mut bad = model();
        bad.far.read = f64::NAN;
        assert!(bad.check().is_err());
        bad = model();
        bad.format = 9;
        assert!(bad.check().unwrap_err().contains("format 9"));
    }
}
