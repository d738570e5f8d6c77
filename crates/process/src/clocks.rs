//! The clocks that count from a machine's start. A restarted job finds them where they were at its
//! capture: programs keep deadlines on them, and know that they never go back. CLOCK_REALTIME is
//! the world's.

use crate::EngineError;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;

const SECOND: i128 = 1_000_000_000;
const OFFSETS: &str = "/proc/self/timens_offsets";

/// In nanoseconds. Of a time namespace: what is added to the machine's own clocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Clocks {
    monotonic: i64,
    boottime: i64,
}

impl Clocks {
    /// As this process sees them.
    pub(crate) fn now() -> Clocks {
        let read = |clock| {
            let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            // SAFETY: the kernel stores the structure; these clocks always exist.
            unsafe { libc::clock_gettime(clock, &raw mut time) };
            time.tv_sec.saturating_mul(SECOND as i64).saturating_add(time.tv_nsec)
        };
        let (monotonic, boottime) = (libc::CLOCK_MONOTONIC, libc::CLOCK_BOOTTIME);
        Clocks { monotonic: read(monotonic), boottime: read(boottime) }
    }

    fn each(
        self,
        other: Clocks,
        combine: impl Fn(i64, i64) -> Option<i64>,
    ) -> Result<Clocks, EngineError> {
        let clock = |a, b| combine(a, b).ok_or(EngineError::Nonsense("a time that never comes"));
        Ok(Clocks {
            monotonic: clock(self.monotonic, other.monotonic)?,
            boottime: clock(self.boottime, other.boottime)?,
        })
    }

    /// Makes a time namespace for the processes that this one forks from now on, in which the
    /// clocks stand at `self`.
    pub(crate) fn set_for_children(self) -> Result<(), EngineError> {
        let now = Clocks::now();
        let made = Clocks::offsets().and_then(|own| {
            let offset = self.each(now.each(own, i64::checked_sub)?, i64::checked_sub)?;
            // SAFETY: unshare takes no pointers; CLONE_NEWTIME changes only where this process's
            // children are made.
            if unsafe { libc::unshare(libc::CLONE_NEWTIME) } < 0 {
                return Err(EngineError::last(0, "make a time namespace"));
            }
            fs::write(OFFSETS, offset.to_string()).map_err(failed)
        });
        match made {
            // Clocks that go forward by the time between are better than no job.
            Err(_) if self.monotonic <= now.monotonic && self.boottime <= now.boottime => Ok(()),
            other => other,
        }
    }

    /// Those of this process's time namespace.
    fn offsets() -> Result<Clocks, EngineError> {
        Clocks::parse(&fs::read_to_string(OFFSETS).map_err(failed)?).ok_or(EngineError::Proc {
            pid: 0,
            file: "timens_offsets",
            what: "a line",
        })
    }

    fn parse(text: &str) -> Option<Clocks> {
        let mut clocks = Clocks::default();
        for line in text.lines() {
            let mut words = line.split_whitespace();
            let (name, seconds, rest) = (words.next()?, words.next()?, words.next()?);
            let (seconds, rest): (i64, i64) = (seconds.parse().ok()?, rest.parse().ok()?);
            let total = i64::try_from(i128::from(seconds) * SECOND + i128::from(rest)).ok()?;
            match name {
                "monotonic" => clocks.monotonic = total,
                "boottime" => clocks.boottime = total,
                _ => {}
            }
        }
        Some(clocks)
    }
}

/// As the kernel reads offsets: whole seconds, rounded down, and nanoseconds.
impl std::fmt::Display for Clocks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (name, time) in [("monotonic", self.monotonic), ("boottime", self.boottime)] {
            let time = i128::from(time);
            writeln!(f, "{name} {} {}", time.div_euclid(SECOND), time.rem_euclid(SECOND))?;
        }
        Ok(())
    }
}

fn failed(source: io::Error) -> EngineError {
    EngineError::System { pid: 0, what: "set the clocks of its time namespace", source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_are_written_as_they_are_read() {
        for monotonic in [0, 1, -1, 5_000_000_000, -5_000_000_001, i64::MAX, i64::MIN] {
            let clocks = Clocks { monotonic, boottime: -monotonic.saturating_add(7) };
            assert_eq!(Clocks::parse(&clocks.to_string()), Some(clocks));
        }
        assert_eq!(Clocks::parse("monotonic x 0"), None);
        assert_eq!(Clocks::parse("monotonic 99999999999999 0"), None);
    }
}
