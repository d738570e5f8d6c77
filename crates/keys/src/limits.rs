//! How much of what a server lends a key may have.

use std::fmt::{self, Write as _};
use std::str::FromStr;
use thiserror::Error;

/// Most devices that a key can be given by number.
pub const MAX_DEVICES: usize = 64;
/// Lowest limit of a key, in bytes per second: a session always reads so much, so that it hears
/// that its near end is there.
pub const MIN_BANDWIDTH: u64 = 64 << 10;

/// What all sessions of a key may have together; `None`: whatever there is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Limits {
    /// Different devices at a time.
    pub gpus: Option<u32>,
    /// Which ones, by the server's numbers.
    pub devices: Option<Vec<u32>>,
    /// Bytes of device memory.
    pub memory: Option<u64>,
    /// Sessions at a time: one for each process of a job.
    pub sessions: Option<u32>,
    /// Jobs at a time.
    pub jobs: Option<u32>,
    /// Bytes a second, both ways together; [`MIN_BANDWIDTH`] at least.
    pub bandwidth: Option<u64>,
}

/// A text that tells no limits, and where it is wrong.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("line {line}: {why}")]
pub struct BadLimits {
    line: usize,
    why: &'static str,
}

impl Limits {
    /// Returns whether there is none.
    pub fn is_empty(&self) -> bool {
        *self == Limits::default()
    }
}

/// As they are kept: a line each.
impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Limits { gpus, devices, memory, sessions, jobs, bandwidth } = self;
        let mut line = |word: &str, value: Option<String>| match value {
            Some(value) => writeln!(f, "{word} {value}"),
            None => Ok(()),
        };
        line("gpus", gpus.map(|it| it.to_string()))?;
        line("devices", devices.as_deref().map(list))?;
        line("memory", memory.map(|it| it.to_string()))?;
        line("sessions", sessions.map(|it| it.to_string()))?;
        line("jobs", jobs.map(|it| it.to_string()))?;
        line("bandwidth", bandwidth.map(|it| it.to_string()))
    }
}

/// Returns numbers with commas.
pub(crate) fn list(numbers: &[u32]) -> String {
    let mut text = String::new();
    for (number, comma) in numbers.iter().zip(std::iter::once("").chain(std::iter::repeat(","))) {
        let _ = write!(text, "{comma}{number}");
    }
    text
}

impl FromStr for Limits {
    type Err = BadLimits;

    fn from_str(text: &str) -> Result<Limits, BadLimits> {
        let mut limits = Limits::default();
        for (line, text) in (1..).zip(text.lines()) {
            let bad = |why| BadLimits { line, why };
            let (word, value) = text.split_once(' ').ok_or(bad("a word and a value are wanted"))?;
            let Limits { gpus, devices, memory, sessions, jobs, bandwidth } = &mut limits;
            let once = match word {
                "gpus" => put(gpus, number(value)),
                "devices" => put(devices, numbers(value)),
                "memory" => put(memory, number(value)),
                "sessions" => put(sessions, number(value)),
                "jobs" => put(jobs, number(value)),
                "bandwidth" => put(bandwidth, number(value).filter(|rate| *rate >= MIN_BANDWIDTH)),
                _ => return Err(bad("no such limit")),
            };
            once.map_err(bad)?;
        }
        Ok(limits)
    }
}

fn put<T>(limit: &mut Option<T>, value: Option<T>) -> Result<(), &'static str> {
    let value = value.ok_or("that is no value")?;
    limit.replace(value).map_or(Ok(()), |_| Err("a limit is there twice"))
}

/// Digits alone: a plus sign is nothing that kedge writes.
fn number<T: FromStr>(text: &str) -> Option<T> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

fn numbers(text: &str) -> Option<Vec<u32>> {
    let numbers = text.split(',').map(number).collect::<Option<Vec<u32>>>()?;
    (numbers.len() <= MAX_DEVICES).then_some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let all = Limits {
            gpus: Some(2),
            devices: Some(vec![3, 0, 11]),
            memory: Some(u64::MAX),
            sessions: Some(0),
            jobs: Some(u32::MAX),
            bandwidth: Some(10_000_000),
        };
        assert_eq!(all.to_string().lines().nth(1), Some("devices 3,0,11"));
        for limits in
            [all, Limits { memory: Some(8 << 30), ..Limits::default() }, Limits::default()]
        {
            assert_eq!(limits.to_string().parse(), Ok(limits.clone()), "{limits}");
        }
        assert!(Limits::default().is_empty() && Limits::default().to_string().is_empty());
    }

    #[test]
    fn what_is_not_understood_is_told_by_line() {
        let many = format!("devices {}\n", ["1"; MAX_DEVICES + 1].join(","));
        for (text, said) in [
            ("gpus 2\nmemry 5\n", "line 2: no such limit"),
            ("gpus 2\ngpus 3\n", "line 2: a limit is there twice"),
            ("gpus\n", "line 1: a word and a value are wanted"),
            ("gpus -1\n", "line 1: that is no value"),
            ("gpus +1\n", "line 1: that is no value"),
            ("gpus 4294967296\n", "line 1: that is no value"),
            ("memory 18446744073709551616\n", "line 1: that is no value"),
            ("memory 8G\n", "line 1: that is no value"),
            ("bandwidth 65535\n", "line 1: that is no value"),
            ("devices 1,\n", "line 1: that is no value"),
            ("devices \n", "line 1: that is no value"),
            (&*many, "line 1: that is no value"),
            ("\n", "line 1: a word and a value are wanted"),
            ("gpus  2\n", "line 1: that is no value"),
        ] {
            assert_eq!(text.parse::<Limits>().unwrap_err().to_string(), said, "{text:?}");
        }
    }
}
