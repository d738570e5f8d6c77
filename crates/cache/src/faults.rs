//! What tests have a daemon fail at: `KEDGE_CACHE_FAULT`, of words with commas between.
//!
//! `eio=FILE` fails writes below while there is that file; `lost=FILE` fails the next sync below,
//! and removes the file; `slow=BYTES` writes no more a second; `descriptors=N` leaves it so many;
//! `carried=FILE` and `noted=FILE` stop drains while there is that file, after the bytes are below
//! and after the journal says so; `put=FILE` and `placed=FILE` stop a move to a device, after the
//! bytes are there and after the journal says so; `back=FILE` stops one back, after the bytes are
//! read. `partner=N` cuts each connection to the partner after N messages.

use std::io;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

/// The variable that names them.
const VARIABLE: &str = "KEDGE_CACHE_FAULT";
/// Time between two looks at whether the file of a hold is still there.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Where a drain can be stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Point {
    /// The bytes are below, and the journal does not say so.
    Carried,
    /// The journal says so, and the tier still has them.
    Noted,
    /// The bytes are on a device, and the journal does not say so.
    Put,
    /// The journal says so, and host memory still has them.
    Placed,
    /// The bytes were read from a device, and host memory does not have them.
    Back,
}

/// What a daemon is to fail at: nothing, outside of tests.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    eio: Option<PathBuf>,
    lost: Option<PathBuf>,
    slow: Option<u64>,
    pub(crate) descriptors: Option<u64>,
    pub(crate) partner: Option<u64>,
    holds: Vec<(Point, PathBuf)>,
}

impl Faults {
    pub(crate) fn of_environment() -> Faults {
        Faults::parse(&std::env::var(VARIABLE).unwrap_or_default())
    }

    pub(crate) fn parse(text: &str) -> Faults {
        let mut faults = Faults::default();
        for (name, value) in text.split(',').filter_map(|word| word.split_once('=')) {
            match name {
                "eio" => faults.eio = Some(value.into()),
                "lost" => faults.lost = Some(value.into()),
                "slow" => faults.slow = value.parse().ok(),
                "descriptors" => faults.descriptors = value.parse().ok(),
                "partner" => faults.partner = value.parse().ok(),
                "carried" => faults.holds.push((Point::Carried, value.into())),
                "noted" => faults.holds.push((Point::Noted, value.into())),
                "put" => faults.holds.push((Point::Put, value.into())),
                "back" => faults.holds.push((Point::Back, value.into())),
                "placed" => faults.holds.push((Point::Placed, value.into())),
                _ => {}
            }
        }
        faults
    }

    /// Is called before so many bytes are written below.
    pub(crate) fn before_write(&self, length: usize) -> io::Result<()> {
        if self.eio.as_ref().is_some_and(|file| file.exists()) {
            return Err(rustix::io::Errno::IO.into());
        }
        if let Some(speed) = self.slow {
            thread::sleep(Duration::from_secs_f64(length as f64 / speed.max(1) as f64));
        }
        Ok(())
    }

    /// Is called in place of a sync below.
    pub(crate) fn sync(&self, sync: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        match &self.lost {
            Some(file) if std::fs::remove_file(file).is_ok() => Err(rustix::io::Errno::IO.into()),
            _ => sync(),
        }
    }

    /// Is called where a drain can be stopped.
    pub(crate) fn hold(&self, at: Point) {
        for (_, file) in self.holds.iter().filter(|(point, _)| *point == at) {
            while file.exists() {
                thread::sleep(POLL_INTERVAL);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_read() {
        let faults = Faults::parse("slow=10,noted=/a,eio=/nothing/there");
        assert_eq!(faults.slow, Some(10));
        assert_eq!(faults.holds, [(Point::Noted, PathBuf::from("/a"))]);
        assert!(faults.before_write(0).is_ok());
        assert!(Faults::parse("").holds.is_empty());
    }
}
